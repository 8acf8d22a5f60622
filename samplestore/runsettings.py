"""What a run is about: its settings, and which of them go together."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

from samplestore import filters, othernames, serving, states
from samplestore.arguments import one_of, plain_json, plain_number, plain_text, require, whole
from samplestore.errors import InvalidSetting

TEACHER_STAGE = "teacher"  # gives log-probs, not a number


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is about. Stored once; `store.run(name)` with other values is an error.

    samples_per_prompt   samples of a group
    groups_per_step      groups that one trainer step takes; with max_staleness it sets how much is in flight
    max_staleness        versions that a group may lie behind when it is leased
    staleness_mode       how a sample's staleness is counted: by its "oldest" token, its "newest", or their "mean"
    stale                groups beyond the window: "expire" (closed), "regenerate" (generated afresh), "mask"
                         (delivered, old tokens masked) or "skip" (left for a batch that takes older ones)
    epochs               passes over the prompts; None repeats for ever
    seed                 of the order in which prompts are served
    stages               work done on every finished sample before its group is ready, e.g. ("reward",)
    group_stages         work done on every group when all its samples are finished and their stages settled, one after
                         the other in this order, e.g. ("group_reward",)
    reward_weights       what a stage's value counts in the sum that is a sample's reward, e.g. {"format": 0.1}; 1 for
                         stages that are not named, 0 records a value without counting it
    array_url            folder for large named arrays (routed experts, ...), as files beside the database: a path, or a
                         URL of fsspec; None keeps all of them in the database. A path is stored as an absolute one
    array_folder         of a restored copy: its own folder under array_url, which `samplestore restore` names
    array_file_bytes     arrays of this many bytes and more become files, where there is an array_url
    max_attempts         failures of a sample or stage before it is given up
    max_deaths           workers that may die in a row while they hold a sample that has no token from them, before it
                         is given up: a prompt that crashes its worker would go on for ever
    on_failed            "drop" the group of a failed sample, or deliver it "short"
    group_deadline_s     seconds after which an open group counts as a straggler; None never
    on_straggler         "wait", "drop" or "short"
    sample_deadline_s    seconds that an attempt at a sample may take from its claim; then it counts as a failure
    progress_deadline_s  seconds without an append after which a sample is taken from its owner
    heartbeat_ttl_s      seconds after which a silent worker is dead
    max_new_tokens       response budget of a sample
    sampling             engine sampling parameters, as SGLang names them
    sampling_seed        sample i of a group asks its engine for the seed sampling_seed + i; None lets engines draw
    group_filters        drop whole groups when they are scored, see samplestore.filters; admission refills
    sample_filters       take single samples out of the loss, see samplestore.filters
    order                which ready groups a batch takes first: "fifo", "oldest" (tokens), or "sql:EXPRESSION", an
                         expression over the columns of sample_group, smallest first. It is run as it stands
    datasets             {NAME: {"weight": 1.0, "epochs": None, "priority": 0}}: serve only these, mixed by weight;
                         lower priorities are served first, up to their epochs (the run's where None). Empty: all
                         prompts in one order
    curriculum           a SELECT that gives ids of the prompts to serve next; it is told :run, :n (how many are
                         wanted), :served (groups so far) and :seed. It is run as it stands
    weight_update        "abort", "keep" or "drain": what happens to samples in flight
    abort_all            an engine that does not hear the abort of one request may be told to abort all it runs
    mode                 "async": generation never stops, the window says how far it runs ahead. "sync": a step's groups
                         are generated for the step. "partial": more are started, what is not needed is aborted when
                         the step has enough, and resumed in the next. A step is one version of the weights
    over_sampling_batch_size  mode partial: groups are started so many at a time; None is groups_per_step
    resume               false: a sample that was aborted starts again from its prompt; its tokens are superseded
    max_aborts           mode partial: a sample that was aborted so often runs to its end; None sets no limit
    mask_offpolicy       tokens from before a sample was resumed under other weights get loss mask 0 in batches
    max_inflight_samples, max_inflight_groups  of all workers together; None sets no limit
    max_samples_per_engine, max_groups_per_engine  of all workers together they are held to so many times the engines
                         that are live; a worker that sends to the engines itself also holds each engine to them
    """

    FLOW_LIMITS: ClassVar[tuple[str, ...]] = (
        "max_inflight_samples", "max_inflight_groups", "max_samples_per_engine", "max_groups_per_engine",
    )  # fmt: skip

    samples_per_prompt: int = 8
    groups_per_step: int = 8
    max_staleness: int = 1
    staleness_mode: str = "oldest"
    stale: str = "expire"
    epochs: int | None = None
    seed: int = 0
    stages: tuple[str, ...] = ()
    group_stages: tuple[str, ...] = ()
    reward_weights: dict[str, float] = field(default_factory=dict)
    array_url: str | None = None
    array_folder: str | None = None
    array_file_bytes: int = 65536
    max_attempts: int = 3
    max_deaths: int = 5
    on_failed: str = "drop"
    group_deadline_s: float | None = None
    on_straggler: str = "wait"
    sample_deadline_s: float | None = None
    progress_deadline_s: float = 600.0
    heartbeat_ttl_s: float = 30.0
    max_new_tokens: int = 1024
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    sampling_seed: int | None = None
    group_filters: tuple[str, ...] = ()
    sample_filters: tuple[str, ...] = ()
    order: str = "fifo"
    datasets: dict[str, Any] = field(default_factory=dict)
    curriculum: str | None = None
    weight_update: str = "abort"
    abort_all: bool = False
    mode: str = "async"
    over_sampling_batch_size: int | None = None
    resume: bool = True
    max_aborts: int | None = None
    mask_offpolicy: bool = False
    max_inflight_samples: int | None = None
    max_inflight_groups: int | None = None
    max_samples_per_engine: int | None = None
    max_groups_per_engine: int | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    @classmethod
    def parse(cls, values: dict[str, Any]) -> RunSettings:
        """Checked settings from plain values (JSON or keyword arguments). Raises InvalidSetting."""
        for name in values:
            if name not in cls.names():
                raise InvalidSetting(name, values[name], othernames.advice(name, cls.names(), othernames.RUN))
        values = {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}  # numpy's numbers
        lists = {name: values.get(name, ()) for name in ("stages", "group_stages", filters.GROUP, filters.SAMPLE)}
        for name, named in lists.items():
            require(name, named, 'a list of names, e.g. ["reward"]', lambda v: isinstance(v, list | tuple))
        made = cls(**{**values, **{name: tuple(named) for name, named in lists.items()}})
        for name in (filters.GROUP, filters.SAMPLE):
            filters.parse(name, getattr(made, name))
        serving.check(made.order, made.datasets, made.curriculum)
        if filters.STAGE in (*made.stages, *made.group_stages):
            raise InvalidSetting("stages", filters.STAGE, f"another name: it is the stage of {filters.GROUP}")
        for name in ("samples_per_prompt", "groups_per_step", "max_attempts", "max_deaths", "max_new_tokens"):
            whole(name, getattr(made, name), 1)
        whole("max_staleness", made.max_staleness)
        require("seed", made.seed, "a whole number", lambda v: _whole(v) and abs(v) < 2**63)
        if made.epochs is not None:
            whole("epochs", made.epochs, 1)
        for name, choices in (
            ("staleness_mode", states.StalenessMode),
            ("stale", states.StalePolicy),
            ("on_failed", states.FailedPolicy),
            ("on_straggler", states.StragglerPolicy),
            ("weight_update", states.WeightUpdateMode),
            ("mode", states.RolloutMode),
        ):
            one_of(name, getattr(made, name), choices)
        for name in ("abort_all", "resume", "mask_offpolicy"):
            require(name, getattr(made, name), "true or false", lambda v: isinstance(v, bool))
        for name in ("over_sampling_batch_size", "max_aborts", *cls.FLOW_LIMITS):
            if getattr(made, name) is not None:
                whole(name, getattr(made, name), 1)
        made.check_partial()
        for name in ("progress_deadline_s", "heartbeat_ttl_s"):
            require(name, getattr(made, name), "seconds above 0", lambda v: plain_number(v) and 0 < v < 1e9)
        for name in ("group_deadline_s", "sample_deadline_s"):
            limit = getattr(made, name)
            require(name, limit, "seconds above 0, or None", lambda v: v is None or (plain_number(v) and 0 < v < 1e9))
        if made.sampling_seed is not None:
            whole("sampling_seed", made.sampling_seed)
        plain_json("sampling", made.sampling)
        _check_stages(made)
        whole("array_file_bytes", made.array_file_bytes, 1)
        if made.array_url is not None:
            plain_text("array_url", made.array_url, 1000)
            made = replace(made, array_url=_absolute(made.array_url))
        require("array_folder", made.array_folder, "a name of up to 64 of a-z, 0-9, -, or None", _folder_name)
        return made

    def as_json(self) -> dict[str, Any]:
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}

    def check_partial(self) -> None:
        """Raises InvalidSetting where mode partial would abort samples only to throw their tokens away."""
        if self.mode == states.RolloutMode.PARTIAL and self.resume and self.stale != states.StalePolicy.MASK:
            allowed = "at least 1 in mode partial, where a resumed sample has tokens of older weights (or stale='mask')"
            require("max_staleness", self.max_staleness, allowed, lambda v: v >= 1)

    @property
    def started_at_once(self) -> int:
        """Groups that mode partial starts at a time: slime's over_sampling_batch_size."""
        return self.over_sampling_batch_size or self.groups_per_step

    @property
    def work_on_groups(self) -> tuple[str, ...]:
        """The stages of a group, in their order: filters come last, when its rewards are there."""
        return (*self.group_stages, *((filters.STAGE,) if self.group_filters or self.sample_filters else ()))

    @property
    def gives_rewards(self) -> bool:
        """Whether some stage gives samples a reward that counts."""
        scored = {*self.stages, *self.group_stages} - {TEACHER_STAGE}
        return any(self.reward_weights.get(name, 1.0) for name in scored)

    @property
    def window_groups(self) -> int:
        """Groups that may be open, scoring or ready at once. async: (max_staleness + 1) x groups_per_step, AReaL's
        rule; sync: those of a step; partial: those of a step, in whole over_sampling_batch_sizes."""
        if self.mode == states.RolloutMode.ASYNC:
            return (self.max_staleness + 1) * self.groups_per_step
        if self.mode == states.RolloutMode.SYNC:
            return self.groups_per_step
        return -(-self.groups_per_step // self.started_at_once) * self.started_at_once


def _check_stages(made: RunSettings) -> None:
    """Raises InvalidSetting."""
    for stage in made.stages:
        plain_text("stages", stage, 100)
    for stage in made.group_stages:
        plain_text("group_stages", stage, 100)
    require("stages", list(made.stages), "names that differ", lambda v: len(set(v)) == len(v))
    both = [*made.stages, *made.group_stages]
    require("group_stages", list(made.group_stages), "names that differ", lambda _: len(set(both)) == len(both))
    require(
        "reward_weights", made.reward_weights, f"finite numbers by the name of a stage (of {both})",
        lambda v: isinstance(v, dict) and all(k in both and plain_number(w) and abs(w) < 1e9 for k, w in v.items()),
    )  # fmt: skip


def _absolute(url: str) -> str:
    """A folder, whoever reads the run and wherever that is started: a relative path would mean another one there."""
    path = url.removeprefix("file://")
    return url if "://" in path else url[: len(url) - len(path)] + os.path.abspath(path)


def _folder_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and re.fullmatch(r"[a-z0-9-]{1,64}", value) is not None)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
