"""What weight versions of elsewhere are in this run.

A version is a number within its run, so it means nothing in another. A run that has no weights and no work of its own
- a new one, or one that was only imported into - takes over the versions, timelines and current version of where the
samples come from: a number means the same there and here. In any other run a version is the one with the same label,
and unknown where the run has none: staleness of such a token is unknown, and never 0. A group that came finished is in
no window whatever its versions (staleness.IMPORTED).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.errors import InvalidSetting
from samplestore.models import BatchRow, EngineRow, Run, Sample, SampleGroup, Timeline, WeightVersionRow, Worker
from samplestore.states import WorkerKind, WorkerState
from samplestore.verbs.tx import PART, Tx

run, timeline_table, version, engine, batch, group, sample, worker = (
    t.__table__ for t in (Run, Timeline, WeightVersionRow, EngineRow, BatchRow, SampleGroup, Sample, Worker)
)

PLACE = ("timeline", "parent", "step", "depth", "common_depth")
AT_WORK = (WorkerKind.ROLLOUT.value, WorkerKind.TRAINER.value)


def bring(
    tx: Tx, row: Any, manifest: Mapping[str, Any] | None, met: Sequence[int], recorded: bool = False
) -> dict[int, int | None]:
    """The run's number of each version of the samples; None where it has no such version. `met`: the versions of the
    samples, ascending. row: the run's, locked. manifest: as portable/manifests.py made it. recorded: the caller writes
    down what a trainer does elsewhere, so that the versions of the run are that trainer's while it is at work too."""
    if not met:
        return {}
    here = {r.version: r for r in tx.rows(sa.select(version).where(version.c.run_id == tx.run_id))}
    told = _guessed(met, here) if manifest is None else manifest
    there: Mapping[int, dict[str, Any]] = told["weight_versions"]
    if not set(met) <= there.keys():
        missing = sorted(set(met) - there.keys())[:5]
        raise InvalidSetting("weight_versions", missing, "versions that the manifest of the export has")
    if _no_weights_of_its_own(tx, here, there, recorded):
        _take_over(tx, row, told, here)
        return {number: number for number in met}
    by_label = {r.label: number for number, r in here.items()}
    return {number: by_label.get(there[number]["label"]) for number in met}


def timeline(row: Any, sample: Any) -> int:
    """Of an imported group: where the run has that timeline by now."""
    return int(sample.timeline if sample.timeline <= row.timeline else row.timeline)


def _guessed(met: Sequence[int], here: Mapping[int, Any]) -> dict[str, Any]:
    """Nobody told what the numbers mean: updates in a row, each with its number as its label, as slime counts."""
    made: dict[int, dict[str, Any]] = {}
    parent = 0
    for number in sorted({0, *met, *(n for n, r in here.items() if r.label == str(n))}):
        made[number] = {
            "label": str(number), "path": None, "timeline": 0, "step": None, "depth": number, "common_depth": number,
            "parent": parent if number else None,
        }  # fmt: skip
        parent = number
    return {"timelines": {}, "timeline": 0, "weight_versions": made, "current_version": max(made)}


def _no_weights_of_its_own(
    tx: Tx, here: Mapping[int, Any], there: Mapping[int, dict[str, Any]], recorded: bool
) -> bool:
    """Every version of the run, but the first, is one of those; and nobody generates or trains with them, or did."""
    if any(n and (n not in there or there[n]["label"] != r.label) for n, r in here.items()):
        return False
    if any(n and told["label"] == here[0].label for n, told in there.items()):
        return False  # the first one's label names another there
    mine = sa.select(group.c.id).where(group.c.run_id == tx.run_id, group.c.import_key.is_(None))
    work = [
        sa.select(engine.c.id).where(engine.c.run_id == tx.run_id),
        sa.select(batch.c.id).where(batch.c.run_id == tx.run_id),
        sa.select(worker.c.id).where(
            worker.c.run_id == tx.run_id, worker.c.state == WorkerState.LIVE.value, worker.c.kind.in_(AT_WORK)
        ),
        sa.select(sample.c.id).where(sample.c.group_id.in_(mine), sample.c.n_tokens > 0),
    ]
    return not any(tx.execute(each.limit(1)).first() for each in (work[:1] if recorded else work))


def _take_over(tx: Tx, row: Any, told: Mapping[str, Any], here: Mapping[int, Any]) -> None:
    mine = sa.select(timeline_table.c.number).where(timeline_table.c.run_id == tx.run_id)
    timelines = set(tx.execute(mine).scalars())
    _insert(tx, timeline_table, [{"number": n, **t} for n, t in told["timelines"].items() if n not in timelines])
    versions = told["weight_versions"]
    _insert(tx, version, [{"version": number, **one} for number, one in versions.items() if number not in here])
    for number in sorted(here.keys() & versions.keys() - {0}):
        place = {name: versions[number][name] for name in PLACE}
        of_run = version.c.run_id == tx.run_id
        tx.execute(sa.update(version).where(of_run, version.c.version == number).values(**place))
    tx.execute(
        sa.update(run)
        .where(run.c.id == tx.run_id)
        .values(
            current_version=max(row.current_version, told["current_version"]),
            last_version=max(row.last_version, max(versions)),
            timeline=max(row.timeline, told["timeline"]),
        )
    )


def _insert(tx: Tx, table: Any, rows: list[dict[str, Any]]) -> None:
    for at in range(0, len(rows), PART):
        part = [{"run_id": tx.run_id, **row} for row in rows[at : at + PART]]
        tx.execute(sa.insert(table).values(created_at=db_now()), part)
