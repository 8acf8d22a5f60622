"""The calls to engines behind a sample: what was asked, what came, and what of it was lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from samplestore import codec
from samplestore.arguments import whole
from samplestore.errors import InvalidSetting
from samplestore.statements import requests as rq
from samplestore.statements import samples as st
from samplestore.statements.totals import MAX_REASON, Amounts
from samplestore.types import Claim, RequestInfo, expect
from samplestore.verbs import samples
from samplestore.verbs.tx import SHARED, Call, Contested, Tx


def begin_request(
    tx: Tx, claim: Claim, rid: str, engine: str | None, temperature: float | None, resumes: bool,
    seed: int | None = None, greedy: bool = False,
) -> None:  # fmt: skip
    """Record that an engine is asked to go on with a claimed sample. `resumes`: from tokens of an earlier request;
    seed, greedy: how it draws. Raises LeaseLost; InvalidSetting for a rid that another call has."""
    begin_many(tx, [((claim, rid, engine, temperature, resumes, seed, greedy), {})])


def begin_many(tx: Tx, calls: Sequence[Call]) -> list[None]:
    """`begin_request` for several samples, each of them once. Raises Contested if the database refuses one."""
    begun = [_beginning(tx, *args, **kwargs) for args, kwargs in calls]
    if rq.BEGIN.execute(tx.connection, [row for _, row in begun]) != len(begun):
        if len(begun) > 1:
            raise Contested
        _require_repetition(tx, *begun[0])
        return [None]
    resumed = [claim for claim, row in begun if row["resumes"]]
    if resumed:
        tx.execute(
            st.COUNT_RESUME,
            [{"sample_id": c.sample_id, "b_owner": c.owner, "fence": c.attempt} for c in resumed],
        )
    for claim in resumed:
        tx.requests("", Amounts(resumes=int(claim.n_tokens > 0), resumed=claim.n_tokens))
        tx.event(
            "resume", None, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id,
            tokens=claim.n_tokens,
        )  # fmt: skip
    return [None] * len(begun)


def _require_repetition(tx: Tx, claim: Claim, row: dict[str, Any]) -> None:
    """This very call began it before, and its acknowledgement was lost. Raises LeaseLost, InvalidSetting: tokens under
    the rid of another call would be counted as lost, and a resume not at all."""
    there = tx.rows(rq.OF, {"of_rid": row["rid"]})
    if there and tuple(there[0]) == tuple(row[name] for name in rq.WHOSE):
        return
    samples.require_owner(tx, claim)  # says whose the sample is now
    if there:
        has = f"sample {there[0].sample_id} has this one, of attempt {there[0].attempt}"
        raise InvalidSetting("rid", row["rid"], f"a new name for every request: {has}")


def _beginning(
    tx: Tx,
    claim: Claim,
    rid: str,
    engine: str | None,
    temperature: float | None,
    resumes: bool,
    seed: int | None = None,
    greedy: bool = False,
) -> tuple[Claim, dict[str, Any]]:
    tx.as_owner_of(claim)
    return claim, {
        "rid": rid, "sample_id": claim.sample_id, "worker_id": claim.owner, "attempt": claim.attempt,
        "incarnation": claim.incarnation, "engine": engine, "temperature": temperature,
        "resumed_tokens": claim.n_tokens if resumes else 0, "resumes": resumes,
        "sampling_seed": seed, "greedy": int(greedy),
    }  # fmt: skip


def end_request(tx: Tx, info: RequestInfo) -> None:
    """Close a request's row: generated = stored + lost(reason). No fence: what an engine did is a fact, also when
    its tokens came too late."""
    end_many(tx, [((info,), {})])


def end_many(tx: Tx, calls: Sequence[Call]) -> list[None]:
    """`end_request` for several requests."""
    told = [_told(tx, info) for (info,), _ in calls]
    # Of one that is told twice here, what is known counts: as if one had come after the other.
    rows = list({row["rid"]: row for row in sorted(told, key=lambda row: row["generated_tokens"] is not None)}.values())
    closed = rq.END.rows(tx.connection, rows)
    for row in closed:
        tx.as_worker(row.worker_id)
        _total(tx, row)
    if len(closed) != len(rows):
        done = {row.rid for row in closed}
        tx.as_worker(SHARED)  # the worker is gone, and so are its totals
        for row in rq.END_LATE.rows(tx.connection, [row for row in rows if row["rid"] not in done]):
            tx.requests("", Amounts(unknown=-1))
            _total(tx, row)
    return [None] * len(told)


def _told(tx: Tx, info: RequestInfo) -> dict[str, Any]:
    expect(info, RequestInfo)
    for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "retractions"):
        if (value := getattr(info, name)) is not None:
            whole(name, value)
    return {
        "rid": info.rid, "run_id": tx.run_id, "engine": info.engine, "prompt_tokens": info.prompt_tokens,
        "cached_tokens": info.cached_tokens, "generated_tokens": info.generated_tokens,
        "lost_reason": _text(info.lost_reason, MAX_REASON), "retractions": info.retractions,
        "queue_s": _seconds(info.queue_s), "e2e_s": _seconds(info.e2e_s),
        "finish_reason": _text(info.finish_reason, 100), "spec": info.spec,
    }  # fmt: skip


def _text(value: str | None, longest: int) -> str | None:
    return None if value is None else codec.clean_text(value, longest)


def _seconds(value: float | None) -> float | None:
    """As it is told, or not known: engines also tell NaN."""
    return None if value is None or not math.isfinite(value) else float(value)


def _total(tx: Tx, row: Any) -> None:
    """Add a request that has ended to the totals."""
    if row.generated_tokens is None:
        tx.requests("", Amounts(unknown=1), row.finished_at)
        return
    made = Amounts(
        ended=1, generated=row.generated_tokens, stored=row.stored_tokens, prompt=row.prompt_tokens or 0,
        cached=row.cached_tokens or 0, lost=row.lost_tokens,
    )  # fmt: skip
    tx.requests((row.lost_reason or "")[:MAX_REASON] if row.lost_tokens else "", made, row.finished_at)
