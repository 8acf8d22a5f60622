"""Groups that are too old: closed, or started afresh, before admission and batches count what is there.

A publish, an admission and a rewind sweep by the run's settings, a lease by the policy of its batch. All of them hold
the run's lock.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.models import SampleGroup
from samplestore.statements import staleness
from samplestore.states import IN_WINDOW, UNFINISHED_GROUP, GroupState, StalePolicy
from samplestore.verbs import groups
from samplestore.verbs.tx import Tx, in_parts
from samplestore.words import amount

group = SampleGroup.__table__

ACTS = (StalePolicy.EXPIRE, StalePolicy.REGENERATE)
Found = tuple[sa.Select[Any], str]  # a query for ids of groups, and what is wrong with them


def sweep(tx: Tx) -> int:
    """Settle the groups of the window that no batch by the run's settings can take. Returns how many.

    Ready groups of unknown staleness are delivered under no policy, so they must not fill the window.
    """
    rules = tx.settings
    ready = (group.c.run_id == tx.run_id) & (group.c.state == GroupState.READY.value)
    unknown = sa.select(group.c.id.label("group_id")).where(
        ready, group.c.oldest_version.is_(None), ~staleness.IMPORTED
    )
    found = [(unknown, staleness.UNKNOWN)]
    if rules.stale in ACTS:
        found += _beyond(tx, rules.max_staleness)
    return _settle(tx, rules.stale, found)


def _beyond(tx: Tx, window: int) -> list[Found]:
    """The groups of the window that are, by the run's staleness mode, more versions behind than that."""
    mode = tx.settings.staleness_mode
    unfinished = group.c.state.in_([s.value for s in UNFINISHED_GROUP]) & group.c.evaluation_id.is_(None)
    return [
        _ready_beyond(tx, window, mode),
        (staleness.beyond(tx.run_id, mode, window, unfinished), _too_old(window)),
    ]


def expire_beyond(tx: Tx, window: int, reason: str | None = None) -> int:
    """Operator's: close what is more than `window` versions behind, whatever the run does with it. Returns how many
    groups."""
    tx.lock_run()
    found = [(query, codec.clean_text(reason, 200) if reason else why) for query, why in _beyond(tx, window)]
    return _settle(tx, StalePolicy.EXPIRE, found)


def settle_ready(tx: Tx, window: int, mode: str, stale: str) -> int:
    """Close the ready groups beyond the window, or start them afresh, as `stale` says. Returns how many."""
    return _settle(tx, stale, [_ready_beyond(tx, window, mode)])


def _ready_beyond(tx: Tx, window: int, mode: str) -> Found:
    source, lag, ready = staleness.ready_groups(tx.run_id, mode)
    return sa.select(group.c.id.label("group_id")).select_from(source).where(ready, lag > window), _too_old(window)


def _too_old(window: int) -> str:
    return f"more than {amount(window, 'version')} behind"


def _settle(tx: Tx, stale: str, found: list[Found]) -> int:
    """Look, lock, look again, act. On PostgreSQL a group can be leased, closed or started afresh by somebody else
    between look and lock, and a fresh group must not be closed for what it was; on SQLite nobody else writes. All are
    locked in one order, whatever they are found for: a drop that locks two of them could wait for this in a circle."""
    done = 0
    for ids in in_parts(row.group_id for query, _ in found for row in tx.rows(query)):
        tx.lock_groups(ids)
        tx.lock_samples_of(ids)
        for query, reason in found:
            key = query.selected_columns[0]
            still = sorted(row.group_id for row in tx.rows(query.where(key.in_(ids))))
            if still and stale == StalePolicy.REGENERATE:
                groups.regenerate(tx, still, reason)
            elif still:
                groups.close(tx, still, GroupState.STALE, reason)
            done += len(still)
    return done


def occupied(tx: Tx) -> int:
    """Groups that admission counts: open, scoring, and ready inside the window. Left out are ready groups that
    stale="skip" keeps beyond it: they would stop generation for good; those of evaluations; and imported ones, which
    nothing here generates. Call it after a sweep."""
    in_window = [s.value for s in IN_WINDOW]
    held = tx.execute(
        sa.select(sa.func.count()).where(
            group.c.run_id == tx.run_id,
            group.c.state.in_(in_window),
            group.c.evaluation_id.is_(None),
            ~staleness.IMPORTED,
        )
    ).scalar_one()
    if tx.settings.stale != StalePolicy.SKIP:
        return int(held)
    source, lag, ready = staleness.ready_groups(tx.run_id, tx.settings.staleness_mode)
    beyond = sa.select(sa.func.count()).select_from(source).where(ready, lag > tx.settings.max_staleness)
    return int(held) - int(tx.execute(beyond).scalar_one())
