"""verl: a batch as DataProto holds it, and as its TransferQueue does.

    made = verl.dataproto(batch, pad_token_id=tokenizer.pad_token_id)
    DataProto.from_dict(tensors=made["batch"], non_tensors=made["non_tensor_batch"], meta_info=made["meta_info"])

Names, shapes and padding are those of verl 0.9.1 (verl/experimental/agent_loop).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.batch import Batch
from samplestore.errors import InvalidSetting, MissingExtra
from samplestore.interop import parts
from samplestore.tensors import BatchSample, as_torch

PARTITION = "train"


def dataproto(
    batch: Batch,
    *,
    pad_token_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
    torch: bool = True,
) -> dict[str, dict[str, Any]]:
    """{"batch": tensors, "non_tensor_batch": numpy arrays of objects, "meta_info": dict}, B samples.

    | batch | | |
    | --- | --- | --- |
    | prompts | int64 [B, P] | padded on the left |
    | responses | int64 [B, R] | padded on the right |
    | response_mask | int64 [B, R] | 1 on tokens that are trained |
    | input_ids, attention_mask, position_ids | int64 [B, P + R] | positions count real tokens, 0 on padding in front |
    | rollout_log_probs | float32 [B, R] | 0 where there is none |
    | rm_scores | float32 [B, R] | the reward, at the last response token; see parts.rewards_of |

    prompt_length, response_length   P and R; the longest of the batch if left out
    torch                            false: numpy arrays in "batch" too
    Raises InvalidSetting where a sample is longer than that, MissingExtra.
    """
    samples = batch.samples
    left = _width("prompt_length", prompt_length, [s.prompt_ids.size for s in samples])
    right = _width("response_length", response_length, [s.response_ids.size for s in samples])
    n = len(samples)
    prompts, responses = np.full((n, left), pad_token_id, np.int64), np.full((n, right), pad_token_id, np.int64)
    there = np.zeros((n, left + right), np.int64)
    mask, probs, scores = np.zeros((n, right), np.int64), np.zeros((n, right), np.float32), np.zeros((n, right), "f4")
    for i, (one, reward) in enumerate(zip(samples, parts.rewards_of(samples), strict=True)):
        p, r = one.prompt_ids.size, one.response_ids.size
        prompts[i, left - p :], responses[i, :r] = one.prompt_ids, one.response_ids
        there[i, left - p : left + r] = 1
        mask[i, :r], probs[i, :r] = one.loss_mask, one.logprobs
        if r:
            scores[i, r - 1] = reward
    made: dict[str, npt.NDArray[Any]] = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": there,
        "position_ids": np.maximum(np.cumsum(there, axis=1) - 1, 0),
        "rollout_log_probs": probs,
        "rm_scores": scores,
    }
    return {
        "batch": as_torch(made, None) if torch else made,
        "non_tensor_batch": _objects(samples),
        "meta_info": {"global_steps": batch.step, "reward_extra_keys": []},
    }


def _width(name: str, given: int | None, sizes: list[int]) -> int:
    longest = max(sizes, default=0)
    if given is not None and given < longest:
        raise InvalidSetting(name, given, f"at least {longest}, what the longest sample of the batch has")
    return longest if given is None else given


def _objects(samples: Sequence[BatchSample]) -> dict[str, npt.NDArray[Any]]:
    """uid names the group, as verl's advantages need it."""
    versions = [parts.versions_of(one) for one in samples]
    columns: dict[str, list[Any]] = {
        "uid": [str(one.group_id) for one in samples],
        "sample_id": [one.sample_id for one in samples],
        "reward_model": [{"ground_truth": one.label} for one in samples],
        "extra_info": [one.metadata for one in samples],
        "min_global_steps": [low for low, _ in versions],
        "max_global_steps": [high for _, high in versions],
    }
    made = {}
    for name, values in columns.items():
        made[name] = np.empty(len(values), dtype=object)
        made[name][:] = values
    return {**made, "__num_turns__": np.array([_turns(one) for one in samples], np.int32)}


def _turns(one: BatchSample) -> int:
    """Stretches of the response that a model made."""
    by_model = [run.version >= 0 or run.trained for run in one.runs if run.size]
    return sum(now and not before for before, now in zip([False, *by_model], by_model, strict=False))


class KeyValues:
    """A batch as TransferQueue's key-value calls read it: kv_list and kv_batch_get. A trajectory's key is
    `{uid}_{session}_{index}`: its group, its place in it, and 0, or 1, 2, ... for what was forked from it."""

    def __init__(self, batch: Batch, partition_id: str = PARTITION) -> None:
        self.partition_id, self._step = partition_id, batch.step
        samples = batch.samples
        keys = [f"{s.group_id}_{session}_{i}" for s, (session, i) in zip(samples, parts.origins(samples), strict=True)]
        rewards = parts.rewards_of(samples)
        self._fields = {k: _fields(one, reward) for k, one, reward in zip(keys, samples, rewards, strict=True)}
        self._tags = {k: self._tag(one) for k, one in zip(keys, samples, strict=True)}
        self.uids = list(dict.fromkeys(str(one.group_id) for one in samples))

    @property
    def keys(self) -> list[str]:
        """Of the trajectories, in the batch's order."""
        return list(self._fields)

    def _tag(self, one: BatchSample) -> dict[str, Any]:
        p, r = int(one.prompt_ids.size), int(one.response_ids.size)
        low, high = parts.versions_of(one)
        return {
            "status": "success", "prompt_len": p, "response_len": r, "seq_len": p + r, "global_steps": self._step,
            "min_global_steps": low, "max_global_steps": high,
        }  # fmt: skip

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """{partition: {key: tag}}; the prompts' own keys (uid) are there too, finished."""
        if partition_id not in (None, self.partition_id):
            return {}
        prompts = {u: {"is_prompt": True, "status": "finished", "global_steps": self._step} for u in self.uids}
        return {self.partition_id: {**prompts, **self._tags}}

    def kv_batch_get(
        self, keys: Sequence[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None
    ) -> Any:
        """A TensorDict of these keys: each field a jagged nested tensor. Raises KeyError, MissingExtra."""
        listed = [keys] if isinstance(keys, str) else list(keys)
        if partition_id != self.partition_id:
            raise KeyError(partition_id)
        rows = [self._fields[key] for key in listed]
        names = [select_fields] if isinstance(select_fields, str) else list(select_fields or (rows[0] if rows else ()))
        try:
            import torch
            from tensordict import TensorDict
        except ImportError:
            raise MissingExtra("KeyValues.kv_batch_get()", "interop") from None
        columns = {
            name: torch.nested.as_nested_tensor([torch.from_numpy(r[name]) for r in rows], layout=torch.jagged)
            for name in names
        }
        return TensorDict(columns, batch_size=[len(rows)])


def _fields(one: BatchSample, reward: float) -> dict[str, npt.NDArray[Any]]:
    """One trajectory without padding."""
    ids = parts.sequence(one).astype(np.int64)
    mask = one.loss_mask.astype(np.int64)
    scores = np.zeros(mask.size, np.float32)
    scores[-1:] = reward
    return {
        "prompts": one.prompt_ids.astype(np.int64), "responses": one.response_ids.astype(np.int64),
        "response_mask": mask, "loss_mask": mask, "input_ids": ids, "position_ids": np.arange(ids.size),
        "rollout_log_probs": one.logprobs, "rm_scores": scores,
    }  # fmt: skip
