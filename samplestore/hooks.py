"""Hooks of a trainer, with slime's signatures: which ready groups a batch takes, and a look at all that was generated.

They run in the trainer's process, outside any transaction. What they see is read in one snapshot; a group that was
dropped or requeued meanwhile is not leased.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore import codec, forks, responses, slimehooks
from samplestore.errors import HookFailed, SampleStoreError
from samplestore.models import (
    BatchGroup,
    BatchRow,
    Event,
    PromptRow,
    Run,
    Sample,
    SampleGroup,
    Segment,
    WeightVersionRow,
)
from samplestore.slimehooks import HookSample, SlimeStatus
from samplestore.states import IN_WINDOW, BatchState, GroupState, StalenessMode, StalePolicy
from samplestore.tokenizers import Tokenizer, as_tokenizer, load_tokenizer
from samplestore.types import Ids
from samplestore.verbs import batches as verbs
from samplestore.verbs.tx import PART, Transactor
from samplestore.words import amount

BufferFilter = Callable[[Any, int, list[list[HookSample]], int], list[list[HookSample]]]
AllSamples = Callable[[Any, list[list[HookSample]], Any], Any]
MOST_GROUPS = 20_000  # that a hook is shown

batch, batch_group, event, group, prompt, run_table, sample, segment, version = (
    t.__table__ for t in (BatchRow, BatchGroup, Event, SampleGroup, PromptRow, Run, Sample, Segment, WeightVersionRow)
)


def choose(run: Transactor, hook: BufferFilter, step: int, n: int, policy: dict[str, Any]) -> list[int]:
    """Ids of the groups that a buffer filter pops for `step`; fewer than n while it has not enough.

    hook   f(args, rollout_id, buffer, n): removes groups from the list `buffer` and returns them. `args` has
           `serving_version`, the weights that engines should serve, and `staleness`, by group index; each sample has
           `oldest_version`
    Raises HookFailed where it raises, or returns what was not in the buffer.
    """
    window = None if policy["stale"] == StalePolicy.MASK else policy["max_staleness"]
    mode = StalenessMode(policy["staleness"])
    wanted = verbs.ready(run.id, MOST_GROUPS, mode, window, policy["order"], lock=False)

    def snapshot(connection: sa.Connection) -> tuple[int, dict[int, Any], dict[int, list[HookSample]]]:
        found = connection.execute(wanted).fetchall()
        if len(found) < n:
            return 0, {}, {}
        current = connection.execute(
            sa.select(run_table.c.current_version).where(run_table.c.id == run.id)
        ).scalar_one()
        return int(current), {r.id: r.lag for r in found}, _groups(connection, run, [r.id for r in found], step)

    current, lags, buffer = run.database.read(snapshot)
    if not buffer:
        return []
    staleness = {samples[0].group_index: lags[id] for id, samples in buffer.items() if samples}
    args = slimehooks.hook_args(run.settings, serving_version=current, staleness=staleness)
    ids = {samples[0].sample_id: id for id, samples in buffer.items() if samples}
    name, popped = _called("buffer filter", hook, args, step, list(buffer.values()), n)
    try:
        chosen = [ids[samples[0].sample_id] for samples in popped]
    except (TypeError, IndexError, KeyError, AttributeError):
        raise HookFailed(name, "it must return a list of groups of the buffer") from None
    if len(chosen) > n or len(set(chosen)) < len(chosen):
        raise HookFailed(name, f"it returned {amount(len(chosen), 'group')}, not {n} different ones")
    return chosen


def _called(what: str, hook: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """The hook's name, and what it returned. Raises HookFailed, from what it raised."""
    name = f"{what} {getattr(hook, '__qualname__', None) or type(hook).__qualname__}"
    try:
        return name, hook(*args)
    except SampleStoreError as error:
        raise HookFailed(name, str(error)) from error
    except Exception as error:  # user code: whatever it raises, the trainer must be told which hook it was
        raise HookFailed(name, codec.clean_text(f"it raised {type(error).__name__}: {error}", 1000)) from error


def show_all(run: Transactor, hook: AllSamples, batch_id: int) -> None:
    """Call f(args, groups, data_source) with all groups that ended since the batch before this one, and those that were
    stopped in the middle: the batch's own, dropped (by filters too), stale and aborted ones. `data_source` is the run.

    A trainer that died is given its batch again, and then the hook is called again: at least once. A batch that was
    given back, by a hook that raised too, is none before this one. Raises HookFailed where the hook raises."""

    def snapshot(connection: sa.Connection) -> tuple[int, dict[int, list[HookSample]]]:
        before = (
            sa.select(batch.c.created_at)
            .where(batch.c.run_id == run.id, batch.c.id < batch_id, batch.c.state != BatchState.RELEASED.value)
            .order_by(batch.c.id.desc())
            .limit(1)
        )
        since = connection.execute(before).scalar() or 0.0
        mine = sa.select(batch_group.c.group_id).where(batch_group.c.batch_id == batch_id)
        gone = sa.select(event.c.group_id).where(
            event.c.run_id == run.id,
            event.c.kind.in_([GroupState.DROPPED.value, GroupState.STALE.value]),
            event.c.at >= since,
            event.c.group_id.is_not(None),
        )
        stopped = (
            sa.select(sample.c.group_id)
            .join(group, group.c.id == sample.c.group_id)
            .where(group.c.run_id == run.id, group.c.state.in_([s.value for s in IN_WINDOW]), sample.c.n_aborts > 0)
        )
        every = sa.union(mine, gone, stopped).subquery()
        to_train = (
            sa.select(group.c.id)
            .where(group.c.id.in_(sa.select(every.c.group_id)), group.c.evaluation_id.is_(None))
            .order_by(group.c.number.desc())
            .limit(MOST_GROUPS)
        )
        ids = sorted(connection.execute(to_train).scalars())
        current = sa.select(run_table.c.current_version).where(run_table.c.id == run.id)
        step = connection.execute(sa.select(batch.c.step).where(batch.c.id == batch_id)).scalar_one()
        return int(connection.execute(current).scalar_one()), _groups(connection, run, ids, step)

    current, groups = run.database.read(snapshot)
    args = slimehooks.hook_args(run.settings, serving_version=current)
    _called("all-samples hook", hook, args, list(groups.values()), run)


def _generated_for(connection: sa.Connection, run: Transactor, step: int) -> dict[int, int]:
    """The step that each weight version generated for first: the one after the step that made it, or made the nearest
    weights before it that name one. Weights that no step made generated for the run's first step, wherever that
    counts from (slime counts from 0, others from 1): the lowest that a batch or a version names.

    step   of the batch that is being made: the first one where there was none before
    """
    versions = connection.execute(
        sa.select(version.c.version, version.c.step, version.c.parent)
        .where(version.c.run_id == run.id)
        .order_by(version.c.version)
    ).fetchall()
    lowest = connection.execute(sa.select(sa.func.min(batch.c.step)).where(batch.c.run_id == run.id)).scalar()
    first = min(s for s in (step, lowest, *(row.step for row in versions)) if s is not None)
    found: dict[int, int] = {}
    for row in versions:  # a parent has a lower number
        found[row.version] = found.get(row.parent, first) if row.step is None else row.step + 1
    return found


def _decoder(run: Transactor) -> Callable[[Ids], str]:
    """Makes text of tokens, with a tokenizer that is loaded when a hook asks for the first text."""
    known: list[Tokenizer] = []

    def decode(ids: Ids) -> str:
        if not known:
            given = _tokenizer_of(run)
            known.append(_loaded(os.fspath(given)) if isinstance(given, str | os.PathLike) else as_tokenizer(given))
        return known[0].decode(ids)

    return decode


@lru_cache(maxsize=2)  # a buffer filter is asked several times a second
def _loaded(path: str) -> Tokenizer:
    return load_tokenizer(path)


def _tokenizer_of(run: Transactor) -> Any:
    """The one that this process gave the run, or that of the newest weights, a model's folder. Raises
    SampleStoreError."""
    if run.tokenizer is not None:
        return run.tokenizer
    paths = sa.select(version.c.path).where(version.c.run_id == run.id, version.c.path.is_not(None))
    newest = paths.order_by(version.c.version.desc()).limit(1)
    path = run.database.read(lambda c: c.execute(newest).scalar())
    if path is not None and (Path(path) / "tokenizer.json").is_file():
        return path
    raise SampleStoreError("it asks for sample.response, and no tokenizer is known. Say run.tokenizer = MODEL_FOLDER")


def _groups(connection: sa.Connection, run: Transactor, ids: Sequence[int], step: int) -> dict[int, list[HookSample]]:
    """These groups with their samples, in this order. Forks are as a batch delivers them (samplestore/forks.py): the
    shared tokens come first, in the response. Those that were emptied are left out."""
    made: dict[int, list[HookSample]] = {id: [] for id in ids}
    steps, decode = _generated_for(connection, run, step), _decoder(run)
    for start in range(0, len(ids), PART):
        part = list(ids[start : start + PART])
        parts: dict[int, list[Any]] = defaultdict(list)
        for piece in connection.execute(
            sa.select(segment.c.sample_id, segment.c.version_min, segment.c.loss, segment.c.payload)
            .join(sample, (sample.c.id == segment.c.sample_id) & (sample.c.incarnation == segment.c.incarnation))
            .where(sample.c.group_id.in_(part))
            .order_by(segment.c.sample_id, segment.c.seq)
        ):
            parts[piece.sample_id].append(piece)
        of_part = connection.execute(
            sa.select(
                sample, group.c.number, prompt.c.prompt, prompt.c.label, prompt.c.metadata.label("meta"),
                prompt.c.prompt_ids,
            )
            .join(group, group.c.id == sample.c.group_id)
            .join(prompt, prompt.c.id == group.c.prompt_id)
            .where(sample.c.group_id.in_(part))
            .order_by(sample.c.group_id, sample.c.index)
        ).fetchall()  # fmt: skip
        roots = {row.id: row._mapping["index"] for row in of_part}
        runs = {id: responses.of(parts[id], missing=np.nan) for id in roots}
        for row in of_part:
            prompt_ids, response = codec.ids_from(row.prompt_ids), runs[row.id]
            if row.parent_id is not None:
                if row.parent_upto is None and not response:
                    continue  # nothing is there, not even its prompt
                own_prompt = 0 if row.parent_upto is not None else response[0].size
                prompt_ids, response = forks.delivered(row, prompt_ids, runs, own_prompt)
            place = row.number * run.settings.samples_per_prompt + roots[row.parent_id or row.id]
            made[row.group_id].append(_sample(row, prompt_ids, response, place, steps, decode))
    return made


def _sample(
    row: Any, prompt_ids: Ids, runs: responses.Runs, index: int, steps: dict[int, int], decode: Callable[[Ids], str]
) -> HookSample:
    metadata = dict(codec.own(row.meta or {}))
    if row.n_aborts and runs and runs[0].version in steps:  # unknown weights generated for nobody knows which step
        metadata.setdefault("start_rollout_id", steps[runs[0].version])
    return HookSample(
        group_index=row.number, index=index, prompt=codec.own(row.prompt),
        tokens=np.concatenate([prompt_ids, responses.ids(runs)]), response_length=responses.length(runs),
        label=codec.own(row.label), reward=row.reward, status=SlimeStatus(row.status), metadata=metadata,
        runs=runs, decode=decode,
        weight_versions=list(dict.fromkeys(str(r.version) for r in runs if r.version >= 0)),
        oldest_version=row.oldest_version, sample_id=row.id, remove_sample=row.removed is not None,
    )  # fmt: skip
