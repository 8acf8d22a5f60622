"""Samples that were generated elsewhere come in, finished: their stages and filters are the run's, as of all others.

Their tokens are of kind `environment`, since no weights of the run made them: they are behind none, fill no window of
admission, and are no part of the token ledger, which counts what was generated here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec, faults
from samplestore.arrays import TEACHER, Prepared
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting
from samplestore.models import PromptRow, Run, Sample, SampleGroup, Segment, SegmentArray, Stage, Worker
from samplestore.states import GroupState, Purpose, SampleStatus, SegmentKind, StageStatus, WorkerKind, WorkerState
from samplestore.types import TEACHER_STAGE, Added
from samplestore.verbs import groups, liveness, prompts
from samplestore.verbs.arrays import row_of as array_row
from samplestore.verbs.stages import OK
from samplestore.verbs.tx import Tx

run, prompt, group, sample, segment, segment_array, stage, worker = (
    t.__table__ for t in (Run, PromptRow, SampleGroup, Sample, Segment, SegmentArray, Stage, Worker)
)

CHUNK = 100  # groups at once
PART = 500  # samples a statement
REWARD_STAGE = "reward"

Keep = Callable[[Prepared], Prepared]


def import_groups(tx: Tx, given: Iterable[Any], keep: Keep) -> Added:
    """Store groups (samplestore.imports.Imported) as finished samples, in their order; those whose key is there already
    are left alone. `keep` puts a large array into its file. Raises InvalidSetting for a reward that no stage of the run
    would give, or a data set that is there for something else."""
    worker_id = liveness.register(tx, WorkerKind.TOOL.value, "import")
    row = tx.lock_run()
    number, existing, waiting = row.n_groups, 0, iter(given)
    while part := list(islice(waiting, CHUNK)):
        keys = {one.key for one in part}
        there = set(
            tx.execute(
                sa.select(group.c.import_key).where(group.c.run_id == tx.run_id, group.c.import_key.in_(keys))
            ).scalars()
        )
        new = []
        for one in part:
            if one.key in there:
                existing += 1
            else:
                there.add(one.key)
                new.append(one)
        if new:
            _store(tx, row, new, number, worker_id, keep)
            number += len(new)
        faults.reached("importing")
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(n_groups=number))
    tx.execute(
        sa.update(worker).where(worker.c.id == worker_id).values(state=WorkerState.GONE.value, ended_at=db_now())
    )
    added = number - row.n_groups
    if added:
        tx.event("import", None, worker_id=worker_id, details={"groups": added, "existing": existing})
    return Added(added, existing)


def _store(tx: Tx, row: Any, new: Sequence[Any], number: int, worker_id: int, keep: Keep) -> None:
    prompts.add(tx, [one.prompt for one in new], Purpose.IMPORT)
    keys = {one.prompt.content_key for one in new}
    mine = (prompt.c.run_id == tx.run_id) & prompt.c.content_key.in_(keys)
    ids = {r.content_key: r.id for r in tx.rows(sa.select(prompt.c.content_key, prompt.c.id).where(mine))}
    made = tx.execute(
        sa.insert(group).values(created_at=db_now()).returning(group.c.id, sort_by_parameter_order=True),
        [
            {
                "run_id": tx.run_id, "prompt_id": ids[one.prompt.content_key], "number": number + i,
                "epoch": row.epoch, "timeline": row.timeline, "state": GroupState.OPEN.value,
                "n_samples": len(one.responses), "n_open": 0, "import_key": one.key,
            }
            for i, one in enumerate(new)
        ],
    ).scalars().all()  # fmt: skip
    pending = _samples(tx, list(zip(made, new, strict=True)), worker_id, keep)
    for group_id in made:
        groups.count(tx, group_id, n_unscored=pending[group_id])


def _samples(tx: Tx, groups: list[tuple[int, Any]], worker_id: int, keep: Keep) -> Counter[int]:
    """The samples of these groups, with segments, arrays and stages, each kind in one statement; how many stages are
    still to be done, by group."""
    responses = [(group_id, i, r) for group_id, one in groups for i, r in enumerate(one.responses)]
    now: dict[str, Any] = {"created_at": db_now()}
    finished = {"finished_at": db_now(), "finished_by": worker_id}
    ids: list[int] = []
    for at in range(0, len(responses), PART):
        rows = [_sample(tx, *each) for each in responses[at : at + PART]]
        inserted = sa.insert(sample).values(**now, **finished).returning(sample.c.id, sort_by_parameter_order=True)
        ids += tx.execute(inserted, rows).scalars().all()
    segments: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []
    settled: list[dict[str, Any]] = []
    for sample_id, (group_id, _, response) in zip(ids, responses, strict=True):
        mine = _segments(sample_id, response, worker_id)
        segments += mine
        beside += [array_row(sample_id, 0, len(mine) - 1, keep(array)) for array in response.named]
        for row in _stages(tx, group_id, sample_id, response):
            (pending if row["status"] == StageStatus.PENDING else settled).append(row)
    tx.execute(sa.insert(segment).values(**now), segments)
    if beside:
        tx.execute(sa.insert(segment_array).values(**now), beside)
    if pending:
        tx.execute(sa.insert(stage).values(**now), pending)
    if settled:
        tx.execute(sa.insert(stage).values(settled_at=db_now(), **now), settled)
    return Counter(row["group_id"] for row in pending)


def _sample(tx: Tx, group_id: int, index: int, response: Any) -> dict[str, Any]:
    n, trained = int(response.ids.size), int(response.loss.sum())
    probs = response.logprobs
    return {
        "run_id": tx.run_id, "group_id": group_id, "index": index, "status": response.status,
        "n_tokens": n, "n_loss_tokens": trained, "n_segments": len(_runs(response.loss)),
        "n_without_logprob": trained if probs is None else 0,
        "logprob_sum": 0.0 if probs is None else _sum(probs[response.loss == 1]),
        "finish_reason": "length" if response.status == SampleStatus.TRUNCATED else "stop",
        "reward": _weighted(tx, response.reward),
    }  # fmt: skip


def _weighted(tx: Tx, reward: float | None) -> float | None:
    """What a reward that came along counts. Raises InvalidSetting where the run's stages leave it no place."""
    if reward is None:
        return None
    rules = tx.settings
    if (rules.stages or rules.group_stages) and REWARD_STAGE not in rules.stages:
        raise InvalidSetting(
            "reward", reward, f"a run without stages, or with the stage {REWARD_STAGE!r}; this one has {rules.stages}"
        )
    return reward * rules.reward_weights.get(REWARD_STAGE, 1.0)


def _sum(values: Any) -> float:
    return float(np.add.reduce(values, dtype=np.float64))


def _runs(loss: Any) -> list[tuple[int, int]]:
    """[start, stop) of neighbours with one loss mask: a segment has one."""
    turns = (np.flatnonzero(np.diff(loss)) + 1).tolist()
    return list(zip([0, *turns], [*turns, len(loss)], strict=True))


def _segments(sample_id: int, response: Any, worker_id: int) -> list[dict[str, Any]]:
    rows = []
    for seq, (start, stop) in enumerate(_runs(response.loss)):
        probs = None if response.logprobs is None else response.logprobs[start:stop]
        rows.append(
            {
                "sample_id": sample_id, "incarnation": 0, "seq": seq, "start": start, "n_tokens": stop - start,
                "kind": SegmentKind.ENVIRONMENT.value, "loss": int(response.loss[start]), "owner": worker_id,
                "attempt": 0, "logprob_sum": 0.0 if probs is None else _sum(probs),
                "payload": codec.encode(response.ids[start:stop], probs),
            }
        )  # fmt: skip
    return rows


def _stages(tx: Tx, group_id: int, sample_id: int, response: Any) -> list[dict[str, Any]]:
    """The run's stages; settled where the row brought what they would give."""
    taught = any(array.name == TEACHER for array in response.named)
    rows = []
    for name in tx.settings.stages:
        done = (name == REWARD_STAGE and response.reward is not None) or (name == TEACHER_STAGE and taught)
        rows.append(
            {
                "run_id": tx.run_id, "group_id": group_id, "sample_id": sample_id, "name": name,
                "status": (StageStatus.DONE if done else StageStatus.PENDING).value, "outcome": OK if done else None,
                "value": response.reward if done and name == REWARD_STAGE else None,
            }
        )  # fmt: skip
    return rows
