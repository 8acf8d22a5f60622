"""Batches: lease, commit, give back. A group is in at most one live batch, and the partial unique index on
batch_group is the proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from samplestore import codec, serving
from samplestore.clock import db_now
from samplestore.errors import LeaseLost, StepAlreadyCommitted, StepHeld
from samplestore.models import BatchGroup, BatchRow, SampleGroup, Timeline, one_of
from samplestore.statements import staleness
from samplestore.states import LIVE_BATCH, BatchState, GroupState, StalenessMode, StalePolicy
from samplestore.types import choice, whole
from samplestore.verbs import stale, steps
from samplestore.verbs.tx import Tx

batch, batch_group, group, timeline = (t.__table__ for t in (BatchRow, BatchGroup, SampleGroup, Timeline))


def lease(
    tx: Tx, worker_id: int, step: int, n_groups: int, policy: dict[str, Any], only: Sequence[int] | None = None
) -> int | None:
    """Lease the first `n_groups` ready groups inside the window for `step`; the batch's id, or None if there are too
    few. Get-or-create: a step that this worker holds is returned again. Nothing is leased by halves.

    policy   {"max_staleness": int, "staleness": StalenessMode, "stale": StalePolicy, ...}, stored with the batch. What
             it says of groups beyond the window is done here, also when too few are left for a batch: the time that a
             group has waited counts, and what nobody will take must make room. "order" says which go first
    only     ids of groups, in the order in which they are wanted: nothing else is leased
    Raises StepAlreadyCommitted, StepHeld, WorkerDead, InvalidSetting.
    """
    whole("groups", n_groups, 1)
    whole("step", step)
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
        return int(held.id)
    if beyond in stale.ACTS:
        stale.settle_ready(tx, window, mode, beyond)
    inside = None if beyond is StalePolicy.MASK else window
    found = tx.rows(ready(tx.run_id, n_groups, mode, inside, policy.get("order", serving.FIFO), only))
    if only is not None:
        place = {id: i for i, id in enumerate(only)}
        found = sorted(found, key=lambda r: place[r.id])
    if len(found) < n_groups:
        return None
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
            n_groups=n_groups, n_samples=int(counts[0]), n_tokens=int(counts[1]), policy=policy, created_at=db_now(),
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
    steps.tend(tx, row)
    return int(batch_id)


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


def _set_groups(tx: Tx, batch_id: int, state: BatchState) -> None:
    tx.execute(sa.update(batch_group).where(batch_group.c.batch_id == batch_id).values(state=state.value))
