"""Ranks of a data-parallel trainer. Rank 0 leases a step's batch, with the plan of who reads what, and settles it; the
others read their part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from samplestore.arguments import whole
from samplestore.clock import db_now
from samplestore.errors import BatchReleased, BatchTimeout, InvalidSetting, StepAlreadyCommitted, WorldMismatch
from samplestore.models import BatchRow, Run, Worker
from samplestore.queries import plans
from samplestore.states import BatchState
from samplestore.verbs import batches as verbs
from samplestore.verbs.tx import Transactor
from samplestore.words import amount

batch, worker, run_table = (t.__table__ for t in (BatchRow, Worker, Run))


def check(rank: int, world: int) -> tuple[int, int]:
    """Both, if `rank` is one of `world`. Raises InvalidSetting."""
    rank, world = whole("rank", rank), whole("world", world, 1)
    if rank >= world:
        raise InvalidSetting("rank", rank, f"0 to {world - 1}: world={world}")
    return rank, world


def world_of(row: Any) -> int:
    return 1 if row.plan is None else int(row.plan["world"])


def join(run: Transactor, step: int, world: int, wait: Callable[[str], float]) -> Any:
    """The row of the batch that rank 0 has leased for `step`, as soon as there is one.

    wait   called with what is waited for, between two looks; returns the seconds so far, and raises when it is too long
    Raises StepAlreadyCommitted, BatchReleased when rank 0 gave it back meanwhile, WorldMismatch.
    """
    mark, waited = run.database.read(plans.last), 0.0
    while True:
        row = run.database.read(lambda c: c.execute(_held(run, step)).one_or_none())
        told = f"rank 0 has not leased step {step} yet"
        mismatch: WorldMismatch | None = None
        if row is None:
            _require_none_since(run, step, mark)
        elif row.state == BatchState.COMMITTED:
            raise StepAlreadyCommitted(step, row.id)
        elif row.beating and world_of(row) == world:
            return row
        elif not row.beating:
            told += ": its last life did, and is silent"
        else:
            mismatch = WorldMismatch(step, row.id, world_of(row), world)
            told = f"rank 0 holds step {step} for {amount(world_of(row), 'rank')}, not {world}"
            # Rank 0 may be starting too, and plan anew, or have died; once it has beaten in this wait it means it.
            if waited > run.settings.heartbeat_ttl_s / 2:
                raise mismatch
        try:
            waited = wait(told)
        except BatchTimeout:
            if mismatch is not None:
                raise mismatch from None
            raise


def _require_none_since(run: Transactor, step: int, mark: int) -> None:
    """Raises BatchReleased where a batch of this step came after the one with the id `mark` and was given back."""
    timeline = sa.select(run_table.c.timeline).where(run_table.c.id == run.id)
    last = run.database.read(lambda c: plans.newest(c, run.id, step, int(c.execute(timeline).scalar_one())))
    if last is not None and last.id > mark and last.state == BatchState.RELEASED:
        raise BatchReleased(step, last.id, last.reason)


def _held(run: Transactor, step: int) -> sa.Select[Any]:
    """The live batch of a step, and whether its owner has shown itself of late: the lease of one that was killed stands
    until it is reaped, and who joined it would train what the next life of rank 0 leases otherwise."""
    beating = worker.c.heartbeat > db_now() - run.settings.heartbeat_ttl_s / 2
    held = verbs.live_of_step(run.id, step).add_columns(beating.label("beating"))
    return held.join(worker, worker.c.id == batch.c.owner)
