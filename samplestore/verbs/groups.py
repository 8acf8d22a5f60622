"""Groups: who reaches zero moves them on; dropping, expiring, reopening."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import InvalidTransition, NotInRun
from samplestore.models import Sample, SampleGroup, Segment, Stage
from samplestore.statements import samples as st
from samplestore.statements import staleness
from samplestore.states import (
    CLAIMABLE,
    FINISHED,
    GROUP_TRANSITIONS,
    IN_WINDOW,
    FailedPolicy,
    GroupState,
    SampleStatus,
    StageStatus,
    StalePolicy,
    StragglerPolicy,
)
from samplestore.verbs.tx import Tx

group, sample, stage, segment = (t.__table__ for t in (SampleGroup, Sample, Stage, Segment))

CANCELLED = "cancelled"  # outcome of a stage whose group was closed before it was done


def _from(target: GroupState) -> list[str]:
    """States that have an arrow to `target`."""
    return [state.value for state, targets in GROUP_TRANSITIONS.items() if target in targets]


def count(tx: Tx, group_id: int, *, n_open: int = 0, n_unscored: int = 0, n_failed: int = 0) -> None:
    """Change a group's counters; whoever reaches zero moves the group on. Deciding by NOT EXISTS over siblings
    instead would strand the group on PostgreSQL when the last two finish at once."""
    row = tx.execute(
        sa.update(group)
        .where(group.c.id == group_id)
        .values(
            n_open=group.c.n_open + n_open,
            n_unscored=group.c.n_unscored + n_unscored,
            n_failed=group.c.n_failed + n_failed,
        )
        .returning(
            group.c.state,
            group.c.n_open,
            group.c.n_unscored,
            group.c.n_failed,
            group.c.n_samples,
            group.c.straggling_at,
        )
    ).one()
    if row.state not in (GroupState.OPEN, GroupState.SCORING):
        return
    if row.n_open == 0 and row.n_unscored == 0:
        _complete(tx, group_id, row, _policy(tx, row))
    elif row.n_open == 0 and row.state == GroupState.OPEN:
        tx.execute(sa.update(group).where(group.c.id == group_id).values(state=GroupState.SCORING.value))


def _policy(tx: Tx, row: Any) -> str:
    """What becomes of a group with failed samples. One whose straggler was cut off is delivered short, also when its
    last reward comes later and however other failures are treated: those have closed the group already."""
    short = row.straggling_at is not None and tx.settings.on_straggler == StragglerPolicy.SHORT
    return FailedPolicy.SHORT.value if short else tx.settings.on_failed


def _complete(tx: Tx, group_id: int, row: Any, on_failed: str) -> None:
    """All samples are finished and scored: the group is ready, or is dropped for its failed samples."""
    if row.n_failed == row.n_samples:
        return close(tx, [group_id], GroupState.DROPPED, "all samples failed")
    if row.n_failed and on_failed == FailedPolicy.DROP:
        return close(tx, [group_id], GroupState.DROPPED, "sample failed")
    with tx.moving(groups=[group_id]):
        tx.execute(
            sa.update(group)
            .where(group.c.id == group_id)
            .values(state=GroupState.READY.value, ready_at=db_now(), **_summary(tx, group_id))
        )
    return None


def _summary(tx: Tx, group_id: int) -> dict[str, Any]:
    """The columns that describe a finished group: tokens, stalest version, reward mean and (population) std."""
    rows = tx.rows(
        sa.select(
            sample.c.n_tokens,
            sample.c.reward,
            sample.c.oldest_version,
            sample.c.version_unknown,
            staleness.freshness_of(tx.run_id, sample.c.oldest_version).label("freshness"),
        ).where(sample.c.group_id == group_id, sample.c.status.in_([s.value for s in FINISHED]))
    )
    known = [row for row in rows if row.freshness is not None]
    unknown = any(row.version_unknown or (row.oldest_version is not None and row.freshness is None) for row in rows)
    rewards = [row.reward for row in rows if row.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return {
        "n_tokens": sum(row.n_tokens for row in rows),
        "oldest_version": None if unknown or not known else min(known, key=lambda r: r.freshness).oldest_version,
        "reward_mean": mean,
        "reward_std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5 if mean is not None else None,
    }


def refresh(tx: Tx, group_id: int) -> None:
    tx.execute(sa.update(group).where(group.c.id == group_id).values(**_summary(tx, group_id)))


def gave_up(tx: Tx, group_id: int, *, n_open: int = 0, n_unscored: int = 0) -> None:
    """A sample of this (locked) group is failed for good: drop the group, or go on without the sample."""
    count(tx, group_id, n_open=n_open, n_unscored=n_unscored, n_failed=1)
    if tx.settings.on_failed == FailedPolicy.DROP:
        close(tx, [group_id], "dropped", "sample failed")


def close(tx: Tx, ids: Sequence[int], state: str, reason: str) -> None:
    """End (locked) groups that will not be trained on. Their owners lose samples and stages: attempt rises, so that
    a late write gets LeaseLost and its request is cancelled."""
    target = GroupState(state)
    tx.lock_samples_of(ids)
    with tx.moving(groups=ids):
        closed = [
            row.id
            for row in tx.rows(
                sa.update(group)
                .where(group.c.id.in_(ids), group.c.state.in_(_from(target)))
                .values(state=target.value, reason=reason, settled_at=db_now(), n_unscored=0)
                .returning(group.c.id)
            )
        ]
        if closed:
            tx.execute(
                sa.update(sample)
                .where(sample.c.group_id.in_(closed), sample.c.owner.is_not(None))
                .values(status=st.STATUS_AT_REST, **st.LET_GO)
            )
            tx.execute(sa.update(sample).where(sample.c.group_id.in_(closed)).values(closed=1))
            tx.execute(
                sa.update(stage)
                .where(stage.c.group_id.in_(closed), stage.c.status == StageStatus.PENDING.value)
                .values(status=StageStatus.FAILED.value, outcome=CANCELLED, settled_at=db_now(), **st.STAGE_LET_GO)
            )
    for id in closed:
        tx.event(target.value, reason, group_id=id)


def drop(tx: Tx, ids: Sequence[int], reason: str) -> int:
    """Operator's drop; groups that are dropped already stay so. Raises InvalidTransition for groups that a trainer
    holds or has consumed, NotInRun."""
    found = tx.lock_groups(ids)
    _all_of_run(tx, "group", ids, found.values())
    for row in found.values():
        if row.state not in (*_from(GroupState.DROPPED), GroupState.DROPPED):
            raise InvalidTransition("group", row.id, row.state, "drop", ", ".join(_from(GroupState.DROPPED)))
    # the reason is a key of the ledger, and PostgreSQL's keys are short
    close(tx, ids, GroupState.DROPPED, codec.clean_text(reason, 200))
    return len(ids)


def _all_of_run(tx: Tx, what: str, ids: Sequence[int], found: Iterable[Any]) -> None:
    missing = sorted(set(ids) - {row.id for row in found if row.run_id == tx.run_id})
    if missing:
        raise NotInRun(what, missing)


def reopen(tx: Tx, ids: Sequence[int]) -> None:
    """Bring closed (locked) groups back to where their samples and stages stand."""
    tx.execute(sa.update(sample).where(sample.c.group_id.in_(ids)).values(closed=0))
    tx.execute(
        sa.update(stage)
        .where(stage.c.group_id.in_(ids), stage.c.outcome == CANCELLED)
        .where(stage.c.sample_id.in_(sa.select(sample.c.id).where(sample.c.incarnation == stage.c.incarnation)))
        .values(status=StageStatus.PENDING.value, outcome=None, settled_at=None)
    )
    for id in ids:
        recounted = _recount(tx, id)
        state = (
            GroupState.OPEN
            if recounted["n_open"]
            else GroupState.SCORING
            if recounted["n_unscored"]
            else GroupState.READY
        )
        ready = _summary(tx, id) if state == GroupState.READY else {"ready_at": None}
        tx.execute(
            sa.update(group)
            .where(group.c.id == id)
            .values(state=state.value, reason=None, settled_at=None, **recounted, **ready)
        )


def _recount(tx: Tx, group_id: int) -> dict[str, int]:
    """Counters from the rows; right because the caller holds the group's lock."""
    statuses = tx.rows(sa.select(sample.c.status).where(sample.c.group_id == group_id))
    pending = tx.execute(
        sa.select(sa.func.count()).where(stage.c.group_id == group_id, stage.c.status == StageStatus.PENDING.value)
    ).scalar_one()
    return {
        "n_open": sum(row.status in CLAIMABLE for row in statuses),
        "n_failed": sum(row.status == SampleStatus.FAILED for row in statuses),
        "n_unscored": int(pending),
    }


def requeue(tx: Tx, sample_ids: Sequence[int], reason: str) -> int:
    """Start samples afresh: a new incarnation, nothing generated is carried over; the old tokens are superseded."""
    asked = tx.rows(sa.select(sample.c.id, sample.c.run_id, sample.c.group_id).where(sample.c.id.in_(sample_ids)))
    _all_of_run(tx, "sample", sample_ids, asked)
    ids = sorted({row.group_id for row in asked})
    for row in tx.lock_groups(ids).values():
        if GroupState(row.state) not in (*IN_WINDOW, GroupState.DROPPED):
            raise InvalidTransition("group", row.id, row.state, "requeue", "open, scoring, ready, dropped")
    tx.lock_samples_of(ids)
    with tx.moving(groups=ids):
        tx.execute(
            sa.update(stage)
            .where(stage.c.sample_id.in_(sample_ids), stage.c.status == StageStatus.PENDING.value)
            .values(status=StageStatus.FAILED.value, outcome="superseded", settled_at=db_now(), **st.STAGE_LET_GO)
        )
        tx.execute(
            sa.update(sample)
            .where(sample.c.id.in_(sample_ids))
            .values(
                incarnation=sample.c.incarnation + 1, status=SampleStatus.PENDING.value, failures=0, not_before=0.0,
                n_tokens=0, n_loss_tokens=0, n_segments=0, n_aborts=0, n_resumes=0, version_min=None,
                version_max=None, oldest_version=None, version_unknown=0, logprob_sum=0.0, reward=None,
                finish_reason=None, error=None, progress_at=None, finished_at=None, finished_by=None, **st.LET_GO,
            )
        )  # fmt: skip
        reopen(tx, ids)
    for id in sample_ids:
        tx.event("requeue", reason, sample_id=id)
    return len(sample_ids)


def expire(tx: Tx) -> int:
    """Close groups of the window that can never be delivered: staleness only grows, so what is beyond
    max_staleness stays there. With stale="mask" such groups are delivered, masked. Ready groups of unknown staleness
    are never delivered, so they must not fill the window. Caller holds the run's lock."""
    unknown = tx.rows(
        sa.select(group.c.id)
        .where(group.c.run_id == tx.run_id, group.c.state == GroupState.READY.value, group.c.oldest_version.is_(None))
        .order_by(group.c.id)
        .with_for_update(key_share=True)
    )
    if unknown:
        close(tx, [row.id for row in unknown], GroupState.STALE, "unknown weight version")
    if tx.settings.stale == StalePolicy.MASK:
        return 0
    candidate = sa.select(group.c.id).where(
        group.c.run_id == tx.run_id, group.c.state.in_([s.value for s in IN_WINDOW])
    )
    beyond = staleness.behind(tx.run_id, sample.c.oldest_version) > tx.settings.max_staleness
    found = tx.rows(
        sa.select(sample.c.group_id)
        .where(sample.c.group_id.in_(candidate), sample.c.status != SampleStatus.FAILED.value, beyond)
        .distinct()
    )
    ids = sorted(row.group_id for row in found)
    if ids:
        tx.lock_groups(ids)
        close(tx, ids, GroupState.STALE, f"more than {tx.settings.max_staleness} versions behind")
    return len(ids)


def settle_stragglers(tx: Tx) -> int:
    """Groups past their deadline: say so once, and do what the run's policy says."""
    if tx.settings.group_deadline_s is None:
        return 0
    late = tx.rows(
        sa.select(group.c.id, group.c.n_open, group.c.n_unscored)
        .where(
            group.c.run_id == tx.run_id,
            group.c.state == GroupState.OPEN.value,
            group.c.straggling_at.is_(None),
            group.c.n_open < group.c.n_samples,  # it has begun, and some of it is finished
            group.c.created_at < db_now() - tx.settings.group_deadline_s,
        )
        .order_by(group.c.id)
        .with_for_update(skip_locked=True, key_share=True)
    )
    policy = StragglerPolicy(tx.settings.on_straggler)
    for row in late:
        tx.execute(sa.update(group).where(group.c.id == row.id).values(straggling_at=db_now()))
        tx.event("straggler", policy.value, group_id=row.id, details={"unfinished": row.n_open})
        if policy == StragglerPolicy.WAIT:
            continue
        tx.lock_samples_of([row.id])
        with tx.moving(groups=[row.id]):
            failed = tx.execute(
                sa.update(sample)
                .where(sample.c.group_id == row.id, sample.c.status.in_([s.value for s in CLAIMABLE]))
                .values(
                    status=SampleStatus.FAILED.value,
                    error="passed the group deadline",
                    finished_at=db_now(),
                    **st.LET_GO,
                )
            ).rowcount
        if policy == StragglerPolicy.DROP:
            count(tx, row.id, n_open=-failed, n_failed=failed)
            close(tx, [row.id], GroupState.DROPPED, "straggler")
        else:
            count(tx, row.id, n_open=-failed, n_failed=failed)
    return len(late)
