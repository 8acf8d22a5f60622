"""What a worker does with samples: claim, append, finish, release, fail, and the requests behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import InvalidSegment, InvalidSetting, LeaseLost, NotInRun, SequenceConflict, UnknownVersion
from samplestore.models import Request, Sample, Segment, SegmentArray, Stage
from samplestore.statements import samples as st
from samplestore.states import CLAIMABLE, FINISHED, Fate, SampleStatus, SegmentKind
from samplestore.types import Claim, RequestInfo, StageClaim, choice, whole
from samplestore.verbs import groups, stages
from samplestore.verbs.tx import Tx

sample, segment, segment_array, stage, request = (t.__table__ for t in (Sample, Segment, SegmentArray, Stage, Request))

Version = int | tuple[int, int] | None  # one version; (min, max) where a label straddled a change; not known


def claim(tx: Tx, worker_id: int, limit: int) -> list[Claim]:
    """Take up to `limit` samples for `worker_id`: resumable ones first, siblings together. Raises WorkerDead."""
    tx.require_live(worker_id)
    # SQLite reads a negative limit as none at all
    ids = [row.id for row in tx.rows(st.CLAIM, {"b_run": tx.run_id, "b_owner": worker_id, "limit": max(0, limit)})]
    return load_claims(tx, ids, worker_id, taken_from=Fate.RESUMABLE)


def load_claims(tx: Tx, ids: list[int], worker_id: int, taken_from: Fate | None) -> list[Claim]:
    """Claims with their prompts and stored tokens, in claim order (RETURNING has none)."""
    if not ids:
        return []
    found = tx.rows(st.CLAIMED, {"ids": ids})
    tokens = stages.response_ids(tx, [row.id for row in found if row.n_tokens])
    if taken_from is not None:
        for row in found:
            shift(tx, row.id, taken_from, Fate.IN_FLIGHT) if row.n_tokens else None
    return [
        Claim(
            run_id=tx.run_id,
            sample_id=row.id,
            group_id=row.group_id,
            group_number=row.group_number,
            index=row._mapping["index"],
            owner=worker_id,
            attempt=row.attempt,
            incarnation=row.incarnation,
            seq=row.n_segments,
            n_tokens=row.n_tokens,
            status=row.status,
            failures=row.failures,
            prompt_ids=codec.ids_from(row.prompt_ids),
            response_ids=tokens.get(row.id, np.empty(0, dtype=np.int32)),
            prompt=row.prompt,
            label=row.label,
            metadata=row.prompt_metadata or {},
            finish_reason=row.finish_reason,
        )
        for row in found
    ]


def shift(tx: Tx, sample_id: int, old: Fate, new: Fate) -> None:
    """Move the tokens of a sample's current incarnation between two fates."""
    rows = tx.rows(
        sa.select(segment.c.version_min, sa.func.sum(segment.c.n_tokens))
        .select_from(segment.join(sample, (sample.c.id == segment.c.sample_id)))
        .where(
            segment.c.sample_id == sample_id,
            segment.c.incarnation == sample.c.incarnation,
            segment.c.kind == SegmentKind.GENERATED.value,
        )
        .group_by(segment.c.version_min)
    )
    for version, amount in rows:
        tx.add(old, version, -int(amount))
        tx.add(new, version, int(amount))


def append(
    tx: Tx,
    claim: Claim,
    seq: int,
    tokens: Any,
    logprobs: Any,
    version: Version,
    finish_reason: str | None = None,
    kind: str = "generated",
    loss: int | None = None,
    rid: str | None = None,
    engine: str | None = None,
    abort_reason: str = "engine",
) -> int:
    """Store the next segment of a claimed sample; returns its number of tokens.

    tokens    whole numbers [n]; logprobs: numbers [n], finite (needed where generated tokens have loss=1)
    Raises InvalidSegment (refused, nothing stored), LeaseLost, SequenceConflict, UnknownVersion.
    """
    tx.as_owner_of(claim)
    kind = choice("kind", kind, SegmentKind).value
    seq = whole("seq", seq)
    loss = int(kind == SegmentKind.GENERATED) if loss is None else loss
    if loss not in (0, 1):
        raise InvalidSegment(f"loss is {loss!r}, not 0 or 1", field="loss")
    ids = codec.as_ids(tokens)
    if not ids.size:
        raise InvalidSegment("it has no tokens", field="tokens")
    probs = codec.as_logprobs(logprobs, ids.size, required=bool(loss) and kind == SegmentKind.GENERATED)
    payload = codec.encode(ids, probs)
    # no weights made the tokens of an environment
    low, high = (None, None) if kind == SegmentKind.ENVIRONMENT else _versions(version)
    finish_reason = None if finish_reason is None else codec.clean_text(finish_reason, 100)
    n, total = int(ids.size), 0.0 if probs is None else float(probs.sum(dtype=np.float64))
    trained = bool(loss) and kind == SegmentKind.GENERATED
    moved = tx.execute(
        st.APPEND,
        {
            "b_run": tx.run_id, "sample_id": claim.sample_id, "b_owner": claim.owner, "fence": claim.attempt,
            "life": claim.incarnation, "seq": seq, "n": n, "n_loss": n if loss else 0,
            "aborted": int(finish_reason == "abort"), "lp_sum": total if loss else 0.0, "low": low, "high": high,
            "loss_version": low if trained else None, "unknown": int(trained and low is None), "reason": finish_reason,
        },
    ).one_or_none()  # fmt: skip
    if moved is None:
        _refused(tx, claim, seq, (kind, loss, low, high, finish_reason), payload)
        return n
    tx.execute(
        st.INSERT_SEGMENT,
        {
            "sample_id": claim.sample_id, "incarnation": claim.incarnation, "seq": seq, "start": moved.n_tokens - n,
            "n_tokens": n, "kind": kind, "loss": loss, "version_min": low, "version_max": high, "owner": claim.owner,
            "attempt": claim.attempt, "request_rid": rid, "engine": engine, "finish_reason": finish_reason,
            "logprob_sum": total, "payload": payload,
        },
    )  # fmt: skip
    if rid is not None:
        tx.execute(st.REQUEST_STORED, {"of_rid": rid, "of_sample": claim.sample_id, "n": n})
    if kind == SegmentKind.GENERATED:
        tx.add(Fate.IN_FLIGHT, low, n)
    if finish_reason == "abort":
        _tell_abort(tx, claim, abort_reason, int(moved.n_tokens))
    return n


def _tell_abort(tx: Tx, claim: Claim, reason: str, tokens: int) -> None:
    tx.event("abort", reason, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id, tokens=tokens)


def note_abort(tx: Tx, claim: Claim, reason: str) -> None:
    """An abort that came when everything was stored already: no segment carries it. Raises LeaseLost."""
    tx.as_owner_of(claim)
    row = _require_owner(tx, claim)
    tx.execute(
        sa.update(sample)
        .where(sample.c.id == claim.sample_id, sample.c.attempt == claim.attempt)
        .values(n_aborts=sample.c.n_aborts + 1, finish_reason="abort")
    )
    _tell_abort(tx, claim, reason, row.n_tokens)


def _versions(version: Version) -> tuple[int | None, int | None]:
    low, high = version if isinstance(version, tuple) else (version, version)
    for number in (low, high):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | np.integer)):
            raise InvalidSegment(f"weight version {number!r} is not a whole number", field="version")
    if low is None or high is None:
        return None, None
    if low > high:
        raise InvalidSegment(f"its weight versions {low}..{high} run backwards", field="version")
    return int(low), int(high)


def _refused(tx: Tx, claim: Claim, seq: int, told: tuple[Any, ...], payload: bytes) -> None:
    """An append changed no row: a repetition of an acknowledged one is a success, everything else says why not."""
    key = (segment.c.sample_id == claim.sample_id) & (segment.c.incarnation == claim.incarnation)
    there = tx.execute(
        sa.select(
            segment.c.owner, segment.c.attempt, segment.c.payload, segment.c.kind, segment.c.loss,
            segment.c.version_min, segment.c.version_max, segment.c.finish_reason,
        ).where(key, segment.c.seq == seq)
    ).one_or_none()  # fmt: skip
    if there and (there.owner, there.attempt) == (claim.owner, claim.attempt):
        same = (there.kind, there.loss, there.version_min, there.version_max, there.finish_reason) == told
        if same and bytes(there.payload) == payload:
            return
        raise SequenceConflict(claim.sample_id, seq, seq + 1, "another segment with this seq is stored")
    row = _require_owner(tx, claim)
    for number in told[2:4]:
        if number is not None and not tx.execute(st.VERSION_EXISTS, {"b_run": tx.run_id, "number": number}).scalar():
            name = tx.execute(sa.select(st.run.c.name).where(st.run.c.id == tx.run_id)).scalar_one()
            raise UnknownVersion(name, number)
    raise SequenceConflict(claim.sample_id, seq, row.n_segments, "it would leave a gap or overwrite")


def _lock_group(tx: Tx, claim: Claim) -> sa.Row[Any]:
    """The group of a claimed sample, locked. Raises NotInRun for a claim that was put together by hand."""
    mine = sa.select(sample.c.group_id).where(sample.c.id == claim.sample_id, sample.c.run_id == tx.run_id)
    if tx.execute(mine).scalar() != claim.group_id:
        raise NotInRun("sample", [claim.sample_id])
    return tx.lock_groups([claim.group_id])[claim.group_id]


def _require_owner(tx: Tx, claim: Claim) -> sa.Row[Any]:
    row = tx.execute(sa.select(sample).where(sample.c.id == claim.sample_id).with_for_update(key_share=True)).one()
    if (row.owner, row.attempt, row.incarnation) != (claim.owner, claim.attempt, claim.incarnation):
        raise LeaseLost("sample", claim.sample_id, claim.attempt, row.owner, row.attempt)
    return row


def _ended_before(tx: Tx, claim: Claim, *statuses: SampleStatus) -> None:
    """Whether this very owner already let go at this attempt: the acknowledgement was lost, the write was not."""
    row = tx.execute(sa.select(sample).where(sample.c.id == claim.sample_id)).one()
    done = row.let_go == claim.attempt and row.incarnation == claim.incarnation
    if done and row.status in statuses:
        return
    raise LeaseLost("sample", claim.sample_id, claim.attempt, row.owner, row.attempt)


def finish(
    tx: Tx, claim: Claim, status: str | None = None, finish_reason: str | None = None, keep_stages: bool = False
) -> list[StageClaim]:
    """End a claimed sample: `completed`, or `truncated` when its last finish reason is "length".

    keep_stages: the caller scores the sample itself; its stages are returned as claims of the same worker.
    Raises LeaseLost, InvalidSegment if nothing was generated. Returns list[StageClaim].
    """
    tx.as_owner_of(claim)
    row = _lock_group(tx, claim)
    # Locked before its tokens are counted: an append or a claim that came between would be counted twice.
    stored = tx.execute(
        sa.select(sample.c.finish_reason, sample.c.n_tokens)
        .where(sample.c.id == claim.sample_id)
        .with_for_update(key_share=True)
    ).one()
    reason = codec.clean_text(finish_reason, 100) if finish_reason else stored.finish_reason
    new = (
        choice("status", status, SampleStatus)
        if status
        else SampleStatus.TRUNCATED
        if reason == "length"
        else SampleStatus.COMPLETED
    )
    if new not in FINISHED:
        raise InvalidSetting("status", status, " | ".join(FINISHED))
    if stored.n_tokens == 0:
        _require_owner(tx, claim)  # after a requeue there are no tokens either, but that is not the caller's fault
        raise InvalidSegment("a sample without tokens cannot finish; release or fail it", field="tokens")
    with tx.moving(samples=[claim.sample_id]):
        changed = tx.execute(
            st.FINISH,
            {
                "sample_id": claim.sample_id,
                "b_owner": claim.owner,
                "fence": claim.attempt,
                "new_status": new.value,
                "reason": reason,
            },
        ).rowcount
    if changed != 1:
        # the same end again is a repetition; FAILED: its reward could not be had meanwhile
        _ended_before(tx, claim, new, SampleStatus.FAILED)
        return stages.owned_by(tx, claim.sample_id, claim.owner) if keep_stages else []
    made = stages.create(tx, claim, keep_stages)
    groups.count(tx, row.id, n_open=-1, n_unscored=len(tx.settings.stages))
    return made


def release(tx: Tx, claim: Claim, reason: str, tokens_lost: int = 0) -> None:
    """Give a claimed sample back: `aborted` if it has tokens, else as before the claim. No failure is counted."""
    tx.as_owner_of(claim)
    changed = tx.execute(
        st.RELEASE, {"sample_id": claim.sample_id, "b_owner": claim.owner, "fence": claim.attempt}
    ).rowcount
    if changed != 1:
        _ended_before(tx, claim, *CLAIMABLE)
        return
    shift(tx, claim.sample_id, Fate.IN_FLIGHT, Fate.RESUMABLE)
    tx.event(
        "release", reason, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id,
        tokens=claim.n_tokens, details={"tokens_lost": tokens_lost} if tokens_lost else None,
    )  # fmt: skip


def fail(tx: Tx, claim: Claim, error: str, backoff_s: float = 1.0) -> str:
    """Record a failed attempt. The sample is tried again after `backoff_s`, from its stored tokens, until
    max_attempts failures; then it is `failed`. Returns the new status."""
    tx.as_owner_of(claim)
    if not 0 <= backoff_s < 1e9:
        raise InvalidSetting("backoff_s", backoff_s, "seconds from 0")
    _lock_group(tx, claim)
    row = tx.execute(
        sa.select(sample.c.failures, sample.c.n_tokens)
        .where(sample.c.id == claim.sample_id)
        .with_for_update(key_share=True)  # as in finish
    ).one()
    last = row.failures + 1 >= tx.settings.max_attempts
    at_rest = SampleStatus.ABORTED if row.n_tokens else SampleStatus.PENDING
    status = SampleStatus.FAILED if last else at_rest
    said = codec.clean_text(error)
    with tx.moving(samples=[claim.sample_id]):
        changed = tx.execute(
            st.FAIL,
            {
                "sample_id": claim.sample_id, "b_owner": claim.owner, "fence": claim.attempt,
                "new_status": status.value, "said": said, "backoff": backoff_s * 2**row.failures,
            },
        ).rowcount  # fmt: skip
    if changed != 1:
        _ended_before(tx, claim, *CLAIMABLE, SampleStatus.FAILED)
        return str(tx.execute(sa.select(sample.c.status).where(sample.c.id == claim.sample_id)).scalar())
    tx.event("fail", said, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id)
    if last:
        groups.gave_up(tx, claim.group_id, n_open=-1)
    return status.value


def begin_request(tx: Tx, claim: Claim, rid: str, engine: str | None, temperature: float | None, resumes: bool) -> None:
    """Record that an engine is asked to go on with a claimed sample. `resumes`: from tokens of an earlier request."""
    tx.as_owner_of(claim)
    if tx.execute(sa.select(request.c.id).where(request.c.rid == rid)).scalar() is not None:
        return
    _require_owner(tx, claim)
    tx.execute(
        sa.insert(request).values(
            run_id=tx.run_id, rid=rid, sample_id=claim.sample_id, incarnation=claim.incarnation, attempt=claim.attempt,
            worker_id=claim.owner, engine=engine, temperature=temperature, started_at=db_now(),
            resumed_tokens=claim.n_tokens if resumes else 0,
        )
    )  # fmt: skip
    if resumes:
        tx.execute(
            sa.update(sample)
            .where(sample.c.id == claim.sample_id, sample.c.attempt == claim.attempt)
            .values(n_resumes=sample.c.n_resumes + 1)
        )
        tx.event(
            "resume",
            None,
            worker_id=claim.owner,
            sample_id=claim.sample_id,
            group_id=claim.group_id,
            tokens=claim.n_tokens,
        )


def end_request(tx: Tx, info: RequestInfo) -> None:
    """Close a request's row: generated = stored + lost(reason). No fence: what an engine did is a fact, also when
    its tokens came too late."""
    for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "retractions"):
        if (value := getattr(info, name)) is not None:
            whole(name, value)
    ended = None if info.finish_reason is None else codec.clean_text(info.finish_reason, 100)
    generated = info.generated_tokens
    lost = None if generated is None else generated - request.c.stored_tokens
    tx.execute(
        sa.update(request)
        .where(request.c.rid == info.rid, request.c.run_id == tx.run_id)
        .values(
            engine=sa.func.coalesce(info.engine, request.c.engine), prompt_tokens=info.prompt_tokens,
            cached_tokens=info.cached_tokens, generated_tokens=generated, lost_tokens=lost,
            lost_reason=info.lost_reason, retractions=info.retractions, queue_s=info.queue_s, e2e_s=info.e2e_s,
            finish_reason=ended, spec=info.spec, finished_at=db_now(),
        )
    )  # fmt: skip


def attach(tx: Tx, claim: Claim, name: str, array: Any, n_experts: int | None = None) -> None:
    """Store a named array beside the last segment of a claimed sample. "routed_experts" [rows, layers, top_k] is
    checked (rows = prompt + response tokens - 1) and narrowed by `n_experts`. Raises InvalidSegment, LeaseLost."""
    tx.as_owner_of(claim)
    row = _require_owner(tx, claim)
    if row.n_segments == 0:
        raise InvalidSegment("an array needs a segment to stand beside", field=name)
    if name == "routed_experts":
        if n_experts is None:
            raise InvalidSegment("routed_experts needs n_experts", field=name)
        array = codec.pack_experts(
            array, n_experts, prompt_tokens=int(claim.prompt_ids.size), response_tokens=row.n_tokens
        )
    dtype, shape, data = codec.encode_array(np.asarray(array))
    key = {"sample_id": claim.sample_id, "incarnation": claim.incarnation, "seq": row.n_segments - 1, "name": name}
    tx.execute(sa.delete(segment_array).filter_by(**key))
    tx.execute(
        sa.insert(segment_array).values(**key, dtype=dtype, shape=shape, codec="raw", data=data, created_at=db_now())
    )
