"""Advantages per sample, normalised inside each group by its id, never by a fixed stride: groups may be uneven."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Rewards = npt.NDArray[np.float64]
EPS = 1e-6


def _grpo(rewards: Rewards) -> Rewards:
    """(r - mean) / (std + 1e-6), std with n in the denominator. DeepSeekMath, arXiv:2402.03300, section 4.1.
    A group whose rewards are all equal gets exact zeros."""
    if rewards.size == 0 or np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + EPS))


def _dr_grpo(rewards: Rewards) -> Rewards:
    """r - mean. "Understanding R1-Zero-Like Training", arXiv:2503.20783: dividing by std favours easy prompts."""
    return np.asarray(rewards - rewards.mean())


def _rloo(rewards: Rewards) -> Rewards:
    """r_i - mean of the others. RLOO, arXiv:2402.14740. A lone sample has no baseline: 0."""
    n = rewards.size
    return np.zeros_like(rewards) if n < 2 else (n * rewards - rewards.sum()) / (n - 1)


def _none(rewards: Rewards) -> Rewards:
    return rewards


METHODS: dict[str, Callable[[Rewards], Rewards]] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo, "none": _none}


def advantages(rewards: npt.ArrayLike, group_ids: npt.ArrayLike, method: str = "grpo") -> npt.NDArray[np.float32]:
    """float32 [n] from rewards [n] and the group id of each sample [n]. Raises ValueError."""
    if method not in METHODS:
        raise ValueError(f"advantages={method!r} is not one of {sorted(METHODS)}")
    values, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    if values.shape != ids.shape or values.ndim != 1:
        raise ValueError(f"rewards {values.shape} and group ids {ids.shape} must have one and the same length")
    result = np.empty_like(values)
    for group_id in np.unique(ids):
        members = ids == group_id
        result[members] = METHODS[method](values[members])
    return result.astype(np.float32)
