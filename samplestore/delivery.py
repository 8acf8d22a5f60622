"""What a batch delivers, read in one snapshot: all of it, or a rank's part of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec, forks, masks, responses
from samplestore.errors import MissingLogprobs
from samplestore.models import BatchGroup, PromptRow, Sample, SampleGroup, Segment, WeightVersionRow
from samplestore.queries.plans import IN_BATCH, OF_BATCH
from samplestore.statements import staleness
from samplestore.statements.lists import among
from samplestore.statements.prepared import Prepared
from samplestore.states import SegmentKind, StalePolicy
from samplestore.tensors import BatchSample, Whole
from samplestore.types import Ids
from samplestore.verbs.tx import Transactor
from samplestore.words import amount

batch_group, group, sample, segment, prompt, version = (
    t.__table__ for t in (BatchGroup, SampleGroup, Sample, Segment, PromptRow, WeightVersionRow)
)


@dataclass(frozen=True, slots=True)
class BatchGroupView:
    """A group of a batch, in its order; of a rank's part, with the samples that it reads."""

    group_id: int
    number: int
    staleness: int | None
    samples: list[BatchSample]

    def __repr__(self) -> str:
        lag = "unknown" if self.staleness is None else self.staleness
        return f"<BatchGroupView {self.number}: {amount(len(self.samples), 'sample')}, staleness {lag}>"


@dataclass(frozen=True, slots=True)
class Delivery:
    """groups that have a sample here, what is known of the whole batch, and versions behind by weight version."""

    groups: list[BatchGroupView]
    whole: Whole
    behind: dict[int, int]


GROUP = sa.select(
    group.c.id, group.c.number, batch_group.c.staleness, prompt.c.label, prompt.c.metadata.label("meta"),
    prompt.c.prompt_ids, prompt.c.images,
).select_from(
    batch_group.join(group, group.c.id == batch_group.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)
).where(batch_group.c.batch_id == sa.bindparam("of_batch")).order_by(batch_group.c.position)  # fmt: skip
GROUPS, SOME_GROUPS = Prepared(GROUP), Prepared(GROUP.where(among(group.c.id, "ids")))
SAMPLES = Prepared(
    sa.select(
        sample.c.id, sample.c.group_id, sample.c.index.label("place"), sample.c.reward, sample.c.status,
        sample.c.finish_reason, sample.c.removed, sample.c.parent_id, sample.c.parent_upto,
    )
    .select_from(IN_BATCH)
    .where(OF_BATCH)
    .order_by(batch_group.c.position, sample.c.index)
)  # fmt: skip
ALIVE = (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation)
# The first two put a sample's segments in order, in _by_sample.
MARK = (
    segment.c.sample_id, segment.c.seq, segment.c.loss, segment.c.kind, segment.c.version_min, segment.c.n_tokens,
)  # fmt: skip
RESUMES = (segment.c.version_max, segment.c.attempt, segment.c.request_rid)  # for masks.resumed_at


@cache
def _segments(*, tokens: bool, resumes: bool, of: str = "batch") -> Prepared:
    """What tells which tokens are trained, and the tokens themselves; of a batch, or of the samples with some ids.
    Unsorted: to sort rows with their payloads takes a database as long again as to read them."""
    columns = (*MARK, *(RESUMES if resumes else ()), *((segment.c.payload,) if tokens else ()))
    found = sa.select(*columns)
    if of == "batch":
        return Prepared(found.select_from(IN_BATCH.join(segment, ALIVE)).where(OF_BATCH))
    return Prepared(found.select_from(segment.join(sample, ALIVE)).where(among(sample.c.id, "ids")))


@dataclass(frozen=True, slots=True)
class _Rows:
    groups: Sequence[Any]
    samples: Sequence[Any]  # of the whole batch
    marks: dict[int, list[Any]]  # by sample: segments, of the whole batch
    pieces: dict[int, list[Any]]  # by sample: segments with their tokens, of what is read
    behind: dict[int, int]


def read(run: Transactor, batch_id: int, policy: dict[str, Any], current: int, only: Sequence[int] | None) -> Delivery:
    """The groups of a batch in their order, without samples that failed: in one snapshot, with as many queries
    whatever its size.

    policy, current   of the batch's row
    only              ids of samples: the tokens of no others are read. None: all
    Raises MissingLogprobs.
    """
    rows = run.database.read(lambda c: _rows(c, run.id, batch_id, policy, current, only))
    rule = _Loss(policy, rows.behind)
    trained = {id: rule.trained(pieces) for id, pieces in (rows.marks | rows.pieces).items()}
    runs = {id: _runs(id, pieces, trained[id], rule.needs_logprobs) for id, pieces in rows.pieces.items()}
    prompts = {row.id: (row, codec.ids_from(row.prompt_ids)) for row in rows.groups}
    # Episodes give rewards without a stage, too: where some have one, a sample without is not one of 0.
    rewarded = run.settings.gives_rewards or any(row.reward is not None for row in rows.samples)
    views = {row.id: BatchGroupView(row.id, row.number, row.staleness, []) for row in rows.groups}
    wanted = None if only is None else set(only)
    whole = []
    for row in rows.samples:
        if row.parent_id is not None and row.id not in rows.marks:
            continue  # of an earlier life of its parent, and emptied (verbs/fanout.py)
        unscored = row.reward is None and rewarded
        n_trained = 0 if unscored or row.removed is not None else _n_trained(row, rows.marks, trained)
        reward = float("nan") if unscored else row.reward or 0.0
        whole.append((row.id, row.group_id, row.parent_id or row.id, reward, n_trained))
        if wanted is None or row.id in wanted:
            views[row.group_id].samples.append(_sample(row, *prompts[row.group_id], runs, unscored))
    return Delivery([view for view in views.values() if view.samples], Whole.of(whole), rows.behind)


def lags(connection: sa.Connection, run_id: int, current: int) -> dict[int, int]:
    """Staleness of each version, as seen from the version that was current when the batch was leased."""
    rows = connection.execute(
        sa.select(version.c.version, version.c.parent, version.c.depth).where(version.c.run_id == run_id)
    )
    return staleness.seen_from(current, rows.fetchall())


def _rows(
    connection: sa.Connection, run_id: int, batch_id: int, policy: dict[str, Any], current: int,
    only: Sequence[int] | None,
) -> _Rows:  # fmt: skip
    of_batch, resumes = {"of_batch": batch_id}, bool(policy.get("mask_offpolicy"))
    some = _segments(tokens=True, resumes=resumes, of="samples")
    samples = SAMPLES.rows(connection, of_batch)
    if only is None:
        mine, groups = samples, GROUPS.rows(connection, of_batch)
        pieces = _by_sample(_segments(tokens=True, resumes=resumes).rows(connection, of_batch))
        marks = dict(pieces)
    else:
        wanted = set(only)
        mine = [row for row in samples if row.id in wanted]
        groups = SOME_GROUPS.rows(connection, {**of_batch, "ids": sorted({row.group_id for row in mine})})
        pieces = _by_sample(some.rows(connection, {"ids": sorted(wanted)}))
        marks = _by_sample(_segments(tokens=False, resumes=resumes).rows(connection, of_batch))
    # Samples that failed are not delivered themselves, but their forks begin with their tokens.
    absent = {row.parent_id for row in mine if row.parent_upto} - {row.id for row in mine}
    if absent:
        pieces |= _by_sample(some.rows(connection, {"ids": sorted(absent)}))
    for row in mine:
        pieces.setdefault(row.id, [])
    behind = lags(connection, run_id, current) if policy["stale"] == StalePolicy.MASK else {}
    return _Rows(groups, samples, marks, pieces, behind)


def _by_sample(segments: Sequence[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for piece in sorted(segments):
        found[piece.sample_id].append(piece)
    return dict(found)


def _sample(row: Any, about: Any, prompt_ids: Ids, runs: dict[int, responses.Runs], unscored: bool) -> BatchSample:
    response, shared = runs[row.id], 0
    if row.parent_id is not None:
        prompt_ids, response = forks.delivered(row, prompt_ids, runs, response[0].ids.size)
        shared = 0 if row.parent_upto is None else responses.length(response) - responses.length(runs[row.id])
    if row.removed is not None or unscored:
        response = tuple(run.untrained() for run in response)  # derived when read, as the staleness policy is
    return BatchSample(row, about, prompt_ids, response, shared, unscored)


class _Loss:
    """Which tokens are trained on: derived when read, never written."""

    def __init__(self, policy: dict[str, Any], behind: dict[int, int]) -> None:
        self._behind, self._window = behind, policy["max_staleness"]
        self._masks = policy["stale"] == StalePolicy.MASK
        self._offpolicy = bool(policy.get("mask_offpolicy"))
        self.needs_logprobs = bool(policy.get("need_logprobs", True))

    def trained(self, pieces: Sequence[Any]) -> list[bool]:
        """Of a sample's segments in order."""
        if not (self._masks or self._offpolicy):
            return [bool(piece.loss) for piece in pieces]
        since = masks.resumed_at(pieces) if self._offpolicy else 0
        return [
            self._in_window(piece) and (place >= since or piece.kind != SegmentKind.GENERATED)
            for place, piece in enumerate(pieces)
        ]

    def _in_window(self, piece: Any) -> bool:
        """Tokens beyond the window carry no gradient. No weights made those of an environment, so they are behind
        none."""
        if not (self._masks and piece.kind == SegmentKind.GENERATED):
            return bool(piece.loss)
        return bool(piece.loss) and self._behind.get(piece.version_min, self._window + 1) <= self._window


def _n_trained(row: Any, marks: dict[int, list[Any]], trained: dict[int, list[bool]]) -> int:
    """A sample's own trained tokens. The first segment of a fork with a prompt of its own is that prompt."""
    sizes = [piece.n_tokens for piece in marks.get(row.id, ())]
    if row.parent_id is not None and row.parent_upto is None:
        sizes[:1] = [0]
    return sum(compress(sizes, trained.get(row.id, ())))


def _runs(sample_id: int, pieces: Sequence[Any], trained: Sequence[bool], needs_logprobs: bool) -> responses.Runs:
    """The response of a sample, a run for each segment. Raises MissingLogprobs."""
    runs = []
    for piece, taken in zip(pieces, trained, strict=True):
        tokens, probs = codec.decode(piece.payload)
        if probs is None:
            if taken and needs_logprobs:
                raise MissingLogprobs(sample_id)
            probs = np.zeros(tokens.size, np.float32)
        version = piece.version_min
        runs.append(responses.Run(tokens, probs, taken, -1 if version is None else version))
    return tuple(runs)
