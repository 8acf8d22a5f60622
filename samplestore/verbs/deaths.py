"""Samples that their workers die of: a prompt that crashes the process which touches it would be claimed, and kill,
for ever.

Counted are deaths in a row of owners that stored no token of the sample, in the events that the reaps write. A worker
that says goodbye, a release and a no-progress deadline are no deaths, and a stored token or a new incarnation begins
the count anew. After `max_deaths` the sample is failed, if all who are that far have one prompt. If not, they were in
one worker, and most are innocent: each prompt comes back alone, a time to live after the one before, and the next
death tells which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.models import Event, Sample, SampleGroup, Segment, Worker
from samplestore.statements import samples as st
from samplestore.states import SampleStatus, WorkerState
from samplestore.verbs import groups, rollouts
from samplestore.verbs.tx import Tx
from samplestore.words import amount

sample, group, segment, worker, event = (t.__table__ for t in (Sample, SampleGroup, Segment, Worker, Event))
fork = sample.alias("fork")

DIED = "worker dead"  # why a reap freed a sample whose owner had died

# An expression has no index. SQLite without statistics would order by the ids of all samples, rather than sort a few.
BY_ID = sample.c.id + sa.literal_column("0")


def owned(run_id: int) -> sa.ColumnElement[bool]:
    """The samples of a run that somebody owns, found by ix_sample_owned. Given the choice, SQLite takes the index that
    starts with the run, and reads all samples that it ever had."""
    return sample.c.owner.is_not(None) & (sample.c.run_id + sa.literal_column("0") == run_id)


@dataclass(frozen=True, slots=True)
class Death:
    """A sample whose owner died before it stored a token of it. deaths: in a row, this one included. wait_s: how long
    it is kept from the others."""

    sample_id: int
    group_id: int
    prompt_id: int
    attempt: int
    incarnation: int
    n_segments: int
    deaths: int
    wait_s: float = 0.0

    @property
    def details(self) -> dict[str, Any]:
        return {"deaths": self.deaths, "life": self.incarnation}


def count(tx: Tx) -> list[Death]:
    """Samples that the dead own and have stored nothing of, in serving order; with its forks a sample is one: while one
    of them gets tokens the others only wait. Reads without locks."""
    last = (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation)
    got_tokens = sa.exists().where(
        last, segment.c.seq == sample.c.n_segments - 1,
        segment.c.owner == sample.c.owner, segment.c.attempt == sample.c.attempt,
    )  # fmt: skip
    fork_got_tokens = (
        sa.exists()
        .where(fork.c.parent_id == sample.c.id, fork.c.owner == sample.c.owner)
        .where(segment.c.sample_id == fork.c.id, segment.c.incarnation == fork.c.incarnation)
        .where(segment.c.seq == fork.c.n_segments - 1)
        .where(segment.c.owner == fork.c.owner, segment.c.attempt == fork.c.attempt)
    )
    found = tx.rows(
        sa.select(
            sample.c.id, sample.c.group_id, group.c.prompt_id, sample.c.attempt, sample.c.incarnation,
            sample.c.n_tokens, sample.c.n_segments, sample.c.created_at,
        )
        .select_from(
            sample.join(worker, worker.c.id == sample.c.owner).join(group, group.c.id == sample.c.group_id)
        )
        .where(owned(tx.run_id), worker.c.state == WorkerState.DEAD.value)
        .where(sample.c.parent_id.is_(None), ~got_tokens, ~fork_got_tokens)
    )  # fmt: skip
    if not found:
        return []
    before = _told(tx, found)
    return [
        Death(
            r.id, r.group_id, r.prompt_id, r.attempt, r.incarnation, r.n_segments,
            1 + before.get((r.id, r.incarnation, r.n_tokens), 0),
        )
        for r in sorted(found, key=lambda r: (r.group_id, r.id))
    ]  # fmt: skip


def _told(tx: Tx, found: Sequence[Any]) -> dict[tuple[int, int, int], int]:
    """(sample, incarnation, tokens) -> deaths in a row, as the last reap of each sample told. It costs with the reaps
    since the oldest of the samples was made, not with history: ix_event_run_id_kind_at."""
    rows = tx.rows(
        sa.select(event.c.sample_id, event.c.tokens, event.c.details, event.c.reason)
        .where(event.c.run_id == tx.run_id, event.c.kind == "reap", event.c.at >= min(r.created_at for r in found))
        .where(event.c.sample_id.in_(sa.select(sample.c.id).where(owned(tx.run_id))))
        .where(event.c.details.is_not(None) | (event.c.reason == DIED))
        .order_by(event.c.id)
    )
    told: dict[int, dict[tuple[int, int, int], int]] = {}
    for r in rows:
        if r.details and "deaths" in r.details:
            told.setdefault(r.sample_id, {})[(r.sample_id, r.details["life"], r.tokens)] = r.details["deaths"]
        else:  # a death after tokens, perhaps of a fork: the count begins anew
            told.pop(r.sample_id, None)
    return {key: deaths for of_sample in told.values() for key, deaths in of_sample.items()}


def settle(tx: Tx, dying: Sequence[Death]) -> tuple[int, dict[int, Death]]:
    """Fail the samples whose owners died too often. Returns how many, and the others by id: those that are set apart
    have a wait."""
    far = [d for d in dying if d.deaths >= tx.settings.max_deaths]
    prompts = list(dict.fromkeys(d.prompt_id for d in far))
    if len(prompts) > 1:
        rank = {prompt_id: i + 1 for i, prompt_id in enumerate(prompts)}
        apart = tx.settings.heartbeat_ttl_s
        return 0, {d.sample_id: replace(d, wait_s=apart * rank[d.prompt_id]) if d in far else d for d in dying}
    return _give_up(tx, far), {d.sample_id: d for d in dying if d not in far}


def given_up_text(deaths: int, sample_id: int) -> str:
    return (
        f"given up: {amount(deaths, 'worker')} in a row died while they held it, before it had a token from them. "
        f"Their logs tell why; to try it again: samplestore requeue {sample_id} --reason TEXT"
    )


def _give_up(tx: Tx, far: Sequence[Death]) -> int:
    """The groups before the samples: the lock order. What somebody else took or freed meanwhile is left to them."""
    if not far:
        return 0
    tx.lock_groups([d.group_id for d in far])
    given_up = 0
    for death in sorted(far, key=lambda d: d.sample_id):
        said = given_up_text(death.deaths, death.sample_id)
        with tx.moving(samples=[death.sample_id]):
            gone = tx.execute(
                sa.update(sample)
                .where(sample.c.id == death.sample_id, sample.c.attempt == death.attempt, sample.c.owner.is_not(None))
                .where(sample.c.n_segments == death.n_segments)  # a last write of the dead may have come between
                .values(status=SampleStatus.FAILED.value, error=said, finished_at=db_now(), **st.LET_GO)
            ).rowcount
        if gone:
            given_up += 1
            tx.event("fail", said, sample_id=death.sample_id, group_id=death.group_id, details=death.details)
            forks = rollouts.fail_forks(tx, death.sample_id)
            groups.count(tx, death.group_id, n_open=-forks, n_failed=forks)
            groups.gave_up(tx, death.group_id, n_open=-1)
    return given_up
