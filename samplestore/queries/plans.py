"""The plan of a batch: which samples each rank of a trainer reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import sqlalchemy as sa

from samplestore.models import BatchGroup, BatchRow, PromptRow, Sample, SampleGroup
from samplestore.planning import plan
from samplestore.queries.arrays import PROMPT_TOKENS, names_of
from samplestore.states import LIVE_BATCH, SampleStatus

batch, batch_group, group, prompt, sample = (
    t.__table__ for t in (BatchRow, BatchGroup, SampleGroup, PromptRow, Sample)
)

LOOKED_AT = 16  # of a run
# The samples of a batch: one that failed is none of them, nor is a fork that was emptied (verbs/fanout.py).
IN_BATCH = batch_group.join(sample, sample.c.group_id == batch_group.c.group_id)
OF_BATCH = (batch_group.c.batch_id == sa.bindparam("of_batch")) & (sample.c.status != SampleStatus.FAILED.value)
LENGTHS = (
    sa.select(
        sample.c.id,
        sa.func.coalesce(sample.c.parent_id, sample.c.id).label("rollout"),
        (PROMPT_TOKENS + sample.c.n_tokens).label("tokens"),
    )
    .select_from(IN_BATCH.join(group, group.c.id == sample.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id))
    .where(OF_BATCH, sample.c.parent_id.is_(None) | (sample.c.n_tokens > 0))
    .order_by(batch_group.c.position, sample.c.index)
)


def of_batch(connection: sa.Connection, batch_id: int, world: int) -> dict[str, Any] | None:
    """{"world": ranks, "samples": [ids in batch order] of each rank}, from what is stored and nothing else, so that the
    same groups are shared out alike whenever and by whoever it is asked. None for one rank: all of them. A sample and
    its forks go together: they share one weight in the loss, and their tokens."""
    if world == 1:
        return None
    rows = _rows(connection, batch_id)
    rollouts: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        rollouts[row.rollout].append(row)
    units = list(rollouts.values())
    place = {row.id: i for i, row in enumerate(rows)}
    ranks = plan([sum(row.tokens for row in unit) for unit in units], world)
    ids = [[row.id for row in chain.from_iterable(units[i] for i in rank)] for rank in ranks]
    return {"world": world, "samples": [sorted(of_rank, key=place.__getitem__) for of_rank in ids]}


def lengths(connection: sa.Connection, batch_id: int) -> dict[int, int]:
    """Tokens of each sample of a batch as it is delivered, prompt and what a fork shares too."""
    return {row.id: int(row.tokens) for row in _rows(connection, batch_id)}


def _rows(connection: sa.Connection, batch_id: int) -> Sequence[Any]:
    return connection.execute(LENGTHS, {"of_batch": batch_id}).fetchall()


def newest(connection: sa.Connection, run_id: int, step: int, timeline: int) -> Any | None:
    """The newest batch of a step, whatever became of it, if it is one of the run's last few: no index finds a step's
    that were given back, and none that is older is of use."""
    return next((row for row in _recent(connection, run_id) if (row.step, row.timeline) == (step, timeline)), None)


def newest_with(connection: sa.Connection, run_id: int, name: str) -> Any | None:
    """The newest of a run's last batches that is leased or committed and has the named array. One by one: no planner
    sees that the newest one answers it."""
    return next(
        (
            row
            for row in _recent(connection, run_id)
            if row.state in LIVE_BATCH and name in names_of(connection, list(lengths(connection, row.id)))
        ),
        None,
    )


def _recent(connection: sa.Connection, run_id: int) -> Sequence[Any]:
    query = sa.select(batch).where(batch.c.run_id == run_id).order_by(batch.c.id.desc()).limit(LOOKED_AT)
    return connection.execute(query).fetchall()


def last(connection: sa.Connection) -> int:
    """The id of the database's newest batch."""
    return int(connection.execute(sa.select(sa.func.max(batch.c.id))).scalar() or 0)
