"""Segments: what an append takes, stores, counts and refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec, faults
from samplestore.arguments import MAX_WHOLE, choice, plain_text, whole
from samplestore.errors import InvalidSegment, SequenceConflict, UnknownVersion
from samplestore.models import Sample
from samplestore.models import Segment as SegmentRow
from samplestore.statements import appends as ap
from samplestore.statements import requests as rq
from samplestore.statements import samples as st
from samplestore.states import Fate, SegmentKind
from samplestore.types import Claim, expect
from samplestore.verbs.samples import require_owner
from samplestore.verbs.tx import Call, Contested, Tx

sample, segment = (t.__table__ for t in (Sample, SegmentRow))

GENERATED, ENVIRONMENT = SegmentKind.GENERATED.value, SegmentKind.ENVIRONMENT.value
Version = int | tuple[int, int] | None  # one version; (min, max) where a label straddled a change; not known


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
    given = (claim, seq, tokens, logprobs, version, finish_reason, kind, loss, rid, engine, abort_reason)
    return append_many(tx, [(given, {})])[0]


def append_many(tx: Tx, calls: Sequence[Call]) -> list[int]:
    """`append` for several samples, each of them once. Raises Contested if the database refuses one of several."""
    segments = [args[0] for args, _ in prepared(calls)]
    for made in segments:
        tx.as_owner_of(made.claim)
    if _stored(tx, [made.row for made in segments]) != len(segments):
        if len(segments) > 1:
            raise Contested
        _refused(tx, segments[0])
        return [segments[0].n]
    requests: Counter[tuple[str, int]] = Counter()
    aborted = []
    for made in segments:
        row = made.row
        tx.as_worker(row["owner"])
        if row["rid"] is not None:
            requests[(row["rid"], row["sample_id"])] += made.n
        if row["kind"] == GENERATED:
            tx.add(Fate.IN_FLIGHT, row["low"], made.n)
        if row["aborted"]:
            aborted.append(made)
    if requests:
        more = [{"rid": r, "sample_id": s, "n": n} for (r, s), n in sorted(requests.items())]
        if rq.STORED.execute(tx.connection, more) != len(more):
            _refuse_ended(tx, [rid for rid, _ in sorted(requests)], alone=len(segments) == 1)
    _tell_aborts(tx, aborted)
    faults.reached("appended")
    return [made.n for made in segments]


def prepared(calls: Sequence[Call]) -> list[Call]:
    """What an append does without a database, for several: their segments are checked and made into bytes. Calls that
    were prepared stay as they are. Raises InvalidSegment."""
    if all(isinstance(args[0], Segment) for args, _ in calls):
        return list(calls)
    segments = [_segment(*args, **kwargs) for args, kwargs in calls]
    payloads, sums = codec.encode_many([s.arrays for s in segments], [s.logprobs for s in segments])
    for made, payload, total in zip(segments, payloads, sums, strict=True):
        made.row.update(payload=payload, lp_sum=total, lp_loss=total if made.row["loss"] else 0.0)
    return [((made,), {}) for made in segments]


def _refuse_ended(tx: Tx, rids: list[str], alone: bool) -> None:
    """Of requests that took no tokens: nobody needs to have begun them, but one that has ended is counted already.
    Raises InvalidSegment; Contested, unless the append is alone."""
    for rid in rids:
        if tx.execute(rq.ENDED, {"of_rid": rid}).scalar() is not None:
            if not alone:
                raise Contested
            raise InvalidSegment(f"request {rid!r} has ended, and its tokens are counted", field="rid")


@dataclass(slots=True)
class Segment:
    """A segment whose form was checked, with the values that statements/appends.py names."""

    claim: Claim
    n: int
    arrays: tuple[Any, Any]  # ids, log-probs
    logprobs: Any  # as they were given
    abort_reason: str
    row: dict[str, Any]


def _segment(
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
) -> Segment:
    expect(claim, Claim)
    kind = GENERATED if kind == GENERATED else choice("kind", kind, SegmentKind).value
    generated = kind == GENERATED
    seq = whole("seq", seq)
    loss = int(generated) if loss is None else loss
    if loss not in (0, 1):
        raise InvalidSegment(f"loss is {loss!r}, not 0 or 1", field="loss")
    loss = int(loss)  # True passes, and PostgreSQL takes no arrays of both kinds
    ids = codec.as_ids(tokens)
    n = int(ids.size)
    if not n:
        raise InvalidSegment("it has no tokens", field="tokens")
    trained = generated and loss == 1
    probs = codec.as_logprobs(logprobs, n, required=trained)
    # no weights made the tokens of an environment
    low, high = (None, None) if kind == ENVIRONMENT else _versions(version)
    reason = None if finish_reason is None else codec.clean_text(finish_reason, 100)
    for name, text in (("rid", rid), ("engine", engine)):
        if text is not None:
            plain_text(name, text)
    row = {
        "run_id": claim.run_id, "sample_id": claim.sample_id, "owner": claim.owner, "attempt": claim.attempt,
        "incarnation": claim.incarnation, "seq": seq, "n": n, "n_loss": n if loss else 0, "kind": kind,
        "loss": loss, "aborted": int(reason == "abort"), "low": low, "high": high,
        "loss_version": low if trained else None,
        "unknown": int(trained and low is None), "rid": rid, "engine": engine, "reason": reason,
    }  # fmt: skip
    return Segment(claim, n, (ids, probs), logprobs, abort_reason, row)


def _stored(tx: Tx, rows: list[dict[str, Any]]) -> int:
    """How many of these segments the database took."""
    if tx.connection.dialect.name == "sqlite":
        moved = ap.MOVE.execute(tx.connection, rows)
        return ap.STORE.execute(tx.connection, rows) if moved == len(rows) else moved
    return ap.MOVE_AND_STORE.execute(tx.connection, rows)


def _tell_aborts(tx: Tx, aborted: list[Segment]) -> None:
    for made in aborted:
        row = tx.execute(st.OWNED, {"sample_id": made.claim.sample_id}).one()
        _tell_abort(tx, made.claim, made.abort_reason, row.n_tokens)


def _tell_abort(tx: Tx, claim: Claim, reason: str, tokens: int) -> None:
    tx.event("abort", reason, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id, tokens=tokens)


def note_abort(tx: Tx, claim: Claim, reason: str, rid: str | None = None) -> None:
    """An abort that came when everything was stored already: no segment carries it. `rid`: the request that it ended;
    with the end of that in the same transaction it may be said twice. Raises LeaseLost."""
    tx.as_owner_of(claim)
    row = require_owner(tx, claim)
    if rid is not None and tx.execute(rq.ENDED, {"of_rid": rid}).scalar() is not None:
        return
    tx.execute(
        sa.update(sample)
        .where(sample.c.id == claim.sample_id, sample.c.attempt == claim.attempt)
        .values(n_aborts=sample.c.n_aborts + 1, finish_reason="abort")
    )
    _tell_abort(tx, claim, reason, row.n_tokens)


def _versions(version: Version) -> tuple[int | None, int | None]:
    if version is None or (type(version) is int and 0 <= version <= MAX_WHOLE):  # nearly always
        return version, version
    low, high = version if isinstance(version, tuple) else (version, version)
    for number in (low, high):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | np.integer)):
            raise InvalidSegment(f"weight version {number!r} is not a whole number", field="version")
        if number is not None and abs(number) > MAX_WHOLE:  # an integer that no column holds
            raise InvalidSegment(f"weight version {number} is beyond {MAX_WHOLE}", field="version")
    if low is None or high is None:
        return None, None
    if low > high:
        raise InvalidSegment(f"its weight versions {low}..{high} run backwards", field="version")
    return int(low), int(high)


def _refused(tx: Tx, made: Segment) -> None:
    """An append changed no row: a repetition of an acknowledged one is a success, everything else says why not."""
    claim, given = made.claim, made.row
    seq, low, high = given["seq"], given["low"], given["high"]
    key = (segment.c.sample_id == claim.sample_id) & (segment.c.incarnation == claim.incarnation)
    there = tx.execute(
        sa.select(
            segment.c.owner, segment.c.attempt, segment.c.payload, segment.c.kind, segment.c.loss,
            segment.c.version_min, segment.c.version_max, segment.c.finish_reason,
        ).where(key, segment.c.seq == seq)
    ).one_or_none()  # fmt: skip
    if there and (there.owner, there.attempt) == (claim.owner, claim.attempt):
        told = (given["kind"], given["loss"], low, high, given["reason"])
        same = (there.kind, there.loss, there.version_min, there.version_max, there.finish_reason) == told
        if same and bytes(there.payload) == given["payload"]:
            return
        raise SequenceConflict(claim.sample_id, seq, seq + 1, "another segment with this seq is stored")
    row = require_owner(tx, claim)
    for number in (low, high):
        if number is not None and not tx.execute(ap.VERSION_EXISTS, {"b_run": tx.run_id, "number": number}).scalar():
            name = tx.execute(sa.select(st.run.c.name).where(st.run.c.id == tx.run_id)).scalar_one()
            raise UnknownVersion(name, number)
    raise SequenceConflict(claim.sample_id, seq, row.n_segments, "it would leave a gap or overwrite")
