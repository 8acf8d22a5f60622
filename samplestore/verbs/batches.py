"""Batches: lease, commit, give back. A group is in at most one live batch, and the partial unique index on
batch_group is the proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from samplestore import codec, serving
from samplestore.arguments import choice, whole
from samplestore.arrays import Prepared
from samplestore.clock import db_now
from samplestore.errors import BatchReleased, LeaseLost, NotInRun, SampleStoreError, StepAlreadyCommitted, StepHeld
from samplestore.models import BatchGroup, BatchRow, Sample, SampleGroup, Segment, SegmentArray, Timeline, one_of
from samplestore.queries import plans
from samplestore.statements import staleness
from samplestore.states import LIVE_BATCH, BatchState, GroupState, StalenessMode, StalePolicy
from samplestore.verbs import arrays, stale, steps
from samplestore.verbs.tx import Tx, in_parts

batch, batch_group, group, timeline, sample, segment, segment_array = (
    t.__table__ for t in (BatchRow, BatchGroup, SampleGroup, Timeline, Sample, Segment, SegmentArray)
)


def lease(
    tx: Tx, worker_id: int, step: int, n_groups: int, policy: dict[str, Any], only: Sequence[int] | None = None,
    world: int = 1,
) -> int | None:  # fmt: skip
    """Lease the first `n_groups` ready groups inside the window for `step`; the batch's id, or None if there are too
    few. Get-or-create: a step that this worker holds is returned again, and one that was given back is leased with the
    same groups, if they are ready and the same is asked for. Nothing is leased by halves.

    policy   {"max_staleness": int, "staleness": StalenessMode, "stale": StalePolicy, ...}, stored with the batch. What
             it says of groups beyond the window is done here, also when too few are left for a batch: the time that a
             group has waited counts, and what nobody will take must make room. "order" says which go first
    only     ids of groups, in the order in which they are wanted: nothing else is leased
    world    ranks that its samples are shared out over: the plan is stored with it, and made anew for another number
    Raises StepAlreadyCommitted, StepHeld, WorkerDead, InvalidSetting.
    """
    n_groups, step = whole("groups", n_groups, 1), whole("step", step)
    window = whole("max_staleness", policy["max_staleness"])
    mode = choice("staleness", policy["staleness"], StalenessMode)
    beyond = choice("stale", policy["stale"], StalePolicy)
    tx.require_live(worker_id)
    row = tx.lock_run()
    held = tx.execute(live_of_step(tx.run_id, step)).one_or_none()
    if held is not None:
        if held.state == BatchState.COMMITTED:
            raise StepAlreadyCommitted(step, held.id)
        if held.owner != worker_id:
            raise StepHeld(step, held.id, held.owner)
        if world != (1 if held.plan is None else held.plan["world"]):
            _share_out(tx, held.id, world)
        return int(held.id)
    if beyond in stale.ACTS:
        stale.settle_ready(tx, window, mode, beyond)
    inside = None if beyond is StalePolicy.MASK else window
    wanted = partial(ready, tx.run_id, n_groups, mode, inside, policy.get("order", serving.FIFO))
    found = _in_order(tx, wanted, only)
    if len(found) < n_groups:
        return None
    if only is None and (again := _given_back(tx, row.timeline, step, n_groups, policy)):
        same = _in_order(tx, wanted, again)
        found = same if len(same) == n_groups else found
    batch_id = _insert(tx, row, worker_id, step, policy, found)
    if world > 1:
        _share_out(tx, batch_id, world)
    steps.tend(tx, row)
    return batch_id


def _insert(tx: Tx, row: Any, worker_id: int, step: int, policy: dict[str, Any], found: Sequence[Any]) -> int:
    """The batch of these groups. row: the run's."""
    ids = [r.id for r in found]
    counts: Any = tx.execute(
        sa.select(sa.func.sum(group.c.n_samples - group.c.n_failed), sa.func.sum(group.c.n_tokens)).where(
            group.c.id.in_(ids)
        )
    ).one()
    batch_id = tx.execute(
        sa.insert(batch)
        .values(
            run_id=tx.run_id, timeline=row.timeline, step=step, owner=worker_id, current_version=row.current_version,
            n_groups=len(ids), n_samples=int(counts[0]), n_tokens=int(counts[1]), policy=policy, created_at=db_now(),
        )
        .returning(batch.c.id)
    ).scalar_one()  # fmt: skip
    tx.execute(
        sa.insert(batch_group),
        [
            # a mean is rounded up: what is recorded lies inside the window where the mean did
            {"batch_id": batch_id, "group_id": r.id, "position": i, "staleness": math.ceil(r.lag)}
            for i, r in enumerate(found)
        ],
    )
    _move(tx, ids, GroupState.LEASED)
    return int(batch_id)


def _in_order(tx: Tx, wanted: Callable[..., Any], only: Sequence[int] | None) -> Sequence[Any]:
    """Ready groups; with `only`, those of them, in that order."""
    found = tx.rows(wanted(only))
    place = {id: i for i, id in enumerate(only or ())}
    return found if only is None else sorted(found, key=lambda r: place[r.id])


def _given_back(tx: Tx, timeline: int, step: int, n_groups: int, policy: dict[str, Any]) -> list[int]:
    """Ids of the groups, in their order, of a batch of this step that was given back, if the same is asked for. A
    trainer that failed or died goes on with what it had: groups that became ready since would change the step, and
    what its ranks have."""
    before = plans.newest(tx.connection, tx.run_id, step, timeline)
    if before is None or (before.policy, before.n_groups) != (policy, n_groups):
        return []
    query = sa.select(batch_group.c.group_id).where(batch_group.c.batch_id == before.id)
    return [row.group_id for row in tx.rows(query.order_by(batch_group.c.position))]


def _share_out(tx: Tx, batch_id: int, world: int) -> None:
    plan = plans.of_batch(tx.connection, batch_id, world)
    tx.execute(sa.update(batch).where(batch.c.id == batch_id).values(plan=plan))


def live_of_step(run_id: int, step: int) -> sa.Select[Any]:
    """The leased or committed batch of a step, on any timeline: a rewind has marked what the current one does not
    contain. Timelines are named and states written out so that uq_batch_step finds it among all batches."""
    timelines = sa.select(timeline.c.number).where(timeline.c.run_id == run_id)
    return sa.select(batch).where(
        batch.c.run_id == run_id,
        batch.c.timeline.in_(timelines),
        batch.c.step == step,
        sa.text(one_of("batch.state", LIVE_BATCH)),
    )


def ready(
    run_id: int, limit: int, mode: StalenessMode, window: int | None, order: str, only: Sequence[int] | None = None,
    lock: bool = True,
) -> Any:  # fmt: skip
    """Ready groups in the order that a run's setting names, inside the window if there is one; with `only`, those of
    them. Unknown staleness is NULL, which no comparison lets in."""
    source, lag, ready = staleness.ready_groups(run_id, mode)
    if only is not None:
        ready = ready & group.c.id.in_(only)
    first: tuple[Any, ...] = ()
    if order == serving.OLDEST:
        first = (lag.desc(),)
    elif order.startswith(serving.SQL):
        # The operator's own expression, trusted; a literal, since text() would take a : in it for a parameter.
        first = (sa.literal_column(f"({order.removeprefix(serving.SQL)})"),)
    query = (
        sa.select(group.c.id, lag.label("lag"))
        .select_from(source)
        # The state is looked at once more on the row that is locked: when a drop or a requeue came between,
        # PostgreSQL reads the condition again, on the row as it is then.
        .where(ready, lag.is_not(None))
        .order_by(*first, group.c.number)
        .limit(limit)
    )
    if lock:
        query = query.with_for_update(of=group, key_share=True, skip_locked=True)
    return query if window is None else query.where(lag <= window)


def _move(tx: Tx, ids: list[int], state: GroupState) -> None:
    with tx.moving(groups=ids):
        settled = db_now() if state == GroupState.CONSUMED else None
        tx.execute(sa.update(group).where(group.c.id.in_(ids)).values(state=state.value, settled_at=settled))


def group_ids(tx: Tx, batch_id: int) -> list[int]:
    rows = tx.rows(
        sa.select(batch_group.c.group_id).where(batch_group.c.batch_id == batch_id).order_by(batch_group.c.group_id)
    )
    return [row.group_id for row in rows]


def commit(tx: Tx, batch_id: int, worker_id: int) -> None:
    """Settle a batch: its groups are consumed, once. Repeating it is harmless. Raises LeaseLost."""
    tx.as_worker(worker_id)
    # The batch before its groups, here as in a reap and a rewind: the other way round they deadlock.
    changed = tx.execute(
        sa.update(batch)
        .where(batch.c.id == batch_id, batch.c.owner == worker_id, batch.c.state == BatchState.LEASED.value)
        .values(state=BatchState.COMMITTED.value, settled_at=db_now())
    ).rowcount
    if changed != 1:
        row = tx.execute(sa.select(batch).where(batch.c.id == batch_id)).one()
        if row.state == BatchState.COMMITTED and row.owner == worker_id:
            return
        raise LeaseLost("batch", batch_id, 0, row.owner)
    ids = group_ids(tx, batch_id)
    tx.lock_groups(ids)
    _set_groups(tx, batch_id, BatchState.COMMITTED)
    _move(tx, ids, GroupState.CONSUMED)


def record(tx: Tx, batch_id: int, made: Mapping[int, Prepared]) -> None:
    """Store an array of each of these samples of a leased batch, in place of one of the same name. Repeatable.
    Raises BatchReleased, SampleStoreError for a batch that is committed or does not hold a sample."""
    # Locked against a commit and a release, which change this row; ranks may record side by side.
    row = tx.execute(sa.select(batch).where(batch.c.id == batch_id).with_for_update(read=True)).one()
    if row.state == BatchState.COMMITTED:
        raise SampleStoreError(f"batch {batch_id} is committed: record before, then run.replay({row.step}) reads it")
    if row.state != BatchState.LEASED:
        raise BatchReleased(row.step, batch_id, row.reason)
    for ids in in_parts(made):
        _record(tx, batch_id, {id: made[id] for id in ids})


def _record(tx: Tx, batch_id: int, made: Mapping[int, Prepared]) -> None:
    last = sa.func.max(segment.c.seq).label("seq")
    alive = (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation)
    found = tx.rows(
        sa.select(sample.c.id, sample.c.incarnation, last)
        .select_from(batch_group.join(sample, sample.c.group_id == batch_group.c.group_id).join(segment, alive))
        .where(batch_group.c.batch_id == batch_id, sample.c.id.in_(sorted(made)))
        .group_by(sample.c.id, sample.c.incarnation)
        .order_by(sample.c.id)
    )
    if len(found) < len(made):
        missing = sorted(set(made) - {row.id for row in found})
        raise NotInRun(f"sample of batch {batch_id}", missing)
    (name,) = {array.name for array in made.values()}
    current = (sample.c.id == segment_array.c.sample_id) & (sample.c.incarnation == segment_array.c.incarnation)
    tx.execute(
        sa.delete(segment_array).where(
            segment_array.c.sample_id.in_(sorted(made)), segment_array.c.name == name, sa.exists().where(current)
        )
    )
    rows = [arrays.row_of(row.id, row.incarnation, row.seq, made[row.id]) for row in found]
    tx.execute(sa.insert(segment_array).values(created_at=db_now()), rows)


def release(tx: Tx, batch_id: int, worker_id: int, reason: str) -> None:
    """Give a leased batch back, all groups ready again. Repeating it is harmless. Raises LeaseLost."""
    tx.as_worker(worker_id)
    row = tx.execute(sa.select(batch).where(batch.c.id == batch_id).with_for_update(key_share=True)).one()
    if row.owner != worker_id or row.state not in (BatchState.LEASED, BatchState.RELEASED):
        raise LeaseLost("batch", batch_id, 0, row.owner)
    if row.state == BatchState.LEASED:
        give_back(tx, batch_id, BatchState.RELEASED, reason)


def give_back(tx: Tx, batch_id: int, state: BatchState, reason: str) -> list[int]:
    """End a (locked) batch without consumption: `released` or `rewound`. Its groups are ready again."""
    reason = codec.clean_text(reason)  # may be the text of a trainer's exception
    ids = group_ids(tx, batch_id)
    tx.lock_groups(ids)
    tx.execute(
        sa.update(batch)
        .where(batch.c.id == batch_id)
        .values(state=state.value, reason=reason, settled_at=db_now(), attempt=batch.c.attempt + 1)
    )
    _set_groups(tx, batch_id, state)
    _move(tx, ids, GroupState.READY)
    tx.event(f"batch_{state.value}", reason, details={"batch": batch_id, "groups": len(ids)})
    return ids


def revive(tx: Tx, batch_id: int) -> bool:
    """Lease the groups of a (locked) batch that was given back once more, as that batch; False unless all are ready."""
    ids = group_ids(tx, batch_id)
    locked = tx.lock_groups(ids)
    if any(locked[id].state != GroupState.READY for id in ids):
        return False
    tx.execute(
        sa.update(batch)
        .where(batch.c.id == batch_id)
        .values(state=BatchState.LEASED.value, reason=None, settled_at=None, attempt=batch.c.attempt + 1)
    )
    _set_groups(tx, batch_id, BatchState.LEASED)
    _move(tx, ids, GroupState.LEASED)
    return True


def _set_groups(tx: Tx, batch_id: int, state: BatchState) -> None:
    tx.execute(sa.update(batch_group).where(batch_group.c.batch_id == batch_id).values(state=state.value))
