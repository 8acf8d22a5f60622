"""Small types that cross the store's boundary."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from samplestore import states
from samplestore.errors import InvalidSetting

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

Choice = TypeVar("Choice", bound=StrEnum)

UNKNOWN_VERSION = -1  # the ledger's key for tokens whose weight version nobody told us


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is about. Stored once; `store.run(name)` with other values is an error.

    samples_per_prompt   samples of a group
    groups_per_step      groups that one trainer step takes; with max_staleness it sets how much is in flight
    max_staleness        versions that a group may lie behind when it is leased
    stale                "skip" or "mask": what happens to groups beyond the window
    epochs               passes over the prompts; None repeats for ever
    seed                 of the order in which prompts are served
    stages               work done on every finished sample before its group is ready, e.g. ("reward",)
    max_attempts         failures of a sample or stage before it is given up
    on_failed            "drop" the group of a failed sample, or deliver it "short"
    group_deadline_s     seconds after which an open group counts as a straggler; None never
    on_straggler         "wait", "drop" or "short"
    progress_deadline_s  seconds without an append after which a sample is taken from its owner
    heartbeat_ttl_s      seconds after which a silent worker is dead
    max_new_tokens       response budget of a sample
    sampling             engine sampling parameters, as SGLang names them
    weight_update        "abort", "keep" or "drain": what happens to samples in flight
    """

    samples_per_prompt: int = 8
    groups_per_step: int = 8
    max_staleness: int = 1
    stale: str = "skip"
    epochs: int | None = None
    seed: int = 0
    stages: tuple[str, ...] = ()
    max_attempts: int = 3
    on_failed: str = "drop"
    group_deadline_s: float | None = None
    on_straggler: str = "wait"
    progress_deadline_s: float = 600.0
    heartbeat_ttl_s: float = 30.0
    max_new_tokens: int = 1024
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    weight_update: str = "abort"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    @classmethod
    def parse(cls, values: dict[str, Any]) -> RunSettings:
        """Checked settings from plain values (JSON or keyword arguments). Raises InvalidSetting."""
        for name in values:
            if name not in cls.names():
                raise InvalidSetting(name, values[name], "one of: " + ", ".join(cls.names()))
        named = values.get("stages", ())
        _check("stages", named, 'a list of names, e.g. ["reward"]', lambda v: isinstance(v, list | tuple))
        made = cls(**{**values, "stages": tuple(named)})
        for name in ("samples_per_prompt", "groups_per_step", "max_attempts", "max_new_tokens"):
            whole(name, getattr(made, name), 1)
        whole("max_staleness", made.max_staleness)
        _check("seed", made.seed, "a whole number", lambda v: _whole(v) and abs(v) < 2**63)
        if made.epochs is not None:
            whole("epochs", made.epochs, 1)
        for name, choices in (
            ("stale", states.StalePolicy),
            ("on_failed", states.FailedPolicy),
            ("on_straggler", states.StragglerPolicy),
            ("weight_update", states.WeightUpdateMode),
        ):
            _check(name, getattr(made, name), " | ".join(choices), lambda v, c=choices: v in list(c))
        for name in ("progress_deadline_s", "heartbeat_ttl_s"):
            _check(name, getattr(made, name), "seconds above 0", lambda v: _number(v) and 0 < v < 1e9)
        _check(
            "group_deadline_s",
            made.group_deadline_s,
            "seconds above 0, or None",
            lambda v: v is None or (_number(v) and 0 < v < 1e9),
        )
        _check("sampling", made.sampling, "a JSON object", lambda v: isinstance(v, dict) and _plain_json(v))
        for stage in made.stages:
            plain_text("stages", stage, 100)
        _check("stages", list(made.stages), "names that differ", lambda v: len(set(v)) == len(v))
        return made

    def as_json(self) -> dict[str, Any]:
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}

    @property
    def window_groups(self) -> int:
        """Groups that may be open, scoring or ready at once: (max_staleness + 1) x groups_per_step, AReaL's rule."""
        return (self.max_staleness + 1) * self.groups_per_step


MAX_WHOLE = 2**31 - 1  # larger counts are typing errors; both databases could hold them, arithmetic on them not


def whole(name: str, value: Any, low: int = 0) -> int:
    """`value` if it is a whole number from `low` to MAX_WHOLE. Raises InvalidSetting."""
    _check(name, value, f"a whole number from {low} to {MAX_WHOLE}", lambda v: _whole(v) and low <= v <= MAX_WHOLE)
    return int(value)


def choice(name: str, value: Any, choices: type[Choice]) -> Choice:
    """The member of `choices` that `value` names. Raises InvalidSetting."""
    _check(name, value, " | ".join(choices), lambda v: isinstance(v, str) and v in list(choices))
    return choices(value)


def plain_text(name: str, value: Any, limit: int = 4000) -> str:
    """`value` if it is text that both databases hold. Raises InvalidSetting."""
    fits = f"text of 1 to {limit} characters without NUL or lone surrogates"
    _check(name, value, fits, lambda v: isinstance(v, str) and 0 < len(v) <= limit and _storable(v))
    return str(value)


def _storable(value: str) -> bool:
    return "\x00" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _plain_json(value: Any) -> bool:
    """Whether `value` comes back from JSON as it went in."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _check(name: str, value: Any, allowed: str, ok: Any) -> None:
    if not ok(value):
        raise InvalidSetting(name, value, allowed)


@dataclass(slots=True)
class Claim:
    """A sample that a worker owns at `attempt`. `seq` and `n_tokens` follow its acknowledged appends.

    prompt_ids    int32 [n]
    response_ids  int32 [m], what is already stored of this incarnation (resume from here)
    """

    run_id: int
    sample_id: int
    group_id: int
    group_number: int
    index: int
    owner: int
    attempt: int
    incarnation: int
    seq: int
    n_tokens: int
    status: str
    failures: int
    prompt_ids: Ids
    response_ids: Ids
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    finish_reason: str | None = None

    @property
    def resumable(self) -> bool:
        return self.n_tokens > 0

    def budget(self, max_new_tokens: int) -> int:
        """Tokens that may still be generated: counted from stored tokens, never from text."""
        return max(0, max_new_tokens - self.n_tokens)


@dataclass(frozen=True, slots=True)
class StageClaim:
    """Work on a finished sample (a reward, ...) that a worker owns at `attempt`."""

    run_id: int
    stage_id: int
    name: str
    sample_id: int
    group_id: int
    group_number: int
    index: int
    owner: int
    attempt: int
    failures: int
    status: str
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    prompt_ids: Ids
    response_ids: Ids


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One call to an engine. Tokens are counts; seconds are wall-clock. None is 'not told'."""

    rid: str
    engine: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    retractions: int | None = None
    temperature: float | None = None
    queue_s: float | None = None
    e2e_s: float | None = None
    finish_reason: str | None = None
    lost_reason: str | None = None
    spec: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WeightVersion:
    version: int
    label: str
    path: str | None
    step: int | None
    timeline: int
    parent: int | None


@dataclass(frozen=True, slots=True)
class Added:
    """What add_prompts did."""

    added: int
    existing: int
    invalid: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a heartbeat learns."""

    run_state: str
    current_version: int
    abort_seq: int
    abort_reason: str | None
    revision: str
    late: bool = False  # the beat before had expired: whoever was away must not judge others at once


@dataclass(frozen=True, slots=True)
class Reaped:
    """What a reap freed."""

    workers: list[int]
    samples: int
    stages: int
    batches: int
    engines: int
    stragglers: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise that the database breaks."""

    code: str
    message: str
    count: int
    examples: list[Any]

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "count": self.count, "examples": self.examples}


@dataclass(frozen=True, slots=True)
class Why:
    """Why no batch is ready: the reasons, most useful first."""

    needed: int
    ready_in_window: int
    reasons: list[tuple[str, str]]

    def __str__(self) -> str:
        told = "; ".join(text for _, text in self.reasons) or "nothing stands in the way"
        return f"{self.ready_in_window} of {self.needed} groups are ready inside the window: {told}"

    def as_json(self) -> dict[str, Any]:
        return {
            "needed": self.needed,
            "ready_in_window": self.ready_in_window,
            "reasons": [{"code": c, "text": t} for c, t in self.reasons],
        }
