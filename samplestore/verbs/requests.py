"""The calls to engines behind a sample: what was asked, what came, and what of it was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samplestore import codec
from samplestore.statements import requests as rq
from samplestore.statements import samples as st
from samplestore.types import Claim, RequestInfo, whole
from samplestore.verbs import samples
from samplestore.verbs.tx import Call, Contested, Tx


def begin_request(
    tx: Tx, claim: Claim, rid: str, engine: str | None, temperature: float | None, resumes: bool,
    seed: int | None = None, greedy: bool = False,
) -> None:  # fmt: skip
    """Record that an engine is asked to go on with a claimed sample. `resumes`: from tokens of an earlier request;
    seed, greedy: how it draws."""
    begin_many(tx, [((claim, rid, engine, temperature, resumes, seed, greedy), {})])


def begin_many(tx: Tx, calls: Sequence[Call]) -> list[None]:
    """`begin_request` for several samples, each of them once. Raises Contested if the database refuses one."""
    begun = [_beginning(tx, *args, **kwargs) for args, kwargs in calls]
    if rq.BEGIN.execute(tx.connection, [row for _, row in begun]) != len(begun):
        if len(begun) > 1:
            raise Contested
        ((claim, row),) = begun
        if tx.execute(rq.OF, {"of_rid": row["rid"]}).scalar() is None:
            samples.require_owner(tx, claim)  # says whose it is now
        return [None]  # a repetition
    resumed = [claim for claim, row in begun if row["resumes"]]
    if resumed:
        tx.execute(
            st.COUNT_RESUME,
            [{"sample_id": c.sample_id, "b_owner": c.owner, "fence": c.attempt} for c in resumed],
        )
    for claim in resumed:
        tx.event(
            "resume", None, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id,
            tokens=claim.n_tokens,
        )  # fmt: skip
    return [None] * len(begun)


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
    rows = []
    for (info,), _ in calls:
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "retractions"):
            if (value := getattr(info, name)) is not None:
                whole(name, value)
        ended = None if info.finish_reason is None else codec.clean_text(info.finish_reason, 100)
        rows.append(
            {
                "of_rid": info.rid, "b_run": tx.run_id, "b_engine": info.engine, "b_prompt": info.prompt_tokens,
                "b_cached": info.cached_tokens, "b_generated": info.generated_tokens, "b_lost": info.lost_reason,
                "b_retractions": info.retractions, "b_queue_s": info.queue_s, "b_e2e_s": info.e2e_s,
                "b_reason": ended, "b_spec": info.spec,
            }
        )  # fmt: skip
    tx.execute(rq.END, rows)
    return [None] * len(rows)
