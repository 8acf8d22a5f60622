"""Objects with slime's field names, for functions that were written for slime: f(args, sample), f(args, samples).

Nothing of slime is needed. The names are those of its Sample (August 2026); what a hook cannot know here is None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from samplestore.slimehooks import SlimeStatus

HOW = "give it with --reward-args '{\"NAME\": VALUE}'"


@dataclass
class SlimeSample:
    """A trajectory by slime's names. tokens are prompt ids followed by response ids."""

    Status: ClassVar[type[SlimeStatus]] = SlimeStatus

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    teacher_log_probs: list[float] | None = None
    multimodal_inputs: Any = None
    remove_sample: bool = False
    status: SlimeStatus = SlimeStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None

    def get_reward_value(self, args: Any) -> Any:
        """The number of a reward that may be a dict, by args.reward_key."""
        key = getattr(args, "reward_key", None) if isinstance(self.reward, dict) else None
        return self.reward if key is None else self.reward[key]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SlimeSample:
        """From the fields of a RewardSample."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**known, "status": SlimeStatus(values["status"])})


class SlimeArgs:
    """slime's `args`: what the user gave, and errors that say how to give what is missing. `getattr(args, name, None)`
    works as it does on slime's."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the function asks for args.{name}, which nobody gave; {HOW}")


def takes_args(function: Callable[..., Any]) -> bool:
    """Whether this is slime's kind of function, f(args, sample): with two positional parameters that must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # a builtin without a signature
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.kind in positional and p.default is p.empty]) == 2


def misfit(function: Callable[..., Any], n: int) -> str | None:
    """Why a function can't be called with n positional arguments; None where it can, or nobody can tell."""
    try:
        inspect.signature(function).bind(*[None] * n)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass  # a builtin without a signature
    return None
