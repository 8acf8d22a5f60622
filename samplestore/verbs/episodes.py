"""The record of an episode: each call of its function is written down, so that the function can run again.

All writes are fenced like an append: who lost the sample gets LeaseLost and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.errors import InvalidSetting, LeaseLost, SequenceConflict
from samplestore.models import EpisodeStep, Sample
from samplestore.queries.episodes import DONE, FAILED, STARTED
from samplestore.statements import samples as st
from samplestore.statements.prepared import Prepared
from samplestore.types import Claim, StageClaim
from samplestore.verbs import samples, stages
from samplestore.verbs.tx import Tx

step, sample = EpisodeStep.__table__, Sample.__table__

REWARD = "reward"  # the stage that a reward given by the episode itself settles
# An episode that waits for a tool makes no tokens: its record is what shows that it gets on.
TOUCH = Prepared(sa.update(sample).where(st.FENCE).values(progress_at=db_now()))


def touch(tx: Tx, claim: Claim) -> None:
    """Say that a claimed sample gets on, though no token came. Raises LeaseLost."""
    tx.as_owner_of(claim)
    fence = {"sample_id": claim.sample_id, "b_owner": claim.owner, "fence": claim.attempt}
    if tx.execute(TOUCH, fence).rowcount != 1:
        row = tx.execute(sa.select(sample).where(sample.c.id == claim.sample_id)).one()
        raise LeaseLost("sample", claim.sample_id, claim.attempt, row.owner, row.attempt)


def _key(claim: Claim, number: int) -> sa.ColumnElement[bool]:
    return (step.c.sample_id == claim.sample_id) & (step.c.incarnation == claim.incarnation) & (step.c.number == number)


def _insert(tx: Tx, claim: Claim, number: int, **values: Any) -> None:
    tx.execute(
        sa.insert(step).values(
            sample_id=claim.sample_id, incarnation=claim.incarnation, number=number, attempt=claim.attempt,
            started_at=db_now(), **values,
        )
    )  # fmt: skip


def begin(tx: Tx, claim: Claim, number: int, kind: str, name: str, key: str, asked: Any, start: int) -> None:
    """Record that call `number` is started: before it does anything. One that another owner started is taken over with
    the same key. Raises LeaseLost."""
    touch(tx, claim)
    there = tx.execute(sa.select(step.c.state, step.c.attempt).where(_key(claim, number))).one_or_none()
    if there is None:
        _insert(
            tx, claim, number, kind=kind, name=name, state=STARTED, idempotency_key=key, asked=asked, start=start
        )  # fmt: skip
    elif there.state == STARTED and there.attempt != claim.attempt:
        tx.execute(sa.update(step).where(_key(claim, number)).values(attempt=claim.attempt, started_at=db_now()))


def settle(
    tx: Tx, claim: Claim, number: int, result: Any = None, error: str | None = None, stop: int | None = None
) -> list[StageClaim]:
    """Record how a started call ended: with a result (JSON), or with an error. stop: the response position that it has
    reached, that of the sample now if left out. Repeating it is harmless. Raises LeaseLost."""
    touch(tx, claim)
    reached = sa.select(sample.c.n_tokens).where(sample.c.id == claim.sample_id).scalar_subquery()
    changed = tx.execute(
        sa.update(step)
        .where(_key(claim, number), step.c.state == STARTED)
        .values(
            state=DONE if error is None else FAILED, result=result, error=error and codec.clean_text(error),
            stop=reached if stop is None else stop, settled_at=db_now(),
        )
    ).rowcount  # fmt: skip
    if changed != 1 and tx.execute(sa.select(step.c.state).where(_key(claim, number))).scalar() is None:
        raise SequenceConflict(claim.sample_id, number, number, "this call of its episode was never begun")
    return []  # as a finish without stages: a request whose end this is has nothing to score


def note(
    tx: Tx, claim: Claim, number: int, kind: str, name: str, key: str, asked: Any, result: Any, start: int, stop: int
) -> None:
    """Record a call that is done at once. Repeating it is harmless. Raises LeaseLost."""
    touch(tx, claim)
    if tx.execute(sa.select(step.c.state).where(_key(claim, number))).scalar() is None:
        _insert(
            tx, claim, number, kind=kind, name=name, state=DONE, idempotency_key=key, asked=asked, result=result,
            start=start, stop=stop, settled_at=db_now(),
        )  # fmt: skip


def finish(
    tx: Tx, claim: Claim, status: str, finish_reason: str, keep_stages: bool | Collection[str], reward: float | None
) -> list[StageClaim]:
    """End the sample of an episode. A reward that the episode gives settles the run's stage "reward" in the same
    transaction; a run without that stage gets it as the sample's reward. NaN: none can be told, as when a judge's
    answer can't be read; the sample has no reward then, and no advantage. None leaves the stage to who scores. Returns
    the stages that are kept and left to do. Raises as samples.finish, InvalidSetting for a reward beyond +-1e25."""
    if reward is None:
        return samples.finish(tx, claim, status, finish_reason, keep_stages)
    told = codec.reward(reward)  # None: it can't be told
    if told is None and not math.isnan(reward):
        raise InvalidSetting("reward", reward, f"{codec.REWARDS}, NaN where none can be told, or None")
    tx.as_owner_of(claim)
    if REWARD not in tx.settings.stages:
        tx.hold_groups([claim.group_id])  # before the sample: the lock order
        fence = {"sample_id": claim.sample_id, "b_owner": claim.owner, "fence": claim.attempt}
        tx.execute(sa.update(sample).where(st.FENCE).values(reward=told), fence)
        return samples.finish(tx, claim, status, finish_reason, keep_stages)
    keep = True if keep_stages is True else {REWARD, *(keep_stages or ())}
    left = samples.finish(tx, claim, status, finish_reason, keep)
    for one in (stage for stage in left if stage.name == REWARD):
        if told is None:
            stages.unparsed(tx, one, "the episode could tell no reward", {"by": "episode"})
        else:
            stages.score(tx, one, told, {"by": "episode"})
    return [one for one in left if one.name != REWARD]
