"""What trainer steps consumed: batches page by page with the staleness of their groups, and the timelines of
rewinds."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.models import BatchGroup, BatchRow, SampleGroup, Timeline, Worker
from samplestore.statements.rewards import countable

batch, batch_group, group, timeline, worker = (
    t.__table__ for t in (BatchRow, BatchGroup, SampleGroup, Timeline, Worker)
)

MAX_PAGE = 200
MAX_GROUPS = 1000
MAX_TIMELINES = 100


def page(database: Database, run_id: int, *, below: int | None = None, limit: int = 50) -> list[dict[str, Any]]:
    """Batches by falling id, from `below` (exclusive) on. staleness_mean, staleness_max: of its groups at the lease,
    None where none is known; staleness_unknown: how many are not; reward_mean: of its groups; waited_s: lease to
    settlement."""
    chosen = (
        sa.select(
            batch.c.id, batch.c.timeline, batch.c.step, batch.c.state, batch.c.current_version, batch.c.n_groups,
            batch.c.n_samples, batch.c.n_tokens, sa.func.substr(batch.c.reason, 1, 200).label("reason"),
            batch.c.created_at, batch.c.settled_at, worker.c.name.label("trainer"),
        )
        .select_from(batch.outerjoin(worker, worker.c.id == batch.c.owner))
        .where(batch.c.run_id == run_id)
        .order_by(batch.c.id.desc())
        .limit(max(1, min(limit, MAX_PAGE)))
    )  # fmt: skip
    if below is not None:
        chosen = chosen.where(batch.c.id < below)
    with database.reading() as c:
        rows = [dict(r._mapping) for r in c.execute(chosen)]
        lag = batch_group.c.staleness
        told = c.execute(
            sa.select(
                batch_group.c.batch_id, sa.func.avg(lag).label("mean"), sa.func.max(lag).label("max"),
                sa.func.count().filter(lag.is_(None)).label("unknown"),
                sa.func.avg(countable(group.c.reward_mean)).label("reward"),
                sa.func.count().filter(group.c.reward_std == 0).label("flat"),
            )
            .select_from(batch_group.join(group, group.c.id == batch_group.c.group_id))
            .where(batch_group.c.batch_id.in_([r["id"] for r in rows]))
            .group_by(batch_group.c.batch_id)
        )  # fmt: skip
        of = {r.batch_id: r for r in told}
    for row in rows:
        r = of.get(row["id"])
        row["staleness_mean"] = None if r is None or r.mean is None else float(r.mean)
        row["staleness_max"] = None if r is None or r.max is None else int(r.max)
        row["staleness_unknown"] = 0 if r is None else int(r.unknown)
        row["reward_mean"] = None if r is None or r.reward is None else float(r.reward)
        row["zero_std"] = 0 if r is None else int(r.flat)
    return rows


def groups(database: Database, run_id: int, batch_id: int) -> list[dict[str, Any]]:
    """The groups of a batch in its order, at most MAX_GROUPS, each with the batch's step and timeline; empty where the
    run has no such batch."""
    query = (
        sa.select(
            group.c.number, batch_group.c.state, batch_group.c.staleness, group.c.state.label("group_state"),
            group.c.n_tokens, group.c.reward_mean, group.c.reward_std, group.c.oldest_version, batch.c.step,
            batch.c.timeline,
        )
        .select_from(
            batch_group.join(group, group.c.id == batch_group.c.group_id).join(
                batch, batch.c.id == batch_group.c.batch_id
            )
        )
        .where(batch_group.c.batch_id == batch_id, group.c.run_id == run_id)
        .order_by(batch_group.c.position)
        .limit(MAX_GROUPS)
    )  # fmt: skip
    with database.reading() as c:
        return [dict(r._mapping) for r in c.execute(query)]


def timelines(database: Database, run_id: int) -> list[dict[str, Any]]:
    """The branches of training, the newest first: each but the first was started by a rewind."""
    query = (
        sa.select(timeline.c.number, timeline.c.parent, timeline.c.forked_at_step, timeline.c.created_at)
        .where(timeline.c.run_id == run_id)
        .order_by(timeline.c.number.desc())
        .limit(MAX_TIMELINES)
    )
    with database.reading() as c:
        return [dict(r._mapping) for r in c.execute(query)]
