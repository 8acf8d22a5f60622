"""Key/value memory: one row per running request, tokens always at the start of their row.

Rows 0..n-1 are in use. A step writes the new keys in place and attends over a view of the used part, so nothing is
copied when a token is added and only one row moves when a request leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 128


class _Window:
    """Which rows and positions the forward pass in progress reads and writes (shared by all layers)."""

    def __init__(self) -> None:
        self.first = 0
        self.last = 0
        self.longest = 0
        self.start: int | None = None
        self.row_index = torch.zeros(0, dtype=torch.long)
        self.positions = torch.zeros(0, dtype=torch.long)


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer: [rows, heads, positions, width], grown by the owner."""

    is_sliding = False
    is_compileable = False

    def __init__(self, window: _Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.rows = 0
        self.capacity = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_zeros((self.rows, key_states.shape[1], self.capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((self.rows, value_states.shape[1], self.capacity, value_states.shape[3]))
        self.is_initialized = True

    def reserve(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        if self.keys is not None and self.values is not None:
            self.keys = _grown(self.keys, rows, capacity)
            self.values = _grown(self.values, rows, capacity)

    def move(self, source: int, target: int, length: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        at = self.window
        if at.start is None:
            self.keys[at.row_index, :, at.positions] = key_states[:, :, 0]
            self.values[at.row_index, :, at.positions] = value_states[:, :, 0]
        else:
            self.keys[at.first, :, at.start : at.longest] = key_states[0]
            self.values[at.first, :, at.start : at.longest] = value_states[0]
        rows = slice(at.first, at.last)
        return self.keys[rows, :, : at.longest], self.values[rows, :, : at.longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.longest, 0

    def get_seq_length(self) -> int:
        return self.window.longest

    def get_max_length(self) -> int:
        return self.capacity

    # The name that transformers 5.0 to 5.2x use for the same question.
    def get_max_cache_shape(self) -> int:
        return self.capacity


class RowCache(Cache):
    """A `transformers` cache over `layers` layers whose rows belong to requests; see the module's docstring."""

    def __init__(self, layers: int) -> None:
        self.window = _Window()
        self._row_layers = [_RowLayer(self.window) for _ in range(layers)]
        super().__init__(layers=list(self._row_layers))
        self.rows = 0
        self.capacity = 0

    def ensure(self, rows: int, length: int, most: int) -> None:
        """Make room for `rows` rows of `length` tokens; grows in blocks and never past `most` tokens per row."""
        if rows <= self.rows and length <= self.capacity:
            return
        capacity = self.capacity
        if length > capacity:
            capacity = max(length, min(capacity + capacity // 2, most))
            capacity = max(length, min(-(-capacity // BLOCK) * BLOCK, most))
        self.rows, self.capacity = max(self.rows, rows), capacity
        for layer in self._row_layers:
            layer.reserve(self.rows, self.capacity)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` over row `target`."""
        # Rows were written in inference mode, and only inference mode may change them.
        with torch.inference_mode():
            for layer in self._row_layers:
                layer.move(source, target, length)

    def one_row(self, row: int, start: int, end: int) -> None:
        """The next forward pass writes tokens start..end-1 of one row."""
        at = self.window
        at.first, at.last, at.start, at.longest = row, row + 1, start, end

    def all_rows(self, positions: torch.Tensor, longest: int) -> None:
        """The next forward pass writes one token per row: row i at `positions[i]` (int64), all below `longest`."""
        at = self.window
        at.first, at.last, at.start, at.longest = 0, positions.shape[0], None, longest
        at.row_index, at.positions = torch.arange(positions.shape[0]), positions


def _grown(old: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    new = old.new_zeros((rows, old.shape[1], capacity, old.shape[3]))
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
