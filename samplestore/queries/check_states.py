"""Promises about states: groups and their counters, owners, batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import sqlalchemy as sa

from samplestore.models import BatchGroup, BatchRow, Sample, SampleGroup, Stage, Worker
from samplestore.states import CLAIMABLE, TAKEN, BatchState, GroupState, SampleStatus, StageStatus, WorkerState

group, sample, stage, worker, batch, batch_group = (
    t.__table__ for t in (SampleGroup, Sample, Stage, Worker, BatchRow, BatchGroup)
)

Check: TypeAlias = tuple[str, str, sa.Select[Any]]  # code, what is wrong with the rows, and the rows


def groups(run_id: int) -> Iterator[Check]:
    def counted(condition: Any) -> Any:
        return sa.func.coalesce(
            sa.select(sa.func.sum(sa.case((condition, 1), else_=0)))
            .where(sample.c.group_id == group.c.id)
            .correlate(group)
            .scalar_subquery(),
            0,
        )

    n_samples = counted(sa.true())
    n_open = counted(sample.c.status.in_([s.value for s in CLAIMABLE]))
    n_failed = counted(sample.c.status == SampleStatus.FAILED.value)
    unscored = (
        sa.select(sa.func.count())
        .where(stage.c.group_id == group.c.id, stage.c.status == StageStatus.PENDING.value)
        .correlate(group)
        .scalar_subquery()
    )
    yield "group_counters", "a group's counters differ from its samples and stages", (
        sa.select(
            group.c.id.label("group"), group.c.state, group.c.n_open, n_open.label("open"), group.c.n_unscored,
            unscored.label("unscored"), group.c.n_failed, n_failed.label("failed"),
        ).where(
            group.c.run_id == run_id,
            sa.or_(
                group.c.n_samples != n_samples,
                group.c.n_open != n_open,
                group.c.n_unscored != unscored,
                group.c.n_failed != n_failed,
            ),
        )
    )  # fmt: skip
    done = (group.c.n_open == 0) & (group.c.n_unscored == 0)
    ended = [s.value for s in (GroupState.READY, *TAKEN)]
    yield (
        "group_stranded",
        "a group's state does not follow from its counters",
        (
            sa.select(group.c.id.label("group"), group.c.state, group.c.n_open, group.c.n_unscored).where(
                group.c.run_id == run_id,
                sa.or_(
                    group.c.state.in_(["open", "scoring"]) & done,
                    group.c.state.in_(ended) & ~done,
                    (group.c.state == GroupState.SCORING.value) & (group.c.n_open > 0),
                ),
            )
        ),
    )


def owners(run_id: int) -> Iterator[Check]:
    for table, word in ((sample, "sample"), (stage, "stage")):
        yield (
            f"{word}_orphan",
            f"a {word} is owned by a worker that does not exist",
            (
                sa.select(table.c.id.label(word), table.c.owner)
                .select_from(table.outerjoin(worker, worker.c.id == table.c.owner))
                .where(table.c.run_id == run_id, table.c.owner.is_not(None), worker.c.id.is_(None))
            ),
        )
        # A reap passes over rows that are locked at that moment; the next one frees them.
        yield (
            f"{word}_owner_gone",
            f"a {word} is owned by a worker that left or died (run: samplestore reap)",
            (
                sa.select(table.c.id.label(word), table.c.owner, worker.c.state)
                .select_from(table.join(worker, worker.c.id == table.c.owner))
                .where(table.c.run_id == run_id, worker.c.state != WorkerState.LIVE.value)
            ),
        )
    yield (
        "closed_but_owned",
        "a sample of a group that was given up has an owner",
        (
            sa.select(sample.c.id.label("sample")).where(
                sample.c.run_id == run_id, sample.c.closed == 1, sample.c.owner.is_not(None)
            )
        ),
    )


def batches(run_id: int) -> Iterator[Check]:
    wanted = {GroupState.LEASED: BatchState.LEASED, GroupState.CONSUMED: BatchState.COMMITTED}
    joined = batch_group.join(batch, batch.c.id == batch_group.c.batch_id).join(
        group, group.c.id == batch_group.c.group_id
    )
    yield (
        "batch_state",
        "a batch and its groups disagree",
        (
            sa.select(
                batch.c.id.label("batch"), batch.c.state, batch_group.c.group_id, group.c.state.label("group_state")
            )
            .select_from(joined)
            .where(
                batch.c.run_id == run_id,
                sa.or_(
                    batch_group.c.state != batch.c.state,
                    *[
                        (batch_group.c.state == held.value) & (group.c.state != state.value)
                        for state, held in wanted.items()
                    ],
                ),
            )
        ),
    )
    for state, held in wanted.items():
        live = sa.exists().where(batch_group.c.group_id == group.c.id, batch_group.c.state == held.value)
        yield (
            f"group_{state.value}_without_batch",
            f"a group is {state.value}, but no batch holds it",
            (sa.select(group.c.id.label("group")).where(group.c.run_id == run_id, group.c.state == state.value, ~live)),
        )
    sizes = sa.select(sa.func.count()).where(batch_group.c.batch_id == batch.c.id).correlate(batch).scalar_subquery()
    yield (
        "batch_size",
        "a batch has another number of groups than it says",
        (
            sa.select(batch.c.id.label("batch"), batch.c.n_groups).where(
                batch.c.run_id == run_id, batch.c.n_groups != sizes
            )
        ),
    )
