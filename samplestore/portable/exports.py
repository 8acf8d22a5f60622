"""Samples of a run on their way out: which, in what order, and each as a PortableSample.

Groups are listed in one snapshot and read a few at a time, each group whole in one: memory holds a few groups, and no
reader holds up a writer. The order is that of steps, of groups in a batch and of their numbers: the same again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from shlex import quote
from typing import Any, NamedTuple

import sqlalchemy as sa

from samplestore import arguments, codec, forks, responses
from samplestore.arguments import one_of, whole
from samplestore.arrays import Prepared
from samplestore.errors import InvalidSetting, SampleStoreError
from samplestore.models import (
    BatchGroup,
    BatchRow,
    PromptRow,
    Sample,
    SampleGroup,
    Segment,
    SegmentArray,
    Stage,
    Timeline,
    WeightVersionRow,
)
from samplestore.models import Run as RunRow
from samplestore.portable.samples import STATUSES, Piece, PortableSample, Reward
from samplestore.queries import images
from samplestore.states import BatchState, StageStatus
from samplestore.tokenizers import Tokenizer
from samplestore.verbs.tx import PART, Transactor

run_table, batch, batch_group, prompt, group, sample, segment, array, stage, timeline, version = (
    t.__table__
    for t in (
        RunRow, BatchRow, BatchGroup, PromptRow, SampleGroup, Sample, Segment, SegmentArray, Stage, Timeline,
        WeightVersionRow,
    )
)  # fmt: skip

CHUNK = 16  # groups read at once
EVERY = "all"  # instead of names of arrays


class NothingToExport(SampleStoreError):
    """Nothing of the run is what was asked for. Nothing was written."""

    def __init__(self, run: str, what: str) -> None:
        self.run, self.what = run, what
        super().__init__(
            f"run {run!r} has {what}. Nothing was written. See what there is with: "
            f"samplestore status --run {quote(run)}"
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """What to export. steps: first and last committed step, None is all groups of the run, whatever became of them;
    statuses: of samples, empty is any; the parent of a fork that is chosen comes along; arrays: names, or ("all",);
    named arrays are left out otherwise."""

    steps: tuple[int, int] | None = None
    statuses: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()

    @classmethod
    def of(cls, steps: Any, statuses: Any, arrays: Any) -> Selection:
        """What a person asks for. Raises InvalidSetting."""
        states = arguments.several("statuses", statuses, "statuses")
        for status in states:
            one_of("status", status, STATUSES)
        return cls(None if steps is None else _steps(steps), tuple(states), tuple(arguments.texts("arrays", arrays)))

    def as_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "statuses": list(self.statuses), "arrays": list(self.arrays)}


def _steps(given: Any) -> tuple[int, int]:
    """Raises InvalidSetting."""
    allowed = "the first and the last step, as (10, 20)"
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InvalidSetting("steps", given, allowed)
    first, last = (whole("steps", one) for one in given)
    if first > last:
        raise InvalidSetting("steps", given, allowed)
    return first, last


class Part(NamedTuple):
    """Groups of one committed step in their order, or of none (step None)."""

    step: int | None
    groups: list[int]
    staleness: dict[int, int | None]


def parts(run: Transactor, wanted: Selection) -> list[Part]:
    """The groups to export, without those of evaluations. Raises NothingToExport."""
    held = (
        sa.select(batch.c.step, batch_group.c.group_id, batch_group.c.staleness)
        .select_from(batch_group.join(batch, batch.c.id == batch_group.c.batch_id))
        .where(batch.c.run_id == run.id, batch.c.state == BatchState.COMMITTED.value)
        .order_by(batch.c.step, batch.c.id, batch_group.c.position)
    )
    taken = batch_group.join(batch, batch.c.id == batch_group.c.batch_id)
    consumed = sa.exists(sa.select(sa.literal(1)).select_from(taken)).where(
        batch_group.c.group_id == group.c.id, batch.c.state == BatchState.COMMITTED.value
    )
    others = (
        sa.select(group.c.id)
        .where(group.c.run_id == run.id, group.c.evaluation_id.is_(None), ~consumed)
        .order_by(group.c.number)
    )
    if wanted.steps is not None:
        held = held.where(batch.c.step.between(*wanted.steps))

    def snapshot(connection: sa.Connection) -> list[Part]:
        by_step: dict[int, Part] = {}
        for row in connection.execute(held):
            part = by_step.setdefault(row.step, Part(row.step, [], {}))
            part.groups.append(row.group_id)
            part.staleness[row.group_id] = row.staleness
        rest = [] if wanted.steps is not None else list(connection.execute(others).scalars())
        return [*by_step.values(), *([Part(None, rest, {})] if rest else [])]

    found = run.database.read(snapshot)
    if not found:
        what = "no groups" if wanted.steps is None else f"no committed step from {wanted.steps[0]} to {wanted.steps[1]}"
        raise NothingToExport(run.name, what)
    return found


def origin(run: Transactor) -> dict[str, Any]:
    """What a manifest says of the run: its identity, its settings, and what its weight versions mean."""

    def rows(connection: sa.Connection, table: Any, key: str) -> list[dict[str, Any]]:
        columns = [c for c in table.c if c.name not in ("run_id", "created_at", "abandoned_at")]
        found = connection.execute(sa.select(*columns).where(table.c.run_id == run.id).order_by(table.c[key]))
        return [dict(row._mapping) for row in found]

    def snapshot(connection: sa.Connection) -> dict[str, Any]:
        row = connection.execute(sa.select(run_table).where(run_table.c.id == run.id)).one_or_none()
        if row is None:  # somebody has removed it since
            raise NothingToExport(run.name, "been removed meanwhile")
        return {
            "run_uuid": row.uuid, "run": row.name, "settings": dict(row.settings), "timeline": row.timeline,
            "current_version": row.current_version, "timelines": rows(connection, timeline, "number"),
            "weight_versions": rows(connection, version, "version"),
        }  # fmt: skip

    return run.database.read(snapshot)


def samples(
    run: Transactor,
    uuid: str,
    part: Part,
    wanted: Selection,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[PortableSample]:
    """The samples of these groups in their order: current incarnations. Those of pruned groups have no tokens any
    more, and are left out. `progress` is called with the number of groups that are done."""
    left = iter(enumerate(part.groups))
    while chunk := list(islice(left, 1 if wanted.arrays else CHUNK)):
        ids = [id for _, id in chunk]
        places = {id: place for place, id in chunk}
        found = run.database.read(partial(_read, run=run, ids=ids, wanted=wanted))
        for group_id in ids:
            for one in _chosen(list(_group(run, uuid, found, group_id)), wanted.statuses):
                if part.step is not None:
                    one = replace(one, step=part.step, position=places[group_id])
                if tokenizer is not None:
                    one.response = tokenizer.decode(one.response_ids)
                yield one
        if progress is not None:
            progress(len(chunk), len(chunk) - len(found.groups))


def _chosen(group: list[PortableSample], statuses: Sequence[str]) -> Iterator[PortableSample]:
    """Those of these statuses, with the parents of forks: a fork alone has not the tokens that it shares."""
    chosen = [one for one in group if not statuses or one.status in statuses]
    wanted = {place for one in chosen for place in (one.sample, one.parent)}
    return (one for one in group if one.sample in wanted)


class _Read(NamedTuple):
    groups: dict[int, Any]
    samples: dict[int, list[Any]]  # by group
    segments: dict[int, list[Any]]  # by sample
    stages: dict[int, list[Any]]
    arrays: dict[int, list[tuple[int, Prepared]]]
    images: dict[str, Any]


def _read(connection: sa.Connection, run: Transactor, ids: Sequence[int], wanted: Selection) -> _Read:
    groups = {
        row.id: row
        for row in connection.execute(
            sa.select(
                group, prompt.c.dataset, prompt.c.prompt, prompt.c.label, prompt.c.metadata.label("meta"),
                prompt.c.tools, prompt.c.template_args, prompt.c.prompt_ids, prompt.c.images,
            )
            .select_from(group.join(prompt, prompt.c.id == group.c.prompt_id))
            .where(group.c.id.in_(ids), group.c.pruned_at.is_(None))
        )
    }  # fmt: skip
    by_group: dict[int, list[Any]] = defaultdict(list)
    mine = sa.select(sample).where(sample.c.group_id.in_(list(groups))).order_by(sample.c.group_id, sample.c.index)
    for row in connection.execute(mine):
        by_group[row.group_id].append(row)
    sample_ids = [row.id for rows in by_group.values() for row in rows]
    current = (sample.c.id == segment.c.sample_id) & (sample.c.incarnation == segment.c.incarnation)
    segments = _by_sample(connection, sample_ids, sa.select(segment).join(sample, current), segment.c.seq)
    of_life = (sample.c.id == stage.c.sample_id) & (sample.c.incarnation == stage.c.incarnation)
    settled = sa.select(stage).join(sample, of_life).where(stage.c.status != StageStatus.PENDING.value)
    stages = _by_sample(connection, sample_ids, settled, stage.c.id)
    named: dict[int, list[tuple[int, Prepared]]] = {}
    if wanted.arrays:
        same = (sample.c.id == array.c.sample_id) & (sample.c.incarnation == array.c.incarnation)
        asked = sa.select(array).join(sample, same)
        asked = asked if EVERY in wanted.arrays else asked.where(array.c.name.in_(wanted.arrays))
        for sample_id, rows in _by_sample(connection, sample_ids, asked, array.c.seq, array.c.name).items():
            named[sample_id] = [(row.seq, _prepared(run, row)) for row in rows]
    shown = images.read(connection, run.id, [d for row in groups.values() for d in row.images or ()])
    return _Read(groups, by_group, segments, stages, named, shown)


def _by_sample(connection: sa.Connection, ids: Sequence[int], query: Any, *order: Any) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = defaultdict(list)
    for at in range(0, len(ids), PART):
        for row in connection.execute(query.where(sample.c.id.in_(ids[at : at + PART])).order_by(sample.c.id, *order)):
            found[row.sample_id].append(row)
    return found


def _prepared(run: Transactor, row: Any) -> Prepared:
    data = bytes(row.data) if row.sidecar is None else run.array_files().get(row.sidecar)
    return Prepared(row.name, row.dtype, list(row.shape), data)


def _group(run: Transactor, uuid: str, read: _Read, group_id: int) -> Iterator[PortableSample]:
    about = read.groups.get(group_id)
    if about is None:
        return  # pruned
    rows = read.samples[group_id]
    index_of = {row.id: row._mapping["index"] for row in rows}
    segments = {row.id: read.segments.get(row.id, ()) for row in rows}
    runs = {id: responses.of(pieces) for id, pieces in segments.items()}
    group_prompt = codec.ids_from(about.prompt_ids)
    first_place = about.number * run.settings.samples_per_prompt
    for row in rows:
        parent = None if row.parent_id is None else index_of[row.parent_id]
        own_prompt = 0
        if parent is not None:
            own_prompt = runs[row.id][0].size if row.parent_upto is None and runs[row.id] else 0
            prompt_ids, response = forks.delivered(row, group_prompt, runs, own_prompt)
            prompt_ids = prompt_ids if own_prompt or row.parent_upto is not None else group_prompt
        else:
            prompt_ids, response = group_prompt, runs[row.id]
        pieces = segments[row.id]
        shared = responses.until(response, row.parent_upto or 0)
        probs = any(p.payload[:1] == codec.HAS_LOGPROBS for p in pieces) or bool(row.parent_upto)
        yield PortableSample(
            run_uuid=uuid, run=run.name, group=about.number, sample=index_of[row.id], incarnation=row.incarnation,
            dataset=about.dataset, prompt=codec.own(about.prompt), prompt_ids=prompt_ids, label=codec.own(about.label),
            metadata=codec.own(about.meta or {}), tools=codec.own(about.tools),
            template_args=codec.own(about.template_args),
            images=tuple(read.images[d].data_url for d in about.images or ()), response_ids=responses.ids(response),
            rollout_log_probs=responses.logprobs(response) if probs and response else None,
            pieces=tuple(_piece(p) for p in pieces), status=row.status, finish_reason=row.finish_reason,
            reward=row.reward, rewards=tuple(_reward(s) for s in read.stages.get(row.id, ())), removed=row.removed,
            n_aborts=row.n_aborts, n_resumes=row.n_resumes, group_state=about.state, group_reason=about.reason,
            group_size=about.n_samples, epoch=about.epoch, timeline=about.timeline,
            rollout_id=first_place + (index_of[row.id] if parent is None else parent),
            parent=parent, parent_upto=row.parent_upto, shared_versions=responses.versions(shared),
            created_at=row.created_at, finished_at=row.finished_at,
            named=tuple(read.arrays.get(row.id, ())),
        )  # fmt: skip


def _piece(row: Any) -> Piece:
    return Piece(
        row.n_tokens, row.kind, row.loss, row.version_min, row.version_max, row.payload[:1] == codec.HAS_LOGPROBS,
        row.attempt, row.request_rid, row.finish_reason,
    )  # fmt: skip


def _reward(row: Any) -> Reward:
    return Reward(row.name, row.status, row.outcome, row.value, codec.own(row.details))
