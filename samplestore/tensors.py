"""A batch as arrays: packed (one row of all tokens) or padded (one row a sample).

B samples, T tokens in all, L the longest sample; a sample's tokens are prompt then response.

| name | packed | padded | |
| --- | --- | --- | --- |
| tokens | int64 [T] | int64 [B, L] | 0 where padded |
| position_ids | int64 [T] | int64 [B, L] | |
| cu_seqlens | int32 [B+1] | - | where samples begin and end |
| attention_mask | - | int64 [B, L] | 1 on tokens, right padding |
| loss_mask | float32 [T] | float32 [B, L] | 1 on response tokens that are trained |
| rollout_log_probs | float32 [T] | float32 [B, L] | nats; 0 where there is none |
| weight_versions | int64 [T] | int64 [B, L] | -1 on prompts, padding and where unknown |
| prompt_lengths, response_lengths | int64 [B] | int64 [B] | |
| rewards, advantages | float32 [B] | float32 [B] | reward 0 where a sample has none |
| group_ids, sample_ids | int64 [B] | int64 [B] | |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.advantages import advantages
from samplestore.errors import MissingExtra
from samplestore.types import Floats, Ids

Arrays = dict[str, npt.NDArray[Any]]
PER_TOKEN: dict[str, tuple[Any, Any]] = {
    "tokens": (np.int64, 0),
    "position_ids": (np.int64, 0),
    "loss_mask": (np.float32, 0),
    "rollout_log_probs": (np.float32, 0),
    "weight_versions": (np.int64, -1),
}


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One trajectory of a batch, n response tokens.

    prompt_ids    int32 [p]
    response_ids  int32 [n]
    logprobs      float32 [n]; 0.0 where a token has none (loss_mask is 0 there)
    loss_mask     uint8 [n]; after the batch's staleness policy
    versions      int32 [n]; -1 where unknown or not generated
    """

    sample_id: int
    group_id: int
    group_number: int
    index: int
    prompt_ids: Ids
    response_ids: Ids
    logprobs: Floats
    loss_mask: npt.NDArray[np.uint8]
    versions: Ids
    reward: float | None
    status: str
    finish_reason: str | None
    label: Any
    metadata: dict[str, Any]


def arrays(samples: Sequence[BatchSample], layout: str = "packed", method: str = "grpo") -> Arrays:
    """numpy arrays as the module says. Raises ValueError for another layout or method."""
    if layout not in ("packed", "padded"):
        raise ValueError(f"layout={layout!r} is not 'packed' or 'padded'")
    lengths = np.array([s.prompt_ids.size + s.response_ids.size for s in samples], dtype=np.int64)
    result = _packed(samples, lengths) if layout == "packed" else _padded(samples, lengths)
    rewards = np.array([0.0 if s.reward is None else s.reward for s in samples], dtype=np.float32)
    group_ids = np.array([s.group_id for s in samples], dtype=np.int64)
    result |= {
        "prompt_lengths": np.array([s.prompt_ids.size for s in samples], dtype=np.int64),
        "response_lengths": np.array([s.response_ids.size for s in samples], dtype=np.int64),
        "rewards": rewards,
        "advantages": advantages(rewards, group_ids, method),
        "group_ids": group_ids,
        "sample_ids": np.array([s.sample_id for s in samples], dtype=np.int64),
    }
    return result


def _fill(target: Arrays, at: Any, sample: BatchSample) -> None:
    """Write one sample's tokens into the rows or the stretch that `at(start, stop)` names."""
    p, n = sample.prompt_ids.size, sample.prompt_ids.size + sample.response_ids.size
    target["tokens"][at(0, p)] = sample.prompt_ids
    target["tokens"][at(p, n)] = sample.response_ids
    target["position_ids"][at(0, n)] = np.arange(n)
    target["loss_mask"][at(p, n)] = sample.loss_mask
    target["rollout_log_probs"][at(p, n)] = sample.logprobs
    target["weight_versions"][at(p, n)] = sample.versions


def _packed(samples: Sequence[BatchSample], lengths: npt.NDArray[np.int64]) -> Arrays:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    target: Arrays = {name: np.full(int(ends[-1]), fill, dtype) for name, (dtype, fill) in PER_TOKEN.items()}
    for sample, start in zip(samples, ends[:-1], strict=True):
        _fill(target, lambda a, b, s=int(start): slice(s + a, s + b), sample)
    return {**target, "cu_seqlens": ends.astype(np.int32)}


def _padded(samples: Sequence[BatchSample], lengths: npt.NDArray[np.int64]) -> Arrays:
    shape = (len(samples), int(lengths.max(initial=0)))
    target: Arrays = {name: np.full(shape, fill, dtype) for name, (dtype, fill) in PER_TOKEN.items()}
    for i, sample in enumerate(samples):
        _fill(target, lambda a, b, row=i: (row, slice(a, b)), sample)
    return {**target, "attention_mask": (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)}


def tensors(samples: Sequence[BatchSample], device: Any, layout: str, method: str) -> dict[str, Any]:
    """The same as torch tensors on `device`."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("batch.tensors()", "trainer") from None
    made = {name: torch.from_numpy(array) for name, array in arrays(samples, layout, method).items()}
    return made if device is None else {name: t.to(device, non_blocking=True) for name, t in made.items()}
