"""What hooks written for slime are called with: its `args`, and samples that have its names.

Only what a hook reads is here; fields that nothing in this store answers to are None. Names and meanings are those of
slime.utils.types.Sample. A hook may set any attribute: `remove_sample` is the one that is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from samplestore import responses
from samplestore.runsettings import RunSettings
from samplestore.states import RolloutMode


class SlimeStatus(Enum):
    """Equal to a member of slime's own Sample.Status, and to its text: a hook that compares with either is right."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    def __eq__(self, other: object) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)


@dataclass
class HookSample:
    """A sample as slime's hooks know it, in the trainer.

    tokens           prompt ids, then response ids: int32 array
    weight_versions  the versions of its tokens, oldest first, as text
    oldest_version   the weight version of its oldest trained token, as a number; None: unknown. slime has no such field
    index            within the run; a fork has that of the sample it was forked from, and so its rollout_id
    metadata         of the prompt; has `start_rollout_id` once the sample was stopped in the middle: the step for which
                     its first token was generated
    runs             its response as the store keeps it; log-probs are NaN where a trained token has none
    decode           makes text of response ids

    Made when they are asked for, a hook may set them:
    response           text
    loss_mask          list of 0 and 1, of the response, as stored: the policies of a batch do not change it
    rollout_log_probs  list of floats, of the response, 0.0 where there is no loss; None where a trained token has none
    """

    Status: ClassVar[type[SlimeStatus]] = SlimeStatus

    group_index: int
    index: int
    prompt: Any
    tokens: Any
    response_length: int
    label: Any
    reward: float | None
    status: SlimeStatus
    metadata: dict[str, Any]
    runs: responses.Runs = field(repr=False)
    decode: Callable[[Any], str] = field(repr=False)
    weight_versions: list[str] = field(default_factory=list)
    oldest_version: int | None = None
    sample_id: int = 0
    remove_sample: bool = False
    rollout_routed_experts: Any = None
    teacher_log_probs: Any = None
    multimodal_inputs: Any = None
    train_metadata: Any = None
    session_id: str | None = None

    @property
    def rollout_id(self) -> int:
        return self.index

    @cached_property
    def response(self) -> str:
        return self.decode(responses.ids(self.runs))

    @cached_property
    def loss_mask(self) -> list[int]:
        return [int(run.trained) for run in self.runs for _ in range(run.size)]

    @cached_property
    def rollout_log_probs(self) -> list[float] | None:
        found = responses.logprobs(self.runs)
        return None if np.isnan(found).any() else list(found.tolist())

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The reward; `args.reward_key` chose it when it was scored."""
        return self.reward


def hook_args(settings: RunSettings, **more: Any) -> SimpleNamespace:
    """slime's args as far as they have a meaning here, and `more`."""
    size = settings.over_sampling_batch_size
    return SimpleNamespace(
        n_samples_per_prompt=settings.samples_per_prompt, rollout_batch_size=settings.groups_per_step,
        over_sampling_batch_size=settings.groups_per_step if size is None else size,
        rollout_max_response_len=settings.max_new_tokens,
        rollout_temperature=settings.sampling.get("temperature", 1.0), rollout_seed=settings.seed,
        reward_key=None, eval_reward_key=None, partial_rollout=settings.mode == RolloutMode.PARTIAL, **more,
    )  # fmt: skip


def verdict(said: Any) -> str | None:
    """Why a dynamic sampling filter drops its group, None where it keeps it. `said`: a bool (or a 0-d array of one), a
    reason to drop (text; None keeps), or an object with `keep` and `reason`. Raises TypeError for anything else."""
    if said is None or isinstance(said, str):
        return said or None
    keep, reason = (said.keep, getattr(said, "reason", None)) if hasattr(said, "keep") else (said, None)
    if not isinstance(keep, bool):
        keep = keep.item() if callable(getattr(keep, "item", None)) else keep
    if not isinstance(keep, bool):
        raise TypeError(f"the filter returned {type(said).__name__}; it must be a bool, or have keep and reason")
    return None if keep else str(reason or "custom filter")
