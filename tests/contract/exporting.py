"""A run that lived, its exports, and all that one says: for tests of exports, imports, merges and forks."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import samplestore
from samplestore import Store
from samplestore.portable import exports
from samplestore.portable import samples as portable
from samplestore.portable.exports import Selection
from samplestore.run import Run, advance
from samplestore.types import Claim
from samplestore.verbs import appends, fanout, samples, stages
from samplestore.verbs.tx import Tx

from ..support import factory as f

FORMATS = ("parquet", "jsonl", "jsonl.gz")
# What is another in another run, by its nature: who it is there, when it was stored, and what a trainer there did.
OF_THE_RUN = ("id", "run_uuid", "run", "group", "created_at", "finished_at", "consumed_step", "batch_position")


def exported_in(template: Path, folder: Path) -> tuple[str, Path]:
    """(uuid of a run that lived, the folder of its exports): "out" and "out.jsonl", to be copied before they change.
    template: a migrated SQLite file."""
    shutil.copyfile(template, folder / "rollouts.db")
    with samplestore.open(str(folder / "rollouts.db")) as store:
        run = lived(store)
        run.export(folder / "out")
        run.export(folder / "out.jsonl", format="jsonl", arrays=["all"])
    return run.uuid, folder


def lived(store: Store, name: str = "lived", **settings: Any) -> Run:
    """A run with a bit of everything: versions, aborts, tools, forks, arrays, rewards, failures, two steps."""
    given = {"samples_per_prompt": 2, "groups_per_step": 2, "max_staleness": 3, "epochs": 1, "on_failed": "short"}
    given["stages"] = ["reward"]
    run = store.run(name, **{**given, **settings})
    run.add_prompts(
        [{"prompt_ids": [1, 2, 3 + i], "label": str(i), "metadata": {"n": i, "deep": [{"ö": None}]}} for i in range(7)]
        + [{"messages": [{"role": "user", "content": "hi\u2028"}], "prompt_ids": [9], "chat_template_kwargs": {"a": 1}}]
    )
    run.admit()
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims = run.claim(worker, 100)
    lengths = [3 + place % 4 for place in range(len(claims))]
    together(
        run, [(c, 0, f.ids_of(n), f.logprobs_of(n), 0, None, "generated") for c, n in zip(claims, lengths, strict=True)]
    )
    tools = claims[1::2]
    together(run, [(claim, 1, [5, 6], None, None, None, "environment") for claim in tools])
    run.publish_weights("/w/1", step=0)
    ended = [p for p in range(len(claims)) if p not in (12, 14)]
    rows = []
    for place in ended:
        version, reason = (0, 1) if place == 3 else 1, "length" if place == 5 else "stop"
        rows.append((claims[place], 1 + place % 2, f.ids_of(2), f.logprobs_of(2), version, reason, "generated"))
    together(run, rows)
    entropy = {place: run.prepare_array("entropy", np.full(2, 0.1 * place + 0.05, np.float32)) for place in ended}
    run.transact(lambda tx: [samples.attach(tx, claims[p], "entropy", entropy[p]) for p in ended])
    forked(run, claims[6])
    run.transact(lambda tx: [samples.finish(tx, claims[p]) for p in ended if p not in (6, 13)])
    run.release(claims[12], "late")
    failing = claims[14]
    while run.fail(failing, "broken", 0.0) != "failed":
        failing = next(c for c in run.claim(worker, 100) if c.sample_id == failing.sample_id)
    scored = run.claim_stages(worker, 100)
    run.transact(lambda tx: [stages.score(tx, c, 0.1 * c.index, {"why": ["ö", 0.1]}) for c in scored])
    for step in (0, 1):
        batch = f.lease(run, trainer, step, max_staleness=3)
        assert batch is not None
        f.commit(run, batch, trainer)
    return run


def together(run: Run, rows: list[tuple[Any, ...]]) -> None:
    """Appends in one transaction: (claim, seq, tokens, log-probs, version, finish reason, kind)."""
    run.transact(lambda tx: [appends.append(tx, *row, None, None, None) for row in rows])
    for claim, seq, tokens, _, _, reason, _ in rows:
        advance(claim, seq, len(tokens), reason)


def forked(run: Run, claim: Claim) -> None:
    """The sample ends as three: itself, one that shares two of its tokens, and one with a prompt of its own."""
    prompt = np.array([40, 41], np.int32)
    for number, (upto, own) in enumerate(((2, None), (None, prompt))):
        child = run.transact(partial(fanout.fork, claim=claim, number=number, key=f"k{number}", asked={"n": number},
                                     place=number, upto=upto, own_prompt=own))  # fmt: skip
        f.add(run, child, 2, 1, "stop")
        run.transact(partial(_end, child))
    run.transact(partial(_end, claim))


def _end(claim: Claim, tx: Tx) -> None:
    fanout.end(tx, claim, "completed", "stop", True, 0.25)


def told(run: Run, **wanted: Any) -> list[dict[str, Any]]:
    """All that an export says, without what is the run's own; arrays as bytes, so that they compare exactly."""
    selection = Selection(arrays=("all",), **wanted)
    rows = []
    for part in exports.parts(run, selection):
        for one in exports.samples(run, run.uuid, part, selection):
            row = portable.to_row(one)
            row["group_state"] = {"consumed": "ready", "leased": "ready"}.get(row["group_state"], row["group_state"])
            row["order"] = (one.group, one.sample)
            rows.append({k: _plain(v) for k, v in row.items() if k not in OF_THE_RUN})
    return sorted(rows, key=lambda row: row["order"])


def _plain(value: Any) -> Any:
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


def place(tmp_path: Path, kind: str) -> Path:
    return tmp_path / ("out" if kind == "parquet" else f"out.{kind}")


def export(run: Run, to: Path, kind: str = "parquet", **options: Any) -> Any:
    return run.export(to, format=kind.partition(".")[0], **options)
