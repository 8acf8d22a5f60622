"""Short words for tests: a run with prompts, claims, segments, whole groups, and raw looks into the database."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import Store
from samplestore.batch import Batch, row_of
from samplestore.run import Run
from samplestore.types import Claim, StageClaim
from samplestore.verbs import batches, liveness

POLICY: dict[str, Any] = {"max_staleness": 1, "staleness": "oldest", "stale": "skip", "need_logprobs": True}


def make_run(store: Store, name: str = "r", *, prompts: int = 4, admit: bool = True, **settings: Any) -> Run:
    """A run with `prompts` prompts of three tokens, admitted; two samples a group, two groups a step, one epoch."""
    run = store.run(name, **{"samples_per_prompt": 2, "groups_per_step": 2, "epochs": 1, **settings})
    run.add_prompts([{"prompt_ids": [1, 2, i], "label": str(i)} for i in range(prompts)])
    if admit:
        run.admit()
    return run


def ids_of(n: int, first: int = 10) -> list[int]:
    return [first + i % 50 for i in range(n)]


def logprobs_of(n: int) -> list[float]:
    return [-0.25 - 0.125 * (i % 8) for i in range(n)]


def add(run: Run, claim: Claim, n: int = 3, version: Any = 0, finish_reason: str | None = None, **more: Any) -> int:
    """Append `n` generated tokens."""
    return run.append(claim, ids_of(n), logprobs_of(n), version, finish_reason, **more)


def answer(run: Run, claim: Claim, n: int = 3, version: Any = 0, reason: str = "stop") -> None:
    """A whole answer of `n` tokens."""
    add(run, claim, n, version, reason)
    run.finish(claim)


def finish_all(run: Run, worker: int, n: int = 3, version: Any = None, reward: float | None = None) -> list[Claim]:
    """Claim everything, answer it and score it."""
    at = run.current_version if version is None else version
    claims = run.claim(worker, 10_000)
    for claim in claims:
        answer(run, claim, n, at)
    for stage in run.claim_stages(worker, 10_000) if run.settings.stages else []:
        run.score(stage, 1.0 if reward is None else reward)
    return claims


def lease(run: Run, trainer: int, step: int, groups: int = 2, **policy: Any) -> int | None:
    """Lease without waiting; the id of the batch."""
    rules = {**POLICY, "max_staleness": run.settings.max_staleness, "stale": run.settings.stale, **policy}
    return run.transact(lambda tx: batches.lease(tx, trainer, step, groups, rules))


def commit(run: Run, batch: int, trainer: int) -> None:
    run.transact(lambda tx: batches.commit(tx, batch, trainer), durable=True)


def train(run: Run, worker: int, trainer: int, steps: int) -> None:
    """Steps from 0 on, of one group each, each followed by its weights: step s makes version s + 1."""
    for step in range(steps):
        run.admit()
        finish_all(run, worker)
        batch = lease(run, trainer, step, 1)
        assert batch is not None
        commit(run, batch, trainer)
        run.publish_weights(path=f"/w/{step}", step=step)


def release(run: Run, batch: int, trainer: int, reason: str = "given back") -> None:
    run.transact(lambda tx: batches.release(tx, batch, trainer, reason))


def silence(run: Run, worker: int, seconds: float = 1e6) -> None:
    """Its last heartbeat is `seconds` older now: the next reap finds it dead."""
    execute(run, "UPDATE worker SET heartbeat = heartbeat - :s WHERE id = :w", s=seconds, w=worker)


def kill(run: Run, worker: int) -> None:
    """Let a worker die and be reaped."""
    silence(run, worker)
    assert worker in run.reap().workers


def execute(run: Run | Store, sql: str, **values: Any) -> None:
    """A write behind the back of the store."""
    with run.database.writing() as connection:
        connection.execute(sa.text(sql), values)


def rows(run: Run | Store, sql: str, **values: Any) -> list[dict[str, Any]]:
    with run.database.reading() as connection:
        return rows_of(connection, sql, **values)


def rows_of(connection: sa.Connection, sql: str, **values: Any) -> list[dict[str, Any]]:
    return [dict(r) for r in connection.execute(_text(sql), values).mappings()]


_text = functools.cache(sa.text)


def value(run: Run | Store, sql: str, **values: Any) -> Any:
    found = rows(run, sql, **values)
    assert len(found) == 1, found
    return next(iter(found[0].values()))


def sample(run: Run, sample_id: int) -> dict[str, Any]:
    return rows(run, "SELECT * FROM sample WHERE id = :i", i=sample_id)[0]


def group(run: Run, group_id: int) -> dict[str, Any]:
    return rows(run, "SELECT * FROM sample_group WHERE id = :i", i=group_id)[0]


def group_id(run: Run, number: int) -> int:
    return int(value(run, "SELECT id FROM sample_group WHERE run_id = :r AND number = :n", r=run.id, n=number))


def batch_of(run: Run, batch: int, trainer: int) -> Batch:
    """A leased batch, as a trainer holds it."""
    return Batch(run, row_of(run, batch), trainer)


def groups_of(run: Run, batch: int) -> list[int]:
    """Numbers of a batch's groups, in its order."""
    found = rows(
        run,
        "SELECT g.number FROM batch_group b JOIN sample_group g ON g.id = b.group_id "
        "WHERE b.batch_id = :b ORDER BY b.position",
        b=batch,
    )
    return [r["number"] for r in found]


def same_arrays(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit, types and shapes too."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


def states(run: Run) -> list[str]:
    """States of all groups, in creation order."""
    return [r["state"] for r in rows(run, "SELECT state FROM sample_group WHERE run_id = :r ORDER BY number", r=run.id)]


def segments(run: Run, sample_id: int) -> list[dict[str, Any]]:
    return rows(run, "SELECT * FROM segment WHERE sample_id = :i ORDER BY incarnation, seq", i=sample_id)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return rows(run, "SELECT * FROM event WHERE run_id = :r AND kind = :k ORDER BY id", r=run.id, k=kind)


def fates(run: Run) -> dict[str, int]:
    """Tokens by fate, zeros left out."""
    return {fate: n for fate, n in run.ledger()["by_fate"].items() if n}


def sound(run: Run) -> None:
    """Every promise that can be checked holds, and the ledger closes."""
    found = run.check()
    assert found == [], found
    told = run.ledger(exact=True)
    assert told["closed"], told["differences"]


OF_WORKERS = ("worker", "event", "event_total")  # what changes by their coming and going


def snapshot(run: Run, *, leave_out: Sequence[str] = OF_WORKERS) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables: two snapshots are equal when nothing was changed in between."""
    from samplestore.models import Base

    with run.database.reading() as connection:
        return {
            table.name: [dict(r) for r in connection.execute(sa.select(table).order_by(*table.primary_key)).mappings()]
            for table in Base.metadata.sorted_tables
            if table.name not in leave_out
        }


def tokens_of(claim: Claim | StageClaim) -> list[int]:
    return [int(t) for t in np.asarray(claim.response_ids)]


def register(run: Run, kind: str = "rollout") -> int:
    return run.transact(lambda tx: liveness.register(tx, kind))
