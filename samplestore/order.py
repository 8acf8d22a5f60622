"""The order in which prompts are served: a seeded permutation that needs no table and no scan.

A chunk of n positions is permuted by a four-round Feistel network over the next power of four, with cycle walking
(values outside the chunk are permuted again until they fall inside). So the i-th prompt of a chunk is found at once,
whatever n is, and every process computes the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

ROUNDS = 4


def permuted(index: int, n: int, key: str) -> int:
    """The position, in 0..n-1, that comes `index`-th in the order that `key` names."""
    if not 0 <= index < n:
        raise ValueError(f"index {index} outside 0..{n - 1}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    value = index
    while True:
        value = _feistel(value, half, key)
        if value < n:
            return value


def _feistel(value: int, half: int, key: str) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for round_number in range(ROUNDS):
        digest = hashlib.blake2b(f"{key}/{round_number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half) | right


@dataclass(slots=True)
class Cursor:
    """Where the serving order stands. Prompts added in the middle of an epoch form a chunk of their own at its end,
    so that nothing that was served already moves."""

    epoch: int
    start: int
    stop: int
    next: int

    def advance(self, n_prompts: int, epochs: int | None, seed: int | str) -> tuple[int, int] | None:
        """(epoch, position) of the next prompt to serve, or None when all epochs are served."""
        if self.next >= self.stop:
            if self.stop < n_prompts:
                self.start, self.stop = self.stop, n_prompts
            elif n_prompts and (epochs is None or self.epoch + 1 < epochs):
                self.epoch, self.start, self.stop = self.epoch + 1, 0, n_prompts
            else:
                return None
            self.next = self.start
        size = self.stop - self.start
        at = permuted(self.next - self.start, size, f"{seed}/{self.epoch}/{self.start}/{size}")
        self.next += 1
        return self.epoch, self.start + at

    def exhausted(self, n_prompts: int, epochs: int | None) -> bool:
        return self.next >= self.stop >= n_prompts and (
            n_prompts == 0 or (epochs is not None and self.epoch + 1 >= epochs)
        )
