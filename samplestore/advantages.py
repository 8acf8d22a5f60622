"""Advantages per sample, normalised inside each group by its id, never by a fixed stride: groups may be uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _over_rollouts(rewards: Rewards, rollouts: npt.NDArray[Any], method: str) -> Rewards:
    """The same for a group in which a rollout may have several samples: each rollout counts once, by the mean of its
    samples' rewards, and each sample is held against that."""
    _, place, counts = np.unique(rollouts, return_inverse=True, return_counts=True)
    if method == "none" or counts.max(initial=1) == 1:
        return METHODS[method](rewards)
    means = np.bincount(place, weights=rewards) / counts
    n, mean = counts.size, means.mean()
    if method == "rloo":
        return np.zeros_like(rewards) if n < 2 else rewards - (means.sum() - means[place]) / (n - 1)
    if method == "dr_grpo":
        return np.asarray(rewards - mean)
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    std = np.sqrt((np.bincount(place, weights=(rewards - mean) ** 2) / counts).mean())
    return np.asarray((rewards - mean) / (std + EPS))


def advantages(
    rewards: npt.ArrayLike, group_ids: npt.ArrayLike, method: str = "grpo", rollout_ids: npt.ArrayLike | None = None
) -> npt.NDArray[np.float32]:
    """float32 [n] from rewards [n] and the group id of each sample [n]. A reward that is not known (NaN) has no
    advantage (NaN), and the others get theirs as if its sample were not there.

    rollout_ids   [n], equal for samples that were forked from one: a group's mean and deviation count a rollout once
    Raises ValueError.
    """
    if method not in METHODS:
        raise ValueError(f"advantages={method!r} is not one of {sorted(METHODS)}")
    values, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    rollouts = np.arange(values.size) if rollout_ids is None else np.asarray(rollout_ids)
    if values.shape != ids.shape or values.shape != rollouts.shape or values.ndim != 1:
        shapes = f"rewards {values.shape}, group ids {ids.shape} and rollout ids {rollouts.shape}"
        raise ValueError(f"{shapes} must have one and the same length")
    result = np.full_like(values, np.nan)
    known = np.flatnonzero(~np.isnan(values))
    forked = np.unique(rollouts).size < rollouts.size
    for members in _by_group(known, ids[known]):
        mine = values[members]
        result[members] = _over_rollouts(mine, rollouts[members], method) if forked else METHODS[method](mine)
    return result.astype(np.float32)


def _by_group(places: npt.NDArray[np.intp], ids: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """The places of each group, wherever its samples stand."""
    order = np.argsort(ids, kind="stable")
    return np.split(places[order], np.flatnonzero(np.diff(ids[order])) + 1) if places.size else []
