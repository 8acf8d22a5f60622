"""Work on finished samples and groups: rewards, filters, teachers. All of them are the same rows, claimed, fenced and
freed by the same code.

A sample's stages are made when it finishes. A group's are made one after the other, each when nothing of the group is
left to do: the second sees what the first has found. The values of a group's stage are stored as settled stages of its
samples, so that a reward is one sum wherever its parts come from.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec
from samplestore.arguments import duration, jsonable, optional
from samplestore.arrays import Prepared, require_rows
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting, LeaseLost
from samplestore.models import Sample, Stage
from samplestore.statements import samples as st
from samplestore.states import GroupState, SampleStatus, StageStatus
from samplestore.types import Claim, Ids, Member, StageClaim, expect
from samplestore.verbs import groups, rollouts
from samplestore.verbs.arrays import holds as holds_array
from samplestore.verbs.arrays import store as store_array
from samplestore.verbs.tx import Tx

sample, stage = Sample.__table__, Stage.__table__

OK, UNPARSED, VERIFIER_ERROR, VERIFIER_TIMEOUT = "ok", "unparsed", "verifier_error", "verifier_timeout"
NO_IDS = np.empty(0, dtype=np.int32)


def response_ids(tx: Tx, ids: list[int]) -> dict[int, Ids]:
    """All stored response ids of these samples' current incarnations."""
    parts: dict[int, list[Ids]] = defaultdict(list)
    if ids:
        for row in tx.rows(st.CURRENT_SEGMENTS, {"ids": ids}):
            parts[row.sample_id].append(codec.decode(row.payload)[0])
    return {key: np.concatenate(value) for key, value in parts.items()}


def create(tx: Tx, claim: Claim, keep: bool | Collection[str]) -> list[StageClaim]:
    """The stages of a sample that has just finished. `keep`: which of them the finishing worker owns at once."""
    names = tx.settings.stages
    if not names:
        return []
    kept = [name for name in names if (keep if isinstance(keep, bool) else name in keep)]
    for owned, these in ((True, kept), (False, [name for name in names if name not in kept])):
        if these:
            tx.execute(
                sa.insert(stage).values(created_at=db_now(), claimed_at=db_now() if owned else None),
                [
                    {
                        "run_id": tx.run_id, "group_id": claim.group_id, "sample_id": claim.sample_id,
                        "incarnation": claim.incarnation, "name": name,
                        "owner": claim.owner if owned else None, "attempt": int(owned),
                    }
                    for name in these
                ],
            )  # fmt: skip
    return owned_by(tx, claim.sample_id, claim.owner) if kept else []


def owned_by(tx: Tx, sample_id: int, worker_id: int) -> list[StageClaim]:
    ids = tx.rows(sa.select(stage.c.id).where(stage.c.sample_id == sample_id, stage.c.owner == worker_id))
    return _load(tx, [row.id for row in ids], worker_id)


def claim_stages(tx: Tx, worker_id: int, limit: int, names: Collection[str] | None = None) -> list[StageClaim]:
    """Take up to `limit` pending stages, oldest first; those called `names`, or any. Raises WorkerDead."""
    tx.require_live(worker_id)
    given = {"b_run": tx.run_id, "b_owner": worker_id, "limit": max(0, limit)}
    if names is None:
        taken = tx.rows(st.CLAIM_STAGES, given)
    else:
        taken = tx.rows(st.CLAIM_NAMED_STAGES, {**given, "names": sorted(names)})
    return _load(tx, [row.id for row in taken], worker_id)


def _load(tx: Tx, ids: list[int], worker_id: int) -> list[StageClaim]:
    if not ids:
        return []
    found = tx.rows(st.CLAIMED_STAGES, {"ids": ids})
    tokens = response_ids(tx, [row.id for row in found])
    forked = rollouts.parted(tx, found, tokens)
    made = [
        StageClaim(
            run_id=tx.run_id, stage_id=row.stage_id, name=row.name, sample_id=row.id, group_id=row.group_id,
            group_number=row.group_number, index=row._mapping["index"], owner=worker_id, attempt=row.stage_attempt,
            failures=row.stage_failures, status=row.status, prompt=row.prompt, label=row.label,
            metadata=row.prompt_metadata or {}, incarnation=row.incarnation,
            prompt_ids=forked[row.id][0] if row.id in forked else codec.ids_from(row.prompt_ids),
            response_ids=forked[row.id][1] if row.id in forked else tokens.get(row.id, NO_IDS),
            images=() if row.parent_id is not None and row.parent_upto is None else tuple(row.images or ()),
        )
        for row in found
    ]  # fmt: skip
    if len(made) < len(ids):
        made += _load_of_groups(tx, ids, worker_id)
    return sorted(made, key=lambda claim: claim.stage_id)


def _load_of_groups(tx: Tx, ids: list[int], worker_id: int) -> list[StageClaim]:
    found = tx.rows(st.CLAIMED_GROUP_STAGES, {"ids": ids})
    rows = tx.rows(st.MEMBERS, {"groups": [row.group_id for row in found]}) if found else []
    tokens = response_ids(tx, [row.id for row in rows])
    forked = rollouts.parted(tx, rows, tokens)
    prompts = {row.group_id: codec.ids_from(row.prompt_ids) for row in found}
    members: dict[int, list[Member]] = defaultdict(list)
    for row in rows:
        before, own = forked.get(row.id, (prompts[row.group_id], tokens.get(row.id, NO_IDS)))
        members[row.group_id].append(
            Member(row.id, row.place, row.root, row.incarnation, row.status, row.reward, own, before)
        )
    return [
        StageClaim(
            run_id=tx.run_id, stage_id=row.stage_id, name=row.name, sample_id=0, group_id=row.group_id,
            group_number=row.group_number, index=0, owner=worker_id, attempt=row.attempt, failures=row.failures,
            status="", prompt=row.prompt, label=row.label, metadata=row.prompt_metadata or {},
            prompt_ids=prompts[row.group_id], response_ids=NO_IDS, incarnation=row.incarnation,
            members=tuple(members[row.group_id]),
        )
        for row in found
    ]  # fmt: skip


def _fence(claim: StageClaim) -> dict[str, Any]:
    return {"stage_id": claim.stage_id, "b_owner": claim.owner, "fence": claim.attempt}


def _ended_before(tx: Tx, claim: StageClaim, end: st.End, **told: Any) -> Any:
    """The row, where this very write was made before, whose acknowledgement was lost. `told`: what it has stored, by
    the names of columns. Raises LeaseLost: for another write of the same owner too (a score that comes after its
    timeout was recorded)."""
    row = tx.execute(sa.select(stage).where(stage.c.id == claim.stage_id)).one()
    done = row.let_go == st.let_go(claim.attempt, end)
    if done and all(getattr(row, name) == value for name, value in told.items()):
        return row
    raise _lost(tx, claim)


def _lost(tx: Tx, claim: StageClaim) -> LeaseLost:
    row = tx.execute(sa.select(stage).where(stage.c.id == claim.stage_id)).one()
    return LeaseLost("stage", claim.stage_id, claim.attempt, row.owner, row.attempt)


def score(
    tx: Tx, claim: StageClaim, value: float, details: dict[str, Any] | None = None, elapsed_s: float | None = None
) -> None:
    """Store a stage's result. The sample's reward is the weighted sum over its stages (settings.reward_weights).
    Raises LeaseLost, InvalidSetting."""
    if (number := codec.reward(value)) is None:
        raise InvalidSetting("reward", value, f"{codec.REWARDS}; record a verifier's error with fail_stage")
    _require(claim, of_group=False)
    if settle(tx, claim, OK, number, details, elapsed_s):
        _reward(tx, [claim.sample_id])
        groups.count(tx, claim.group_id, n_unscored=-1)


def unparsed(
    tx: Tx, claim: StageClaim, said: str, details: dict[str, Any] | None = None, elapsed_s: float | None = None
) -> None:
    """A judge has answered, and nothing could be read from it (`said`). The stage is settled without a value and is not
    tried again. The sample then has no reward, unless the stage weighs 0: it is left out of its group's mean and of its
    advantages, and is never counted as 0. Of a group: for all its samples. Raises LeaseLost."""
    if expect(claim, StageClaim).members:
        score_group(tx, claim, [None] * len(claim.members), {**(details or {}), "said": said}, elapsed_s)
    elif settle(tx, claim, UNPARSED, None, details, elapsed_s, said):
        _reward(tx, [claim.sample_id])
        groups.count(tx, claim.group_id, n_unscored=-1)


def complete_stage(
    tx: Tx,
    claim: StageClaim,
    details: dict[str, Any] | None = None,
    elapsed_s: float | None = None,
    array: Prepared | None = None,
) -> None:
    """Settle a stage that gives no number. `array`: what it gives instead, one row for each response token, such as a
    teacher's log-probs. Raises LeaseLost, InvalidSegment."""
    if array is not None:
        _require(claim, of_group=False)
        require_rows(array, 0, int(claim.response_ids.size), rows=int(claim.response_ids.size))
    new = settle(tx, claim, OK, None, details, elapsed_s)
    if array is not None:
        last = tx.execute(sa.select(sample.c.n_segments).where(sample.c.id == claim.sample_id)).scalar_one() - 1
    if not new:
        if array is not None and not holds_array(tx, claim.sample_id, claim.incarnation, int(last), array):
            raise _lost(tx, claim)
        return
    if array is not None:
        store_array(tx, claim.sample_id, claim.incarnation, int(last), array)
    groups.count(tx, claim.group_id, n_unscored=-1)


def score_group(
    tx: Tx,
    claim: StageClaim,
    values: Sequence[float | None],
    details: dict[str, Any] | None = None,
    elapsed_s: float | None = None,
) -> None:
    """Store a group stage's results: a number for each of `claim.members`, in their order, or None where a judge's
    answer could not be read. Raises LeaseLost, InvalidSetting."""
    _require(claim, of_group=True)
    numbers = [None if v is None else codec.reward(v) for v in values]
    bad = [v for v, number in zip(values, numbers, strict=True) if v is not None and number is None]
    if bad or len(numbers) != len(claim.members):
        allowed = f"{len(claim.members)} values, each {codec.REWARDS} or None"
        raise InvalidSetting("rewards", bad or len(numbers), allowed)
    if not settle(tx, claim, OK, None, details, elapsed_s):
        if not _stored_values(tx, claim, numbers):
            raise _lost(tx, claim)
        return
    ids = [member.sample_id for member in claim.members]
    tx.hold_samples(ids)
    # those of an earlier life of the group, for samples that were not started afresh
    now = sa.select(sample.c.incarnation).where(sample.c.id == stage.c.sample_id).scalar_subquery()
    mine = stage.c.sample_id.in_(ids) & (stage.c.incarnation == now)
    tx.execute(sa.delete(stage).where(mine, stage.c.name == claim.name))
    tx.execute(
        sa.insert(stage).values(created_at=db_now(), settled_at=db_now()),
        [
            {
                "run_id": tx.run_id, "group_id": claim.group_id, "sample_id": member.sample_id,
                "incarnation": member.incarnation, "name": claim.name, "status": StageStatus.DONE.value,
                "outcome": UNPARSED if number is None else OK, "value": number,
            }
            for member, number in zip(claim.members, numbers, strict=True)
        ],
    )  # fmt: skip
    _reward(tx, ids)
    groups.count(tx, claim.group_id, n_unscored=-1)


def _stored_values(tx: Tx, claim: StageClaim, numbers: Sequence[float | None]) -> bool:
    """Whether these are the values that a group's stage has stored: they are not in its own row."""
    given = {m.sample_id: (m.incarnation, n) for m, n in zip(claim.members, numbers, strict=True)}
    rows = tx.rows(sa.select(stage).where(stage.c.sample_id.in_(given), stage.c.name == claim.name))
    stored = {r.sample_id: (r.incarnation, r.value) for r in rows if r.incarnation == given[r.sample_id][0]}
    return stored == given


def _require(claim: StageClaim, of_group: bool) -> None:
    expect(claim, StageClaim)
    if bool(claim.members) != of_group:
        verb = "score_group" if claim.members else "score"
        raise InvalidSetting("claim", claim.name, f"{verb} for this stage: it is work on a {_what(claim)}")


def _what(claim: StageClaim) -> str:
    return "group" if claim.members else "sample"


def settle(
    tx: Tx, claim: StageClaim, outcome: str, value: float | None, details: Any, elapsed_s: float | None,
    said: str | None = None,
) -> bool:  # fmt: skip
    """Settle a stage; False where this very write was made before. Raises LeaseLost."""
    tx.as_owner_of(claim, StageClaim)
    jsonable("details", details)
    elapsed_s = optional(duration, "elapsed_s", elapsed_s)
    tx.lock_groups([claim.group_id])
    error = None if said is None else codec.clean_text(said)
    changed = tx.execute(
        sa.update(stage)
        .where(st.STAGE_FENCE)
        .values(
            status=StageStatus.DONE.value, outcome=outcome, value=value, details=details, elapsed_s=elapsed_s,
            error=error, owner=None, let_go=st.let_go(stage.c.attempt, int(st.End.SETTLED)), settled_at=db_now(),
        ),
        _fence(claim),
    ).rowcount  # fmt: skip
    if changed != 1:
        there = json.loads(json.dumps(details))  # as it comes back from the database: keys are text, tuples are lists
        _ended_before(tx, claim, st.End.SETTLED, outcome=outcome, value=value, details=there, error=error)
    return bool(changed == 1)


def _reward(tx: Tx, sample_ids: Sequence[int]) -> None:
    """The rewards of samples anew: the weighted sum of the values of their stages; NULL where one that counts could not
    be read."""
    weights = tx.settings.reward_weights
    weight: Any = sa.case(weights, value=stage.c.name, else_=1.0) if weights else sa.literal(1.0)
    missing = sa.func.sum(sa.case(((stage.c.outcome == UNPARSED) & (weight != 0), 1), else_=0))
    total = (
        sa.select(sa.case((missing > 0, None), else_=sa.func.sum(stage.c.value * weight)))
        .where(stage.c.sample_id == sample.c.id, stage.c.incarnation == sample.c.incarnation)
        .scalar_subquery()
    )
    tx.execute(sa.update(sample).where(sample.c.id.in_(sample_ids)).values(reward=total))


def fail_stage(
    tx: Tx,
    claim: StageClaim,
    error: str,
    outcome: str = VERIFIER_ERROR,
    elapsed_s: float | None = None,
    backoff_s: float = 1.0,
) -> str:
    """Record that a stage gave no result. It is tried again until max_attempts; then the sample is `failed` and the
    error kept: never a reward of 0. A group whose stage fails so is dropped. Returns the stage's new status."""
    if outcome not in (VERIFIER_ERROR, VERIFIER_TIMEOUT):
        raise InvalidSetting("outcome", outcome, f"{VERIFIER_ERROR} | {VERIFIER_TIMEOUT}")
    tx.as_owner_of(claim, StageClaim)
    backoff_s, elapsed_s = duration("backoff_s", backoff_s), optional(duration, "elapsed_s", elapsed_s)
    tx.lock_groups([claim.group_id])
    failures = tx.execute(sa.select(stage.c.failures).where(stage.c.id == claim.stage_id)).scalar_one()
    last = failures + 1 >= tx.settings.max_attempts
    said = codec.clean_text(error)
    changed = tx.execute(
        sa.update(stage)
        .where(st.STAGE_FENCE)
        .values(
            status=(StageStatus.FAILED if last else StageStatus.PENDING).value, outcome=outcome, error=said,
            failures=stage.c.failures + 1, elapsed_s=elapsed_s, not_before=db_now() + backoff_s * 2**failures,
            settled_at=db_now() if last else None, let_go=st.let_go(stage.c.attempt, int(st.End.FAILED)),
            **st.STAGE_LET_GO,
        ),
        _fence(claim),
    ).rowcount  # fmt: skip
    if changed != 1:
        return str(_ended_before(tx, claim, st.End.FAILED, outcome=outcome, error=said).status)
    tx.event("stage_failed", said, worker_id=claim.owner, sample_id=claim.sample_id or None, group_id=claim.group_id,
             details={"stage": claim.name, "outcome": outcome})  # fmt: skip
    if last and claim.members:
        groups.close(tx, [claim.group_id], GroupState.DROPPED, f"stage {claim.name} failed")
    elif last:
        _fail_sample(tx, claim, said)
    return (StageStatus.FAILED if last else StageStatus.PENDING).value


def _fail_sample(tx: Tx, claim: StageClaim, error: str) -> None:
    with tx.moving(samples=[claim.sample_id]):
        tx.execute(
            sa.update(sample)
            .where(sample.c.id == claim.sample_id)
            .values(status=SampleStatus.FAILED.value, error=error, failures=tx.settings.max_attempts)
        )
    others = tx.execute(
        sa.update(stage)
        .where(stage.c.sample_id == claim.sample_id, stage.c.status == StageStatus.PENDING.value)
        .values(status=StageStatus.FAILED.value, outcome="sample failed", settled_at=db_now(), **st.STAGE_LET_GO)
    ).rowcount
    groups.gave_up(tx, claim.group_id, n_unscored=-1 - others)


def release_stage(tx: Tx, claim: StageClaim) -> None:
    """Give a stage back undone. No failure is counted."""
    tx.as_owner_of(claim, StageClaim)
    ended = st.let_go(stage.c.attempt, int(st.End.RELEASED))
    changed = tx.execute(
        sa.update(stage).where(st.STAGE_FENCE).values(let_go=ended, **st.STAGE_LET_GO), _fence(claim)
    ).rowcount
    if changed != 1:
        _ended_before(tx, claim, st.End.RELEASED)
