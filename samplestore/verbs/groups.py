"""Groups: who reaches zero moves them on; dropping, reopening, starting afresh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import InvalidTransition, NotInRun, TokensPruned
from samplestore.models import Event, Sample, SampleGroup, Segment, Stage
from samplestore.statements import samples as st
from samplestore.statements.staleness import FRESHNESS, FRESHNESS_REWOUND
from samplestore.states import (
    CLAIMABLE,
    EVALUATED,
    GROUP_TRANSITIONS,
    IN_WINDOW,
    PROMPT_REFUSED,
    FailedPolicy,
    Fate,
    GroupState,
    SampleStatus,
    StageStatus,
    StragglerPolicy,
)
from samplestore.verbs import group_stages, rollouts
from samplestore.verbs.tx import Tx

group, sample, stage, segment, event = (t.__table__ for t in (SampleGroup, Sample, Stage, Segment, Event))

CANCELLED = "cancelled"  # outcome of a stage whose group was closed before it was done


def _from(target: GroupState) -> list[str]:
    """States that have an arrow to `target`."""
    return [state.value for state, targets in GROUP_TRANSITIONS.items() if target in targets]


def count(tx: Tx, group_id: int, *, n_open: int = 0, n_unscored: int = 0, n_failed: int = 0) -> None:
    """Change a group's counters; whoever reaches zero moves the group on. Deciding by NOT EXISTS over siblings
    instead would strand the group on PostgreSQL when the last two finish at once."""
    count_many(tx, {group_id: (n_open, n_unscored, n_failed)})


def count_many(tx: Tx, changes: Mapping[int, tuple[int, int, int]]) -> None:
    """`count` for several (locked) groups: (n_open, n_unscored, n_failed) to add, by their ids."""
    given = [dict(zip(st.COUNTS, (id, *more), strict=True)) for id, more in sorted(changes.items())]
    for row in sorted(st.COUNT.rows(tx.connection, given)):
        if row.state not in (GroupState.OPEN, GroupState.SCORING):
            continue
        if row.n_open == 0 and row.n_unscored == 0:
            _complete(tx, row.id, row, _policy(tx, row))
        elif row.n_open == 0 and row.state == GroupState.OPEN:
            tx.execute(sa.update(group).where(group.c.id == row.id).values(state=GroupState.SCORING.value))


def _policy(tx: Tx, row: Any) -> str:
    """What becomes of a group with failed samples. One whose straggler was cut off is delivered short, also when its
    last reward comes later and however other failures are treated: those have closed the group already."""
    short = row.straggling_at is not None and tx.settings.on_straggler == StragglerPolicy.SHORT
    return FailedPolicy.SHORT.value if short else tx.settings.on_failed


def _complete(tx: Tx, group_id: int, row: Any, on_failed: str) -> None:
    """All samples are finished and scored: the group is ready, or is dropped for its failed samples."""
    if row.evaluation_id is not None:
        return _evaluated(tx, group_id, row)
    if row.n_failed == row.n_samples:
        return close(tx, [group_id], GroupState.DROPPED, "all samples failed")
    if row.n_failed and on_failed == FailedPolicy.DROP:
        return close(tx, [group_id], GroupState.DROPPED, "sample failed")
    if group_stages.create_next(tx, group_id, tx.settings.work_on_groups):
        tx.execute(sa.update(group).where(group.c.id == group_id).values(state=GroupState.SCORING.value, n_unscored=1))
        return None
    restale(tx, [group_id], once_rewound=True)
    tx.move([group_id], Fate.AWAITING_STAGE, Fate.READY)
    tx.execute(st.READY, {"b_group": group_id, **_summary(tx, group_id)})
    return None


def _evaluated(tx: Tx, group_id: int, row: Any) -> None:
    """A group of an evaluation has its rewards. It is never ready, so that no batch and no window meets it; its tokens
    are dropped for a reason of their own. No filter is asked: an evaluation counts what there is."""
    if row.n_failed < row.n_samples and group_stages.create_next(tx, group_id, tx.settings.group_stages):
        tx.execute(sa.update(group).where(group.c.id == group_id).values(state=GroupState.SCORING.value, n_unscored=1))
        return
    refresh(tx, group_id)
    close(tx, [group_id], GroupState.DROPPED, EVALUATED)


def _summary(tx: Tx, group_id: int) -> dict[str, Any]:
    """The columns that describe a finished group: tokens, stalest version, reward mean and (population) std."""
    rows = tx.rows(st.SUMMARY, {"b_run": tx.run_id, "b_group": group_id})
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


def restale(tx: Tx, ids: Sequence[int], once_rewound: bool = False) -> None:
    """Find the stalest version of each sample of these (locked) groups anew, by the timeline of now.

    A rewind turns the order of versions around. An append that began before it and was stored after it has compared
    by the old order, so a group of a run that was ever rewound (`once_rewound`: only of such a run) looks again when
    it is complete.
    """
    fresh: dict[int, tuple[int, int]] = {}
    for r in tx.rows(FRESHNESS_REWOUND if once_rewound else FRESHNESS, {"b_run": tx.run_id, "ids": list(ids)}):
        if r.sample_id not in fresh or r.freshness < fresh[r.sample_id][0]:
            fresh[r.sample_id] = (r.freshness, r.version_min)
    for sample_id, (_, oldest) in sorted(fresh.items()):
        tx.execute(
            sa.update(sample)
            .where(sample.c.id == sample_id, sample.c.oldest_version != oldest)
            .values(oldest_version=oldest)
        )


def refresh(tx: Tx, group_id: int) -> None:
    tx.execute(sa.update(group).where(group.c.id == group_id).values(**_summary(tx, group_id)))


def gave_up(tx: Tx, group_id: int, *, n_open: int = 0, n_unscored: int = 0, prompt_refused: str | None = None) -> None:
    """A sample of this (locked) group is failed for good: drop the group, or go on without the sample. prompt_refused:
    why no sibling could fare better."""
    to_train = _to_train(tx, group_id)
    if to_train and prompt_refused is not None:  # before it is counted: the last sample would give another reason
        close(tx, [group_id], "dropped", PROMPT_REFUSED + prompt_refused)
    count(tx, group_id, n_open=n_open, n_unscored=n_unscored, n_failed=1)
    if to_train and tx.settings.on_failed == FailedPolicy.DROP:
        close(tx, [group_id], "dropped", "sample failed")


def _to_train(tx: Tx, group_id: int) -> bool:
    return tx.execute(sa.select(group.c.evaluation_id).where(group.c.id == group_id)).scalar() is None


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
    for id in closed if reason != EVALUATED else ():
        tx.event(target.value, reason, group_id=id)


def drop(tx: Tx, ids: Sequence[int], reason: str) -> int:
    """Operator's drop; groups that are dropped already stay so. Raises InvalidTransition for groups that a trainer
    holds or has consumed, NotInRun."""
    return _end(tx, ids, GroupState.DROPPED, "drop", reason)


def expire(tx: Tx, ids: Sequence[int], reason: str) -> int:
    """Operator's: these groups are too old, whatever the run's window says; those that are stale already stay so. A
    rewind that makes them fresh again brings them back. Raises as `drop`."""
    return _end(tx, ids, GroupState.STALE, "expire", reason)


def _end(tx: Tx, ids: Sequence[int], target: GroupState, verb: str, reason: str) -> int:
    found = tx.lock_groups(ids)
    _all_of_run(tx, "group", ids, found.values())
    for row in found.values():
        if row.state not in (*_from(target), target):
            raise InvalidTransition("group", row.id, row.state, verb, ", ".join(_from(target)))
    # the reason is a key of the ledger, and PostgreSQL's keys are short
    close(tx, ids, target, codec.clean_text(reason, 200))
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
        .where(
            sa.or_(
                stage.c.sample_id.in_(sa.select(sample.c.id).where(sample.c.incarnation == stage.c.incarnation)),
                stage.c.sample_id.is_(None) & (stage.c.incarnation == group_stages.life(stage.c.group_id)),
            )
        )
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


def requeue(tx: Tx, sample_ids: Sequence[int], reason: str, call: str | None = None) -> int:
    """Start samples afresh: a new incarnation, nothing generated is carried over; the old tokens are superseded.
    `call` names this call, so that its repetition after a lost acknowledgement does not start them once more."""
    asked = tx.rows(sa.select(sample.c.id, sample.c.run_id, sample.c.group_id).where(sample.c.id.in_(sample_ids)))
    _all_of_run(tx, "sample", sample_ids, asked)
    ids = sorted({row.group_id for row in asked})
    locked = tx.lock_groups(ids)
    # Below the locks: on PostgreSQL the call that is repeated may still be committing.
    if _requeued(tx, sample_ids, call):
        return len(sample_ids)
    for row in locked.values():
        if GroupState(row.state) not in (*IN_WINDOW, GroupState.DROPPED):
            raise InvalidTransition("group", row.id, row.state, "requeue", "open, scoring, ready, dropped")
    rollout_ids = rollouts.whole(tx, sample_ids)
    _all_of_pruned(tx, rollout_ids, [row.id for row in locked.values() if row.pruned_at is not None])
    tx.lock_samples_of(ids)
    _afresh(tx, rollout_ids, ids)
    for id in sample_ids:
        tx.event("requeue", reason, sample_id=id, details={"call": call})
    return len(sample_ids)


def _requeued(tx: Tx, sample_ids: Sequence[int], call: str | None) -> bool:
    """Whether this very call ran before. Every sample has an event of it, so one sample's are one a call. Among the
    newest of all samples (Tx.done_before) a call would be forgotten after another one of a hundred samples."""
    if call is None or not sample_ids:
        return False
    mine = (event.c.run_id == tx.run_id) & (event.c.kind == "requeue") & (event.c.sample_id == sample_ids[0])
    return any((row.details or {}).get("call") == call for row in tx.rows(sa.select(event.c.details).where(mine)))


def regenerate(tx: Tx, ids: Sequence[int], reason: str) -> None:
    """Start (locked) groups afresh that are too old: every sample that has tokens, or had failed, begins a new
    incarnation. What waits for its first token stays as it is, also in the hands of a worker: it will be fresh."""
    begun = sa.or_(sample.c.n_tokens > 0, sample.c.status == SampleStatus.FAILED.value)
    found = tx.rows(
        sa.select(sample.c.id, sample.c.group_id, sample.c.n_tokens).where(sample.c.group_id.in_(ids), begun)
    )
    if not found:
        return
    _afresh(tx, rollouts.whole(tx, [row.id for row in found]), ids)
    # A deadline for stragglers counts from here: by the first creation every new life would be late at once.
    tx.execute(sa.update(group).where(group.c.id.in_(ids)).values(created_at=db_now(), straggling_at=None))
    for id in ids:
        mine = [row.n_tokens for row in found if row.group_id == id]
        tx.event("regenerate", reason, group_id=id, tokens=sum(mine), details={"samples": len(mine)})


def _afresh(tx: Tx, sample_ids: Sequence[int], ids: Sequence[int]) -> None:
    """A new incarnation for these samples of (locked) groups, and the groups to where they stand then."""
    with tx.moving(groups=ids):
        tx.execute(
            sa.update(stage)
            .where(
                sa.or_(stage.c.sample_id.in_(sample_ids), stage.c.sample_id.is_(None) & stage.c.group_id.in_(ids)),
                stage.c.status == StageStatus.PENDING.value,
            )
            .values(status=StageStatus.FAILED.value, outcome="superseded", settled_at=db_now(), **st.STAGE_LET_GO)
        )
        tx.execute(
            sa.update(sample)
            .where(sample.c.id.in_(sample_ids))
            .values(
                incarnation=sample.c.incarnation + 1, status=SampleStatus.PENDING.value, failures=0, not_before=0.0,
                n_tokens=0, n_loss_tokens=0, n_segments=0, n_aborts=0, n_resumes=0, version_min=None,
                version_max=None, oldest_version=None, version_unknown=0, logprob_sum=0.0, reward=None,
                finish_reason=None, error=None, progress_at=None, finished_at=None, finished_by=None,
                n_without_logprob=0, removed=None, **st.LET_GO,
            )
        )  # fmt: skip
        # What it goes on with is generated here: an import of the same file would bring another group.
        tx.execute(sa.update(group).where(group.c.id.in_(ids)).values(import_key=None))
        reopen(tx, ids)


def _all_of_pruned(tx: Tx, sample_ids: Sequence[int], pruned: list[int]) -> None:
    """A pruned group starts afresh as a whole, or not at all: tokens that its other samples would bring are gone.
    Raises TokensPruned."""
    if not pruned:
        return
    kept = tx.rows(sa.select(sample.c.group_id).where(sample.c.group_id.in_(pruned), sample.c.id.not_in(sample_ids)))
    if kept:
        raise TokensPruned(f"group {kept[0].group_id}, whose other samples would have to be requeued too,")
    tx.execute(sa.update(group).where(group.c.id.in_(pruned)).values(pruned_at=None))


def settle_stragglers(tx: Tx) -> int:
    """Groups past their deadline: say so once, and do what the run's policy says."""
    if tx.settings.group_deadline_s is None:
        return 0
    late = tx.rows(
        sa.select(group.c.id, group.c.n_open, group.c.n_unscored, group.c.evaluation_id)
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
        if policy == StragglerPolicy.DROP and row.evaluation_id is None:
            count(tx, row.id, n_open=-failed, n_failed=failed)
            close(tx, [row.id], GroupState.DROPPED, "straggler")
        else:
            count(tx, row.id, n_open=-failed, n_failed=failed)
    return len(late)
