"""What all converters share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

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
    known = [run.version for run in one.runs if run.version >= 0 and run.ids.size]
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
