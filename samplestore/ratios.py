"""Importance ratios between the weights being trained and those that wrote the tokens: of stale tokens, and of tokens
whose engine computes other log-probs than the trainer does with the same weights.

All take numpy arrays or torch tensors of one kind and give the same kind, in float32 at least; gradients go through
`new`. Shapes are those of batch.tensors(): packed [T] or padded [B, L]. `mask` is the loss mask: where it is 0 nothing
is looked at, and the log-ratio is 0 (the ratio 1), so that padding and prompts can't bring inf or NaN into a sum. Where
it is 1, a log-prob that is not finite raises ValueError with its place. A log-ratio is clamped to +-20 before exp.

    log r = new - old,  r = pi_new(token) / pi_old(token)
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

LIMIT = 20.0  # exp(20) = 4.9e8: no policy that is trained comes near, and no sum of such overflows


def log_ratio(new: Any, old: Any, mask: Any) -> Any:
    """new - old in nats, clamped to +-20, 0 where `mask` is 0. new, old: log-probs, and mask, all of one shape.
    Raises ValueError for other shapes, and for what is not finite where `mask` is 1."""
    if not new.shape == old.shape == mask.shape:
        raise ValueError(f"new {_dims(new)}, old {_dims(old)} and mask {_dims(mask)} must have one shape")
    xp, used = _of(new), mask > 0
    new, old = _single(new), _single(old)
    for name, values in (("new", new), ("old", old)):
        bad = used & ~xp.isfinite(values)
        if bool(bad.any()):
            at = np.argwhere(np.asarray(bad.tolist()))[0].tolist()
            raise ValueError(f"{name} is {float(values[tuple(at)])} at {at}, where the mask is 1")
    zero = xp.zeros_like(new)
    # Both sides before the difference: the gradient of a NaN that is thrown away afterwards is NaN, not 0.
    return (xp.where(used, new, zero) - xp.where(used, old, zero)).clip(-LIMIT, LIMIT)


def token_ratio(new: Any, old: Any, mask: Any) -> Any:
    """r_t = exp(new_t - old_t), 1 where `mask` is 0. PPO, arXiv:1707.06347, eq. 6. Raises ValueError."""
    return _of(new).exp(log_ratio(new, old, mask))


def sequence_ratio(new: Any, old: Any, mask: Any, cu_seqlens: Any = None) -> Any:
    """[B]: s = exp(mean over the sample's tokens with mask 1 of (new_t - old_t)), the geometric mean of its token
    ratios; 1 for a sample without such a token. GSPO, arXiv:2507.18071, eq. 7.

    cu_seqlens   int [B+1], an array or tensor: where samples begin and end, of packed [T]; padded [B, L] needs none
    Raises ValueError.
    """
    logs = log_ratio(new, old, mask)
    used = (mask > 0).astype(logs.dtype) if isinstance(logs, np.ndarray) else (mask > 0).to(logs.dtype)
    if cu_seqlens is None:
        if logs.ndim != 2:
            raise ValueError(f"{_dims(logs)} is not padded [B, L]; a packed batch needs cu_seqlens")
        total, n = logs.sum(-1), used.sum(-1)
    else:
        ends = cu_seqlens.tolist()
        if logs.ndim != 1 or ends[:1] + ends[-1:] != [0, logs.shape[0]] or ends != sorted(ends):
            raise ValueError(f"cu_seqlens must rise from 0 to the end of packed [T]; the log-probs are {_dims(logs)}")
        total, n = _sums(logs, cu_seqlens), _sums(used, cu_seqlens)
    return _of(logs).exp(total / n.clip(1, None))


def truncated(ratio: Any, cap: float = 2.0) -> Any:
    """min(ratio, cap): the weight of truncated importance sampling. It bounds the variance and keeps every token, at
    the price of a bias where it cuts. IMPALA, arXiv:1802.01561, section 4.1 (rho-bar). As a weight of a loss detach
    it. Raises ValueError for a cap that is not above 0."""
    if not cap > 0:
        raise ValueError(f"cap={cap} is not above 0")
    return ratio.clip(None, cap)


def masked(ratio: Any, low: float = 0.5, high: float = 2.0) -> Any:
    """ratio where low <= ratio <= high, else 0: the weight of masked importance sampling. A token that one policy all
    but excludes is left out rather than cut. IcePop, arXiv:2510.18855. Raises ValueError unless 0 <= low < high."""
    if not 0 <= low < high:
        raise ValueError(f"low={low} and high={high}: 0 <= low < high is needed")
    xp = _of(ratio)
    return xp.where((ratio >= low) & (ratio <= high), ratio, xp.zeros_like(ratio))


def kl_k1(new: Any, old: Any, mask: Any) -> Any:
    """Per token -log r = old_t - new_t, 0 where `mask` is 0: its mean over tokens that pi_old drew estimates
    KL(pi_old || pi_new) without bias; single values may be negative. Schulman 2020, "Approximating KL Divergence", k1.
    Raises ValueError."""
    return -log_ratio(new, old, mask)


def kl_k3(new: Any, old: Any, mask: Any) -> Any:
    """Per token (r - 1) - log r, 0 where `mask` is 0: estimates the same, never negative and of less variance.
    Schulman 2020, "Approximating KL Divergence", k3. Raises ValueError."""
    xp, logs = _of(new), log_ratio(new, old, mask)
    return xp.expm1(logs) - logs


def _of(array: Any) -> Any:
    """The library of an array. torch is never imported here: who passes a tensor has it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else np


def _single(array: Any) -> Any:
    """In float32 at least: exp(20) is no float16."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float32) if array.dtype.itemsize < 4 else array
    return array.float() if array.element_size() < 4 else array


def _sums(values: Any, cu_seqlens: Any) -> Any:
    """Sums over the samples of a packed row. By sample, not as differences of one running sum, which loses digits."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    if isinstance(values, np.ndarray):
        return np.bincount(np.repeat(np.arange(len(lengths)), lengths), values, len(lengths)).astype(values.dtype)
    xp = _of(values)
    place = xp.arange(len(lengths), device=values.device).repeat_interleave(lengths.to(values.device).long())
    return values.new_zeros(len(lengths)).index_add(0, place, values)


def _dims(array: Any) -> list[int]:
    return list(array.shape)
