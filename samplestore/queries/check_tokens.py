"""Promises about tokens: segments, what samples and requests say of them, and what was pruned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import sqlalchemy as sa

from samplestore import codec
from samplestore.models import BatchGroup, BatchRow, Request, Run, Sample, SampleGroup, Segment, WeightVersionRow
from samplestore.statements.ledger import counted_from_payload, pruned
from samplestore.states import FINISHED, BatchState, GroupState, SegmentKind

run, group, sample, segment, batch, batch_group, request, version = (
    t.__table__ for t in (Run, SampleGroup, Sample, Segment, BatchRow, BatchGroup, Request, WeightVersionRow)
)

Check: TypeAlias = tuple[str, str, sa.Select[Any]]  # code, what is wrong with the rows, and the rows


def segments(run_id: int) -> Iterator[Check]:
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
                first != sa.literal(bytes([codec.WITH_LOGPROBS]), sa.LargeBinary),
                ~pruned(),
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


def samples(run_id: int) -> Iterator[Check]:
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
            sample.c.run_id == run_id,
            sample.c.status.in_([s.value for s in FINISHED]),
            sample.c.n_tokens == 0,
            sample.c.parent_id.is_(None),  # a fork of an earlier life is emptied (verbs/fanout.py)
        ),
    )


def requests(run_id: int) -> Iterator[Check]:
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


def retention(run_id: int) -> Iterator[Check]:
    """That nothing is gone which a rewind inside the retention window, or anybody at work, may still ask for."""
    settled = [s.value for s in (GroupState.CONSUMED, GroupState.DROPPED, GroupState.STALE, GroupState.SUPERSEDED)]
    kept_from = sa.select(run.c.retention_step).where(run.c.id == run_id).scalar_subquery()
    in_window = sa.exists(
        sa.select(sa.literal(1))
        .select_from(batch_group.join(batch, batch.c.id == batch_group.c.batch_id))
        .where(batch_group.c.group_id == group.c.id, batch.c.state == BatchState.COMMITTED.value)
        .where(batch.c.step > kept_from)
    )
    yield (
        "pruned_but_needed",
        "a group was pruned that is not settled, or that a rewind inside the retention window brings back",
        (
            sa.select(group.c.id.label("group"), group.c.state).where(
                group.c.run_id == run_id,
                group.c.pruned_at.is_not(None),
                sa.or_(group.c.state.not_in(settled), in_window),
            )
        ),
    )
    yield (
        "pruned_by_halves",
        "a segment has lost its tokens while its group counts as whole, or has them while its group counts as pruned",
        (
            sa.select(
                segment.c.sample_id.label("sample"), segment.c.incarnation, segment.c.seq, group.c.id.label("group")
            )
            .select_from(
                segment.join(sample, sample.c.id == segment.c.sample_id).join(group, group.c.id == sample.c.group_id)
            )
            .where(
                sample.c.run_id == run_id,
                sa.or_(
                    pruned() & group.c.pruned_at.is_(None) & (segment.c.incarnation == sample.c.incarnation),
                    ~pruned() & group.c.pruned_at.is_not(None),
                ),
            )
        ),
    )
