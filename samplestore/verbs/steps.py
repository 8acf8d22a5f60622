"""Steps: in the modes sync and partial, generation and training take turns.

A step is one version of the weights. It wants groups_per_step groups, ready or taken by batches under that version.
Admission starts them (sync: as many as are missing; partial: over_sampling_batch_size at a time, as slime does). When
there are enough the step is over: nothing more is claimed, and in mode partial what is still in flight is aborted at
the engines. Published weights begin the next step, in which what was aborted goes first.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.models import BatchRow, Run, Sample, SampleGroup, one_of
from samplestore.runsettings import RunSettings
from samplestore.statements import staleness
from samplestore.states import LIVE_BATCH, GroupState, RolloutMode, StalePolicy
from samplestore.types import Claim
from samplestore.verbs import aborts, deaths, flow, samples
from samplestore.verbs.tx import Tx

run, group, sample, batch = (t.__table__ for t in (Run, SampleGroup, Sample, BatchRow))

OVER = "step over: enough groups are ready"


def room(tx: Tx, row: Any, live: int, wanted: int = 0) -> int:
    """How many groups admission may create. row: the run's, locked; live: groups that are open, scoring, or ready;
    wanted: in mode async as many at least."""
    rules = tx.settings
    if rules.mode == RolloutMode.ASYNC:
        return max(rules.window_groups - live, wanted)
    if tend(tx, row):
        return 0
    have = live + taken(tx.connection, row, rules)
    if rules.mode == RolloutMode.SYNC:
        return rules.groups_per_step - have
    if row.step_filled != row.current_version:
        # What the last step has left counts; without this first look a step that inherits enough would start none.
        tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(step_filled=row.current_version))
        return rules.window_groups - have
    missing = max(0, rules.groups_per_step - have)  # groups were filtered or dropped
    return -(-missing // rules.started_at_once) * rules.started_at_once


def taken(connection: sa.Connection, row: Any, rules: RunSettings) -> int:
    """Groups that live batches took under the run's current version. A version never comes back, so these are the last
    steps of the timeline, and each holds a group at least: no more than groups_per_step of them matter."""
    last = (
        sa.select(batch.c.n_groups, batch.c.current_version)
        .where(
            batch.c.run_id == row.id,
            batch.c.timeline == row.timeline,
            sa.text(one_of("batch.state", LIVE_BATCH)),  # written out: so that uq_batch_step is found
        )
        .order_by(batch.c.step.desc())
        .limit(rules.groups_per_step)
        .subquery()
    )
    total = sa.select(sa.func.sum(last.c.n_groups)).where(last.c.current_version == row.current_version)
    return int(connection.execute(total).scalar() or 0)


def enough(connection: sa.Connection, row: Any, rules: RunSettings) -> bool:
    """Whether as many groups as a step wants are taken, or ready for a batch by the run's settings."""
    source, lag, ready = staleness.ready_groups(row.id, rules.staleness_mode)
    fits = lag.is_not(None) if rules.stale == StalePolicy.MASK else lag <= rules.max_staleness
    waiting = sa.select(sa.func.count()).select_from(source).where(ready, fits, group.c.evaluation_id.is_(None))
    have = int(connection.execute(waiting).scalar_one())
    return have >= rules.groups_per_step or have + taken(connection, row, rules) >= rules.groups_per_step


def due(connection: sa.Connection, run_id: int, rules: RunSettings) -> bool:
    """Whether `tend` would end the step: a look that locks nothing."""
    row = connection.execute(sa.select(run).where(run.c.id == run_id)).one()
    return row.step_over != row.current_version and enough(connection, row, rules)


def tend(tx: Tx, row: Any = None, by: int = 0) -> bool:
    """End the run's step if there are enough groups, or go on with it if there no longer are (some were dropped).
    Whether it is over. row: the run's, locked; by: the worker that looks."""
    rules = tx.settings
    if rules.mode == RolloutMode.ASYNC:
        return False
    row = tx.lock_run() if row is None else row
    over = enough(tx.connection, row, rules)
    if over != (row.step_over == row.current_version):
        mark = row.current_version if over else -1
        tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(step_over=mark))
        by = by or tx.worker_id
        tx.event("step_over" if over else "step_goes_on", version=row.current_version, worker_id=by or None)
        if over and rules.mode == RolloutMode.PARTIAL and (rest := _in_flight(tx)):
            aborts.ask(tx, row, OVER, rest, f"worker {by}" if by else "admission", by)
    return over


def _in_flight(tx: Tx) -> list[int]:
    """Samples that the end of a step aborts: those of unfinished groups, but for those that were aborted often
    enough, which run to their end. Without that limit the longest answers might never end."""
    query = (
        sa.select(sample.c.id)
        .select_from(sample.join(group, group.c.id == sample.c.group_id))
        .where(
            deaths.owned(tx.run_id),
            group.c.state == GroupState.OPEN.value,
            group.c.evaluation_id.is_(None),
        )
        .order_by(deaths.BY_ID)
    )
    if tx.settings.max_aborts is not None:
        query = query.where(sample.c.n_aborts < tx.settings.max_aborts)
    return list(tx.execute(query).scalars())


def claim(tx: Tx, worker_id: int, limit: int, version: int, serves: bool = True) -> list[Claim]:
    """`samples.claim` for a worker that believes that the run is at `version`; serves: all its engines serve that.
    When the run is at another, or its engines are not there yet, it gets no samples of evaluations, which are about the
    weights of now; in a run in steps it then gets nothing of a version that is gone."""
    evaluations = False
    if tx.settings.mode != RolloutMode.ASYNC or (serves and flow.evaluation_waits(tx)):
        tx.require_live(worker_id)
        # It keeps weights from being published, and their evaluation from starting, between this look and the claim.
        current = flow.hold_run(tx).current_version == version
        if tx.settings.mode != RolloutMode.ASYNC and not current:
            return []
        evaluations = serves and current
    return samples.claim(tx, worker_id, limit, evaluations)
