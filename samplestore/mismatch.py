"""How far a trainer's log-probs are from those that the engines gave for the same tokens. With the same weights and the
same arithmetic they would be equal; what is left is the mismatch that importance ratios correct (ratios.py), or a
mistake of the trainer, such as log-probs that stand one place beside their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore import ratios, responses
from samplestore.tensors import BatchSample
from samplestore.types import Floats

LAGS = (0, -1, 1, -2, 2)  # the first of those that fit alike is the best
FEWEST = 16  # pairs of tokens that say anything about a lag
PERCENTILES = (1, 5, 50, 95, 99)
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distance:
    """Over n_tokens tokens, in nats; r = pi_trainer / pi_engine of a token, and NaN where there is no token.

    kl_k1      mean of -log r: an estimate of KL(engine || trainer), see samplestore.ratios
    kl_k3      mean of (r - 1) - log r: the same, never negative
    abs_diff   mean of |log r|
    """

    n_tokens: int
    kl_k1: float
    kl_k3: float
    abs_diff: float


@dataclass(frozen=True, slots=True)
class SampleMismatch(Distance):
    """log_ratio: log r of each response token, float32 [n]; NaN where one of the two log-probs is not known, and where
    the token is not trained."""

    sample_id: int
    log_ratio: Floats = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Mismatch(Distance):
    """Of the trained tokens of a step that have both log-probs.

    ratio      percentiles of r: {1: ..., 5: ..., 50: ..., 95: ..., 99: ...}
    by_lag     by how many versions the weights that wrote a token were behind at the lease; -1: unknown
    lags       mean |difference| if the trainer's number at place t + lag is held against the engine's at t, for lags of
               -2 to 2 that 16 tokens or more tell something about
    best_lag   the lag with the smallest: 0 in a trainer whose log-probs stand at their tokens
    shifted    another lag fits at least twice as well as 0: the trainer's log-probs stand beside their tokens
    """

    step: int
    ratio: dict[int, float]
    by_lag: dict[int, Distance]
    lags: dict[int, float]
    best_lag: int
    samples: list[SampleMismatch] = field(repr=False)

    @property
    def shifted(self) -> bool:
        return self.best_lag != 0 and self.lags[self.best_lag] < self.lags[0] / 2

    @property
    def warning(self) -> str:
        """What is wrong, or ""."""
        if not self.shifted:
            return ""
        places = f"{abs(self.best_lag)} {'place' if abs(self.best_lag) == 1 else 'places'}"
        side = "after" if self.best_lag > 0 else "before"
        return (
            f"the trainer's log-probs stand {places} {side} their tokens: mean |difference| to the engines' is "
            f"{self.lags[self.best_lag]:.3g} there, and {self.lags[0]:.3g} as they were given. The entry of a token "
            "belongs at its own place, not at the one whose logits predict it"
        )


def compare(
    step: int, samples: Sequence[BatchSample], trainer: Sequence[Floats], behind: Mapping[int, int]
) -> Mismatch:  # fmt: skip
    """trainer: float32 [n response tokens] of each sample, NaN where there is none. behind: versions behind, by weight
    version."""
    made, lags = [], []
    pairs: dict[int, list[Doubles]] = {lag: [] for lag in LAGS}
    for sample, values in zip(samples, trainer, strict=True):
        used = (sample.loss_mask > 0) & _has_logprobs(sample) & np.isfinite(values)
        new, old = values.astype(np.float64), sample.logprobs.astype(np.float64)
        logs = ratios.log_ratio(new, old, used)
        shown = np.where(used, logs, np.nan).astype(np.float32)
        made.append(SampleMismatch(**_distance(logs[used]), sample_id=sample.sample_id, log_ratio=shown))
        lags.append((logs[used], np.array([behind.get(v, -1) for v in sample.versions[used].tolist()], np.int64)))
        for lag in LAGS:
            pairs[lag].append(_apart(new, old, used, lag))
    every = np.concatenate([logs for logs, _ in lags]) if lags else np.zeros(0)
    late = np.concatenate([late for _, late in lags]) if lags else np.zeros(0, np.int64)
    fits = {lag: np.concatenate(parts) for lag, parts in pairs.items()} if made else {}
    told = {lag: float(apart.mean()) for lag, apart in fits.items() if apart.size >= FEWEST}
    known = 0 in told  # else nothing can be said to be better than it
    return Mismatch(
        **_distance(every), step=step,
        ratio={p: float(np.exp(np.percentile(every, p))) for p in PERCENTILES} if every.size else {},
        by_lag={int(n): Distance(**_distance(every[late == n])) for n in np.unique(late)},
        lags=told, best_lag=min(told, key=told.__getitem__) if known else 0, samples=made,
    )  # fmt: skip


def on_response(sample: BatchSample, rows: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> Floats:
    """A stored array, as long as the sample's response: a fork has its own tokens only, the last ones."""
    values = np.full(responses.length(sample.runs), np.nan, np.float32)
    n = min(len(rows), len(values))
    values[len(values) - n :] = np.where(present, rows, np.nan)[len(rows) - n :]
    return values


def _has_logprobs(sample: BatchSample) -> npt.NDArray[np.bool_]:
    """Which tokens came with a log-prob. A segment without has 0 everywhere; so has one of nothing but certainties,
    which tells nothing about a mismatch either."""
    sizes = [run.size for run in sample.runs]
    return np.repeat(np.array([bool(run.logprobs.any()) for run in sample.runs], np.bool_), sizes)


def _apart(new: Doubles, old: Doubles, used: npt.NDArray[np.bool_], lag: int) -> Doubles:
    """|new[t + lag] - old[t]| of the places t where both are known."""
    n = len(new)
    at = np.flatnonzero(used[max(0, -lag) : max(0, n - max(0, lag))]) + max(0, -lag)
    apart = np.abs(new[at + lag] - old[at])
    return np.asarray(apart[np.isfinite(apart)])


def _distance(logs: Doubles) -> dict[str, Any]:
    if not logs.size:
        return {"n_tokens": 0, "kl_k1": np.nan, "kl_k3": np.nan, "abs_diff": np.nan}
    return {
        "n_tokens": int(logs.size),
        "kl_k1": float(-logs.mean()),
        "kl_k3": float((np.expm1(logs) - logs).mean()),
        "abs_diff": float(np.abs(logs).mean()),
    }
