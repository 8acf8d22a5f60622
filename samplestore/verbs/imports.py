"""Samples that were generated elsewhere come in: their stages and filters are the run's, as of all others.

Imported groups are behind no weights and fill no window of admission. Tokens that came with a bare response are of kind
`environment`, since no weights of a run made them, and are no part of the token ledger. Those that another store or
slime generated keep their kind and their weight versions (verbs/import_versions.py), and the ledger counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec, faults
from samplestore.arrays import TEACHER, Prepared
from samplestore.clock import db_now
from samplestore.errors import ImportConflict, InvalidSetting
from samplestore.models import PromptRow, Run, Sample, SampleGroup, Segment, SegmentArray, Stage, Worker
from samplestore.runsettings import TEACHER_STAGE
from samplestore.statements.staleness import UNFINISHED
from samplestore.states import (
    CLAIMABLE,
    FINISHED,
    GroupState,
    Purpose,
    SampleStatus,
    SegmentKind,
    StageStatus,
    WorkerKind,
    WorkerState,
)
from samplestore.types import Added
from samplestore.verbs import groups, import_versions, liveness, prompts
from samplestore.verbs.arrays import row_of as array_row
from samplestore.verbs.own_groups import OwnGroups
from samplestore.verbs.stages import OK
from samplestore.verbs.tx import Tx

run, prompt, group, sample, segment, segment_array, stage, worker = (
    t.__table__ for t in (Run, PromptRow, SampleGroup, Sample, Segment, SegmentArray, Stage, Worker)
)

CHUNK = 100  # groups at once
PART = 500  # samples a statement
REWARD_STAGE = "reward"
GIVEN_UP = (GroupState.DROPPED, GroupState.STALE, GroupState.SUPERSEDED)

Keep = Callable[[Prepared], Prepared]


def import_groups(
    tx: Tx,
    given: Iterable[Any],
    keep: Keep,
    manifest: Mapping[str, Any] | None = None,
    versions: Iterable[int] = (),
    recorded: bool = False,
) -> Added:
    """Store groups (portable/imports.py: Imported), in their order; those whose key is there already are left alone,
    and so are the run's own, which an export of it brings back. `keep` puts a large array into its file; `manifest`,
    `versions` and `recorded` say what the weight versions of the groups are (verbs/import_versions.py).
    Raises InvalidSetting for a reward that no stage of the run would give, or a data set that is there for something
    else; ImportConflict for a group that says something else than when it was imported before, or has the run's uuid
    and is none of its groups (verbs/own_groups.py)."""
    worker_id = liveness.register(tx, WorkerKind.TOOL.value, "import")
    row = tx.lock_run()
    known = import_versions.bring(tx, row, manifest, sorted(versions), recorded)
    number, existing, waiting = row.n_groups, 0, iter(given)
    before, own = _Before(tx), OwnGroups(tx, row)
    while part := list(islice(waiting, CHUNK)):
        keys = {one.import_key for one in part}
        there = set(
            tx.execute(
                sa.select(group.c.import_key).where(group.c.run_id == tx.run_id, group.c.import_key.in_(keys))
            ).scalars()
        )
        new = []
        for one in part:
            if one.import_key in there or own.has(one):
                existing += 1
            else:
                before.require_new(one)
                there.add(one.import_key)
                new.append(one)
        if new:
            _Storing(tx, worker_id, keep, known).store(new, number, row)
            number += len(new)
        faults.reached("importing")
    tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(n_groups=number))
    tx.execute(
        sa.update(worker).where(worker.c.id == worker_id).values(state=WorkerState.GONE.value, ended_at=db_now())
    )
    added = number - row.n_groups
    if added:
        tx.event("import", None, worker_id=worker_id, details={"groups": added, "existing": existing})
    return Added(added, existing)


class _Before:
    """What was imported before from the same runs, by portable id. Looked up once a run: a database's order of text is
    its own, so that no index finds what begins alike."""

    def __init__(self, tx: Tx) -> None:
        self.tx, self.known = tx, dict[str, dict[str, str]]()

    def require_new(self, one: Any) -> None:
        """Raises ImportConflict where a group of this portable id is there, that said something else."""
        if one.origin is None:
            return
        uuid = one.origin.partition("/")[0]
        if uuid not in self.known:
            begins = [group.c.import_key.startswith(f"{mark}{uuid}/", autoescape=True) for mark in ("", UNFINISHED)]
            mine = sa.select(group.c.import_key).where(group.c.run_id == self.tx.run_id, sa.or_(*begins))
            keys = self.tx.execute(mine)
            self.known[uuid] = dict(key.removeprefix(UNFINISHED).rsplit(":", 1) for key in keys.scalars())
        if one.origin in self.known[uuid]:
            raise ImportConflict(one.origin)
        self.known[uuid][one.origin] = one.key


class _Storing:
    """Groups with all that belongs to them, each kind of row in one statement. versions: the run's number of a version
    of the groups, None where the run does not have it."""

    def __init__(self, tx: Tx, worker_id: int, keep: Keep, versions: Mapping[int, int | None]) -> None:
        self.tx, self.worker_id, self.keep, self.versions = tx, worker_id, keep, versions

    def store(self, new: Sequence[Any], number: int, row: Any) -> None:
        tx = self.tx
        prompts.add(tx, [one.prompt for one in new], Purpose.IMPORT)
        keys = {one.prompt.content_key for one in new}
        mine = (prompt.c.run_id == tx.run_id) & prompt.c.content_key.in_(keys)
        ids = {r.content_key: r.id for r in tx.rows(sa.select(prompt.c.content_key, prompt.c.id).where(mine))}
        made = tx.execute(
            sa.insert(group).values(created_at=db_now()).returning(group.c.id, sort_by_parameter_order=True),
            [
                {
                    "run_id": tx.run_id, "prompt_id": ids[one.prompt.content_key], "number": number + i,
                    "epoch": row.epoch if one.origin is None else one.samples[0].epoch,
                    "timeline": row.timeline if one.origin is None else import_versions.timeline(row, one.samples[0]),
                    "state": GroupState.OPEN.value, "n_samples": len(one.samples), "n_open": 0,
                    "import_key": one.import_key,
                }
                for i, one in enumerate(new)
            ],
        ).scalars().all()  # fmt: skip
        pending = self._samples(list(zip(made, new, strict=True)))
        for group_id, one in zip(made, new, strict=True):
            n_open = sum(s.status in CLAIMABLE for s in one.samples)
            n_failed = sum(s.status == SampleStatus.FAILED for s in one.samples)
            if any(p.version_min is not None for s in one.samples for p in s.pieces):
                groups.restale(tx, [group_id])
            groups.count(tx, group_id, n_open=n_open, n_unscored=pending[group_id], n_failed=n_failed)
            self._close(group_id, one)

    def _close(self, group_id: int, one: Any) -> None:
        """What was given up elsewhere is given up here. What was consumed there may be trained on here."""
        state, reason = one.samples[0].group_state, one.samples[0].group_reason
        if one.origin is None or state not in GIVEN_UP:
            return
        target = GroupState.STALE if state == GroupState.STALE else GroupState.DROPPED
        groups.close(self.tx, [group_id], target, codec.clean_text(reason or state, 200))

    def _samples(self, given: list[tuple[int, Any]]) -> Counter[int]:
        """How many stages are still to be done, by group."""
        tx = self.tx
        all_of_them = [(group_id, one, s) for group_id, one in given for s in one.samples]
        now: dict[str, Any] = {"created_at": db_now()}
        ids: list[int] = []
        for at in range(0, len(all_of_them), PART):
            rows = [self._sample(*each) for each in all_of_them[at : at + PART]]
            inserted = sa.insert(sample).values(**now).returning(sample.c.id, sort_by_parameter_order=True)
            ids += tx.execute(inserted, rows).scalars().all()
        self._ended(ids, [s for _, _, s in all_of_them])
        self._parents(ids, all_of_them)
        beside: list[dict[str, Any]] = []
        stages: dict[StageStatus, list[dict[str, Any]]] = {StageStatus.PENDING: [], StageStatus.DONE: []}
        for at in range(0, len(ids), PART):
            part = list(zip(ids, all_of_them, strict=True))[at : at + PART]
            segments = [r for sample_id, (_, _, s) in part for r in self._segments(sample_id, s)]
            with tx.moving(samples=[sample_id for sample_id, _ in part]):
                if segments:
                    tx.execute(sa.insert(segment).values(**now), segments)
        for sample_id, (group_id, one, s) in zip(ids, all_of_them, strict=True):
            beside += [array_row(sample_id, s.incarnation, seq, self.keep(array)) for seq, array in s.named]
            for row in _stages(tx, group_id, sample_id, s, one.origin is not None):
                stages[StageStatus.PENDING if row["status"] == StageStatus.PENDING else StageStatus.DONE].append(row)
        if beside:
            tx.execute(sa.insert(segment_array).values(**now), beside)
        stages[StageStatus.DONE] += [r for group_id, one in given for r in _of_group(tx, group_id, one)]
        if stages[StageStatus.PENDING]:
            tx.execute(sa.insert(stage).values(**now), stages[StageStatus.PENDING])
        if stages[StageStatus.DONE]:
            tx.execute(sa.insert(stage).values(settled_at=db_now(), **now), stages[StageStatus.DONE])
        return Counter(row["group_id"] for row in stages[StageStatus.PENDING])

    def _ended(self, ids: Sequence[int], samples: Sequence[Any]) -> None:
        ended = [i for i, s in zip(ids, samples, strict=True) if s.status not in CLAIMABLE]
        for at in range(0, len(ended), PART):
            mine = sample.c.id.in_(ended[at : at + PART])
            self.tx.execute(
                sa.update(sample).where(mine).values(finished_at=db_now(), finished_by=self.worker_id)
            )  # both by one clock: the database's

    def _parents(self, ids: Sequence[int], all_of_them: Sequence[tuple[int, Any, Any]]) -> None:
        """A fork names its parent by its place, and the database by its id."""
        by_place = {(group_id, s.sample): id for id, (group_id, _, s) in zip(ids, all_of_them, strict=True)}
        for id, (group_id, _, s) in zip(ids, all_of_them, strict=True):
            if s.parent is not None:
                values = {"parent_id": by_place[group_id, s.parent], "parent_upto": s.parent_upto}
                self.tx.execute(sa.update(sample).where(sample.c.id == id).values(**values))

    def _range(self, piece: Any) -> tuple[int | None, int | None]:
        """Lowest and highest version of a piece; neither where one of them is unknown: any token may be its."""
        of = [self.versions.get(v) for v in (piece.version_min, piece.version_max) if v is not None]
        known = [v for v in of if v is not None]
        return (min(known), max(known)) if known and len(known) == len(of) else (None, None)

    def _sample(self, group_id: int, one: Any, s: Any) -> dict[str, Any]:
        loss = np.repeat([p.loss for p in s.pieces], [p.n_tokens for p in s.pieces]) if s.pieces else np.zeros(0)
        trained = [p for p in s.pieces if p.loss and p.kind == SegmentKind.GENERATED]
        known = [v for p in trained if (v := self._range(p)[0]) is not None]
        told = [v for p in s.pieces for v in self._range(p) if v is not None]
        reward = s.reward if one.origin is not None else _weighted(self.tx, s.reward)
        return {
            "run_id": self.tx.run_id, "group_id": group_id, "index": s.sample, "incarnation": s.incarnation,
            "status": s.status, "attempt": max((p.attempt for p in s.pieces), default=0),
            "n_tokens": int(s.own_ids.size), "n_loss_tokens": int(loss.sum()), "n_segments": len(s.pieces),
            "n_aborts": s.n_aborts, "n_resumes": s.n_resumes, "removed": s.removed, "reward": reward,
            "n_without_logprob": sum(p.n_tokens for p in s.pieces if p.loss and not p.log_probs),
            "logprob_sum": _sum(s.own_log_probs[loss == 1]), "finish_reason": s.finish_reason,
            "version_min": min(told, default=None), "version_max": max(told, default=None),
            "oldest_version": min(known, default=None), "version_unknown": int(len(known) < len(trained)),
        }  # fmt: skip

    def _segments(self, sample_id: int, s: Any) -> list[dict[str, Any]]:
        rows, start = [], 0
        ids, all_probs = s.own_ids, s.own_log_probs
        for seq, p in enumerate(s.pieces):
            stop = start + p.n_tokens
            probs = all_probs[start:stop] if p.log_probs else None
            low, high = self._range(p)
            rows.append(
                {
                    "sample_id": sample_id, "incarnation": s.incarnation, "seq": seq, "start": start,
                    "n_tokens": p.n_tokens, "kind": p.kind, "loss": p.loss, "owner": self.worker_id,
                    "attempt": p.attempt, "request_rid": p.request, "finish_reason": p.finish_reason,
                    "version_min": low, "version_max": high,
                    "logprob_sum": 0.0 if probs is None else _sum(probs),
                    "payload": codec.encode(ids[start:stop], probs),
                }
            )  # fmt: skip
            start = stop
        return rows


def _weighted(tx: Tx, reward: float | None) -> float | None:
    """What a reward that came along counts. Raises InvalidSetting where the run's stages leave it no place."""
    if reward is None:
        return None
    rules = tx.settings
    if (rules.stages or rules.group_stages) and REWARD_STAGE not in rules.stages:
        raise InvalidSetting(
            "reward", reward, f"a run without stages, or with the stage {REWARD_STAGE!r}; this one has {rules.stages}"
        )
    return (codec.reward(reward) or 0.0) * rules.reward_weights.get(REWARD_STAGE, 1.0)


def _sum(values: Any) -> float:
    return float(np.add.reduce(values, dtype=np.float64))


def _stages(tx: Tx, group_id: int, sample_id: int, s: Any, exported: bool) -> list[dict[str, Any]]:
    """The run's stages, settled where the row brought what they would give; and what stages of its own run gave."""
    taught = any(array.name == TEACHER for _, array in s.named)
    base = {"run_id": tx.run_id, "group_id": group_id, "sample_id": sample_id, "incarnation": s.incarnation}
    brought = {r.name: r for r in s.rewards}
    rows = [
        {
            **base, "name": r.name, "status": r.status, "outcome": r.outcome, "value": r.value, "details": r.details,
        }
        for r in brought.values()
        if exported or r.name in tx.settings.stages
    ]  # fmt: skip
    for name in tx.settings.stages:
        if name in brought or s.status not in FINISHED:
            continue
        done = name == TEACHER_STAGE and taught
        status = (StageStatus.DONE if done else StageStatus.PENDING).value
        rows.append(
            {**base, "name": name, "status": status, "outcome": OK if done else None, "value": None, "details": None}
        )
    return rows


def _of_group(tx: Tx, group_id: int, one: Any) -> list[dict[str, Any]]:
    """Stages of the group that need not be done again: every sample that they would judge brought their value."""
    judged = [s for s in one.samples if s.status in FINISHED]
    return [
        {
            "run_id": tx.run_id, "group_id": group_id, "sample_id": None, "name": name, "outcome": OK, "value": None,
            "incarnation": sum(s.incarnation for s in one.samples), "status": StageStatus.DONE.value, "details": None,
        }
        for name in tx.settings.group_stages
        if judged and all(any(r.name == name for r in s.rewards) for s in judged)
    ]  # fmt: skip
