"""What a worker does with samples: claim, finish, release, fail. Their segments are in appends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import arrays, codec
from samplestore.arguments import choice, duration, whole
from samplestore.errors import InvalidSegment, InvalidSetting, LeaseLost, NotInRun
from samplestore.models import Sample
from samplestore.statements import samples as st
from samplestore.states import FINISHED, Fate, SampleStatus
from samplestore.types import Claim, StageClaim
from samplestore.verbs import flow, groups, restarts, rollouts, sampling, stages
from samplestore.verbs.arrays import store as store_array
from samplestore.verbs.tx import Call, Contested, Tx

sample = Sample.__table__
NO_IDS = np.empty(0, dtype=np.int32)
Kept = bool | Collection[str]  # stages that whoever finishes a sample keeps: all, none, or those of these names


def claim(
    tx: Tx, worker_id: int, limit: int, evaluations: bool = True, only: Collection[int] | None = None
) -> list[Claim]:
    """Take up to `limit` samples for `worker_id`: resumable ones first, siblings together. evaluations: samples of
    evaluations too. only: those of these groups. Raises WorkerDead."""
    tx.require_live(worker_id)
    limit, of_groups = flow.claimable(tx, limit, evaluations)  # never negative: SQLite reads that as no limit at all
    if only is not None:
        of_groups = sorted(only if of_groups is None else {*only} & {*of_groups})
    given = {"b_run": tx.run_id, "b_owner": worker_id, "limit": limit, "least": flow.least_priority(evaluations)}
    taken = tx.rows(st.CLAIM, given) if of_groups is None else tx.rows(st.CLAIM_OF_GROUPS, {**given, "ids": of_groups})
    if not taken:
        return []
    taken = taken if tx.settings.resume else restarts.from_the_prompt(tx, taken)
    prompts = {row.id: row for row in tx.rows(st.PROMPTS_OF, {"ids": {row.group_id for row in taken}})}
    asked = sampling.settings_of(tx, {row.evaluation_id for row in prompts.values()})
    begun = [row.id for row in taken if row.n_tokens]
    tokens = stages.response_ids(tx, begun)
    shift(tx, begun, Fate.RESUMABLE, Fate.IN_FLIGHT)
    return [
        Claim(
            run_id=tx.run_id,
            sample_id=row.id,
            group_id=row.group_id,
            group_number=prompts[row.group_id].group_number,
            index=row.place,
            owner=worker_id,
            attempt=row.attempt,
            incarnation=row.incarnation,
            seq=row.n_segments,
            n_tokens=row.n_tokens,
            status=row.status,
            failures=row.failures,
            prompt_ids=codec.ids_from(prompts[row.group_id].prompt_ids),
            response_ids=tokens.get(row.id, NO_IDS),
            prompt=codec.own(prompts[row.group_id].prompt),
            label=codec.own(prompts[row.group_id].label),
            metadata=codec.own(prompts[row.group_id].prompt_metadata or {}),
            images=tuple(prompts[row.group_id].images or ()),
            finish_reason=row.finish_reason,
            **asked.get(prompts[row.group_id].evaluation_id, {}),
        )
        # the order of the claim, which RETURNING does not keep
        for row in sorted(taken, key=lambda row: (row.priority, row.status, row.group_id, row.place))
    ]


def shift(tx: Tx, sample_ids: Collection[int], old: Fate, new: Fate) -> None:
    """Move the tokens of samples' current incarnations between two fates."""
    if not sample_ids:
        return
    for version, amount in tx.rows(st.TOKENS_OF, {"ids": sample_ids}):
        tx.add(old, version, -int(amount))
        tx.add(new, version, int(amount))


def _lock_group(tx: Tx, claim: Claim) -> None:
    """Lock the group of a claimed sample. Raises NotInRun for a claim that was put together by hand."""
    if tx.execute(st.GROUP_OF, {"sample_id": claim.sample_id, "b_run": tx.run_id}).scalar() != claim.group_id:
        raise NotInRun("sample", [claim.sample_id])
    tx.hold_groups([claim.group_id])


def require_owner(tx: Tx, claim: Claim) -> Any:
    """Where a claimed sample stands. Raises LeaseLost."""
    row = tx.execute(st.OWNED, {"sample_id": claim.sample_id}).one()
    if (row.owner, row.attempt, row.incarnation) != (claim.owner, claim.attempt, claim.incarnation):
        raise LeaseLost("sample", claim.sample_id, claim.attempt, row.owner, row.attempt)
    return row


def _ended_before(tx: Tx, claim: Claim, end: st.End, **told: str | None) -> Any:
    """The row, where this very owner made this very end at this attempt: the acknowledgement was lost, the write was
    not. `told`: what the end has stored, by the names of columns. Raises LeaseLost: for another end of the same owner
    too, which would be acknowledged without being done."""
    row = tx.execute(sa.select(sample).where(sample.c.id == claim.sample_id)).one()
    done = row.let_go == st.let_go(claim.attempt, end) and row.incarnation == claim.incarnation
    if done and all(getattr(row, name) == value for name, value in told.items()):
        return row
    raise LeaseLost("sample", claim.sample_id, claim.attempt, row.owner, row.attempt)


def finish(
    tx: Tx, claim: Claim, status: str | None = None, finish_reason: str | None = None, keep_stages: Kept = False
) -> list[StageClaim]:
    """End a claimed sample: `completed`, or `truncated` when its last finish reason is "length".

    keep_stages: the caller does the sample's stages (those that are named, or all) itself; they are returned as claims
                 of the same worker.
    Raises LeaseLost, InvalidSegment if nothing was generated. Returns list[StageClaim].
    """
    return finish_many(tx, [((claim, status, finish_reason, keep_stages), {})])[0]


def finish_many(tx: Tx, calls: Sequence[Call]) -> list[list[StageClaim]]:
    """`finish` for several samples, each of them once. Raises Contested if the database refuses one of several."""
    ends = [_ending(tx, *args, **kwargs) for args, kwargs in calls]
    tx.hold_groups(end.claim.group_id for end in ends)
    if st.FINISH.execute(tx.connection, [end.row for end in ends]) != len(ends):
        if len(ends) > 1:
            raise Contested
        (end,) = ends
        _not_finished(tx, end.claim, end.row["status"], end.row["reason"])
        return [stages.owned_by(tx, end.claim.sample_id, end.claim.owner) if end.keep_stages else []]
    owned: dict[int, list[int]] = defaultdict(list)
    closed: Counter[int] = Counter()
    for end in ends:
        owned[end.claim.owner].append(end.claim.sample_id)
        closed[end.claim.group_id] += 1
    for owner, ids in owned.items():
        tx.as_worker(owner)
        shift(tx, ids, Fate.IN_FLIGHT, Fate.AWAITING_STAGE)  # an owner's group is open
    made = [stages.create(tx, end.claim, end.keep_stages) for end in ends]
    groups.count_many(tx, {id: (-n, n * len(tx.settings.stages), 0) for id, n in closed.items()})
    return made


@dataclass(frozen=True, slots=True)
class _End:
    claim: Claim
    keep_stages: Kept
    row: dict[str, Any]


def _ending(
    tx: Tx, claim: Claim, status: str | None = None, finish_reason: str | None = None, keep_stages: Kept = False
) -> _End:
    tx.as_owner_of(claim)
    given = None if status is None else choice("status", status, SampleStatus).value
    if given is not None and given not in FINISHED:
        raise InvalidSetting("status", status, " | ".join(FINISHED))
    reason = codec.clean_text(finish_reason, 100) if finish_reason else None
    row = {
        "sample_id": claim.sample_id, "owner": claim.owner, "attempt": claim.attempt, "group_id": claim.group_id,
        "run_id": tx.run_id, "status": given, "reason": reason,
    }  # fmt: skip
    return _End(claim, keep_stages, row)


def _not_finished(tx: Tx, claim: Claim, given: str | None, reason: str | None) -> None:
    """A finish changed no row: the same end again is a repetition and passes, everything else says why not."""
    row = tx.execute(st.OWNED, {"sample_id": claim.sample_id}).one_or_none()
    if row is None or (row.run_id, row.group_id) != (tx.run_id, claim.group_id):
        raise NotInRun("sample", [claim.sample_id])  # a claim that was put together by hand
    if row.n_tokens == 0:
        require_owner(tx, claim)  # after a requeue there are no tokens either, but that is not the caller's fault
        raise InvalidSegment("a sample without tokens cannot finish; release or fail it", field="tokens")
    kept = reason or row.finish_reason  # a call that gives none has taken the one that is stored
    length = kept == "length" if given is None else given == SampleStatus.TRUNCATED
    # not by its status: its reward could not be had meanwhile, perhaps, and it is failed
    _ended_before(tx, claim, st.End.TRUNCATED if length else st.End.COMPLETED, finish_reason=kept)


def release(tx: Tx, claim: Claim, reason: str, tokens_lost: int = 0) -> None:
    """Give a claimed sample back: `aborted` if it has tokens, else as before the claim. No failure is counted."""
    tx.as_owner_of(claim)
    changed = tx.execute(
        st.RELEASE, {"sample_id": claim.sample_id, "b_owner": claim.owner, "fence": claim.attempt}
    ).rowcount
    if changed != 1:
        _ended_before(tx, claim, st.End.RELEASED)
        return
    shift(tx, [claim.sample_id], Fate.IN_FLIGHT, Fate.RESUMABLE)
    tx.event(
        "release", reason, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id,
        tokens=claim.n_tokens, details={"tokens_lost": tokens_lost} if tokens_lost else None,
    )  # fmt: skip


def fail(tx: Tx, claim: Claim, error: str, backoff_s: float = 1.0, prompt_refused: bool = False) -> str:
    """Record a failed attempt. The sample is tried again after `backoff_s`, from its stored tokens, until
    max_attempts failures; then it is `failed`. Returns the new status.

    prompt_refused   no engine can ever take its prompt: it is `failed` at once, its group is dropped, and the prompt
                     is not served again unless the group is requeued
    """
    backoff_s = duration("backoff_s", backoff_s)
    end = st.End.REFUSED if prompt_refused else st.End.FAILED
    said = codec.clean_text(error)
    status = _fail(tx, claim, said, backoff_s, end)
    # Whoever wrote another error since has made the two ends indistinguishable: it is refused then.
    return str(_ended_before(tx, claim, end, error=said).status) if status is None else status.value


def fail_overdue(tx: Tx, claim: Claim, error: str) -> bool:
    """Record a failed attempt for an owner that takes too long. It has not let go: whatever it writes next is refused,
    or it would not learn that its sample is gone. False where it has let go meanwhile."""
    return _fail(tx, claim, codec.clean_text(error), 1.0, None) is not None


def _fail(tx: Tx, claim: Claim, said: str, backoff_s: float, end: st.End | None) -> SampleStatus | None:
    """`end`: of its owner's. Returns the new status; None where the claim no longer holds the sample."""
    tx.as_owner_of(claim)
    _lock_group(tx, claim)
    prompt_refused = end == st.End.REFUSED
    row = tx.execute(
        sa.select(sample.c.failures, sample.c.n_tokens)
        .where(sample.c.id == claim.sample_id)
        .with_for_update(key_share=True)  # as in finish
    ).one()
    last = prompt_refused or row.failures + 1 >= tx.settings.max_attempts
    at_rest = SampleStatus.ABORTED if row.n_tokens else SampleStatus.PENDING
    status = SampleStatus.FAILED if last else at_rest
    with tx.moving(samples=[claim.sample_id]):
        changed = tx.execute(
            st.FAIL,
            {
                "sample_id": claim.sample_id, "b_owner": claim.owner, "fence": claim.attempt,
                "new_status": status.value, "said": said, "backoff": backoff_s * 2**row.failures,
                "end": None if end is None else st.let_go(claim.attempt, int(end)),
            },
        ).rowcount  # fmt: skip
    if changed != 1:
        return None
    tx.event("fail", said, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id)
    if last:
        forks = rollouts.fail_forks(tx, claim.sample_id)
        groups.count(tx, claim.group_id, n_open=-forks, n_failed=forks)
        groups.gave_up(tx, claim.group_id, n_open=-1, prompt_refused=said if prompt_refused else None)
    return status


def attach(
    tx: Tx, claim: Claim, name: str, array: Any, n_experts: int | None = None, first_row: int | None = None
) -> None:
    """Store a named array (see samplestore.arrays) beside the last segment of a claimed sample: an array, or one that
    `arrays.prepare` or `run.prepare_array` has made. Its last row is of the last token; of "routed_experts", which
    `n_experts` narrows, of the last but one. first_row: the token of prompt and response that its first row must be of,
    where the caller knows. Raises InvalidSegment, LeaseLost."""
    tx.as_owner_of(claim)
    row = require_owner(tx, claim)
    if row.n_segments == 0:
        raise InvalidSegment("an array needs a segment to stand beside", field=name)
    made = array if isinstance(array, arrays.Prepared) else arrays.prepare(name, array, n_experts)
    prompt_tokens = int(claim.prompt_ids.size)
    if first_row is None and name == arrays.EXPERTS:
        first_row = 0
    given = None if first_row is None else whole("first_row", first_row)
    wanted = None if given is None else arrays.last_row(name, prompt_tokens, row.n_tokens) - given
    arrays.require_rows(made, prompt_tokens, row.n_tokens, wanted)
    store_array(tx, claim.sample_id, claim.incarnation, row.n_segments - 1, made)
