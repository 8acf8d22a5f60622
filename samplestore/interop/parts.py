"""What all converters share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore import codec
from samplestore.errors import InvalidSegment
from samplestore.tensors import BatchSample
from samplestore.types import Ids


def rewards_of(samples: Sequence[BatchSample]) -> list[float]:
    """The rewards, by sample. Where one could not be read it is the mean of its group, and the sample's loss mask is 0
    everywhere: for a trainer that normalises by group it moves nothing. 0 where the run gives none."""
    known: dict[int, list[float]] = defaultdict(list)
    for one in samples:
        if one.reward is not None:
            known[one.group_id].append(one.reward)
    return [
        one.reward if one.reward is not None else fmean(known[one.group_id]) if known[one.group_id] else 0.0
        for one in samples
    ]


def versions_of(one: BatchSample) -> tuple[int | None, int | None]:
    """(oldest, newest) weight version of its tokens; None where none is known."""
    known = [run.version for run in one.runs if run.version >= 0 and run.size]
    return (min(known), max(known)) if known else (None, None)


def sequence(one: BatchSample) -> Ids:
    """int32 [p + n]: prompt, then response."""
    return np.concatenate([one.prompt_ids, one.response_ids])


def origins(samples: Sequence[BatchSample]) -> list[tuple[int, int]]:
    """(place within its group of the sample that it was forked from or is, 0 for that one and 1, 2, ... for forks)."""
    places = {one.sample_id: one.index for one in samples}
    seen: dict[tuple[int, int], int] = defaultdict(int)
    made = []
    for one in samples:
        root = one.index if one.rollout_id is None else places.get(one.rollout_id, one.index)
        made.append((root, seen[one.group_id, root]))
        seen[one.group_id, root] += 1
    return made


def array_of(given: Mapping[str, Any], name: str) -> npt.NDArray[Any]:
    """What a foreign sample says under a name: numbers, numpy or torch. Raises InvalidSegment."""
    value = given.get(name)
    if value is None:
        raise InvalidSegment(f"{name} is missing", field=name)
    try:
        made = np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:  # rows of several lengths
        raise InvalidSegment(f"{name} is no array: {str(error)[:200]}", field=name) from None
    if made.dtype.kind not in "biuf":
        raise InvalidSegment(f"{name} must be numbers, not {made.dtype}", field=name)
    return made


def reward_of(value: Any, name: str) -> float:
    """The reward that a foreign sample says. Raises InvalidSegment."""
    number = codec.reward(value)
    if number is None:
        raise InvalidSegment(f"{name} is {value!s:.80}, not {codec.REWARDS}", field=name)
    return number
