"""Work on finished samples: rewards now; filters, teachers and group rewards use the same rows."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting, LeaseLost
from samplestore.models import Sample, Stage
from samplestore.statements import samples as st
from samplestore.states import SampleStatus, StageStatus
from samplestore.types import Claim, Ids, StageClaim
from samplestore.verbs import groups
from samplestore.verbs.tx import Tx

sample, stage = Sample.__table__, Stage.__table__

OK, VERIFIER_ERROR, VERIFIER_TIMEOUT = "ok", "verifier_error", "verifier_timeout"


def response_ids(tx: Tx, ids: list[int]) -> dict[int, Ids]:
    """All stored response ids of these samples' current incarnations."""
    parts: dict[int, list[Ids]] = defaultdict(list)
    if ids:
        for row in tx.rows(st.CURRENT_SEGMENTS, {"ids": ids}):
            parts[row.sample_id].append(codec.decode(row.payload)[0])
    return {key: np.concatenate(value) for key, value in parts.items()}


def create(tx: Tx, claim: Claim, keep: bool) -> list[StageClaim]:
    """The stages of a sample that has just finished. `keep`: owned at once by the finishing worker."""
    names = tx.settings.stages
    if not names:
        return []
    tx.execute(
        sa.insert(stage).values(created_at=db_now(), claimed_at=db_now() if keep else None),
        [
            {
                "run_id": tx.run_id, "group_id": claim.group_id, "sample_id": claim.sample_id,
                "incarnation": claim.incarnation, "name": name,
                "owner": claim.owner if keep else None, "attempt": int(keep),
            }
            for name in names
        ],
    )  # fmt: skip
    return owned_by(tx, claim.sample_id, claim.owner) if keep else []


def owned_by(tx: Tx, sample_id: int, worker_id: int) -> list[StageClaim]:
    ids = tx.rows(sa.select(stage.c.id).where(stage.c.sample_id == sample_id, stage.c.owner == worker_id))
    return _load(tx, [row.id for row in ids], worker_id)


def claim_stages(tx: Tx, worker_id: int, limit: int) -> list[StageClaim]:
    """Take up to `limit` pending stages, oldest first. Raises WorkerDead."""
    tx.require_live(worker_id)
    ids = [
        row.id for row in tx.rows(st.CLAIM_STAGES, {"b_run": tx.run_id, "b_owner": worker_id, "limit": max(0, limit)})
    ]
    return _load(tx, ids, worker_id)


def _load(tx: Tx, ids: list[int], worker_id: int) -> list[StageClaim]:
    if not ids:
        return []
    found = tx.rows(st.CLAIMED_STAGES, {"ids": ids})
    tokens = response_ids(tx, [row.id for row in found])
    return [
        StageClaim(
            run_id=tx.run_id, stage_id=row.stage_id, name=row.name, sample_id=row.id, group_id=row.group_id,
            group_number=row.group_number, index=row._mapping["index"], owner=worker_id, attempt=row.stage_attempt,
            failures=row.stage_failures, status=row.status, prompt=row.prompt, label=row.label,
            metadata=row.prompt_metadata or {}, prompt_ids=codec.ids_from(row.prompt_ids),
            response_ids=tokens.get(row.id, np.empty(0, dtype=np.int32)),
        )
        for row in found
    ]  # fmt: skip


def _fence(claim: StageClaim) -> dict[str, Any]:
    return {"stage_id": claim.stage_id, "b_owner": claim.owner, "fence": claim.attempt}


def _ended_before(tx: Tx, claim: StageClaim, *same: sa.ColumnElement[bool]) -> None:
    """A repetition of a write whose acknowledgement was lost passes. Another write of the same owner (a score that
    comes after its timeout was recorded) does not, nor does anybody else's."""
    row = tx.execute(sa.select(stage).where(stage.c.id == claim.stage_id)).one()
    repeated = (
        row.let_go == claim.attempt
        and tx.execute(sa.select(stage.c.id).where(stage.c.id == claim.stage_id, *same)).scalar()
    )
    if not repeated:
        raise LeaseLost("stage", claim.stage_id, claim.attempt, row.owner, row.attempt)


def score(
    tx: Tx, claim: StageClaim, value: float, details: dict[str, Any] | None = None, elapsed_s: float | None = None
) -> None:
    """Store a stage's result. The sample's reward is the sum over its stages. Raises LeaseLost, InvalidSetting."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise InvalidSetting("reward", value, "a finite number; record a verifier's error with fail_stage")
    tx.as_owner_of(claim)
    tx.lock_groups([claim.group_id])
    changed = tx.execute(
        sa.update(stage)
        .where(st.STAGE_FENCE)
        .values(
            status=StageStatus.DONE.value, outcome=OK, value=float(value), details=details, elapsed_s=elapsed_s,
            error=None, owner=None, let_go=stage.c.attempt, settled_at=db_now(),
        ),
        _fence(claim),
    ).rowcount  # fmt: skip
    if changed != 1:
        return _ended_before(tx, claim, stage.c.status == StageStatus.DONE.value, stage.c.value == float(value))
    total = (
        sa.select(sa.func.sum(stage.c.value))
        .where(stage.c.sample_id == claim.sample_id, stage.c.incarnation == sample.c.incarnation)
        .scalar_subquery()
    )
    tx.execute(sa.update(sample).where(sample.c.id == claim.sample_id).values(reward=total))
    return groups.count(tx, claim.group_id, n_unscored=-1)


def fail_stage(
    tx: Tx,
    claim: StageClaim,
    error: str,
    outcome: str = VERIFIER_ERROR,
    elapsed_s: float | None = None,
    backoff_s: float = 1.0,
) -> str:
    """Record that a stage gave no result. It is tried again until max_attempts; then the sample is `failed` and the
    error kept: never a reward of 0. Returns the stage's new status."""
    if outcome not in (VERIFIER_ERROR, VERIFIER_TIMEOUT):
        raise InvalidSetting("outcome", outcome, f"{VERIFIER_ERROR} | {VERIFIER_TIMEOUT}")
    tx.as_owner_of(claim)
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
            settled_at=db_now() if last else None, let_go=stage.c.attempt, **st.STAGE_LET_GO,
        ),
        _fence(claim),
    ).rowcount  # fmt: skip
    if changed != 1:
        _ended_before(tx, claim, stage.c.outcome == outcome, stage.c.error == said)
        return str(tx.execute(sa.select(stage.c.status).where(stage.c.id == claim.stage_id)).scalar())
    tx.event("stage_failed", said, worker_id=claim.owner, sample_id=claim.sample_id, group_id=claim.group_id,
             details={"stage": claim.name, "outcome": outcome})  # fmt: skip
    if last:
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
    changed = tx.execute(
        sa.update(stage).where(st.STAGE_FENCE).values(let_go=stage.c.attempt, **st.STAGE_LET_GO), _fence(claim)
    ).rowcount
    if changed != 1:
        _ended_before(tx, claim)
