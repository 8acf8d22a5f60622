"""Built-in filters, by their spec. A group filter keeps a group or drops it, a sample filter takes single samples out
of the loss and leaves the group alone.

    reward_std[:MIN]     group     the (population) standard deviation of its rewards is above MIN (default 0)
    reward:LOW:HIGH      group     the mean of its rewards lies in LOW..HIGH
    length:MIN:MAX       both      response tokens of every sample (group filter) or of the sample lie in MIN..MAX
    truncated            sample    samples that ended by a length limit are taken out
    custom               both      the function of the worker's --filter decides

`reward_std` is DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): a group whose rewards are all equal has
advantage 0 everywhere, and teaches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samplestore.errors import InvalidSetting

STAGE = "filter"  # of a group, the last of its stages
CUSTOM = "custom"
GROUP, SAMPLE = "group_filters", "sample_filters"
SPECS = {
    GROUP: "reward_std[:MIN] | reward:LOW:HIGH | length:MIN:MAX | custom",
    SAMPLE: "truncated | length:MIN:MAX | custom",
}
MAX_FILTERS = 20
NUMBERS = {GROUP: {"reward_std": (0, 1), "reward": (2, 2), "length": (2, 2), CUSTOM: (0, 0)},
           SAMPLE: {"truncated": (0, 0), "length": (2, 2), CUSTOM: (0, 0)}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed spec: its name and its numbers."""

    name: str
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a filter knows of a sample. n_tokens: of the response; reward: None where it has none."""

    reward: float | None
    n_tokens: int
    status: str


def parse(setting: str, specs: Any) -> tuple[Filter, ...]:
    """The filters of a setting (GROUP or SAMPLE). Raises InvalidSetting."""
    allowed = f"at most {MAX_FILTERS} of: {SPECS[setting]}"
    if not isinstance(specs, list | tuple) or len(specs) > MAX_FILTERS or len(set(map(str, specs))) != len(specs):
        raise InvalidSetting(setting, specs, allowed)
    return tuple(_one(setting, spec, allowed) for spec in specs)


def _one(setting: str, spec: Any, allowed: str) -> Filter:
    if not isinstance(spec, str):
        raise InvalidSetting(setting, spec, allowed)
    name, *texts = spec.split(":")
    low, high = NUMBERS[setting].get(name, (-1, -1))
    try:
        numbers = tuple(float(text) for text in texts)
    except ValueError:
        numbers = (math.nan,)
    if not low <= len(texts) <= high or not all(map(math.isfinite, numbers)) or list(numbers) != sorted(numbers):
        raise InvalidSetting(setting, spec, allowed)
    return Filter(name, numbers)


def refusal(filters: Sequence[Filter], samples: Sequence[Scored]) -> str | None:
    """Why the first built-in group filter that objects would drop the group; None: it is kept. Samples are those that
    did not fail. The reason names the filter and no measured value: it is a key by which groups are counted."""
    rewards = [s.reward for s in samples if s.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    for f in filters:
        if f.name == CUSTOM:
            continue
        if f.name == "length":
            if not all(f.numbers[0] <= s.n_tokens <= f.numbers[1] for s in samples):
                return f"length outside {f.numbers[0]:g}..{f.numbers[1]:g}"
        elif mean is None:
            return "no reward"
        elif f.name == "reward":
            if not f.numbers[0] <= mean <= f.numbers[1]:
                return f"mean reward outside {f.numbers[0]:g}..{f.numbers[1]:g}"
        else:
            least = f.numbers[0] if f.numbers else 0.0
            if max(rewards) == min(rewards):
                return "zero reward std"
            if (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5 <= least:
                return f"reward std up to {least:g}"
    return None


def removal(filters: Sequence[Filter], sample: Scored) -> str | None:
    """Why the first built-in sample filter that objects takes this sample out of the loss; None: it stays."""
    for f in filters:
        if f.name == "truncated" and sample.status == "truncated":
            return "truncated"
        if f.name == "length" and not f.numbers[0] <= sample.n_tokens <= f.numbers[1]:
            return f"length outside {f.numbers[0]:g}..{f.numbers[1]:g}"
    return None
