"""Who trains what: a batch over the ranks of a trainer, and a rank's samples over its forward passes. Pure functions of
lengths: whoever asks with the same lengths gets the same answer, so no rank has to tell another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from samplestore.arguments import whole
from samplestore.errors import InvalidSetting


def plan(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Places of the `lengths` (tokens), shared out over `world` ranks: for each rank its places, rising.

    Longest first, each to the rank that has the fewest tokens so far; ties go to the earlier place, then to the rank
    with fewer of them, then to the lower one. So the fullest and the emptiest rank differ by no more than the longest
    length, and no rank is empty unless there are fewer lengths than ranks. Graham 1969, "Bounds on Multiprocessing
    Timing Anomalies": the fullest rank has at most 4/3 of what the best plan gives it. Raises InvalidSetting.
    """
    whole("world", world, 1)
    ranks: list[list[int]] = [[] for _ in range(world)]
    fewest = [(0, 0, rank) for rank in range(world)]  # tokens, how many, rank: a heap, and sorted
    for place in _longest_first(lengths):
        tokens, n, rank = fewest[0]
        ranks[rank].append(place)
        heapq.heapreplace(fewest, (tokens + lengths[place], n + 1, rank))
    return [sorted(places) for places in ranks]


def micro_batches(lengths: Sequence[int], max_tokens: int, at_least: int = 0) -> list[list[int]]:
    """Places of the `lengths` (tokens) in micro-batches of at most `max_tokens`, as few as first-fit of the longest
    first finds (Johnson 1973: at most 11/9 of the fewest, and 4). Places rise inside a micro-batch, and micro-batches
    by their first place.

    at_least   make as many, by halving those with most samples, then with empty ones at the end: ranks that reduce
               gradients together must run equally often
    Raises InvalidSetting for a length that fits in none.
    """
    whole("max_tokens", max_tokens, 1)
    if (longest := max(lengths, default=0)) > max_tokens:
        raise InvalidSetting("max_tokens", max_tokens, f"at least {longest}, the longest sample of the batch")
    made: list[list[int]] = []
    room = np.full(len(lengths), max_tokens, dtype=np.int64)  # in each micro-batch; no more than one a sample
    for place in _longest_first(lengths):
        first = int(np.argmax(room >= lengths[place]))
        if first == len(made):
            made.append([])
        made[first].append(place)
        room[first] -= lengths[place]
    while len(made) < at_least and (most := max(made, key=len, default=[])) and len(most) > 1:
        made.remove(most)
        halves = plan([lengths[place] for place in most], 2)
        made += [[most[i] for i in half] for half in halves]
    made = sorted(sorted(places) for places in made)
    return made + [[] for _ in range(at_least - len(made))]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
