"""The reward of the crash tests: a number that follows from the response, so that a wrong one shows."""

from __future__ import annotations

from typing import Any


def score(sample: Any) -> float:
    return expected(sample.response_length)


def expected(n_tokens: int) -> float:
    return (n_tokens % 7) / 8
