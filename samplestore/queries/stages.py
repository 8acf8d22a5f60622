"""Stages that are not done: how many, by name, and whether anybody serves them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sqlalchemy as sa

from samplestore.models import Stage, Worker
from samplestore.states import StageStatus, WorkerState

stage, worker = Stage.__table__, Worker.__table__

# Written out: with a bound value no planner sees that the partial index on pending stages answers it.
PENDING_STAGE = stage.c.status == sa.literal_column(repr(StageStatus.PENDING.value))


def pending(connection: sa.Connection, run_id: int) -> dict[str, int]:
    """How many stages wait for somebody, or are with somebody, by name."""
    # in two counts, each with an index that holds nothing else: there is none over all pending stages
    parts = (
        sa.select(stage.c.name, sa.func.count().label("n"))
        .where(stage.c.run_id == run_id, PENDING_STAGE, owned)
        .group_by(stage.c.name)
        for owned in (stage.c.owner.is_(None), stage.c.owner.is_not(None))
    )
    found: Counter[str] = Counter()
    for name, n in connection.execute(sa.union_all(*parts)):
        found[name] += int(n)
    return dict(sorted(found.items()))


def served(connection: sa.Connection, run_id: int) -> set[str]:
    """Names of stages that some live worker says it serves."""
    live = (worker.c.run_id == run_id) & (worker.c.state == WorkerState.LIVE.value)
    told = connection.execute(sa.select(worker.c.info).where(live)).scalars()
    return {str(name) for info in told for name in (info or {}).get("stages") or ()}


def of_sample(connection: sa.Connection, sample_id: int, group_id: int, incarnation: int) -> list[dict[str, Any]]:
    """Rewards, filters and other stages of one life of a sample, and those of its whole group."""
    s = stage.c
    rows = connection.execute(
        sa.select(
            s.name, sa.case((s.sample_id.is_(None), "group"), else_="sample").label("of"), s.status, s.outcome, s.value,
            s.elapsed_s, s.failures, s.owner, s.created_at, s.settled_at,
            sa.func.substr(s.error, 1, 500).label("error"),
        )
        .where(
            s.group_id == group_id,
            sa.or_((s.sample_id == sample_id) & (s.incarnation == incarnation), s.sample_id.is_(None)),
        )
        .order_by(s.id)
        .limit(200)
    )  # fmt: skip
    return [dict(r._mapping) for r in rows]
