"""Rewind: training goes back to a checkpoint, and everything that it has not seen is there again."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.arguments import whole
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting, RewindTooFar
from samplestore.models import BatchGroup, BatchRow, Run, SampleGroup, Timeline, WeightVersionRow
from samplestore.states import IN_WINDOW, BatchState, GroupState
from samplestore.types import WeightVersion
from samplestore.verbs import batches, groups, stale, weights
from samplestore.verbs.tx import SHARED, Tx, in_parts

run, batch, batch_group, group, timeline, version = (
    t.__table__ for t in (Run, BatchRow, BatchGroup, SampleGroup, Timeline, WeightVersionRow)
)

ON_THE_LINE = (version.c.common_depth == version.c.depth) & version.c.abandoned_at.is_(None)


def rewind(tx: Tx, step: int, call: str | None = None) -> WeightVersion:
    """Training goes back to the checkpoint of `step`. Batches that it has not seen are marked rewound and their
    groups are ready again; a new timeline starts; the restored weights get a new version number. A repetition before
    anything was leased or published on the new timeline changes nothing.

    call   names this call, so that its repetition after a lost acknowledgement is known whatever happened since
    Raises RewindTooFar, InvalidSetting for a step that this line of training has not reached.
    """
    step = whole("step", step, -1)
    row = tx.lock_run()
    if (done := tx.done_before("rewind", call)) is not None:
        return weights.as_version(weights.row_of(tx, done["version"]))
    if _is_there(tx, row, step):
        return weights.as_version(weights.row_of(tx, row.current_version))
    undone = _undone(tx, step)
    require_reachable(tx, row, step)
    tx.as_worker(SHARED)
    _lock_groups(tx, [b.id for b in undone])
    for b in undone:
        end = BatchState.REWOUND if b.state == BatchState.COMMITTED else BatchState.RELEASED
        batches.give_back(tx, b.id, end, f"rewind to step {step}")
    restored = _branch(tx, row, step)
    _refresh_window(tx)
    tx.event("rewind", None, step=step, version=restored.version, details={"batches": len(undone), "call": call})
    return restored


def require_reachable(tx: Tx, row: Any, step: int) -> None:
    """Raises RewindTooFar, InvalidSetting where no checkpoint of `step` can be gone back to. row: the run's."""
    step = whole("step", step, -1)
    if step < row.retention_step:
        raise RewindTooFar(step, row.retention_step, "what came after it was pruned, up to step")
    if step > (newest := newest_step(tx)):  # a typing error must not fork the timeline
        reach = f"-1 (before the first) to {newest}, the newest of this timeline"
        raise InvalidSetting("step", step, reach if newest >= 0 else "-1: this timeline has no committed step yet")


def _is_there(tx: Tx, row: Any, step: int) -> bool:
    """Whether the run stands where this rewind would lead: at the first version of a timeline that forked at this
    step, and no batch was leased on it."""
    forked_at = tx.execute(
        sa.select(timeline.c.forked_at_step).where(timeline.c.run_id == tx.run_id, timeline.c.number == row.timeline)
    ).scalar()
    first = tx.execute(
        sa.select(sa.func.min(version.c.version)).where(
            version.c.run_id == tx.run_id, version.c.timeline == row.timeline
        )
    ).scalar()
    used = tx.execute(
        sa.select(batch.c.id).where(batch.c.run_id == tx.run_id, batch.c.timeline == row.timeline).limit(1)
    ).scalar()
    return row.timeline > 0 and forked_at == step and first == row.current_version and used is None


def _undone(tx: Tx, step: int) -> list[Any]:
    """The batches that the checkpoint has not seen, locked."""
    return list(
        tx.rows(
            sa.select(batch.c.id, batch.c.state)
            .where(
                batch.c.run_id == tx.run_id,
                sa.or_(
                    (batch.c.state == BatchState.COMMITTED.value) & (batch.c.step > step),
                    batch.c.state == BatchState.LEASED.value,
                ),
            )
            .order_by(batch.c.id)
            .with_for_update(key_share=True)  # a commit that is under way ends first
        )
    )


def newest_step(tx: Tx) -> int:
    """The newest step of this line of training: of a committed batch, or of a version that was not left behind."""
    settled = (batch.c.run_id == tx.run_id) & (batch.c.state == BatchState.COMMITTED.value)
    of_batch = tx.execute(sa.select(sa.func.max(batch.c.step)).where(settled)).scalar()
    published = tx.execute(
        sa.select(sa.func.max(version.c.step)).where(version.c.run_id == tx.run_id, ON_THE_LINE)
    ).scalar()
    return max(-1 if of_batch is None else of_batch, -1 if published is None else published)


def _lock_groups(tx: Tx, batch_ids: list[int]) -> None:
    """Lock all groups that may change, in one order: batch by batch they would be in none, and a drop of two of them
    could wait for this in a circle."""
    ids = [row.id for row in tx.rows(_of_window(tx.run_id))]
    for part in in_parts(batch_ids):
        held = sa.select(batch_group.c.group_id).where(batch_group.c.batch_id.in_(part))
        ids += [row.group_id for row in tx.rows(held)]
    for part in in_parts(ids):
        tx.lock_groups(part)


def _of_window(run_id: int) -> sa.Select[Any]:
    """Ids of the groups that are in the window, or were. What was pruned can't come back, see verbs/prune.py."""
    states = [*(s.value for s in IN_WINDOW), GroupState.STALE.value]
    return sa.select(group.c.id).where(group.c.run_id == run_id, group.c.state.in_(states), group.c.pruned_at.is_(None))


def version_at(run_id: int, step: int) -> sa.Select[Any]:
    """The row of the weights that a rewind to `step` restores: the last version of the current line at or before it."""
    return (
        sa.select(version)
        .where(version.c.run_id == run_id, ON_THE_LINE)
        .where(sa.or_(version.c.version == 0, version.c.step <= step))
        .order_by(version.c.version.desc())
        .limit(1)
    )


def _branch(tx: Tx, row: Any, step: int) -> WeightVersion:
    """The new timeline and its first version: the weights of the last version at or before `step`."""
    of_run = version.c.run_id == tx.run_id
    source = tx.execute(version_at(tx.run_id, step)).one()
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
            depth=source.depth, common_depth=source.depth, label=weights.made_label(row.uuid, number), path=source.path,
            created_at=db_now(),
        )
    )  # fmt: skip
    tx.execute(
        sa.update(run).where(run.c.id == tx.run_id).values(timeline=branch, current_version=number, last_version=number)
    )
    return weights.as_version(weights.row_of(tx, number))


def _refresh_window(tx: Tx) -> None:
    """After a rewind other tokens are the stalest, and groups that had become stale may be inside the window again:
    going back must not skip them. What is now too far from the restored weights is settled by the run's policy."""
    for ids in in_parts(row.id for row in tx.rows(_of_window(tx.run_id))):
        locked = tx.lock_groups(ids)
        # Appends lock no group: one that is under way must be stored before its sample is looked at.
        tx.lock_samples_of(ids)
        groups.restale(tx, ids)
        closed = [id for id in ids if locked[id].state == GroupState.STALE]
        if closed:
            with tx.moving(groups=closed):
                groups.reopen(tx, closed)
        for id in ids:
            if locked[id].state == GroupState.READY:
                groups.refresh(tx, id)
    stale.sweep(tx)
