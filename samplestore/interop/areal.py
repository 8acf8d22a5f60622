"""AReaL: trajectories as its workflows return them, and back to segments.

Names, dtypes and padding are those of AReaL 1.0.4 (RolloutWorkflow.arun_episode).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore import codec
from samplestore.arguments import MAX_WHOLE
from samplestore.batch import Batch
from samplestore.errors import InvalidSegment
from samplestore.interop import parts
from samplestore.portable.samples import Piece, PortableSample
from samplestore.states import SampleStatus, SegmentKind
from samplestore.tensors import BatchSample, as_torch

UNKNOWN = -1
KEYS = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards")


def trajectories(batch: Batch, *, torch: bool = True) -> list[dict[str, Any]]:
    """One trajectory dict for each group of the batch, in its order: see `trajectory`."""
    return [trajectory(view.samples, torch=torch) for view in batch.groups]


def trajectory(samples: Sequence[BatchSample], *, torch: bool = True) -> dict[str, Any]:
    """B samples, L tokens of the longest (prompt and response), padded on the right.

    | | | |
    | --- | --- | --- |
    | input_ids | int32 [B, L] | 0 where padded |
    | loss_mask | int32 [B, L] | 1 on tokens that are trained |
    | logprobs | float32 [B, L] | 0 on prompts, and where there is none |
    | versions | int32 [B, L] | -1 on prompts and on tokens that no weights made |
    | attention_mask | bool [B, L] | |
    | rewards | float32 [B] | see parts.rewards_of |

    torch   false: numpy arrays. Raises MissingExtra
    """
    longest = max((one.prompt_ids.size + one.response_ids.size for one in samples), default=0)
    shape = (len(samples), longest)
    made: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "versions": np.zeros(shape, np.int32),
        "attention_mask": np.zeros(shape, np.bool_),
        "rewards": np.array(parts.rewards_of(samples), np.float32),
    }
    for i, one in enumerate(samples):
        p, end = one.prompt_ids.size, one.prompt_ids.size + one.response_ids.size
        made["input_ids"][i, :end] = parts.sequence(one)
        made["loss_mask"][i, p:end] = one.loss_mask
        made["logprobs"][i, p:end] = one.logprobs
        made["versions"][i, :p], made["versions"][i, p:end] = UNKNOWN, one.versions
        made["attention_mask"][i, :end] = True
    return as_torch(made, None) if torch else made


def samples_of(given: Mapping[str, Any], *, group: int = 0, label: Any = None) -> list[PortableSample]:
    """The samples of a trajectory dict, each with its segments: neighbours of one loss mask and one version are one
    (versions are told per token, so nothing is lost). The prompt ends where the first token was generated.

    Raises InvalidSegment where arrays disagree, or a row has no generated token.
    """
    arrays = {name: parts.array_of(given, name) for name in KEYS}
    shape = arrays["input_ids"].shape
    for name in KEYS[:-1]:
        if arrays[name].shape != shape or len(shape) != 2:
            raise InvalidSegment(f"{name} has the shape {list(arrays[name].shape)}, expected [B, L]", field=name)
    if arrays["rewards"].shape != shape[:1]:
        told = list(arrays["rewards"].shape)
        raise InvalidSegment(f"rewards has the shape {told}, expected [{shape[0]}]", field="rewards")
    return [_sample(arrays, row, group, shape[0], label) for row in range(shape[0])]


def _sample(arrays: Mapping[str, npt.NDArray[Any]], row: int, group: int, size: int, label: Any) -> PortableSample:
    there = arrays["attention_mask"][row].astype(bool)
    end = int(there.sum())
    if not there[:end].all():
        raise InvalidSegment(f"row {row} is not padded on the right", field="attention_mask")
    ids = codec.token_ids(arrays["input_ids"][row, :end].tolist(), "input_ids")
    loss, versions = arrays["loss_mask"][row, :end], arrays["versions"][row, :end]
    if np.any((loss != 0) & (loss != 1)):
        raise InvalidSegment(f"loss_mask of row {row} must be 0 or 1", field="loss_mask")
    if np.any((versions < UNKNOWN) | (versions > MAX_WHOLE) | (versions % 1 != 0)):
        raise InvalidSegment(f"versions of row {row} must be whole numbers from -1", field="versions")
    loss, versions = loss.astype(np.int32), versions.astype(np.int32)
    made = (loss == 1) | (versions >= 0)
    if not made.any():
        raise InvalidSegment(f"row {row} has no generated token", field="loss_mask")
    start = int(np.argmax(made))
    probs = codec.finite_logprobs(arrays["logprobs"][row, start:end].tolist(), end - start, required=True)
    keys = versions[start:] * 2 + loss[start:]
    pieces = tuple(_piece(loss[start + a], versions[start + a], b - a) for a, b in codec.runs_of(keys))
    return PortableSample(
        group=group, sample=row, group_size=size, prompt_ids=ids[:start], response_ids=ids[start:], label=label,
        rollout_log_probs=probs, pieces=pieces, status=SampleStatus.COMPLETED.value,
        reward=parts.reward_of(arrays["rewards"][row], "rewards"),
    )  # fmt: skip


def _piece(loss: Any, version: Any, n: int) -> Piece:
    by = None if version == UNKNOWN else int(version)
    generated = by is not None or loss == 1
    kind = SegmentKind.GENERATED if generated else SegmentKind.ENVIRONMENT
    return Piece(n, kind.value, int(loss), by, by, log_probs=generated)
