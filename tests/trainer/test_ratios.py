"""Importance ratios against values that were computed by hand, in numpy and in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from samplestore import ratios

KINDS: list[Callable[[Any], Any]] = [
    lambda values: np.array(values, np.float32),
    lambda values: torch.tensor(values, dtype=torch.float32),
]
pytestmark = pytest.mark.parametrize("make", KINDS, ids=["numpy", "torch"])

LN2, LN4 = math.log(2), math.log(4)
# Two samples, [3] and [2] tokens, packed; the first token of each is its prompt.
NEW = [math.nan, -1.0, -2.0, -math.inf, -1.0]
OLD = [0.0, -1.0 - LN2, -2.0 + LN4, 0.0, -1.0 - LN2]
MASK = [0.0, 1.0, 1.0, 0.0, 1.0]
LOG = [0.0, LN2, -LN4, 0.0, LN2]


def close(found: Any, wanted: Any) -> None:
    assert isinstance(found, (np.ndarray, np.generic, torch.Tensor))
    assert np.asarray(found, np.float64) == pytest.approx(np.array(wanted), rel=1e-6, abs=1e-7)


def test_token_ratios(make: Callable[[Any], Any]) -> None:
    new, old, mask = make(NEW), make(OLD), make(MASK)
    close(ratios.log_ratio(new, old, mask), LOG)
    ratio = ratios.token_ratio(new, old, mask)
    close(ratio, [1, 2, 0.25, 1, 2])
    close(ratios.truncated(ratio, 1.5), [1, 1.5, 0.25, 1, 1.5])
    close(ratios.masked(ratio, 0.5, 2.0), [1, 2, 0, 1, 2])
    close(ratios.masked(ratio, 0.25, 1.0), [1, 0, 0.25, 1, 0])


def test_kl_estimates(make: Callable[[Any], Any]) -> None:
    new, old, mask = make(NEW), make(OLD), make(MASK)
    close(ratios.kl_k1(new, old, mask), [0, -LN2, LN4, 0, -LN2])
    close(ratios.kl_k3(new, old, mask), [0, 1 - LN2, -0.75 + LN4, 0, 1 - LN2])


def test_sequence_ratios(make: Callable[[Any], Any]) -> None:
    """exp((ln 2 - ln 4) / 2) = 1 / sqrt(2), and exp(ln 2); without a token: 1."""
    bounds = make([0, 3, 5])
    bounds = bounds.astype(np.int32) if isinstance(bounds, np.ndarray) else bounds.int()
    close(ratios.sequence_ratio(make(NEW), make(OLD), make(MASK), bounds), [math.sqrt(0.5), 2])
    padded = [[*NEW[:3]], [*NEW[3:], 7.0], [1.0, 2.0, 3.0]]
    old = [[*OLD[:3]], [*OLD[3:], 0.0], [0.0, 0.0, 0.0]]
    mask = [[*MASK[:3]], [*MASK[3:], 0.0], [0.0, 0.0, 0.0]]
    close(ratios.sequence_ratio(make(padded), make(old), make(mask)), [math.sqrt(0.5), 2, 1])
    with pytest.raises(ValueError, match="cu_seqlens"):
        ratios.sequence_ratio(make(NEW), make(OLD), make(MASK))
    for wrong in ([0, 3], [0, 3, 6], [1, 5], [0, 4, 3, 5], [5], []):
        cut = make([0, *wrong])[1:]  # of no dtype else, where it is empty
        with pytest.raises(ValueError, match="must rise from 0 to the end"):
            ratios.sequence_ratio(make(NEW), make(OLD), make(MASK), cut)


def test_far_apart_does_not_overflow(make: Callable[[Any], Any]) -> None:
    new, old, mask = make([0.0, -900.0]), make([-900.0, 0.0]), make([1.0, 1.0])
    close(ratios.log_ratio(new, old, mask), [20, -20])
    close(ratios.token_ratio(new, old, mask), [math.exp(20), math.exp(-20)])
    assert np.isfinite(np.asarray(ratios.kl_k3(new, old, mask))).all()


def test_half_precision_is_computed_in_single(make: Callable[[Any], Any]) -> None:
    new, old, mask = make([10.0, -1.25]), make([-90.0, -1.5]), make([1.0, 1.0])
    half = [x.astype(np.float16) if isinstance(x, np.ndarray) else x.bfloat16() for x in (new, old, mask)]
    for given in (half, [half[0], old, mask], [new, *half[1:]]):
        found = ratios.token_ratio(*given)
        assert found.dtype == new.dtype
        close(found, [math.exp(20), math.exp(0.25)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_where_it_is_trained(make: Callable[[Any], Any], bad: float) -> None:
    fine, mask = make([[-1.0, -1.0]]), make([[0.0, 1.0]])
    for new, old, name in ((make([[-1.0, bad]]), fine, "new"), (fine, make([[-1.0, bad]]), "old")):
        with pytest.raises(ValueError, match=rf"{name} is .* at \[0, 1\]"):
            ratios.token_ratio(new, old, mask)
    close(ratios.token_ratio(make([[bad, -1.0]]), fine, mask), [[1, 1]])
    with pytest.raises(ValueError, match="one shape"):
        ratios.token_ratio(make([[-1.0]]), fine, mask)


def test_bounds_are_checked(make: Callable[[Any], Any]) -> None:
    for low, high in ((-0.1, 1.0), (1.0, 1.0), (2.0, 1.0), (0.5, math.nan)):
        with pytest.raises(ValueError, match="low"):
            ratios.masked(make([1.0]), low, high)
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="cap"):
            ratios.truncated(make([1.0]), cap)


def test_gradients_stay_finite(make: Callable[[Any], Any]) -> None:
    """A prompt's NaN is thrown away; its gradient must not come back as NaN."""
    if isinstance(make([0.0]), np.ndarray):
        return
    new = make(NEW).requires_grad_()
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    total = ratios.token_ratio(new, make(OLD), make(MASK)).sum() + ratios.kl_k3(new, make(OLD), make(MASK)).sum()
    (total + ratios.sequence_ratio(new, make(OLD), make(MASK), bounds).sum()).backward()
    assert torch.isfinite(new.grad).all() and new.grad[0] == new.grad[3] == 0 and (new.grad[1:3] != 0).all()
