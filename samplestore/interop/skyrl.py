"""SkyRL: a batch as the GeneratorOutput that its generators return.

Keys are those of skyrl/train/generators/base.py (0.3, 2026).
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from samplestore.batch import Batch
from samplestore.interop import parts

BASE = "skyrl.train.generators.base"
EMPTY = (
    "rollout_metrics", "trajectory_generation_times", "rollout_expert_indices", "is_last_step", "env_metrics",
    "pixel_values", "image_grid_thw",
)  # fmt: skip


@dataclass
class TrajectoryID:
    """SkyRL's, where SkyRL is not there."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def generator_output(batch: Batch) -> dict[str, Any]:
    """prompt_token_ids, response_ids, loss_masks, rollout_logprobs: a list for each sample; rewards: a number each (see
    parts.rewards_of); stop_reasons; trajectory_ids: group and place in it. What the store does not have is None."""
    samples = batch.samples
    # never imported for its own sake: SkyRL itself has it loaded
    trajectory = importlib.import_module(BASE).TrajectoryID if BASE in sys.modules else TrajectoryID
    return {
        "prompt_token_ids": [one.prompt_ids.tolist() for one in samples],
        "response_ids": [one.response_ids.tolist() for one in samples],
        "rewards": parts.rewards_of(samples),
        "loss_masks": [one.loss_mask.tolist() for one in samples],
        "stop_reasons": [one.finish_reason or "stop" for one in samples],
        "rollout_logprobs": [one.logprobs.tolist() for one in samples],
        "trajectory_ids": [trajectory(str(one.group_id), one.index) for one in samples],
        **dict.fromkeys(EMPTY),
    }
