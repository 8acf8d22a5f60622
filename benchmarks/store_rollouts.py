"""The rollouts that every store is measured with. Imports numpy only: peers run in environments of their own."""

from __future__ import annotations

import itertools

import numpy as np

GROUP = 8  # samples of a prompt
VOCABULARY = 151_000
SEGMENT = 1024  # tokens of a flush, in the long profile

Piece = tuple[np.ndarray, np.ndarray]  # ids int32 [n], log-probs float32 [n]


def pieces(tokens: int, n: int = 64, seed: int = 0) -> list[Piece]:
    """n different segments of so many tokens."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, VOCABULARY, tokens).astype(np.int32), -rng.exponential(0.5, tokens).astype(np.float32))
        for _ in range(n)
    ]


def long_lengths(n: int, seed: int = 0) -> list[int]:
    """Response lengths as RL has them: lognormal, median 1,000 tokens, at most 8,192."""
    drawn = np.random.default_rng(seed).lognormal(np.log(1000), 0.8, n)
    return [int(length) for length in np.clip(drawn, 16, 8192)]


def cut(length: int) -> list[int]:
    """Lengths of the segments of a response."""
    return [min(SEGMENT, length - at) for at in range(0, length, SEGMENT)]


def rollouts(n: int) -> list[list[Piece]]:
    """The segments of n answers of the long profile; answers share their arrays' bytes, not their lengths."""
    ((ids, probs),) = pieces(8192, 1)
    made = []
    for length in long_lengths(n):
        bounds = itertools.pairwise(itertools.accumulate(cut(length), initial=0))
        made.append([(ids[start:stop], probs[start:stop]) for start, stop in bounds])
    return made
