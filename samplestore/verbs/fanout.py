"""Fan-out: one trajectory that ends as several training samples - sub-agents, branches, compacted context.

A fork is a sample of the same group. It begins with tokens of its parent by reference (parent, upto), or with a prompt
of its own (upto is NULL; the prompt is its first segment, of the environment). Nobody claims it: it belongs to whoever
owns its parent, whose episode generates both. Parent and forks are one rollout: they share one weight in the loss.

A parent that begins a new life forks anew: its n-th fork is then the n-th sample that it had before, begun afresh. What
is left over when it ends is emptied: a completed sample without tokens, which no batch delivers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.errors import InvalidSetting, LeaseLost, NotInRun
from samplestore.models import EpisodeStep, Sample, SampleGroup, Stage
from samplestore.queries.episodes import DONE
from samplestore.statements import samples as st
from samplestore.states import SampleStatus, StageStatus
from samplestore.types import Claim, Ids, StageClaim
from samplestore.verbs import appends, episodes, groups, rollouts, samples, stages
from samplestore.verbs.tx import Tx

sample, group, stage, step = (t.__table__ for t in (Sample, SampleGroup, Stage, EpisodeStep))

FORK = "fork"
End = tuple[Claim, str, str, float | None]  # a sample of a rollout, its status, finish reason and reward


def fork(
    tx: Tx, claim: Claim, number: int, key: str, asked: Any, place: int, upto: int | None, own_prompt: Ids | None
) -> Claim:
    """The sample that call `number` of an episode forks, as the `place`-th of its forks, owned like its parent.

    upto         response tokens of the parent that it begins with
    own_prompt   int32 [p], instead of that and of the prompt
    Repeating it is harmless. Raises LeaseLost, InvalidSetting.
    """
    if (upto is None) == (own_prompt is None):
        raise InvalidSetting("fork", (upto, own_prompt is not None), "upto, or a prompt of its own: one of them")
    tx.as_owner_of(claim)
    tx.hold_groups([claim.group_id])  # before its samples: the lock order
    episodes.touch(tx, claim)
    row: Any = tx.execute(sa.select(sample.c.n_tokens, sample.c.parent_id).where(sample.c.id == claim.sample_id)).one()
    if row.parent_id is not None:
        raise InvalidSetting("fork", claim.sample_id, "the episode's own sample: a fork is not forked again")
    if upto is not None and not 0 <= upto <= row.n_tokens:
        raise InvalidSetting("upto", upto, f"a response position from 0 to {row.n_tokens}")
    made = _recorded(tx, claim, number)
    if made is None:
        made = _place(tx, claim, place, upto)
        episodes.note(tx, claim, number, FORK, "", key, asked, {"child": made}, claim.n_tokens, claim.n_tokens)
    child = take(tx, claim, made)
    if own_prompt is not None and child.seq == 0:
        appends.append(tx, child, 0, own_prompt, None, None, None, "environment")
        child = _with_tokens(replace(child, seq=1, n_tokens=int(own_prompt.size)), own_prompt)
    return child


def _recorded(tx: Tx, claim: Claim, number: int) -> int | None:
    result = tx.execute(
        sa.select(step.c.result).where(
            step.c.sample_id == claim.sample_id, step.c.incarnation == claim.incarnation, step.c.number == number,
            step.c.state == DONE,
        )
    ).scalar()  # fmt: skip
    return None if result is None else int(result["child"])


def _place(tx: Tx, claim: Claim, place: int, upto: int | None) -> int:
    """The id of the parent's `place`-th fork: a new sample of its group, or one of an earlier life, begun afresh."""
    there = rollouts.forks(tx, claim.sample_id)
    if place < len(there):
        _afresh(tx, there[place], SampleStatus.PENDING, upto)
        return int(there[place].id)
    last = sa.select(sa.func.max(sample.c.index)).where(sample.c.group_id == claim.group_id)
    made = tx.execute(
        sa.insert(sample)
        .values(
            run_id=tx.run_id, group_id=claim.group_id, index=last.scalar_subquery() + 1, created_at=db_now(),
            parent_id=claim.sample_id, parent_upto=upto,
        )
        .returning(sample.c.id)
    ).scalar_one()  # fmt: skip
    tx.execute(
        sa.update(group).where(group.c.id == claim.group_id).values(n_samples=group.c.n_samples + 1)
    )  # its group is open, since its parent is
    groups.count(tx, claim.group_id, n_open=1)
    return int(made)


def _afresh(tx: Tx, child: Any, status: SampleStatus, upto: int | None) -> None:
    """A new incarnation of a fork (its group is locked): pending, or emptied for good."""
    waiting = (stage.c.sample_id == child.id) & (stage.c.status == StageStatus.PENDING.value)
    with tx.moving(samples=[child.id]):
        cancelled = tx.execute(
            sa.update(stage)
            .where(waiting)
            .values(status=StageStatus.FAILED.value, outcome="superseded", settled_at=db_now(), **st.STAGE_LET_GO)
        ).rowcount
        tx.execute(
            sa.update(sample)
            .where(sample.c.id == child.id)
            .values(
                incarnation=sample.c.incarnation + 1, status=status.value, n_tokens=0, n_loss_tokens=0, n_segments=0,
                version_min=None, version_max=None, oldest_version=None, version_unknown=0, logprob_sum=0.0,
                reward=None, finish_reason=None, error=None, progress_at=None, finished_at=None, finished_by=None,
                parent_upto=upto, n_without_logprob=0, removed=None, **st.LET_GO,
            )
        )  # fmt: skip
    was_open, is_open = child.status in rollouts.OPEN, status.value in rollouts.OPEN
    groups.count(
        tx, child.group_id, n_open=int(is_open) - int(was_open), n_unscored=-cancelled,
        n_failed=-int(child.status == SampleStatus.FAILED),
    )  # fmt: skip


def take(tx: Tx, claim: Claim, child_id: int) -> Claim:
    """A fork for the owner of its parent, whoever had it before: with the parent the forks change hands. One that is
    finished is only read. Raises LeaseLost."""
    episodes.touch(tx, claim)
    row: Any = tx.execute(
        sa.select(sample).where(sample.c.id == child_id).with_for_update(key_share=True)
    ).one_or_none()  # fmt: skip
    if row is None or row.parent_id != claim.sample_id:
        raise NotInRun("sample", [child_id])
    attempt = row.attempt
    if row.status in rollouts.OPEN and not row.closed:
        with tx.moving(samples=[child_id]):
            attempt = tx.execute(
                sa.update(sample)
                .where(sample.c.id == child_id)
                .values(owner=claim.owner, attempt=sample.c.attempt + 1, claimed_at=db_now(), progress_at=db_now())
                .returning(sample.c.attempt)
            ).scalar_one()
    elif row.closed:
        raise LeaseLost("sample", child_id, attempt)
    tokens = stages.response_ids(tx, [child_id]).get(child_id, samples.NO_IDS)
    made = replace(
        claim, sample_id=child_id, index=row.index, attempt=attempt, incarnation=row.incarnation, seq=row.n_segments,
        n_tokens=row.n_tokens, status=row.status, failures=0,
        images=() if row.parent_upto is None else claim.images, finish_reason=row.finish_reason,
        prompt_ids=samples.NO_IDS if row.parent_upto is None else np.concatenate(
            [claim.prompt_ids, claim.response_ids[: row.parent_upto]]
        ),
    )  # fmt: skip
    return _with_tokens(made, tokens)


def _with_tokens(claim: Claim, tokens: Ids) -> Claim:
    return replace(claim, response_ids=tokens)


def empty_leftovers(tx: Tx, claim: Claim) -> None:
    """Before an episode's sample ends: forks that got no token, and those of its earlier lives that this one has not
    made again, are emptied."""
    there = rollouts.forks(tx, claim.sample_id)
    if not there:
        return
    made = {
        row.result["child"]
        for row in tx.rows(
            sa.select(step.c.result).where(
                step.c.sample_id == claim.sample_id, step.c.incarnation == claim.incarnation, step.c.kind == FORK
            )
        )
    }
    for child in there:
        unused = child.id not in made or not child.n_tokens  # without a token it has nothing to finish with
        if unused and (child.n_tokens or child.status != SampleStatus.COMPLETED):
            _afresh(tx, child, SampleStatus.COMPLETED, child.parent_upto)


def end(
    tx: Tx, claim: Claim, status: str, finish_reason: str, keep_stages: bool | Collection[str], reward: float | None
) -> list[StageClaim]:
    """episodes.finish for a sample that has forks, or had some in an earlier life."""
    tx.as_owner_of(claim)
    tx.hold_groups([claim.group_id])
    held = (sample.c.id == claim.sample_id) & (sample.c.owner == claim.owner) & (sample.c.attempt == claim.attempt)
    if tx.execute(sa.select(sample.c.id).where(held)).scalar() is not None:  # else it is a repetition, or a zombie's
        empty_leftovers(tx, claim)
    return episodes.finish(tx, claim, status, finish_reason, keep_stages, reward)


def end_all(tx: Tx, claim: Claim, ends: Sequence[End], keep_stages: bool | Collection[str]) -> list[StageClaim]:
    """End a rollout, `claim` last of `ends`, in this one transaction: no fork is finished, and no stage of it kept,
    where its parent's end is refused. Returns the stages that are kept and left to do. Raises as `end`."""
    tx.as_owner_of(claim)
    tx.hold_groups([claim.group_id])  # before its samples: the lock order
    tx.hold_samples(one.sample_id for one, *_ in ends)
    left: list[StageClaim] = []
    for one, status, reason, reward in ends:
        verb = end if one.sample_id == claim.sample_id else episodes.finish
        left += verb(tx, one, status, reason, keep_stages, reward)
    return left
