"""Plans over ranks and micro-batches: what holds for any lengths, and a few by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplestore.errors import InvalidSetting
from samplestore.planning import micro_batches, plan

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


def test_a_plan_by_hand() -> None:
    # 9 to rank 0; 7 to rank 1; 6 to rank 1 (7 < 9); 5 to rank 0 (9 < 13); 5 to rank 1 (13 < 14)
    assert plan([5, 9, 5, 7, 6], 2) == [[0, 1], [2, 3, 4]]
    assert plan([4, 4, 4, 4], 2) == [[0, 2], [1, 3]]
    assert plan([3], 3) == [[0], [], []]
    assert plan([0, 0, 0], 3) == [[0], [1], [2]]


@given(LENGTHS, st.integers(1, 12))
@settings(deadline=None)
def test_a_plan_is_a_balanced_partition(lengths: list[int], world: int) -> None:
    ranks = plan(lengths, world)
    assert len(ranks) == world
    assert sorted(place for rank in ranks for place in rank) == list(range(len(lengths)))
    assert all(rank == sorted(rank) for rank in ranks)
    sums = [sum(lengths[place] for place in rank) for rank in ranks]
    assert max(sums) - min(sums) <= max(lengths, default=0)
    assert plan(list(lengths), world) == ranks
    if len(lengths) >= world:
        assert all(ranks), "an empty rank"


@given(LENGTHS, st.integers(60, 150), st.integers(0, 20))
@settings(deadline=None)
def test_micro_batches_are_a_partition_within_the_budget(lengths: list[int], budget: int, at_least: int) -> None:
    parts = micro_batches(lengths, budget)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in parts) and parts == sorted(parts)
    sums = [sum(lengths[place] for place in part) for part in parts]
    assert max(sums, default=0) <= budget
    # of two that are half empty one would have been spared
    assert sum(2 * n <= budget for n in sums) <= 1
    more = micro_batches(lengths, budget, at_least)
    assert len(more) == max(len(parts), at_least)
    assert sorted(place for part in more for place in part) == list(range(len(lengths)))
    assert max((sum(lengths[place] for place in part) for part in more), default=0) <= budget
    if len(lengths) >= at_least:
        assert all(more), "an empty one, though there are samples enough"
    assert micro_batches(list(lengths), budget, at_least) == more


def test_micro_batches_by_hand() -> None:
    assert micro_batches([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert micro_batches([6, 5, 4, 3], 10, 3) == [[0], [1, 3], [2]]
    assert micro_batches([2], 10, 3) == [[0], [], []]
    assert micro_batches([], 10) == []


def test_what_can_not_be_planned_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="at least 11"):
        micro_batches([3, 11], 10)
    for world in (0, -1, 1.5, True):
        with pytest.raises(InvalidSetting, match="world"):
            plan([1], world)  # type: ignore[arg-type]
