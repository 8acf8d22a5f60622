"""`check`: every promise that a query can verify, in one snapshot. An empty list is good.

Each check is one SELECT of the rows that break a promise; the first column names the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.models import (
    BatchGroup,
    BatchRow,
    Request,
    Run,
    Sample,
    SampleGroup,
    Segment,
    Stage,
    WeightVersionRow,
    Worker,
)
from samplestore.queries import ledger
from samplestore.statements.ledger import counted_from_payload
from samplestore.states import (
    CLAIMABLE,
    FINISHED,
    BatchState,
    GroupState,
    SampleStatus,
    SegmentKind,
    StageStatus,
    WorkerState,
)
from samplestore.types import Finding, RunSettings

run, group, sample, segment, stage, worker, batch, batch_group, request, version = (
    t.__table__
    for t in (Run, SampleGroup, Sample, Segment, Stage, Worker, BatchRow, BatchGroup, Request, WeightVersionRow)
)

EXAMPLES = 5


def check(database: Database, run_id: int, settings: RunSettings) -> list[Finding]:
    with database.reading() as connection:
        found = [_run_check(connection, *item) for item in _checks(run_id)]
        return [*(f for f in found if f is not None), *_ledger(connection, run_id), *_foreign_keys(connection)]


def _run_check(connection: sa.Connection, code: str, message: str, query: sa.Select[Any]) -> Finding | None:
    rows = connection.execute(query.limit(1000)).fetchall()
    if not rows:
        return None
    shown = [{name: _plain(value) for name, value in row._mapping.items()} for row in rows[:EXAMPLES]]
    return Finding(code, message, len(rows), shown)


def _plain(value: Any) -> Any:
    """PostgreSQL gives sums as Decimal, which JSON does not know."""
    return int(value) if isinstance(value, Decimal) else value


def _checks(run_id: int) -> Iterator[tuple[str, str, sa.Select[Any]]]:
    yield from _segments(run_id)
    yield from _samples(run_id)
    yield from _groups(run_id)
    yield from _owners(run_id)
    yield from _batches(run_id)
    yield from _requests(run_id)


def _segments(run_id: int) -> Iterator[tuple[str, str, sa.Select[Any]]]:
    mine = segment.join(sample, sample.c.id == segment.c.sample_id)
    of_run = sample.c.run_id == run_id
    key = (segment.c.sample_id.label("sample"), segment.c.incarnation, segment.c.seq)
    counted = counted_from_payload()
    yield (
        "segment_length",
        "a segment's payload holds another number of tokens than its row says",
        (
            sa.select(*key, segment.c.n_tokens, counted.label("payload_tokens"))
            .select_from(mine)
            .where(of_run, counted != segment.c.n_tokens)
        ),
    )
    first = sa.func.substr(segment.c.payload, 1, 1, type_=sa.LargeBinary)
    yield (
        "segment_logprobs",
        "trained tokens that were generated here have no log-probs",
        (
            sa.select(*key)
            .select_from(mine)
            .where(
                of_run,
                segment.c.kind == SegmentKind.GENERATED.value,
                segment.c.loss == 1,
                first != sa.literal(bytes([1]), sa.LargeBinary),
            )
        ),
    )
    before = segment.alias("before")
    yield (
        "segment_gap",
        "a segment has no predecessor, or does not start where it ends",
        (
            sa.select(*key)
            .select_from(
                mine.outerjoin(
                    before,
                    (before.c.sample_id == segment.c.sample_id)
                    & (before.c.incarnation == segment.c.incarnation)
                    & (before.c.seq == segment.c.seq - 1),
                )
            )
            .where(
                of_run,
                sa.or_(
                    (segment.c.seq == 0) & (segment.c.start != 0),
                    (segment.c.seq > 0) & before.c.seq.is_(None),
                    (segment.c.seq > 0) & (segment.c.start != before.c.start + before.c.n_tokens),
                ),
            )
        ),
    )
    yield (
        "segment_version",
        "a segment names a weight version that the run does not have",
        (
            sa.select(*key, segment.c.version_min)
            .select_from(
                mine.outerjoin(
                    version, (version.c.run_id == sample.c.run_id) & (version.c.version == segment.c.version_min)
                )
            )
            .where(of_run, segment.c.version_min.is_not(None), version.c.version.is_(None))
        ),
    )


def _samples(run_id: int) -> Iterator[tuple[str, str, sa.Select[Any]]]:
    joined = sample.outerjoin(
        segment, (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation)
    )
    tokens = sa.func.coalesce(sa.func.sum(segment.c.n_tokens), 0)
    loss = sa.func.coalesce(sa.func.sum(sa.case((segment.c.loss == 1, segment.c.n_tokens), else_=0)), 0)
    rows = sa.func.count(segment.c.seq)
    yield (
        "sample_summary",
        "a sample's counters differ from its segments",
        (
            sa.select(
                sample.c.id.label("sample"),
                sample.c.n_tokens,
                tokens.label("tokens"),
                sample.c.n_segments,
                rows.label("segments"),
            )
            .select_from(joined)
            .where(sample.c.run_id == run_id)
            .group_by(sample.c.id)
            .having(sa.or_(tokens != sample.c.n_tokens, rows != sample.c.n_segments, loss != sample.c.n_loss_tokens))
        ),
    )
    lowest, highest = sa.func.min(segment.c.version_min), sa.func.max(segment.c.version_max)
    yield (
        "sample_versions",
        "a sample's version range differs from its segments",
        (
            sa.select(
                sample.c.id.label("sample"),
                sample.c.version_min,
                lowest.label("lowest"),
                sample.c.version_max,
                highest.label("highest"),
            )
            .select_from(joined)
            .where(sample.c.run_id == run_id)
            .group_by(sample.c.id)
            .having(
                sa.or_(
                    sa.func.coalesce(lowest, -1) != sa.func.coalesce(sample.c.version_min, -1),
                    sa.func.coalesce(highest, -1) != sa.func.coalesce(sample.c.version_max, -1),
                )
            )
        ),
    )
    yield (
        "finished_empty",
        "a finished sample has no tokens",
        sa.select(sample.c.id.label("sample")).where(
            sample.c.run_id == run_id, sample.c.status.in_([s.value for s in FINISHED]), sample.c.n_tokens == 0
        ),
    )


def _groups(run_id: int) -> Iterator[tuple[str, str, sa.Select[Any]]]:
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
    ended = [s.value for s in (GroupState.READY, GroupState.LEASED, GroupState.CONSUMED)]
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


def _owners(run_id: int) -> Iterator[tuple[str, str, sa.Select[Any]]]:
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


def _batches(run_id: int) -> Iterator[tuple[str, str, sa.Select[Any]]]:
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


def _requests(run_id: int) -> Iterator[tuple[str, str, sa.Select[Any]]]:
    stored = (
        sa.select(sa.func.coalesce(sa.func.sum(segment.c.n_tokens), 0))
        .where(segment.c.sample_id == request.c.sample_id, segment.c.request_rid == request.c.rid)
        .correlate(request)
        .scalar_subquery()
    )
    yield (
        "request_stored",
        "a request's stored tokens differ from its segments",
        (
            sa.select(request.c.rid, request.c.stored_tokens, stored.label("segments")).where(
                request.c.run_id == run_id, request.c.stored_tokens != stored
            )
        ),
    )
    yield (
        "request_unexplained",
        "an engine generated tokens that were neither stored nor lost for a reason",
        (
            sa.select(request.c.rid, request.c.generated_tokens, request.c.stored_tokens, request.c.lost_tokens).where(
                request.c.run_id == run_id,
                request.c.generated_tokens.is_not(None),
                sa.or_(
                    request.c.generated_tokens != request.c.stored_tokens + request.c.lost_tokens,
                    (request.c.lost_tokens != 0) & request.c.lost_reason.is_(None),
                ),
            )
        ),
    )


def _ledger(connection: sa.Connection, run_id: int) -> Iterator[Finding]:
    kept, counted = ledger.kept_totals(connection, run_id), ledger.recounted(connection, run_id)
    wrong = sorted(key for key in {*kept, *counted} if kept.get(key, 0) != counted.get(key, 0))
    if wrong:
        shown = [
            {
                "fate": f,
                "reason": r,
                "version": v,
                "kept": kept.get((f, r, v), 0),
                "recounted": counted.get((f, r, v), 0),
            }
            for f, r, v in wrong
        ]
        yield Finding("ledger", "the token ledger does not close", len(wrong), shown[:EXAMPLES])


def _foreign_keys(connection: sa.Connection) -> Iterator[Finding]:
    if connection.dialect.name != "sqlite":
        return  # PostgreSQL never lets a foreign key be off
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        yield Finding(
            "foreign_key", "rows refer to rows that do not exist", len(broken), [list(r) for r in broken[:EXAMPLES]]
        )
