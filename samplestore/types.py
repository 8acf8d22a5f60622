"""Small types that cross the store's boundary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from samplestore.errors import InvalidSetting
from samplestore.words import amount, which

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

UNKNOWN_VERSION = -1  # the ledger's key for tokens whose weight version nobody told us


@dataclass(slots=True)
class Claim:
    """A sample that a worker owns at `attempt`. `seq` and `n_tokens` follow its acknowledged appends.

    prompt_ids    int32 [n]
    response_ids  int32 [m], what is already stored of this incarnation (resume from here)
    sampling, max_new_tokens  of an evaluation: over those of run and worker
    images        digests of the prompt's images; run.images gives their bytes
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
    sampling: dict[str, Any] | None = None
    max_new_tokens: int | None = None
    images: tuple[str, ...] = ()

    @property
    def resumable(self) -> bool:
        return self.n_tokens > 0

    def budget(self, max_new_tokens: int) -> int:
        """Tokens that may still be generated: counted from stored tokens, never from text."""
        return max(0, max_new_tokens - self.n_tokens)


@dataclass(frozen=True, slots=True)
class Member:
    """A sample of a group that a worker has a stage of. response_ids int32 [n]; reward: so far, None without one.
    prompt_ids int32 [m]: what came before them; a fork's also has the tokens that it shares, or is its own prompt.
    root: index of the sample that it was forked from, its own where it was not."""

    sample_id: int
    index: int
    root: int
    incarnation: int
    status: str
    reward: float | None
    response_ids: Ids
    prompt_ids: Ids


@dataclass(frozen=True, slots=True)
class StageClaim:
    """Work on a finished sample (a reward, ...), or on a whole group, that a worker owns at `attempt`.

    sample_id    0 where the work is on the group
    members      of a group: its samples that have tokens and did not fail, by index
    images       of a sample: digests of its prompt's images; run.images gives their bytes
    incarnation  of the sample; of a group, the sum of its samples'
    """

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
    incarnation: int = 0
    members: tuple[Member, ...] = ()
    images: tuple[str, ...] = ()


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


Given = TypeVar("Given")
SOURCES: dict[type, tuple[str, str]] = {
    Claim: ("claim", "a sample's, one of the list that this gives: run.claim(worker, limit)"),
    StageClaim: ("claim", "a stage's, one of the list that this gives: run.claim_stages(worker, limit)"),
    RequestInfo: ("info", "samplestore.types.RequestInfo(rid, ...)"),
}


def expect(value: Any, kind: type[Given]) -> Given:
    """`value` if it is what a verb works on. Raises InvalidSetting."""
    if isinstance(value, kind):
        return value
    name, source = SOURCES[kind]
    plain = value is None or isinstance(value, int | float | str)
    raise InvalidSetting(name, value if plain else type(value).__name__, source)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine told of itself when it was looked at. None is 'not told'.

    counter          tokens that it has generated since it started, as it counts them
    context_length   tokens
    release          version of SGLang
    running, queued  requests
    """

    counter: int | None = None
    context_length: int | None = None
    release: str | None = None
    running: int | None = None
    queued: int | None = None


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
        return f"{self.ready_in_window} of {amount(self.needed, 'group')} {self.are} ready inside the window: {told}"

    @property
    def are(self) -> str:
        return which(self.ready_in_window, "is", "are")

    def as_json(self) -> dict[str, Any]:
        return {
            "needed": self.needed,
            "ready_in_window": self.ready_in_window,
            "reasons": [{"code": c, "text": t} for c, t in self.reasons],
        }
