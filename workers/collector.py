"""Python's garbage collector in a worker's process."""

from __future__ import annotations

import gc

YOUNG = 100_000  # objects; Python's own threshold is 700


def collect_seldom() -> None:
    """Look for cycles a hundred times less often. An answer in JSON is thousands of lists that live for a millisecond,
    none of them in a cycle, and each 700 of them started a walk over the heap: half of what a unary answer cost. What
    was imported stays, so it is not walked at all. For a process that is a worker's own, when all is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 100)
