"""What is refused when a run is made, beyond what RunSettings.parse refuses: settings that do nothing where they stand,
and filters that keep no group. A stored run that has them can still be opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samplestore import filters, othernames
from samplestore.errors import InvalidSetting
from samplestore.filters import CUSTOM, GROUP, SAMPLE, Filter
from samplestore.runsettings import RunSettings
from samplestore.states import RolloutMode, StragglerPolicy


def check(made: RunSettings) -> None:
    """Raises InvalidSetting."""
    if made.mode != RolloutMode.PARTIAL:
        for name in ("over_sampling_batch_size", "max_aborts"):
            if getattr(made, name) is not None:
                raise InvalidSetting(name, getattr(made, name), f"None in mode {made.mode}, or mode='partial'")
    if made.group_deadline_s is None and made.on_straggler != StragglerPolicy.WAIT:
        raise InvalidSetting("on_straggler", made.on_straggler, "it with a group_deadline_s, which is None")
    for setting in (GROUP, SAMPLE):
        _check_filters(setting, filters.parse(setting, getattr(made, setting)))
    alone = made.samples_per_prompt == 1
    if alone and any(spec.partition(":")[0] == "reward_std" for spec in made.group_filters):
        allowed = "samples_per_prompt of at least 2 with it: one reward has no standard deviation"
        raise InvalidSetting(GROUP, list(made.group_filters), allowed)


def _check_filters(setting: str, parsed: tuple[Filter, ...]) -> None:
    """A filter that nothing passes, or several that nothing passes together. Raises InvalidSetting."""
    for f in parsed:
        if f.name == "reward_std" and f.numbers and f.numbers[0] < 0:
            raise InvalidSetting(setting, shown(f), "a MIN of 0 or more: no standard deviation is below 0")
    for name in ("length", "reward"):
        bands = [f for f in parsed if f.name == name]
        if not bands:
            continue
        low, high = max(f.numbers[0] for f in bands), min(f.numbers[1] for f in bands)
        empty = low > high or (name == "length" and math.floor(high) < max(1, math.ceil(low)))
        if empty:
            what = "a number of tokens, 1 or more," if name == "length" else "a mean reward"
            raise InvalidSetting(setting, [shown(f) for f in bands], f"bands that {what} can lie in: none passes")


def doubts(made: RunSettings) -> list[str]:
    """What may be meant, and mostly is not."""
    told = []
    long = [f for f in filters.parse(GROUP, made.group_filters) if f.name == "length"]
    for f in long:
        if f.numbers[0] > made.max_new_tokens:
            told.append(
                f"group filter {shown(f)} wants more tokens than max_new_tokens={made.max_new_tokens} allows: it keeps "
                "a group only where workers say a larger --max-new-tokens"
            )
    scored = [s for s in made.group_filters if s != CUSTOM and not s.startswith("length")]
    if scored and not made.gives_rewards:
        told.append(
            f"group filters {', '.join(scored)} look at rewards, and the run has no stage that gives some: they drop "
            'every group but those of episodes that return a reward (stages=["reward"])'
        )
    return [*told, *doubts_of_sampling(made.sampling)]


def doubts_of_sampling(given: Mapping[str, Any]) -> list[str]:
    """Engines gain parameters, so a name that is not known is no error here; what an engine does not know it refuses,
    with every request."""
    told = []
    for name in given:
        if name == "max_new_tokens":
            told.append("max_new_tokens inside sampling does nothing: give it beside sampling, as max_new_tokens=N")
        elif name not in othernames.SAMPLING:
            close = othernames.meant(name, othernames.SAMPLING, othernames.OF_OTHER_ENGINES)
            beside = " beside sampling" if close == "max_new_tokens" else ""
            told.append(
                f"sampling has {name!r}, which SGLang is not known to take: an engine that does not refuses each "
                "request" + (f". Did you mean {close}{beside}?" if close else "")
            )
    return told


def shown(f: Filter) -> str:
    return ":".join((f.name, *(f"{number:g}" for number in f.numbers)))
