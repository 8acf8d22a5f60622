"""Stages that are not done: how many, by name, and whether anybody serves them."""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from samplestore.models import Stage, Worker
from samplestore.states import StageStatus, WorkerState

stage, worker = Stage.__table__, Worker.__table__

# Written out: with a bound value no planner sees that the partial index on pending stages answers it.
PENDING_STAGE = stage.c.status == sa.literal_column(repr(StageStatus.PENDING.value))


def pending(connection: sa.Connection, run_id: int) -> dict[str, int]:
    """How many stages wait for somebody, or are with somebody, by name."""
    found: Counter[str] = Counter()
    # in two counts, each with an index that holds nothing else: there is none over all pending stages
    for owned in (stage.c.owner.is_(None), stage.c.owner.is_not(None)):
        query = sa.select(stage.c.name, sa.func.count()).where(stage.c.run_id == run_id, PENDING_STAGE, owned)
        found.update({name: int(n) for name, n in connection.execute(query.group_by(stage.c.name))})
    return dict(sorted(found.items()))


def served(connection: sa.Connection, run_id: int) -> set[str]:
    """Names of stages that some live worker says it serves."""
    live = (worker.c.run_id == run_id) & (worker.c.state == WorkerState.LIVE.value)
    told = connection.execute(sa.select(worker.c.info).where(live)).scalars()
    return {str(name) for info in told for name in (info or {}).get("stages") or ()}
