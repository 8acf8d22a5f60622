"""Advantages per sample: normalised inside each group by its id, never by a fixed stride, since groups may be uneven;
or over the whole batch."""

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


BY_GROUP: dict[str, Callable[[Rewards], Rewards]] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo, "none": _none}
# Inside each group first, then over the batch: REINFORCE++, arXiv:2501.03262, without its KL term, which is the loss's.
#   reinforce_pp            (r - mean of the batch) / (std of the batch + 1e-6)               for any number of samples
#   reinforce_pp_baseline   the same of (r - mean of its group)                       "w/ Baseline", for groups of many
OVER_BATCH = {"reinforce_pp": "none", "reinforce_pp_baseline": "dr_grpo"}
METHODS = (*BY_GROUP, *OVER_BATCH)


def _over_rollouts(rewards: Rewards, rollouts: npt.NDArray[Any], method: str) -> Rewards:
    """The same for a group in which a rollout may have several samples: each rollout counts once, by the mean of its
    samples' rewards, and each sample is held against that."""
    place, counts = _rollouts(rollouts)
    if method == "none" or counts.max(initial=1) == 1:
        return BY_GROUP[method](rewards)
    means = np.bincount(place, weights=rewards) / counts
    n, mean = counts.size, means.mean()
    if method == "rloo":
        return np.zeros_like(rewards) if n < 2 else rewards - (means.sum() - means[place]) / (n - 1)
    if method == "dr_grpo":
        return np.asarray(rewards - mean)
    return _standard(rewards, rollouts)


def _standard(values: Rewards, rollouts: npt.NDArray[Any]) -> Rewards:
    """(value - mean) / (std + 1e-6), std with n in the denominator; each rollout counts once, by the mean of its
    samples. Exact zeros where all are equal."""
    if values.size == 0 or np.all(values == values[0]):
        return np.zeros_like(values)
    place, counts = _rollouts(rollouts)
    mean = (np.bincount(place, weights=values) / counts).mean()
    std = np.sqrt((np.bincount(place, weights=(values - mean) ** 2) / counts).mean())
    return np.asarray((values - mean) / (std + EPS))


def _rollouts(rollouts: npt.NDArray[Any]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """(place of each sample's rollout, samples of each rollout)."""
    _, place, counts = np.unique(rollouts, return_inverse=True, return_counts=True)
    return place, counts


def advantages(
    rewards: npt.ArrayLike, group_ids: npt.ArrayLike, method: str = "grpo", rollout_ids: npt.ArrayLike | None = None
) -> npt.NDArray[np.float32]:
    """float32 [n] from rewards [n] and the group id of each sample [n]. A reward that is not known (NaN) has no
    advantage (NaN), and the others get theirs as if its sample were not there.

    method                  A of a sample with reward r
    grpo                    (r - mean of its group) / (std of its group + 1e-6)    arXiv:2402.03300, section 4.1
    dr_grpo                 r - mean of its group                                  arXiv:2503.20783
    rloo                    r - mean of the others of its group; 0 for a lone one  arXiv:2402.14740
    reinforce_pp            (r - mean of the batch) / (std of the batch + 1e-6)    arXiv:2501.03262
    reinforce_pp_baseline   the same of r - mean of its group                      arXiv:2501.03262, w/ Baseline
    none                    r

    std has n in the denominator; where all are equal it is not divided by: exact zeros. REINFORCE++ is given without
    the KL term that its paper takes off the reward: that belongs to the loss. Its mean and deviation are over samples,
    not tokens: long ones weigh no more.

    rollout_ids   [n], equal for samples that were forked from one: every mean and deviation counts a rollout once
    Raises ValueError.
    """
    if method not in METHODS:
        raise ValueError(f"advantages={method!r} is not one of {sorted(METHODS)}")
    inside = OVER_BATCH.get(method, method)
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
        result[members] = _over_rollouts(mine, rollouts[members], inside) if forked else BY_GROUP[inside](mine)
    if method in OVER_BATCH:
        result[known] = _standard(result[known], rollouts[known])
    return result.astype(np.float32)


def _by_group(places: npt.NDArray[np.intp], ids: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """The places of each group, wherever its samples stand."""
    order = np.argsort(ids, kind="stable")
    return np.split(places[order], np.flatnonzero(np.diff(ids[order])) + 1) if places.size else []
