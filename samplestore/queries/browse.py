"""Lists of groups and samples for people: bounded, paged by key, newest first, without blobs."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.errors import InvalidSetting
from samplestore.models import Sample, SampleGroup
from samplestore.statements import staleness
from samplestore.states import GroupState

group, sample = SampleGroup.__table__, Sample.__table__

MAX_PAGE = 500
MAX_SAMPLES = 1000
RECENT_GROUPS = 200  # how far back `recent` looks: its cost must not grow with the run
TEXT = 200  # characters of an error that a list carries


def groups(
    database: Database, run_id: int, *, below: int | None = None, state: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """Groups of a run by falling number, from `below` (exclusive) on; `state` leaves out all others.

    staleness is that of now, of what a trainer holds or has consumed that at the lease; None where it is not known or
    the group is not finished.
    Raises InvalidSetting for a state that does not exist.
    """
    if state is not None and state not in list(GroupState):
        raise InvalidSetting("state", state, " | ".join(GroupState))
    query = (
        sa.select(
            group.c.number, group.c.state, group.c.reason, group.c.epoch, group.c.n_samples, group.c.n_open,
            group.c.n_unscored, group.c.n_failed, group.c.n_tokens, group.c.oldest_version,
            staleness.shown_lag(run_id).label("staleness"), group.c.reward_mean,
            group.c.reward_std, group.c.created_at,
        )
        .where(group.c.run_id == run_id)
        .order_by(group.c.number.desc())
        .limit(max(1, min(limit, MAX_PAGE)))
    )  # fmt: skip
    if below is not None:
        query = query.where(group.c.number < below)
    if state is not None:
        query = query.where(group.c.state == state)
    with database.reading() as connection:
        return [dict(row._mapping) for row in connection.execute(query)]


_SAMPLE = (
    sample.c.index, sample.c.incarnation, sample.c.status, sample.c.owner.is_not(None).label("in_flight"),
    sample.c.n_tokens, sample.c.n_segments, sample.c.n_aborts, sample.c.n_resumes, sample.c.failures,
    sample.c.version_min, sample.c.version_max, sample.c.reward, sample.c.finish_reason, sample.c.finished_at,
    sa.func.substr(sample.c.error, 1, TEXT).label("error"),
)  # fmt: skip


def samples(database: Database, run_id: int, group_number: int) -> list[dict[str, Any]]:
    """The samples of a group by index, at most MAX_SAMPLES; empty where there is no such group."""
    query = (
        sa.select(*_SAMPLE)
        .select_from(sample.join(group, group.c.id == sample.c.group_id))
        .where(group.c.run_id == run_id, group.c.number == group_number)
        .order_by(sample.c.index)
        .limit(MAX_SAMPLES)
    )
    with database.reading() as connection:
        return [dict(row._mapping) for row in connection.execute(query)]


def recent(database: Database, run_id: int, limit: int = 10) -> list[dict[str, Any]]:
    """Samples that have tokens, those that moved last first, out of the newest RECENT_GROUPS groups."""
    moved = sa.func.coalesce(sample.c.finished_at, sample.c.progress_at, sample.c.created_at)
    # So many, and not "from this number on": PostgreSQL knows that it is short, and reads the samples of no others.
    newest = (
        sa.select(group.c.id, group.c.number, group.c.state, group.c.reason)
        .where(group.c.run_id == run_id)
        .order_by(group.c.number.desc())
        .limit(RECENT_GROUPS)
        .subquery("newest")
    )
    query = (
        sa.select(
            newest.c.number.label("group"),
            newest.c.state.label("group_state"),
            newest.c.reason.label("group_reason"),
            moved.label("moved_at"),
            *_SAMPLE,
        )
        .select_from(newest.join(sample, sample.c.group_id == newest.c.id))
        .where(sample.c.n_tokens > 0)
        .order_by(moved.desc(), sample.c.id.desc())
        .limit(max(1, min(limit, MAX_PAGE)))
    )
    with database.reading() as connection:
        return [dict(row._mapping) for row in connection.execute(query)]
