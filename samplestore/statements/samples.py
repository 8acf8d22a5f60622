"""The hot statements on samples, built once. Guards come from states.py."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from samplestore.clock import db_now
from samplestore.models import PromptRow, Request, Run, Sample, SampleGroup, Segment, Stage, WeightVersionRow
from samplestore.statements import staleness
from samplestore.states import CLAIMABLE, FINISHED, RunState, SampleStatus, StageStatus

run, group, sample, segment, stage, prompt, request, version = (
    t.__table__ for t in (Run, SampleGroup, Sample, Segment, Stage, PromptRow, Request, WeightVersionRow)
)

FENCE = (
    (sample.c.id == bindparam("sample_id"))
    & (sample.c.owner == bindparam("b_owner"))
    & (sample.c.attempt == bindparam("fence"))
)

# What ends an ownership, whoever ends it: the next owner is told apart by the attempt.
LET_GO: dict[str, Any] = {"owner": None, "attempt": sample.c.attempt + 1}
STATUS_AT_REST = sa.case((sample.c.n_tokens > 0, SampleStatus.ABORTED.value), else_=SampleStatus.PENDING.value)


# Stopped in the middle, unless its last segment was an abort, which has been counted already.
STOPPED = sa.case(
    ((sample.c.n_tokens > 0) & (sa.func.coalesce(sample.c.finish_reason, "") != "abort"), 1),
    else_=0,
)


def _is(column: Any, *values: str) -> sa.ColumnElement[bool]:
    """column IN (values), values written out: with bound ones the planner can't see that a partial index covers the
    question, and SQLite then walks another index through all history."""
    return column.in_([sa.literal_column(repr(str(v))) for v in values])  # type: ignore[no-any-return]


def _running() -> sa.ColumnElement[bool]:
    return sa.exists().where(run.c.id == bindparam("b_run"), run.c.state == RunState.RUNNING.value)


def _claim() -> Any:
    """Claim in one statement. SKIP LOCKED lets PostgreSQL's claimers pass each other; SQLite drops the clause and is
    safe because the transaction began IMMEDIATE. A CTE, since an inline subquery with LIMIT may be run more than once
    and claim too many. Order: priority, resumable first ('aborted' sorts before 'pending'), then groups in creation
    order, so that siblings go together and share their prefix cache."""
    picked = (
        sa.select(sample.c.id)
        .where(
            sample.c.run_id == bindparam("b_run"),
            sample.c.owner.is_(None),
            sample.c.closed == sa.literal_column("0"),
            _is(sample.c.status, *CLAIMABLE),
            sample.c.not_before <= db_now(),
            _running(),
        )
        .order_by(sample.c.priority, sample.c.status, sample.c.group_id, sample.c.index)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True, of=sample, key_share=True)
        .cte("picked")
    )
    return (
        sa.update(sample)
        .where(sample.c.id.in_(sa.select(picked.c.id)))
        .values(owner=bindparam("b_owner"), attempt=sample.c.attempt + 1, claimed_at=db_now(), progress_at=db_now())
        .returning(sample.c.id)
    )


CLAIM = _claim()

_PROMPT_COLUMNS = (
    prompt.c.prompt_ids,
    prompt.c.prompt,
    prompt.c.label,
    prompt.c.metadata.label("prompt_metadata"),
    group.c.number.label("group_number"),
)
_WITH_PROMPT = sample.join(group, group.c.id == sample.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)

CLAIMED = (
    sa.select(sample, *_PROMPT_COLUMNS)
    .select_from(_WITH_PROMPT)
    .where(sample.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(sample.c.priority, sample.c.status, sample.c.group_id, sample.c.index)
)

CURRENT_SEGMENTS = (
    sa.select(segment.c.sample_id, segment.c.seq, segment.c.payload, segment.c.finish_reason)
    .select_from(
        segment.join(sample, (sample.c.id == segment.c.sample_id) & (sample.c.incarnation == segment.c.incarnation))
    )
    .where(sample.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(segment.c.sample_id, segment.c.seq)
)


def _lowest(column: Any, value: str) -> Any:
    """The lower of a column and a bound value; NULL counts as not there."""
    given = bindparam(value, type_=sa.BigInteger)
    return sa.case((sa.or_(column.is_(None), given < column), given), else_=column)


def _stalest() -> Any:
    """The staler of the stored oldest version and the new one: by freshness, not by number, since after a rewind a
    lower number can be the fresher one."""
    given = bindparam("loss_version", type_=sa.BigInteger)
    new = staleness.freshness_of(bindparam("b_run"), given)
    old = staleness.freshness_of(bindparam("b_run"), sample.c.oldest_version)
    return sa.case(
        (given.is_(None), sample.c.oldest_version),
        (sample.c.oldest_version.is_(None), given),
        (sample.c.oldest_version == given, given),
        (new < old, given),
        else_=sample.c.oldest_version,
    )


def _known(name: str) -> sa.ColumnElement[bool]:
    """The run has this weight version, or none is given. Staleness of a number that means nothing would be a guess."""
    given = bindparam(name, type_=sa.BigInteger)
    return given.is_(None) | sa.exists().where(version.c.run_id == bindparam("b_run"), version.c.version == given)


# n_segments = :seq makes gaps and repeats visible: both change no row, and neither does an unknown version.
APPEND = (
    sa.update(sample)
    .where(
        FENCE,
        sample.c.incarnation == bindparam("life"),
        sample.c.n_segments == bindparam("seq"),
        _known("low"),
        _known("high"),
    )
    .values(
        n_segments=sample.c.n_segments + 1,
        n_tokens=sample.c.n_tokens + bindparam("n"),
        n_loss_tokens=sample.c.n_loss_tokens + bindparam("n_loss"),
        n_aborts=sample.c.n_aborts + bindparam("aborted"),
        logprob_sum=sample.c.logprob_sum + bindparam("lp_sum"),
        version_min=_lowest(sample.c.version_min, "low"),
        version_max=sa.case(
            (
                sa.or_(sample.c.version_max.is_(None), bindparam("high", type_=sa.BigInteger) > sample.c.version_max),
                bindparam("high", type_=sa.BigInteger),
            ),
            else_=sample.c.version_max,
        ),
        oldest_version=_stalest(),
        version_unknown=sa.case((bindparam("unknown") == 1, 1), else_=sample.c.version_unknown),
        finish_reason=bindparam("reason"),
        progress_at=db_now(),
    )
    .returning(sample.c.n_tokens)
)

VERSION_EXISTS = sa.select(_known("number"))
INSERT_SEGMENT = sa.insert(segment).values(created_at=db_now())
REQUEST_STORED = (
    sa.update(request)
    .where(request.c.rid == bindparam("of_rid"), request.c.sample_id == bindparam("of_sample"))
    .values(stored_tokens=request.c.stored_tokens + bindparam("n"))
)

FINISH = (
    sa.update(sample)
    .where(FENCE, sample.c.status.in_([s.value for s in CLAIMABLE]))
    .values(
        status=bindparam("new_status"),
        owner=None,
        let_go=sample.c.attempt,
        finish_reason=bindparam("reason"),
        finished_at=db_now(),
        finished_by=bindparam("b_owner"),
        error=None,
    )
)

RELEASE = (
    sa.update(sample)
    .where(FENCE)
    .values(
        status=STATUS_AT_REST,
        n_aborts=sample.c.n_aborts + STOPPED,
        let_go=sample.c.attempt,
        **LET_GO,
    )
)

FAIL = (
    sa.update(sample)
    .where(FENCE)
    .values(
        status=bindparam("new_status"),
        failures=sample.c.failures + 1,
        error=bindparam("said"),
        not_before=db_now() + bindparam("backoff"),
        finished_at=sa.case((bindparam("new_status") == SampleStatus.FAILED.value, db_now()), else_=None),
        let_go=sample.c.attempt,
        **LET_GO,
    )
)


def _claim_stages() -> Any:
    """The claim of samples, for stages."""
    picked = (
        sa.select(stage.c.id)
        .where(
            stage.c.run_id == bindparam("b_run"),
            stage.c.owner.is_(None),
            stage.c.status == sa.literal_column(repr(StageStatus.PENDING.value)),
            stage.c.not_before <= db_now(),
        )
        .order_by(stage.c.id)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True, key_share=True)
        .cte("picked")
    )
    return (
        sa.update(stage)
        .where(stage.c.id.in_(sa.select(picked.c.id)))
        .values(owner=bindparam("b_owner"), attempt=stage.c.attempt + 1, claimed_at=db_now())
        .returning(stage.c.id)
    )


CLAIM_STAGES = _claim_stages()

CLAIMED_STAGES = (
    sa.select(
        stage.c.id.label("stage_id"),
        stage.c.name,
        stage.c.attempt.label("stage_attempt"),
        stage.c.failures.label("stage_failures"),
        sample,
        *_PROMPT_COLUMNS,
    )
    .select_from(_WITH_PROMPT.join(stage, stage.c.sample_id == sample.c.id))
    .where(stage.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(stage.c.id)
)

STAGE_FENCE = (
    (stage.c.id == bindparam("stage_id"))
    & (stage.c.owner == bindparam("b_owner"))
    & (stage.c.attempt == bindparam("fence"))
    & (stage.c.status == StageStatus.PENDING.value)
)
STAGE_LET_GO: dict[str, Any] = {"owner": None, "attempt": stage.c.attempt + 1}

assert set(FINISHED).isdisjoint(CLAIMABLE)
