"""The hot statements on samples, built once. Guards come from states.py."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from samplestore.clock import db_now
from samplestore.models import PromptRow, Run, Sample, SampleGroup, Segment, Stage
from samplestore.statements import staleness
from samplestore.statements.lists import among
from samplestore.statements.prepared import Over, Prepared, given
from samplestore.states import CLAIMABLE, FINISHED, GroupState, RunState, SampleStatus, SegmentKind, StageStatus

run, group, sample, segment, stage, prompt = (
    t.__table__ for t in (Run, SampleGroup, Sample, Segment, Stage, PromptRow)
)

FENCE = (
    (sample.c.id == bindparam("sample_id"))
    & (sample.c.owner == bindparam("b_owner"))
    & (sample.c.attempt == bindparam("fence"))
)


def held_by(given: Any) -> tuple[sa.ColumnElement[bool], ...]:
    """The fence for many samples at once: given rows have their sample_id, owner and attempt."""
    return sample.c.id == given.c.sample_id, sample.c.owner == given.c.owner, sample.c.attempt == given.c.attempt


class End(IntEnum):
    """How the owner of a sample or a stage ended its claim itself. Stored: the numbers stay as they are."""

    COMPLETED = 0
    TRUNCATED = 1
    RELEASED = 2
    FAILED = 3
    REFUSED = 4  # its prompt, by every engine there is
    SETTLED = 5  # a stage, with a result


def let_go(attempt: Any, end: Any) -> Any:
    """What the column let_go holds after an end: which attempt it ended, and how. By the attempt alone a failure that
    comes after a release would be taken for its repetition, acknowledged, and never counted.

    Below -1, which is nobody's: attempts of claims begin with 1. Rows of earlier releases of this package have the bare
    attempt, and match no call."""
    return -(attempt * 8 + end)


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


def _claim(*only: Any) -> Any:
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
            sample.c.priority >= bindparam("least", type_=sa.BigInteger),  # without those of evaluations, or with them
            sample.c.parent_id.is_(None),  # a fork goes with its parent (verbs/fanout.py)
            _running(),
            *only,
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
        .returning(
            sample.c.id, sample.c.group_id, sample.c.index.label("place"), sample.c.priority, sample.c.status,
            sample.c.attempt, sample.c.incarnation, sample.c.n_segments, sample.c.n_tokens, sample.c.failures,
            sample.c.finish_reason,
        )
    )  # fmt: skip


CLAIM = Prepared(_claim())
CLAIM_OF_GROUPS = Prepared(_claim(among(sample.c.group_id, "ids")))

_PROMPT_COLUMNS = (
    prompt.c.prompt_ids,
    prompt.c.prompt,
    prompt.c.label,
    prompt.c.metadata.label("prompt_metadata"),
    group.c.number.label("group_number"),
    group.c.evaluation_id,
    prompt.c.images,
)
_WITH_PROMPT = sample.join(group, group.c.id == sample.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)

# Siblings share their prompt: it is read and decoded once.
PROMPTS_OF = Prepared(
    sa.select(group.c.id, *_PROMPT_COLUMNS)
    .select_from(group.join(prompt, prompt.c.id == group.c.prompt_id))
    .where(among(group.c.id, "ids"))
)

CURRENT_SEGMENTS = (
    sa.select(segment.c.sample_id, segment.c.seq, segment.c.payload, segment.c.finish_reason)
    .select_from(
        segment.join(sample, (sample.c.id == segment.c.sample_id) & (sample.c.incarnation == segment.c.incarnation))
    )
    .where(sample.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(segment.c.sample_id, segment.c.seq)
)


COUNT_RESUME = Prepared(sa.update(sample).where(FENCE).values(n_resumes=sample.c.n_resumes + 1))
OWNED = Prepared(sa.select(sample).where(sample.c.id == bindparam("sample_id")).with_for_update(key_share=True))
TOKENS_OF = Prepared(
    sa.select(segment.c.version_min, sa.func.sum(segment.c.n_tokens))
    .select_from(segment.join(sample, (sample.c.id == segment.c.sample_id)))
    .where(
        among(segment.c.sample_id, "ids"),
        segment.c.incarnation == sample.c.incarnation,
        segment.c.kind == SegmentKind.GENERATED.value,
    )
    .group_by(segment.c.version_min)
)
GROUP_OF = sa.select(sample.c.group_id).where(
    sample.c.id == bindparam("sample_id"), sample.c.run_id == bindparam("b_run")
)
COUNTS: dict[str, Any] = dict.fromkeys(("id", "n_open", "n_unscored", "n_failed"), sa.BigInteger)


def _count() -> Over:
    """Change counters of groups, which are locked."""
    more = given(COUNTS)
    changed = sa.update(group).where(group.c.id == more.c.id)
    return Over(
        more,
        changed.values({name: group.c[name] + more.c[name] for name in COUNTS if name != "id"}).returning(
            group.c.id, group.c.state, group.c.n_open, group.c.n_unscored, group.c.n_failed, group.c.n_samples,
            group.c.straggling_at, group.c.evaluation_id,
        ),
    )  # fmt: skip


COUNT = _count()
SUMMARY = Prepared(
    sa.select(
        sample.c.n_tokens,
        sample.c.reward,
        sample.c.oldest_version,
        sample.c.version_unknown,
        staleness.freshness_of(bindparam("b_run"), sample.c.oldest_version).label("freshness"),
    ).where(sample.c.group_id == bindparam("b_group"), _is(sample.c.status, *FINISHED))
)

READY = Prepared(
    sa.update(group)
    .where(group.c.id == bindparam("b_group"))
    .values(
        state=GroupState.READY.value, ready_at=db_now(), n_tokens=bindparam("n_tokens"),
        oldest_version=bindparam("oldest_version"), reward_mean=bindparam("reward_mean"),
        reward_std=bindparam("reward_std"),
    )
)  # fmt: skip


ENDS: dict[str, Any] = {
    "run_id": sa.BigInteger, "group_id": sa.BigInteger, "sample_id": sa.BigInteger, "owner": sa.BigInteger,
    "attempt": sa.BigInteger, "status": sa.Text, "reason": sa.Text,
}  # fmt: skip


def _finish() -> Over:
    """The end of samples that have tokens. What is not given comes from their last segment. Their groups are locked, so
    that nobody else ends them; appends may come, so the rows are taken in the order of their ids."""
    ends = given(ENDS)
    held = (
        sa.select(sample.c.id)
        .where(sample.c.id.in_(sa.select(ends.c.sample_id)))
        .order_by(sample.c.id)
        .with_for_update(key_share=True)
        .cte("held")
    )
    reason = sa.func.coalesce(ends.c.reason, sample.c.finish_reason)
    truncated = sa.func.coalesce(ends.c.status == SampleStatus.TRUNCATED.value, reason == "length")
    return Over(
        ends,
        sa.update(sample)
        .where(
            sample.c.id == held.c.id,
            *held_by(ends),
            sample.c.group_id == ends.c.group_id,
            sample.c.run_id == ends.c.run_id,
            sample.c.n_tokens > 0,
            _is(sample.c.status, *CLAIMABLE),
        )
        .values(
            status=sa.case((truncated, SampleStatus.TRUNCATED.value), else_=SampleStatus.COMPLETED.value),
            owner=None,
            let_go=let_go(sample.c.attempt, sa.case((truncated, int(End.TRUNCATED)), else_=int(End.COMPLETED))),
            finish_reason=reason,
            finished_at=db_now(),
            finished_by=ends.c.owner,
            error=None,
        ),
    )


FINISH = _finish()

RELEASE = (
    sa.update(sample)
    .where(FENCE)
    .values(
        status=STATUS_AT_REST,
        n_aborts=sample.c.n_aborts + STOPPED,
        let_go=let_go(sample.c.attempt, int(End.RELEASED)),
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
        let_go=sa.func.coalesce(bindparam("end", type_=sa.BigInteger), sample.c.let_go),  # NULL: not by its owner
        **LET_GO,
    )
)


def _claim_stages(*of: sa.ColumnElement[bool]) -> Any:
    """The claim of samples, for stages."""
    picked = (
        sa.select(stage.c.id)
        .where(
            stage.c.run_id == bindparam("b_run"),
            stage.c.owner.is_(None),
            stage.c.status == sa.literal_column(repr(StageStatus.PENDING.value)),
            stage.c.not_before <= db_now(),
            *of,
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
CLAIM_NAMED_STAGES = _claim_stages(stage.c.name.in_(bindparam("names", expanding=True)))

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

_GROUP = stage.join(group, group.c.id == stage.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)
CLAIMED_GROUP_STAGES = (
    sa.select(stage.c.id.label("stage_id"), stage, *_PROMPT_COLUMNS)
    .select_from(_GROUP)
    .where(stage.c.id.in_(bindparam("ids", expanding=True)), stage.c.sample_id.is_(None))
    .order_by(stage.c.id)
)
_root = sample.alias("root")
MEMBERS = (
    sa.select(
        sample.c.id, sample.c.group_id, sample.c.index.label("place"), sample.c.incarnation, sample.c.status,
        sample.c.reward, sample.c.parent_id, sample.c.parent_upto, prompt.c.prompt_ids,
        sa.func.coalesce(
            sa.select(_root.c.index).where(_root.c.id == sample.c.parent_id).correlate(sample).scalar_subquery(),
            sample.c.index,
        ).label("root"),
    )
    .select_from(_WITH_PROMPT)
    .where(
        sample.c.group_id.in_(bindparam("groups", expanding=True)),
        _is(sample.c.status, *FINISHED),
        sample.c.n_tokens > 0,  # without the forks that a later life of their episode has not made again
    )
    .order_by(sample.c.group_id, sample.c.index)
)  # fmt: skip

assert set(FINISHED).isdisjoint(CLAIMABLE)
