"""What a batch delivers, read in one snapshot: all of it, or a rank's part of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa

from samplestore import codec, forks, masks, responses
from samplestore.models import BatchGroup, PromptRow, Sample, SampleGroup, Segment, WeightVersionRow
from samplestore.queries.plans import IN_BATCH, OF_BATCH
from samplestore.statements import staleness
from samplestore.statements.lists import among
from samplestore.statements.prepared import Prepared
from samplestore.states import SegmentKind, StalePolicy
from samplestore.tensors import BatchSample, Whole
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


NAN = float("nan")
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
MARK = (segment.c.sample_id, segment.c.seq, segment.c.loss, segment.c.version_min, segment.c.n_tokens)
MASKS = (segment.c.kind, segment.c.version_max, segment.c.attempt, segment.c.request_rid)  # for policies that mask


@cache
def _segments(*, tokens: bool, masking: bool, of: str = "batch") -> Prepared:
    """What tells which tokens are trained, and the tokens themselves; of a batch, or of the samples with some ids.
    Unsorted: to sort rows with their payloads takes a database as long again as to read them."""
    columns = (*MARK, *(MASKS if masking else ()), *((segment.c.payload,) if tokens else ()))
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
    missing = None if policy.get("need_logprobs", True) else 0.0
    runs = {id: responses.of(pieces, rule.trained(pieces), missing) for id, pieces in rows.pieces.items()}
    groups = {row.id: (row, responses.prompt(row.prompt_ids)) for row in rows.groups}
    views = {row.id: BatchGroupView(row.id, row.number, row.staleness, []) for row in rows.groups}
    # Episodes give rewards without a stage, too: where some have one, a sample without is not one of 0.
    rewarded = run.settings.gives_rewards or any(row.reward is not None for row in rows.samples)
    wanted = None if only is None else set(only)
    # A fork without segments is of an earlier life of its parent, and emptied (verbs/fanout.py).
    delivered = [row for row in rows.samples if row.parent_id is None or row.id in rows.marks]
    rewards: list[float] = []
    n_trained: list[int] = []
    for row in delivered:
        id, forked, unscored = row.id, row.parent_id is not None, row.reward is None and rewarded
        untrained, marks = unscored or row.removed is not None, rows.marks.get(id, ())
        rewards.append(NAN if unscored else row.reward or 0.0)
        n_trained.append(0 if untrained else _n_trained(row, marks, rule.trained(marks)))
        if wanted is None or id in wanted:
            about, prompt = groups[row.group_id]
            response, shared = runs[id], 0
            if forked:
                prompt, response, shared = _forked(row, prompt, runs)
            if untrained:
                response = tuple(run.untrained() for run in response)  # derived when read, as the staleness policy is
            views[row.group_id].samples.append(BatchSample(row, about, prompt, response, shared, unscored))
    whole = Whole.of(delivered, rewards, n_trained)
    return Delivery([view for view in views.values() if view.samples], whole, rows.behind)


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
    of_batch, masking = {"of_batch": batch_id}, _masks(policy)
    some = _segments(tokens=True, masking=masking, of="samples")
    samples = SAMPLES.rows(connection, of_batch)
    if only is None:
        mine, groups = samples, GROUPS.rows(connection, of_batch)
        pieces = _by_sample(_segments(tokens=True, masking=masking).rows(connection, of_batch))
        marks = dict(pieces)
    else:
        wanted = set(only)
        mine = [row for row in samples if row.id in wanted]
        groups = SOME_GROUPS.rows(connection, {**of_batch, "ids": sorted({row.group_id for row in mine})})
        pieces = _by_sample(some.rows(connection, {"ids": sorted(wanted)}))
        marks = _by_sample(_segments(tokens=False, masking=masking).rows(connection, of_batch))
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


def _forked(
    row: Any, prompt: responses.Run, runs: dict[int, responses.Runs]
) -> tuple[responses.Run, responses.Runs, int]:
    """(prompt, response, response tokens that it shares with its parent) of a fork."""
    prompt_ids, response = forks.delivered(row, responses.ids([prompt]), runs, runs[row.id][0].size)
    shared = 0 if row.parent_upto is None else responses.length(response) - responses.length(runs[row.id])
    return responses.prompt(codec.ids_bytes(prompt_ids)), response, shared


def _masks(policy: dict[str, Any]) -> bool:
    """Whether it takes tokens out of the loss."""
    return policy["stale"] == StalePolicy.MASK or bool(policy.get("mask_offpolicy"))


class _Loss:
    """Which tokens are trained on: derived when read, never written."""

    def __init__(self, policy: dict[str, Any], behind: dict[int, int]) -> None:
        self._behind, self._window = behind, policy["max_staleness"]
        self._masks, self._by_age = _masks(policy), policy["stale"] == StalePolicy.MASK
        self._offpolicy = bool(policy.get("mask_offpolicy"))

    def trained(self, pieces: Sequence[Any]) -> list[bool] | None:
        """Of a sample's segments in order. None: as they were stored."""
        if not self._masks:
            return None
        since = masks.resumed_at(pieces) if self._offpolicy else 0
        return [
            self._in_window(piece) and (place >= since or piece.kind != SegmentKind.GENERATED)
            for place, piece in enumerate(pieces)
        ]

    def _in_window(self, piece: Any) -> bool:
        """Tokens beyond the window carry no gradient. No weights made those of an environment, so they are behind
        none."""
        if not (self._by_age and piece.kind == SegmentKind.GENERATED):
            return bool(piece.loss)
        return bool(piece.loss) and self._behind.get(piece.version_min, self._window + 1) <= self._window


def _n_trained(row: Any, marks: Sequence[Any], trained: Sequence[bool] | None) -> int:
    """A sample's own trained tokens. The first segment of a fork with a prompt of its own is that prompt."""
    own = 1 if row.parent_id is not None and row.parent_upto is None else 0
    n = 0
    for place, piece in enumerate(marks):
        if place >= own and (piece.loss if trained is None else trained[place]):
            n += piece.n_tokens
    return n
