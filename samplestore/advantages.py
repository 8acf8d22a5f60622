"""Advantages per sample: normalised inside each group by its id, never by a fixed stride, since groups may be uneven;
or over the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.arguments import one_of

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
EPS = 1e-6

BY_GROUP = ("grpo", "dr_grpo", "rloo", "none")
# Inside each group first, then over the batch: REINFORCE++, arXiv:2501.03262, without its KL term, which is the loss's.
#   reinforce_pp            (r - mean of the batch) / (std of the batch + 1e-6)               for any number of samples
#   reinforce_pp_baseline   the same of (r - mean of its group)                       "w/ Baseline", for groups of many
OVER_BATCH = {"reinforce_pp": "none", "reinforce_pp_baseline": "dr_grpo"}
METHODS = (*BY_GROUP, *OVER_BATCH)


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

    std has n in the denominator. Where all are equal the result is exact zeros, but for `none`. REINFORCE++ is given
    without the KL term that its paper takes off the reward: that belongs to the loss. Its mean and deviation are over
    samples, not tokens: long ones weigh no more.

    rollout_ids   [n], equal for samples that were forked from one: every mean and deviation counts a rollout once, by
                  the mean of its samples
    Raises InvalidSetting for another method, ValueError for shapes that differ.
    """
    one_of("advantages", method, METHODS)
    values, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    rollouts = np.arange(values.size) if rollout_ids is None else np.asarray(rollout_ids)
    if values.shape != ids.shape or values.shape != rollouts.shape or values.ndim != 1:
        shapes = f"rewards {values.shape}, group ids {ids.shape} and rollout ids {rollouts.shape}"
        raise ValueError(f"{shapes} must have one and the same length")
    result = np.full_like(values, np.nan)
    known = ~np.isnan(values)
    inside = _within(values[known], ids[known], rollouts[known], OVER_BATCH.get(method, method))
    if method in OVER_BATCH:
        inside = _within(inside, np.zeros(inside.size), rollouts[known], "grpo")
    result[known] = inside
    return result.astype(np.float32)


def _within(values: Values, groups: npt.NDArray[Any], rollouts: npt.NDArray[Any], method: str) -> Values:
    """One of BY_GROUP, of all groups at once."""
    if method == "none" or not values.size:
        return values
    _, group = np.unique(groups, return_inverse=True)
    _, rollout = np.unique(rollouts, return_inverse=True)
    _, first, rollout, size = np.unique(
        group * (rollout.max() + 1) + rollout, return_index=True, return_inverse=True, return_counts=True
    )
    of_group = group[first]  # of each rollout
    n = np.bincount(of_group)

    def by_rollout(x: Values) -> Values:
        return np.bincount(rollout, x) / size

    def mean(x: Values) -> Values:
        return (np.bincount(of_group, by_rollout(x)) / n)[group]

    apart = values - mean(values)
    if method == "grpo":
        apart = apart / (np.sqrt(mean(apart**2)) + EPS)
    elif method == "rloo":  # r - (sum - own) / (n - 1) of the rollouts
        own = by_rollout(values)
        others = (np.bincount(of_group, own)[of_group] - own) / np.maximum(n - 1, 1)[of_group]
        apart = np.where((n > 1)[group], values - others[rollout], 0.0)
    apart[_equal(values, group)] = 0.0  # their mean may be off by a rounding, and nothing of that is to be trained
    return apart


def _equal(values: Values, group: Places) -> npt.NDArray[np.bool_]:
    """Which values are of a group whose values are all equal."""
    low, high = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return np.asarray((low == high)[group])
