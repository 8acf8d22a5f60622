"""A sample outside of any database: what an export writes and an import reads, whatever the format.

COLUMNS is the schema, once: names, order and kinds of a row. A row is a plain dict; to_row makes it, and
rows.from_row the sample of it again, without loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.arrays import Prepared
from samplestore.states import CLAIMABLE, TERMINAL, GroupState, SampleStatus, SegmentKind, StageStatus
from samplestore.types import UNKNOWN_VERSION, Floats, Ids

FORMAT = 1  # of rows; raised when an older reader would misread them
STATUSES = (*CLAIMABLE, *TERMINAL)

# kind: str, int, float; json (any JSON value, text in Parquet); ids, mask, floats (one number a token); a list of
# strings; and lists of the objects below.
COLUMNS: dict[str, str] = {
    "id": "str", "run_uuid": "str", "run": "str", "group": "int", "sample": "int", "incarnation": "int",
    "dataset": "str", "prompt": "str", "messages": "json", "prompt_ids": "ids", "label": "json", "metadata": "json",
    "tools": "json", "chat_template_kwargs": "json", "images": "strings",
    "response": "str", "response_ids": "ids", "rollout_log_probs": "floats", "loss_mask": "mask",
    "weight_versions": "ids", "version_min": "int", "version_max": "int",
    "status": "str", "finish_reason": "str", "reward": "float", "rewards": "rewards", "removed": "str",
    "n_aborts": "int", "n_resumes": "int",
    "group_state": "str", "group_reason": "str", "group_size": "int", "epoch": "int", "timeline": "int",
    "consumed_step": "int", "batch_position": "int", "rollout_id": "int", "parent": "int", "parent_upto": "int",
    "created_at": "float", "finished_at": "float", "segments": "segments", "arrays": "arrays",
}  # fmt: skip
STRUCTS: dict[str, dict[str, str]] = {
    "segments": {
        "seq": "int", "kind": "str", "loss": "int", "n_tokens": "int", "version_min": "int", "version_max": "int",
        "log_probs": "int", "attempt": "int", "request": "str", "finish_reason": "str",
    },
    "rewards": {"name": "str", "status": "str", "outcome": "str", "value": "float", "details": "json"},
    "arrays": {"seq": "int", "name": "str", "dtype": "str", "shape": "ints", "data": "bytes"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment without its tokens. log_probs: whether they have some; request: of the engine that made them."""

    n_tokens: int
    kind: str = SegmentKind.GENERATED.value
    loss: int = 1
    version_min: int | None = None
    version_max: int | None = None
    log_probs: bool = True
    attempt: int = 0
    request: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """What a stage gave a sample, by its name."""

    name: str
    status: str = StageStatus.DONE.value
    outcome: str | None = None
    value: float | None = None
    details: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class PortableSample:
    """One trajectory of n response tokens.

    run_uuid, group, sample, incarnation   its portable id; run_uuid None: it comes from no store
    prompt             text ("" where only ids are known) or messages
    prompt_ids         int32 [p]
    response           text, where a tokenizer was there to make it
    response_ids       int32 [n]; of a fork the tokens that it shares with its parent come first
    rollout_log_probs  float32 [n], 0 where a token has none; None where none has
    pieces             segments of the tokens that are its own, oldest first; those of a fork with a prompt of its own
                       begin with that prompt
    parent             the sample of the group that it was forked from; parent_upto: how many tokens it shares, None
                       where it has a prompt of its own
    shared_versions    int32 [parent_upto], the versions of the tokens that it shares
    step               the step whose committed batch has it; position within that batch
    images             data URLs
    named              arrays, each beside the piece of that place
    """

    run_uuid: str | None = None
    run: str = ""
    group: int = 0
    sample: int = 0
    incarnation: int = 0
    dataset: str = "default"
    prompt: str | list[dict[str, Any]] = ""
    prompt_ids: Ids
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] | None = None
    images: tuple[str, ...] = ()
    response: str | None = None
    response_ids: Ids
    rollout_log_probs: Floats | None = None
    pieces: tuple[Piece, ...] = ()
    status: str = SampleStatus.COMPLETED.value
    finish_reason: str | None = None
    reward: float | None = None
    rewards: tuple[Reward, ...] = ()
    removed: str | None = None
    n_aborts: int = 0
    n_resumes: int = 0
    group_state: str = GroupState.READY.value
    group_reason: str | None = None
    group_size: int = 1
    epoch: int = 0
    timeline: int = 0
    step: int | None = None
    position: int | None = None
    rollout_id: int | None = None
    parent: int | None = None
    parent_upto: int | None = None
    shared_versions: Ids | None = None
    created_at: float | None = None
    finished_at: float | None = None
    named: tuple[tuple[int, Prepared], ...] = ()

    @property
    def id(self) -> str | None:
        """run_uuid/group/sample/incarnation"""
        return None if self.run_uuid is None else f"{self.run_uuid}/{self.group}/{self.sample}/{self.incarnation}"

    @property
    def own_prompt(self) -> bool:
        """A fork whose first piece is its prompt."""
        return self.parent is not None and self.parent_upto is None

    @property
    def own_ids(self) -> Ids:
        """int32: the tokens of its pieces."""
        if self.own_prompt and self.pieces:
            return np.concatenate([self.prompt_ids, self.response_ids])
        return self.response_ids[self.parent_upto or 0 :]

    @property
    def own_log_probs(self) -> Floats:
        """float32, one for each of own_ids, 0 where it has none."""
        n = self.response_ids.size
        probs = np.zeros(n, np.float32) if self.rollout_log_probs is None else self.rollout_log_probs
        if self.own_prompt and self.pieces:
            return np.concatenate([np.zeros(self.prompt_ids.size, np.float32), probs])
        return probs[self.parent_upto or 0 :]

    def _by_token(self, values: Sequence[int]) -> npt.NDArray[np.int32]:
        """What each piece says, by its tokens; those of a prompt of its own are left out."""
        sizes = [p.n_tokens for p in self.pieces]
        own = np.repeat(np.asarray(values, np.int32), sizes) if sizes else np.empty(0, np.int32)
        return own[self.prompt_ids.size :] if self.own_prompt and sizes else own

    @property
    def loss_mask(self) -> npt.NDArray[np.int32]:
        """[n], 0 or 1; 0 on shared tokens, which are trained on once, in the parent, and in samples that a filter
        removed from the loss."""
        own = self._by_token([0 if self.removed is not None else p.loss for p in self.pieces])
        return np.concatenate([np.zeros(self.parent_upto or 0, np.int32), own])

    @property
    def weight_versions(self) -> npt.NDArray[np.int32]:
        """[n], the version that made each token; -1 where that is not known, or none did."""
        own = self._by_token([UNKNOWN_VERSION if p.version_min is None else p.version_min for p in self.pieces])
        shared = self.shared_versions
        if shared is None:
            shared = np.full(self.parent_upto or 0, UNKNOWN_VERSION, np.int32)
        return np.concatenate([shared, own])


def to_row(sample: PortableSample) -> dict[str, Any]:
    """All COLUMNS of a sample; numpy arrays for tokens, bytes for array data."""
    versions = [p for p in sample.pieces if p.version_min is not None]
    text = isinstance(sample.prompt, str)
    return {
        "id": sample.id, "run_uuid": sample.run_uuid, "run": sample.run, "group": sample.group,
        "sample": sample.sample, "incarnation": sample.incarnation, "dataset": sample.dataset,
        "prompt": sample.prompt if text else None, "messages": None if text else sample.prompt,
        "prompt_ids": sample.prompt_ids, "label": sample.label, "metadata": sample.metadata, "tools": sample.tools,
        "chat_template_kwargs": sample.template_args, "images": list(sample.images), "response": sample.response,
        "response_ids": sample.response_ids, "rollout_log_probs": sample.rollout_log_probs,
        "loss_mask": sample.loss_mask, "weight_versions": sample.weight_versions,
        "version_min": min((int(p.version_min or 0) for p in versions), default=None),
        "version_max": max((int(p.version_max or 0) for p in versions), default=None),
        "status": sample.status, "finish_reason": sample.finish_reason, "reward": sample.reward,
        "rewards": [{name: getattr(r, name) for name in STRUCTS["rewards"]} for r in sample.rewards],
        "removed": sample.removed, "n_aborts": sample.n_aborts, "n_resumes": sample.n_resumes,
        "group_state": sample.group_state, "group_reason": sample.group_reason,
        "group_size": sample.group_size, "epoch": sample.epoch, "timeline": sample.timeline,
        "consumed_step": sample.step, "batch_position": sample.position, "rollout_id": sample.rollout_id,
        "parent": sample.parent, "parent_upto": sample.parent_upto, "created_at": sample.created_at,
        "finished_at": sample.finished_at,
        "segments": [
            {"seq": seq, **{n: getattr(p, n) for n in STRUCTS["segments"] if n != "seq"}, "log_probs": int(p.log_probs)}
            for seq, p in enumerate(sample.pieces)
        ],
        "arrays": [
            {"seq": seq, "name": a.name, "dtype": a.dtype, "shape": list(a.shape), "data": a.data}
            for seq, a in sample.named
        ],
    }  # fmt: skip


assert {f.name for f in fields(Piece)} == STRUCTS["segments"].keys() - {"seq"}
