"""REINFORCE++ by hand. The other methods: test_cases.py and test_fanout.py of tests/contract, and test_grpo.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplestore.advantages import METHODS, advantages
from samplestore.errors import InvalidSetting

REWARDS, GROUPS = [1.0, 0.0, 4.0, 3.0], [7, 7, 5, 5]


def test_over_the_whole_batch() -> None:
    """Mean 2, variance (1 + 4 + 4 + 1) / 4 = 2.5; with a group's mean taken off first: +-0.5, deviation 0.5."""
    std = math.sqrt(2.5) + 1e-6
    found = advantages(REWARDS, GROUPS, "reinforce_pp")
    assert found == pytest.approx([-1 / std, -2 / std, 2 / std, 1 / std])
    found = advantages(REWARDS, GROUPS, "reinforce_pp_baseline")
    assert found == pytest.approx([1, -1, 1, -1], rel=1e-5)
    assert found.dtype == np.float32


@pytest.mark.parametrize("method", [m for m in METHODS if m != "none"])
def test_equal_rewards_teach_nothing(method: str) -> None:
    """Exactly nothing: the mean of three times 0.1 is not 0.1, and what that leaves is not to be scaled up."""
    assert advantages([0.1] * 3, [7] * 3, method).tolist() == [0] * 3
    if method != "reinforce_pp":
        assert advantages([0.1, 0.3, 0.1, 0.3, 0.1, 0.3], [7, 5] * 3, method).tolist() == [0] * 6
    assert advantages([0.3], [1], method).tolist() == [0]
    assert advantages([], [], method).size == 0


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_reward_counts_for_nobody(method: str) -> None:
    with_it = advantages([*REWARDS, math.nan], [*GROUPS, 5], method)
    assert math.isnan(with_it[-1])
    assert with_it[:-1].tolist() == advantages(REWARDS, GROUPS, method).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_samples_is_no_matter(method: str) -> None:
    order = [2, 0, 3, 1]
    mixed = advantages([REWARDS[i] for i in order], [GROUPS[i] for i in order], method)
    assert mixed.tolist() == pytest.approx(advantages(REWARDS, GROUPS, method)[order].tolist())


@pytest.mark.parametrize("method", METHODS)
def test_a_forked_rollout_counts_once(method: str) -> None:
    """A rollout of two samples with the same reward changes nothing for the others, nor for itself."""
    forked = advantages([*REWARDS, 1.0], [*GROUPS, 7], method, [0, 1, 2, 3, 0])
    plain = advantages(REWARDS, GROUPS, method)
    assert forked.tolist() == pytest.approx([*plain.tolist(), plain[0]])


def test_forks_by_hand() -> None:
    """One group. Rollout 0 has samples of 1 and 3 (mean 2), rollout 1 one of 0: mean of the batch 1, variance
    ((0 + 4) / 2 + 1) / 2 = 1.5."""
    std = math.sqrt(1.5) + 1e-6
    for method in ("reinforce_pp", "reinforce_pp_baseline"):
        found = advantages([1.0, 3.0, 0.0], [9, 9, 9], method, [0, 0, 1])
        assert found == pytest.approx([0, 2 / std, -1 / std], abs=1e-6)


def by_hand(rewards: list[float], groups: list[int], method: str, rollouts: list[int]) -> list[float]:
    """The formulas of the papers one after the other, over rollouts."""

    def mean(values: dict[int, float]) -> float:
        of: dict[int, list[float]] = {}
        for i, value in values.items():
            of.setdefault(rollouts[i], []).append(value)
        return math.fsum(math.fsum(v) / len(v) for v in of.values()) / len(of)

    def standard(values: dict[int, float]) -> dict[int, float]:
        middle = mean(values)
        std = math.sqrt(mean({i: (v - middle) ** 2 for i, v in values.items()})) + 1e-6
        return {i: (v - middle) / std for i, v in values.items()}

    found: dict[int, float] = {}
    for group in set(groups):
        mine = {i: r for i, r in enumerate(rewards) if groups[i] == group and not math.isnan(r)}
        for i, r in mine.items():
            others = {j: v for j, v in mine.items() if rollouts[j] != rollouts[i]}
            if method == "rloo":
                found[i] = r - mean(others) if others else 0.0
            elif method in ("dr_grpo", "reinforce_pp_baseline"):
                found[i] = r - mean(mine)
            else:
                found[i] = r
        if method == "grpo" and mine:
            found |= standard(mine)
    if method.startswith("reinforce") and found:
        found = standard(found)
    return [found.get(i, math.nan) for i in range(len(rewards))]


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, -2.5, 0.1, math.nan]), st.integers(0, 2), st.integers(0, 2))),
    st.sampled_from(METHODS),
)
def test_any_batch_by_hand(samples: list[tuple[float, int, int]], method: str) -> None:
    """Groups of any size, forks and unknown rewards among them, in any order."""
    rewards, groups = [r for r, _, _ in samples], [g for _, g, _ in samples]
    rollouts = [10 * g + rollout for _, g, rollout in samples]
    found = advantages(rewards, groups, method, rollouts)
    np.testing.assert_allclose(found, by_hand(rewards, groups, method, rollouts), rtol=1e-4, atol=1e-5)


def test_another_method_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="reinforce_pp"):
        advantages([1.0], [1], "ppo")
    with pytest.raises(InvalidSetting, match="Did you mean 'dr_grpo'"):
        advantages([1.0], [1], "drgrpo")
