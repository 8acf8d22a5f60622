"""Flow control: how many samples a claim may take now, and of which groups.

Three things hold a claim back: a step that has enough groups already, an engine that is being brought to other weights
(both in the modes sync and partial), and the run's limits on what is in flight. A run in mode async without limits pays
nothing for them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.models import EngineRow, Run, Sample, SampleGroup, one_of
from samplestore.states import CLAIMABLE, EVALUATION_PRIORITY, IN_WINDOW, RolloutMode
from samplestore.verbs import deaths
from samplestore.verbs.tx import Tx

run, group, sample, engine = (t.__table__ for t in (Run, SampleGroup, Sample, EngineRow))


def claimable(tx: Tx, limit: int, evaluations: bool = True) -> tuple[int, list[int] | None]:
    """(how many samples, of which groups); None is any group. Call it before anything else is locked but the worker.
    evaluations: groups that are there to be evaluated may be among them."""
    rules, limit = tx.settings, max(0, limit)
    limited = _limited(tx)
    if not limit or (rules.mode == RolloutMode.ASYNC and not limited):
        return limit, None
    row = hold_run(tx)
    engines = _engines(tx) if limited else 0
    samples = _least(rules.max_inflight_samples, rules.max_samples_per_engine, engines)
    groups = _least(rules.max_inflight_groups, rules.max_groups_per_engine, engines)
    if samples is not None:
        limit = min(limit, max(0, samples - in_flight(tx)))
    only = None if groups is None else _groups_within(tx, groups, least_priority(evaluations))
    if rules.mode != RolloutMode.ASYNC and closed(tx, row):
        return limit, _evaluations(tx, only) if evaluations else []
    return limit, only


def _limited(tx: Tx) -> bool:
    return any(getattr(tx.settings, name) is not None for name in tx.settings.FLOW_LIMITS)


def hold_run(tx: Tx) -> Any:
    """The run's row, locked as a claim of this run needs it, by whatever part of the claim comes to it first: two that
    share it, and then want it for themselves, wait for each other.

    With a limit the lock is exclusive: two claims that count at the same moment would both fit. Without one a shared
    lock is enough to keep a step from ending between this look and the claim: what is claimed then would not be
    aborted. SQLite needs neither, since the transaction holds the whole database.
    """
    limited = _limited(tx)
    query = sa.select(run).where(run.c.id == tx.run_id).with_for_update(read=not limited, key_share=limited)
    return tx.execute(query).one()


def least_priority(evaluations: bool) -> int:
    """Of the samples that may be claimed: those of evaluations have one of their own."""
    return EVALUATION_PRIORITY if evaluations else EVALUATION_PRIORITY + 1


def evaluation_waits(tx: Tx) -> bool:
    """Whether a sample of an evaluation waits to be claimed."""
    waits = sa.exists().where(*_waiting(tx), sample.c.priority == EVALUATION_PRIORITY)
    return bool(tx.execute(sa.select(waits)).scalar())


def _waiting(tx: Tx) -> tuple[sa.ColumnElement[bool], ...]:
    """Samples that may be claimed, in the words of ix_sample_claim: with bound values SQLite does not see that it
    covers the question, and reads all samples that the run ever had."""
    return (
        sample.c.run_id == tx.run_id,
        sample.c.owner.is_(None),
        sample.c.closed == sa.literal_column("0"),
        sa.text(one_of("sample.status", CLAIMABLE)),  # type: ignore[return-value]
        sample.c.not_before <= db_now(),
    )


def _engines(tx: Tx) -> int:
    """Engines that serve this run; 1 before any was seen, so that the first sample can find out."""
    live = sa.select(sa.func.count()).where(engine.c.run_id == tx.run_id, engine.c.state == "live")
    return max(1, int(tx.execute(live).scalar_one()))


def _least(of_run: int | None, of_engine: int | None, engines: int) -> int | None:
    limits = [of_run, None if of_engine is None else of_engine * engines]
    return min((limit for limit in limits if limit is not None), default=None)


def closed(tx: Tx, row: Any) -> bool:
    """Whether a run in steps starts nothing to train on for now: it has enough, or an engine is on its way to the
    weights of the step that begins."""
    # One that was gone the last time is tried again and again: the others would stand still for it.
    there = sa.or_(engine.c.state != "failed", engine.c.label.is_not(None))
    updating = sa.exists().where(engine.c.run_id == tx.run_id, engine.c.owner.is_not(None), there)
    return row.step_over == row.current_version or bool(tx.execute(sa.select(updating)).scalar())


def in_flight(tx: Tx) -> int:
    """Samples that workers hold."""
    held = sa.select(sa.func.count()).select_from(sample).where(deaths.owned(tx.run_id))
    return int(tx.execute(held).scalar_one())


def _groups_within(tx: Tx, most: int, least: int) -> list[int]:
    """Groups with samples in flight, and as many others, in the order of claims, as may be begun. least: priority."""
    owned = deaths.owned(tx.run_id)
    # not DISTINCT: SQLite without statistics would walk the groups of all samples to have them in order
    held = sorted(set(tx.execute(sa.select(sample.c.group_id).where(owned)).scalars()))
    if len(held) >= most:
        return held
    waiting = (
        sa.select(sample.c.group_id)
        .where(
            *_waiting(tx),
            sample.c.priority >= least,
            sample.c.group_id.not_in(sa.select(sample.c.group_id).where(owned)),
        )
        .group_by(sample.c.group_id)
        .order_by(sa.func.min(sample.c.priority), sa.func.min(sample.c.status), sample.c.group_id)
        .limit(most - len(held))
    )
    return [*held, *tx.execute(waiting).scalars()]


def whole_groups(tx: Tx, most: int) -> list[int]:
    """Groups to train on, in the order of claims, of which every sample that is left to generate may be claimed now."""
    sibling = sample.alias("sibling")
    elsewhere = sa.exists().where(
        sibling.c.group_id == sample.c.group_id,
        sibling.c.closed == sa.literal_column("0"),
        sa.text(one_of("sibling.status", CLAIMABLE)),
        sibling.c.parent_id.is_(None),
        sibling.c.owner.is_not(None) | (sibling.c.not_before > db_now()),
    )
    waiting = (
        sa.select(sample.c.group_id)
        .where(*_waiting(tx), sample.c.priority >= least_priority(False), sample.c.parent_id.is_(None), ~elsewhere)
        .group_by(sample.c.group_id)
        .order_by(sa.func.min(sample.c.priority), sa.func.min(sample.c.status), sample.c.group_id)
        .limit(most)
    )
    return list(tx.execute(waiting).scalars())


def _evaluations(tx: Tx, only: list[int] | None) -> list[int]:
    """Those of the groups that are there to be evaluated: no step waits for them, and none ends them."""
    open_ones = sa.select(group.c.id).where(
        group.c.run_id == tx.run_id,
        sa.text(one_of("sample_group.state", IN_WINDOW)),  # written out: so that ix_sample_group_window is found
        group.c.evaluation_id.is_not(None),
    )
    found = set(tx.execute(open_ones).scalars())
    return sorted(found if only is None else found & set(only))
