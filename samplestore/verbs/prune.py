"""Retention, one transaction a function: what may go, the tokens of groups, and whole runs.

A pruned group keeps its rows. Only payloads and named arrays go, so that counters, versions, rewards and the ledger
stay what they were. Before the first token goes, `run.retention_step` says up to which step; no rewind goes below it,
and so whatever is pruned here is what no later rewind can ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import RunInUse
from samplestore.models import (
    BatchGroup,
    BatchRow,
    DatasetRow,
    EngineRow,
    EpisodeStep,
    EvaluationRow,
    Event,
    EventTotal,
    LedgerTotal,
    PromptImage,
    Request,
    RequestTotal,
    Run,
    Sample,
    SampleGroup,
    Segment,
    SegmentArray,
    Stage,
    Timeline,
    WeightVersionRow,
    Worker,
)
from samplestore.statements import staleness
from samplestore.states import FINISHED, BatchState, GroupState, RunState, SampleStatus, StalenessMode, WorkerState
from samplestore.verbs import rewind
from samplestore.verbs.tx import Tx

run, batch, batch_group, group, sample, segment, array = (
    t.__table__
    for t in (
        Run,
        BatchRow,
        BatchGroup,
        SampleGroup,
        Sample,
        Segment,
        SegmentArray,
    )
)
worker = Worker.__table__

GIVEN_UP = (GroupState.DROPPED, GroupState.SUPERSEDED)


class Freed(NamedTuple):
    """What a transaction removed. size: bytes of payloads and arrays. files: side-car files."""

    groups: int = 0
    segments: int = 0
    size: int = 0
    files: int = 0

    def plus(self, other: Freed) -> Freed:
        return Freed(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Retention:
    """What may go.

    step     batches up to this step
    before   what was given up by then, by the database's clock; None: nothing is old enough
    reach    depth of the weights that a rewind to `step` restores: the furthest that a rewind may still go
    window   the run's max_staleness
    mode     how the run counts staleness
    """

    step: int
    before: float | None
    reach: int
    window: int
    mode: str


def retain(tx: Tx, keep_steps: int) -> Retention:
    """Fix up to which step tokens may go, before any goes: the newest committed step less `keep_steps`. It never falls:
    what an earlier prune removed does not come back."""
    row = tx.lock_run()
    committed = (batch.c.run_id == tx.run_id) & (batch.c.state == BatchState.COMMITTED.value)
    newest = tx.execute(sa.select(sa.func.max(batch.c.step)).where(committed)).scalar()
    step = max(row.retention_step, -1 if newest is None else newest - keep_steps)
    if step > row.retention_step:
        tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(retention_step=step))
        tx.event("prune", f"keep {keep_steps} steps", step=step)
    before = tx.execute(sa.select(sa.func.max(batch.c.settled_at)).where(committed, batch.c.step <= step)).scalar()
    reach = tx.execute(rewind.version_at(tx.run_id, step)).one().depth
    return Retention(step, before, int(reach), tx.settings.max_staleness, tx.settings.staleness_mode)


def prunable(run_id: int, may: Retention) -> sa.ColumnElement[bool]:
    """Groups that no rewind to `may.step` or later, and no other verb, can bring back with the tokens they have."""
    of_group = sample.c.group_id == group.c.id
    held = batch_group.join(batch, batch.c.id == batch_group.c.batch_id)
    trained = sa.exists(
        sa.select(sa.literal(1))
        .select_from(held)
        .where(batch_group.c.group_id == group.c.id, batch.c.state == BatchState.COMMITTED.value)
        .where(batch.c.step <= may.step)
    )
    # A rewind opens stale groups that come back into the window. How fresh a version is can only fall to the depth of
    # the weights that are restored, so what lies too far behind the oldest of those lies too far behind all of them.
    # That of every trained token of one sample, so that it is true however the run counts staleness.
    lag = sa.literal(may.reach) - staleness.freshness_of(run_id, segment.c.version_min)
    own = (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation) & (segment.c.loss == 1)
    near = sa.exists(sa.select(sa.literal(1)).where(own, sa.func.coalesce(lag, 0) <= may.window))
    # Except by `oldest`, tokens to come could make an unfinished sample fresh again.
    certain = sample.c.status != SampleStatus.FAILED.value
    if may.mode != StalenessMode.OLDEST:
        certain = sample.c.status.in_([s.value for s in FINISHED])
    beyond = sa.exists(sa.select(sa.literal(1)).where(of_group, certain, sample.c.n_loss_tokens > 0, ~near))
    never = group.c.ready_at.is_not(None) & group.c.oldest_version.is_(None)  # closed for a version nobody knows
    old = group.c.settled_at <= may.before if may.before is not None else sa.false()
    child, home = sample.alias("child"), group.alias("home")
    shared = sa.exists(  # samples of another group that begin with tokens of this one
        sa.select(sa.literal(1))
        .select_from(sample.join(child, child.c.parent_id == sample.c.id).join(home, home.c.id == child.c.group_id))
        .where(of_group, home.c.id != group.c.id, home.c.pruned_at.is_(None))
    )
    return (
        (group.c.run_id == run_id)
        & group.c.pruned_at.is_(None)
        & sa.or_(
            (group.c.state == GroupState.CONSUMED.value) & trained,
            group.c.state.in_([s.value for s in GIVEN_UP]) & old,
            (group.c.state == GroupState.STALE.value) & old & sa.or_(beyond, never),
        )
        & ~shared
    )


def former_lives(run_id: int, may: Retention) -> sa.ColumnElement[bool]:
    """Segments of incarnations that a requeue has ended, in groups that are still there."""
    old = segment.c.created_at <= may.before if may.before is not None else sa.false()
    return (sample.c.run_id == run_id) & (segment.c.incarnation < sample.c.incarnation) & old & _has_tokens()


def _has_tokens() -> sa.ColumnElement[bool]:
    return sa.func.length(segment.c.payload) > 1  # the length alone: comparing payloads would read them


def prune_groups(tx: Tx, ids: Sequence[int], may: Retention) -> Freed:
    """Remove the tokens of these groups, as far as they are still prunable. Repeating it is harmless."""
    tx.lock_groups(ids)
    # Looked at again, on locked rows: a requeue may have come between.
    found = [r.id for r in tx.rows(sa.select(group.c.id).where(group.c.id.in_(ids), prunable(tx.run_id, may)))]
    if not found:
        return Freed()
    of_groups = sa.select(sample.c.id).where(sample.c.group_id.in_(found))
    freed = _empty(tx, segment.c.sample_id.in_(of_groups) & _has_tokens(), array.c.sample_id.in_(of_groups))
    tx.execute(sa.update(group).where(group.c.id.in_(found)).values(pruned_at=db_now()))
    return freed.plus(Freed(groups=len(found)))


def prune_lives(tx: Tx, ids: Sequence[int], may: Retention) -> Freed:
    """Remove the tokens of former incarnations of these samples. They have no owner, so nothing needs a lock."""
    before = may.before if may.before is not None else 0.0
    life = sa.select(sample.c.incarnation).where(sample.c.id == segment.c.sample_id).scalar_subquery()
    array_life = sa.select(sample.c.incarnation).where(sample.c.id == array.c.sample_id).scalar_subquery()
    return _empty(
        tx,
        segment.c.sample_id.in_(ids) & (segment.c.incarnation < life) & (segment.c.created_at <= before)
        & _has_tokens(),
        array.c.sample_id.in_(ids) & (array.c.incarnation < array_life) & (array.c.created_at <= before),
    )  # fmt: skip


def _empty(tx: Tx, segments: sa.ColumnElement[bool], arrays: sa.ColumnElement[bool]) -> Freed:
    freed = _measured(tx, segments, arrays)
    tx.execute(sa.delete(array).where(arrays))
    tx.execute(sa.update(segment).where(segments).values(payload=codec.PRUNED_PAYLOAD))
    return freed


def _measured(tx: Tx, segments: sa.ColumnElement[bool], arrays: sa.ColumnElement[bool]) -> Freed:
    size, in_row = (sa.func.coalesce(sa.func.sum(sa.func.length(c)), 0) for c in (segment.c.payload, array.c.data))
    found: Any = tx.execute(sa.select(sa.func.count(), size).where(segments)).one()
    beside = tx.execute(sa.select(in_row).where(arrays)).scalar_one()
    return Freed(segments=int(found[0]), size=int(found[1]) + int(beside))


# -- whole runs


def close_run(tx: Tx) -> None:
    """Before a run is removed: nobody may be at work on it, nobody begins, and no rewind comes back to it. Reap before,
    in a transaction of its own: that locks groups, and this the run, which comes first. Raises RunInUse."""
    row = tx.lock_run()
    require_idle(tx, row.name)
    newest = tx.execute(sa.select(sa.func.max(batch.c.step)).where(batch.c.run_id == tx.run_id)).scalar()
    tx.execute(
        sa.update(run)
        .where(run.c.id == tx.run_id)
        .values(state=RunState.PAUSED.value, retention_step=max(row.retention_step, -1 if newest is None else newest))
    )
    tx.event("prune", "the whole run")


def require_idle(tx: Tx, name: str) -> None:
    live = tx.rows(sa.select(worker.c.id).where(worker.c.run_id == tx.run_id, worker.c.state == WorkerState.LIVE.value))
    if live:
        raise RunInUse(f"run {name!r}", [row.id for row in live])


def remove_batches(tx: Tx, ids: Sequence[int], name: str) -> Freed:
    """Remove batches; the groups of committed ones with them, since a consumed group is one that a batch holds."""
    require_idle(tx, name)
    held = tx.rows(
        sa.select(batch_group.c.group_id)
        .where(batch_group.c.batch_id.in_(ids), batch_group.c.state == BatchState.COMMITTED.value)
        .order_by(batch_group.c.group_id)
    )
    tx.execute(sa.delete(batch_group).where(batch_group.c.batch_id.in_(ids)))
    freed = remove_groups(tx, [row.group_id for row in held], name)
    tx.execute(sa.delete(batch).where(batch.c.id.in_(ids)))
    return freed


def remove_groups(tx: Tx, ids: Sequence[int], name: str) -> Freed:
    """Remove groups with all that hangs on them; their tokens leave the ledger in the same transaction."""
    require_idle(tx, name)
    if not ids:
        return Freed()
    tx.lock_groups(ids)
    samples = sa.select(sample.c.id).where(sample.c.group_id.in_(ids))
    freed = _measured(tx, segment.c.sample_id.in_(samples), array.c.sample_id.in_(samples))
    # Whoever ends one of these requests has no fence: one that came between the count and the end would stay counted.
    mine = Request.sample_id.in_(samples)
    tx.rows(sa.select(Request.id).where(mine).order_by(Request.id).with_for_update())
    tx.recount(requests=mine, times=-1)
    with tx.moving(groups=ids):
        for table in (SegmentArray, Segment, EpisodeStep, Request):
            tx.execute(sa.delete(table).where(table.sample_id.in_(samples)))
        for child in (Stage, Sample):
            tx.execute(sa.delete(child).where(child.group_id.in_(ids)))
        tx.execute(sa.delete(group).where(group.c.id.in_(ids)))
    return freed.plus(Freed(groups=len(ids)))


def remove_rows(tx: Tx, table: Any, ids: Sequence[int], name: str) -> Freed:
    """Remove prompts or events."""
    require_idle(tx, name)
    if table is Event.__table__:
        tx.recount(events=Event.id.in_(ids), times=-1)
    tx.execute(sa.delete(table).where(table.c.id.in_(ids)))
    return Freed()


def remove_run(tx: Tx, name: str) -> Freed:
    """Remove what is left: the run and the few rows that only it has."""
    tx.lock_run()
    require_idle(tx, name)
    of_run = (
        Event, EngineRow, Worker, LedgerTotal, RequestTotal, EventTotal, WeightVersionRow, Timeline, EvaluationRow,
        DatasetRow, PromptImage,
    )  # fmt: skip
    for table in of_run:
        tx.execute(sa.delete(table).where(table.run_id == tx.run_id))
    tx.execute(sa.delete(run).where(run.c.id == tx.run_id))
    return Freed()
