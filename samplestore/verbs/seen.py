"""A trainer that keeps many steps between two checkpoints: what a checkpoint has seen is consumed, all else comes back.

Such a trainer (slime and others) asks for batch after batch, also for the next one before it has trained on this one,
and commits nothing by itself. All that it says is: the checkpoint of this step is on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.errors import InvalidSetting
from samplestore.models import BatchGroup, BatchRow, WeightVersionRow
from samplestore.states import BatchState
from samplestore.verbs import batches, rewind
from samplestore.verbs.tx import Tx, in_parts

batch, batch_group, version = BatchRow.__table__, BatchGroup.__table__, WeightVersionRow.__table__

# Since training began last, see resume. A checkpoint that is loaded may be of a life before that: what it was handed
# out then is rewound, and still on the same timeline.
OF_THIS_LIFE = (BatchState.LEASED, BatchState.RELEASED)
OF_ANY_LIFE = (*OF_THIS_LIFE, BatchState.REWOUND)


def settle(tx: Tx, worker_id: int, step: int, states: Sequence[BatchState] = OF_THIS_LIFE) -> list[int]:
    """Commit what was handed out for `step` and the steps before it: its checkpoint is on the disk. Whoever leased it,
    and also where that lease ended with its process, as long as the groups are still there. Returns the steps that
    could not be settled: groups of theirs are gone, or in another batch. Repeating it is harmless. Raises WorkerDead.

    states   of batches that the checkpoint may have seen
    """
    tx.require_live(worker_id)
    row = tx.lock_run()
    lost = []
    for found in _handed_out(tx, row, step, states):
        if found.state != BatchState.LEASED and not batches.revive(tx, found.id):
            lost.append(int(found.step))
            continue
        tx.execute(sa.update(batch).where(batch.c.id == found.id).values(owner=worker_id))
        batches.commit(tx, found.id, worker_id)
    if lost:
        tx.event("not_settled", "its groups are no longer ready", step=step, details={"steps": lost})
    return lost


def _handed_out(tx: Tx, row: Any, step: int, states: Sequence[BatchState]) -> list[Any]:
    """The last batch of each step up to `step` that has none committed, on this timeline, oldest step first. One that
    was given back is among them: the process that trained on it is gone, and its checkpoint is there."""
    mine = (batch.c.run_id == tx.run_id) & (batch.c.timeline == row.timeline)
    settled = sa.select(sa.func.max(batch.c.step)).where(
        batch.c.run_id == tx.run_id, batch.c.state == BatchState.COMMITTED.value
    )
    last = tx.execute(settled).scalar()
    newest = (
        sa.select(sa.func.max(batch.c.id))
        .where(mine, batch.c.step > (-1 if last is None else last), batch.c.step <= step)
        .group_by(batch.c.step)
    )
    return list(
        tx.rows(
            sa.select(batch.c.id, batch.c.step, batch.c.state)
            .where(batch.c.id.in_(newest), batch.c.state.in_([s.value for s in states]))
            .order_by(batch.c.step)
            .with_for_update(key_share=True)
        )
    )


def resume(tx: Tx, worker_id: int, step: int, call: str | None = None) -> list[int]:
    """A trainer begins with the checkpoint of `step` (-1: with none): what that has seen is settled, and all that was
    handed out later is ready again; no later `settle` takes it for something of this life. Only where something later
    is committed or published does a new timeline begin, see verbs.rewind. Leases of a process that is still alive end
    too: a run has one trainer. Returns what settle does.
    Raises WorkerDead, RewindTooFar, InvalidSetting for the checkpoint of a timeline that was left.
    """
    lost = settle(tx, worker_id, step, OF_ANY_LIFE)
    _require_on_the_line(tx, step)
    of_run = batch.c.run_id == tx.run_id
    consumed = sa.select(batch.c.id).where(of_run, batch.c.state == BatchState.COMMITTED.value, batch.c.step > step)
    published = sa.select(version.c.version).where(
        version.c.run_id == tx.run_id, rewind.ON_THE_LINE, version.c.step > step
    )
    if any(tx.execute(later.limit(1)).scalar() is not None for later in (consumed, published)):
        rewind.rewind(tx, step, call)
    leased = sa.select(batch.c.id).where(of_run, batch.c.state == BatchState.LEASED.value).order_by(batch.c.id)
    for row in tx.rows(leased.with_for_update(key_share=True)):
        batches.give_back(tx, row.id, BatchState.RELEASED, f"the trainer begins again after step {step}")
    given_back = sa.select(batch.c.id).where(of_run, batch.c.state == BatchState.RELEASED.value, batch.c.step > step)
    for ids in in_parts(row.id for row in tx.rows(given_back.order_by(batch.c.id))):
        for table, key in ((batch, batch.c.id), (batch_group, batch_group.c.batch_id)):
            tx.execute(sa.update(table).where(key.in_(ids)).values(state=BatchState.REWOUND.value))
    return lost


def _require_on_the_line(tx: Tx, step: int) -> None:
    """Training went back behind this step, and has not come to it again: what its checkpoint has seen is ready for
    others, and would be trained on twice. Steps that the store has never seen are no matter: a run may begin with a
    checkpoint from before there was a store. Raises InvalidSetting."""
    reached, here = rewind.newest_step(tx), tx.lock_run().timeline
    left = sa.select(batch.c.id).where(
        batch.c.run_id == tx.run_id, batch.c.state == BatchState.REWOUND.value, batch.c.timeline != here,
        batch.c.step > reached, batch.c.step <= step,
    )  # fmt: skip
    if tx.execute(left.limit(1)).scalar() is not None:
        allowed = (
            f"-1 to {reached}, or a new run: that checkpoint is of a timeline that was left. See: samplestore tail"
        )
        raise InvalidSetting("step", step, allowed)
