"""What never gets through: under each policy for groups that are too old, long answers can starve in another way.

expire       their prompts are lost for the pass
regenerate   they are generated again and again
skip         they stay ready for good
mask         they are delivered, and train on little or nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from samplestore.models import BatchGroup, BatchRow, Sample, SampleGroup
from samplestore.runsettings import RunSettings
from samplestore.statements import staleness
from samplestore.states import IN_WINDOW, LIVE_BATCH, TAKEN, GroupState, StalePolicy
from samplestore.words import amount, which

group, sample, batch, batch_group = (t.__table__ for t in (SampleGroup, Sample, BatchRow, BatchGroup))

AGAIN = 2  # lives of a sample from which on somebody should look: one new start is what the policy is for
LAST_BATCHES = 20


def regenerated(connection: sa.Connection, run_id: int) -> tuple[int, int]:
    """(groups of the window that were started afresh AGAIN times or more, the most of these times)."""
    in_window = sa.select(group.c.id).where(
        group.c.run_id == run_id, group.c.state.in_([s.value for s in IN_WINDOW]), group.c.evaluation_id.is_(None)
    )
    row = connection.execute(
        sa.select(sa.func.count(sa.distinct(sample.c.group_id)), sa.func.max(sample.c.incarnation)).where(
            sample.c.group_id.in_(in_window), sample.c.incarnation >= AGAIN
        )
    ).one()
    return int(row[0]), int(row[1] or 0)


def starving(connection: sa.Connection, run_id: int, settings: RunSettings) -> list[str]:
    """Sentences, one for each way in which something starves; an empty list is good."""
    return list(_told(connection, run_id, settings))


def _told(connection: sa.Connection, run_id: int, settings: RunSettings) -> Iterator[str]:
    # In one of several passes a group may well be late; a prompt that is late in each of them starves.
    chances = 1 if settings.epochs == 1 else AGAIN
    if lost := int(connection.execute(_lost_prompts(run_id, chances)).scalar_one()):
        yield (
            f"{amount(lost, 'prompt')} lost all {which(lost, 'its', 'their')} groups to staleness and "
            f"{which(lost, 'was', 'were')} never trained on"
        )
    n, most = regenerated(connection, run_id)
    if n:
        yield (
            f"{amount(n, 'group')} in the window {which(n, 'was', 'were')} started afresh {AGAIN} times or more, at "
            f"most {most} times: {which(n, 'it is', 'they are')} too old whenever {which(n, 'it is', 'they are')} done"
        )
    if settings.stale == StalePolicy.SKIP:
        source, lag, ready = staleness.ready_groups(run_id, settings.staleness_mode)
        query = sa.select(sa.func.count()).select_from(source).where(ready, lag > settings.max_staleness)
        if kept := int(connection.execute(query).scalar_one()):
            verbs = which(kept, "is beyond the window and waits", "are beyond the window and wait")
            yield f"{amount(kept, 'ready group')} {verbs} for a batch that takes {which(kept, 'it', 'them')}"
    if masked := int(connection.execute(_masked(run_id)).scalar_one()):
        yield (
            f"{amount(masked, 'group')} of the last {LAST_BATCHES} batches {which(masked, 'was', 'were')} delivered "
            f"beyond the window, {which(masked, 'its', 'their')} old tokens masked"
        )


def _lost_prompts(run_id: int, chances: int) -> Any:
    """How many prompts have at least so many stale groups, and none that may still be, or was, trained on."""
    other = group.alias("other")
    # Late again and again, it is no better off for a group that is begun; most of the time it has one.
    hope = [s.value for s in ((*IN_WINDOW, *TAKEN) if chances < AGAIN else (GroupState.READY, *TAKEN))]
    lost = (
        sa.select(group.c.prompt_id)
        .where(
            group.c.run_id == run_id,
            group.c.state == GroupState.STALE.value,
            ~sa.exists().where(other.c.prompt_id == group.c.prompt_id, other.c.state.in_(hope)),
        )
        .group_by(group.c.prompt_id)
        .having(sa.func.count() >= chances)
    )
    return sa.select(sa.func.count()).select_from(lost.subquery())


def _masked(run_id: int) -> Any:
    last = (
        sa.select(batch.c.id)
        .where(
            batch.c.run_id == run_id,
            batch.c.state.in_([s.value for s in LIVE_BATCH]),
            batch.c.policy["stale"].as_string() == StalePolicy.MASK.value,
        )
        .order_by(batch.c.id.desc())
        .limit(LAST_BATCHES)
    )
    return (
        sa.select(sa.func.count())
        .select_from(batch_group.join(batch, batch.c.id == batch_group.c.batch_id))
        .where(batch.c.id.in_(last), batch_group.c.staleness > batch.c.policy["max_staleness"].as_integer())
    )
