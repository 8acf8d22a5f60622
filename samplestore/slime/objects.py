"""Samples and outputs as slime's own classes where slime (or Miles, which has the same) is running, else stand-ins."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

import sqlalchemy as sa

from samplestore.arrays import TEACHER
from samplestore.batches import Batch
from samplestore.errors import SampleStoreError
from samplestore.models import PromptRow, SampleGroup
from samplestore.portable import slime_samples
from samplestore.portable.samples import PortableSample
from samplestore.run import Run
from samplestore.runsettings import TEACHER_STAGE
from samplestore.slimehooks import SlimeStatus
from samplestore.tensors import BatchSample
from samplestore.tokenizers import Tokenizer, as_tokenizer
from samplestore.verbs.tx import in_parts
from samplestore.workers.slime_types import SlimeSample

log = logging.getLogger("samplestore.slime")

FRAMEWORKS = ("slime", "miles")
PORTABLE_ID = "samplestore_id"  # an attribute of each sample: run_uuid/group/sample
group, prompt = SampleGroup.__table__, PromptRow.__table__


class PlainSample(SlimeSample):
    """slime's Sample by its field names, where slime is not there. Keys that it does not know become attributes."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PlainSample:
        made = cls(**{k: v for k, v in values.items() if k in cls.__dataclass_fields__})
        for key, value in values.items():
            setattr(made, key, value)
        made.status = SlimeStatus(values["status"])
        return made

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "status": self.status.value}


@dataclass
class TrainOutput:
    """slime's RolloutFnTrainOutput, where slime is not there."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class EvalOutput:
    """slime's RolloutFnEvalOutput, where slime is not there."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def of_framework(module: str, name: str) -> Any:
    """A class of the framework that runs in this process; None where none does. Never imported for its own sake: a
    package called slime may be something else."""
    for framework in FRAMEWORKS:
        if f"{framework}.utils.types" in sys.modules:
            return getattr(importlib.import_module(f"{framework}.{module}"), name)
    return None


def sample_of(args: Any, values: dict[str, Any], key: str | None = None) -> Any:
    """A Sample of Sample.to_dict() values. slime looks its reward up under --reward-key (or `key`), where there is
    one."""
    kind, key = of_framework("utils.types", "Sample"), key or getattr(args, "reward_key", None)
    if key is not None and values["reward"] is not None:
        values = {**values, "reward": {key: values["reward"]}}
    return (PlainSample if kind is None else kind).from_dict(values)


def status_of(sample: Any) -> str:
    """Also of slime's enum, whose members are not text."""
    return str(getattr(sample.status, "value", sample.status))


def train_output(groups: list[list[Any]], metrics: dict[str, Any]) -> Any:
    kind = of_framework("rollout.base_types", "RolloutFnTrainOutput")
    return (kind or TrainOutput)(samples=groups, metrics=metrics)


def eval_output(data: dict[str, dict[str, Any]], metrics: dict[str, Any]) -> Any:
    kind = of_framework("rollout.base_types", "RolloutFnEvalOutput")
    return (kind or EvalOutput)(data=data, metrics=metrics)


@lru_cache(maxsize=4)
def tokenizer_at(folder: str) -> Tokenizer | None:
    """slime's tokenizer (--hf-checkpoint), to fill `response`; None where it can't be had, which is told once."""
    try:
        made = as_tokenizer(folder)
        made.decode([])
        return made
    except SampleStoreError as error:
        log.warning("responses stay without text: %s", error)
        return None


def tokenizer_of(args: Any) -> Tokenizer | None:
    folder = getattr(args, "hf_checkpoint", None)
    return tokenizer_at(str(folder)) if folder else None


def groups_of(run: Run, batch: Batch, args: Any) -> list[list[Any]]:
    """The batch as slime's samples, a list for each group.

    A sample whose reward could not be read has the mean of its group and loss mask 0: it moves nothing.
    """
    prompts = _prompts(run, [view.group_id for view in batch.groups])
    tokenizer = tokenizer_of(args)
    experts = bool(getattr(args, "use_rollout_routing_replay", False))
    made = []
    for view in batch.groups:
        places = {s.sample_id: s.index for s in view.samples}
        known = [s.reward for s in view.samples if s.reward is not None]
        neutral = fmean(known) if known else 0.0
        listed = []
        for one in view.samples:
            values = slime_samples.to_slime(portable(run, one, places, prompts[view.group_id]))
            values["reward"] = neutral if one.reward is None else one.reward
            values["response"] = "" if tokenizer is None else tokenizer.decode(one.response_ids)
            values[PORTABLE_ID] = f"{run.uuid}/{one.group_number}/{one.index}"
            values |= _named(run, one, experts)
            listed.append(sample_of(args, values))
        made.append(listed)
    return made


def portable(run: Run, one: BatchSample, places: dict[int, int], text: Any) -> PortableSample:
    """A sample of a batch outside of the store; its loss mask is the batch's, with the batch's policies in it.
    places: of the samples of its group, by id."""
    size = run.settings.samples_per_prompt
    origin = one.index if one.rollout_id is None else places.get(one.rollout_id, one.index)
    made = slime_samples.of_batch(one, prompt=text, size=size)
    return replace(made, rollout_id=one.group_number * size + origin)


def _prompts(run: Run, ids: Sequence[int]) -> dict[int, Any]:
    """The prompts' texts or messages, by group id."""
    found: dict[int, Any] = {}
    with run.database.reading() as connection:
        for part in in_parts(ids):
            rows = connection.execute(
                sa.select(group.c.id, prompt.c.prompt)
                .join(prompt, prompt.c.id == group.c.prompt_id)
                .where(group.c.id.in_(part))
            )
            found |= {row.id: row.prompt for row in rows}
    return found


def _named(run: Run, one: BatchSample, experts: bool) -> dict[str, Any]:
    """Arrays that slime has a field for, where every token has its row."""
    made: dict[str, Any] = {}
    if experts:
        rows, present = run.routed_experts(one.sample_id)
        if len(rows) and bool(present.all()):
            made["rollout_routed_experts"] = rows
    if TEACHER_STAGE in run.settings.stages:
        rows, present = run.array(one.sample_id, TEACHER)
        if len(rows) and bool(present.all()):
            made["teacher_log_probs"] = rows.tolist()
    return made
