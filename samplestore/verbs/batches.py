"""Batches: lease, commit, give back, rewind. A group is in at most one live batch, and the partial unique index on
batch_group is the proof."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting, LeaseLost, RewindTooFar, StepAlreadyCommitted, StepHeld
from samplestore.models import BatchGroup, BatchRow, Run, Sample, SampleGroup, Segment, Timeline, WeightVersionRow
from samplestore.statements import staleness
from samplestore.states import IN_WINDOW, LIVE_BATCH, BatchState, GroupState, StalePolicy
from samplestore.types import WeightVersion, whole
from samplestore.verbs import groups, weights
from samplestore.verbs.tx import SHARED, Tx

run, batch, batch_group, group, sample, segment, timeline, version = (
    t.__table__ for t in (Run, BatchRow, BatchGroup, SampleGroup, Sample, Segment, Timeline, WeightVersionRow)
)


def lease(tx: Tx, worker_id: int, step: int, n_groups: int, policy: dict[str, Any]) -> int | None:
    """Lease the first `n_groups` ready groups inside the window for `step`; the batch's id, or None if there are too
    few. Get-or-create: a step that this worker holds is returned again. Nothing is leased by halves.

    policy: {"max_staleness": int, "staleness": mode, "stale": "skip" | "mask", ...}, stored with the batch.
    Raises StepAlreadyCommitted, StepHeld, WorkerDead.
    """
    whole("groups", n_groups, 1)
    whole("step", step)
    whole("max_staleness", policy["max_staleness"])
    tx.require_live(worker_id)
    row = tx.lock_run()
    held = tx.execute(
        sa.select(batch).where(
            batch.c.run_id == tx.run_id,
            batch.c.step == step,  # on any timeline: a rewind has marked what the current one does not contain
            batch.c.state.in_([s.value for s in LIVE_BATCH]),
        )
    ).one_or_none()
    if held is not None:
        if held.state == BatchState.COMMITTED:
            raise StepAlreadyCommitted(step, held.id)
        if held.owner != worker_id:
            raise StepHeld(step, held.id, held.owner)
        return int(held.id)
    found = tx.rows(_ready(tx.run_id, n_groups, policy))
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
            {"batch_id": batch_id, "group_id": r.id, "position": i, "staleness": None if r.lag is None else int(r.lag)}
            for i, r in enumerate(found)
        ],
    )
    _move(tx, ids, GroupState.LEASED)
    return int(batch_id)


def _ready(run_id: int, limit: int, policy: dict[str, Any]) -> Any:
    """Ready groups in serving order, inside the window. Unknown staleness is NULL, which no comparison lets in."""
    mode = policy["staleness"]
    if mode not in staleness.MODES:
        raise InvalidSetting("staleness", mode, " | ".join(staleness.MODES))
    chosen = sa.select(group.c.id).where(group.c.run_id == run_id, group.c.state == GroupState.READY.value)
    if mode == "oldest":
        lag: Any = staleness.behind(run_id, group.c.oldest_version)
        source: Any = group
    else:
        measured = staleness.group_staleness(run_id, mode, chosen)
        lag, source = measured.c.staleness, group.join(measured, measured.c.group_id == group.c.id)
    query = (
        sa.select(group.c.id, lag.label("lag"))
        .select_from(source)
        # The state once more, on the row that is locked: when a drop or a requeue came between, PostgreSQL looks at
        # that again, and not into the subquery.
        .where(group.c.id.in_(chosen), group.c.state == GroupState.READY.value, lag.is_not(None))
        .order_by(group.c.number)
        .limit(limit)
        .with_for_update(of=group, key_share=True, skip_locked=True)
    )
    return query if policy["stale"] == StalePolicy.MASK else query.where(lag <= policy["max_staleness"])


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


def rewind(tx: Tx, step: int) -> WeightVersion:
    """Training goes back to the checkpoint of `step`. Batches that it has not seen are marked rewound and their
    groups are ready again; a new timeline starts; the restored weights get a new version number.
    Raises RewindTooFar, InvalidSetting for a step that was never reached."""
    whole("step", step, -1)
    row = tx.lock_run()
    newest = _newest_step(tx)
    if step > newest:  # a typing error must not fork the timeline
        raise InvalidSetting("step", step, f"-1 (before the first) to {newest}, the newest of this run")
    if step < row.retention_step:
        raise RewindTooFar(step, row.retention_step, "what came after it was pruned, up to step")
    undone = tx.rows(
        sa.select(batch.c.id, batch.c.state).where(
            batch.c.run_id == tx.run_id,
            sa.or_(
                (batch.c.state == BatchState.COMMITTED.value) & (batch.c.step > step),
                batch.c.state == BatchState.LEASED.value,
            ),
        )
        .order_by(batch.c.id)
        .with_for_update(key_share=True)  # a commit that is under way ends first
    )  # fmt: skip
    tx.as_worker(SHARED)
    for b in undone:
        end = BatchState.REWOUND if b.state == BatchState.COMMITTED else BatchState.RELEASED
        give_back(tx, b.id, end, f"rewind to step {step}")
    restored = _branch(tx, row, step)
    _refresh_window(tx)
    tx.event("rewind", None, step=step, version=restored.version, details={"batches": len(undone)})
    return restored


def _newest_step(tx: Tx) -> int:
    """The newest step that a batch or a weight version of this run is of."""
    held = tx.execute(sa.select(sa.func.max(batch.c.step)).where(batch.c.run_id == tx.run_id)).scalar()
    published = tx.execute(sa.select(sa.func.max(version.c.step)).where(version.c.run_id == tx.run_id)).scalar()
    return max(held or 0, published or 0)


def _branch(tx: Tx, row: Any, step: int) -> WeightVersion:
    """The new timeline and its first version: the weights of the last version at or before `step`."""
    of_run = version.c.run_id == tx.run_id
    source = tx.execute(
        sa.select(version)
        .where(of_run, version.c.common_depth == version.c.depth, version.c.abandoned_at.is_(None))
        .where(sa.or_(version.c.version == 0, version.c.step <= step))
        .order_by(version.c.version.desc())
        .limit(1)
    ).one()
    tx.execute(
        sa.update(version)
        .where(of_run, version.c.depth > source.depth, version.c.abandoned_at.is_(None))
        .values(abandoned_at=db_now())
    )
    tx.execute(
        sa.update(version).where(of_run, version.c.common_depth > source.depth).values(common_depth=source.depth)
    )
    number, branch = row.last_version + 1, int(
        tx.execute(sa.select(sa.func.max(timeline.c.number)).where(timeline.c.run_id == tx.run_id)).scalar_one()
    ) + 1  # fmt: skip
    tx.execute(
        sa.insert(timeline).values(
            run_id=tx.run_id, number=branch, parent=row.timeline, forked_at_step=step, created_at=db_now()
        )
    )
    tx.execute(
        sa.insert(version).values(
            run_id=tx.run_id, version=number, timeline=branch, parent=source.version, step=source.step,
            depth=source.depth, common_depth=source.depth, label=f"{row.uuid[:8]}-v{number}", path=source.path,
            created_at=db_now(),
        )
    )  # fmt: skip
    tx.execute(
        sa.update(run).where(run.c.id == tx.run_id).values(timeline=branch, current_version=number, last_version=number)
    )
    return weights.as_version(weights.row_of(tx, number))


def _refresh_window(tx: Tx) -> None:
    """After a rewind other tokens are the stalest, and groups that had become stale may be inside the window again:
    going back must not skip them."""
    states = [*(s.value for s in IN_WINDOW), GroupState.STALE.value]
    ids = [r.id for r in tx.rows(
        sa.select(group.c.id).where(group.c.run_id == tx.run_id, group.c.state.in_(states)).order_by(group.c.id)
    )]  # fmt: skip
    locked = tx.lock_groups(ids)
    fresh: dict[int, tuple[int, int]] = {}
    found = tx.rows(
        sa.select(segment.c.sample_id, segment.c.version_min, staleness.freshness(version).label("freshness"))
        .select_from(
            segment.join(
                sample, (sample.c.id == segment.c.sample_id) & (sample.c.incarnation == segment.c.incarnation)
            ).join(version, (version.c.run_id == sample.c.run_id) & (version.c.version == segment.c.version_min))
        )
        .where(sample.c.group_id.in_(ids), segment.c.loss == 1)
        .distinct()
    )
    for r in found:
        best = fresh.get(r.sample_id)
        if best is None or r.freshness < best[0]:
            fresh[r.sample_id] = (r.freshness, r.version_min)
    for sample_id, (_, oldest) in sorted(fresh.items()):
        tx.execute(
            sa.update(sample)
            .where(sample.c.id == sample_id, sample.c.oldest_version != oldest)
            .values(oldest_version=oldest)
        )
    stale = [id for id in ids if locked[id].state == GroupState.STALE]
    if stale:
        with tx.moving(groups=stale):
            groups.reopen(tx, stale)
    for id in ids:
        if locked[id].state == GroupState.READY:
            groups.refresh(tx, id)
    groups.expire(tx)
