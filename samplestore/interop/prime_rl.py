"""prime-rl: a batch as the training samples that its orchestrator sends to the trainer.

    [TrainingSample(**made) for made in prime_rl.training_samples(batch, env_name="gsm8k")]

Field names are those of src/prime_rl/transport/types.py with one flat token sequence a sample (2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from samplestore import codec
from samplestore.batch import Batch
from samplestore.errors import InvalidSegment
from samplestore.interop import parts
from samplestore.portable.samples import Piece, PortableSample
from samplestore.states import SegmentKind
from samplestore.words import amount


def training_samples(
    batch: Batch, *, env_name: str, temperature: float = 1.0, experts: Mapping[int, Any] | None = None
) -> list[dict[str, Any]]:
    """The fields of one TrainingSample a dict, T tokens (prompt and response); what is not there is left out.

    token_ids, mask (bool: trained), logprobs (0 on prompts), temperatures, advantages   lists [T]
    env_name, reward

    temperature   that the log-probs carry
    experts       by sample id: routed experts [rows, layers, top_k], see run.routed_experts
    """
    samples = batch.samples
    advantages = batch.arrays()["advantages"].tolist()
    made = []
    for one, advantage, reward in zip(samples, advantages, parts.rewards_of(samples), strict=True):
        p = one.prompt_ids.size
        ids = parts.sequence(one).tolist()
        # an advantage that could not be had is NaN, and nothing of such a sample is trained
        each = advantage if np.isfinite(advantage) else 0.0
        made.append(
            {
                "token_ids": ids,
                "mask": [False] * p + (one.loss_mask == 1).tolist(),
                "logprobs": [0.0] * p + one.logprobs.tolist(),
                "temperatures": [temperature] * len(ids),
                "env_name": env_name,
                "reward": reward,
                "advantages": [0.0] * p + [each] * one.response_ids.size,
            }
        )
        if experts is not None and one.sample_id in experts:
            rows = np.ascontiguousarray(experts[one.sample_id])
            made[-1]["routed_experts"] = {"data": rows.tobytes(), "shape": list(rows.shape), "dtype": str(rows.dtype)}
    return made


def sample_of(given: Mapping[str, Any], *, group: int = 0, sample: int = 0, size: int = 1) -> PortableSample:
    """The sample of a TrainingSample's fields. It does not say where its prompt ends and which weights made a token:
    the prompt ends where the first token is trained, and versions are unknown. Raises InvalidSegment."""
    ids = codec.token_ids(parts.array_of(given, "token_ids").tolist(), "token_ids")
    mask = parts.array_of(given, "mask").astype(np.bool_)
    if mask.size != ids.size:
        raise InvalidSegment(f"mask has {amount(mask.size, 'value')} for {amount(ids.size, 'token')}", field="mask")
    if not mask.any():
        raise InvalidSegment("no token is trained: nobody can tell prompt and response apart", field="mask")
    start = int(np.argmax(mask))
    n = ids.size - start
    probs = codec.finite_logprobs(parts.array_of(given, "logprobs")[start:].tolist(), n, required=True)
    pieces = tuple(
        Piece(b - a, (SegmentKind.GENERATED if trained else SegmentKind.ENVIRONMENT).value, int(trained),
              log_probs=bool(trained))
        for a, b in codec.runs_of(mask[start:].astype(np.int32))
        for trained in [mask[start + a]]
    )  # fmt: skip
    reward = given.get("reward")
    return PortableSample(
        group=group, sample=sample, group_size=size, prompt_ids=ids[:start], response_ids=ids[start:],
        rollout_log_probs=probs, pieces=pieces, reward=None if reward is None else parts.reward_of(reward, "reward"),
    )  # fmt: skip
