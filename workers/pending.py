"""Tokens that an engine has sent and the store has not acknowledged, and which weights made which of them."""

from __future__ import annotations

import math
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samplestore.errors import InvalidSegment
from samplestore.workers.replies import MAX_LOGPROB, Delta, EngineError


@dataclass(slots=True)
class Pending:
    """Tokens that the engine has sent and the store has not acknowledged, in order: in arrays of the store's own types,
    since as Python objects they take ten times the memory. Log-probs turn into a list where one is no number, so that
    the store can show it."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] | list[Any] | None = None
    since: float = 0.0

    def add(self, delta: Delta) -> None:
        if not delta.ids:
            return
        if not self.ids:
            self.since, self.logprobs = time.monotonic(), array("f")
        try:
            self.ids.fromlist(delta.ids)
        except (TypeError, OverflowError) as error:
            raise EngineError("broken", f"output_ids holds what is no token id: {error}") from error
        if self.logprobs is None or delta.logprobs is None:
            self.logprobs = None
        elif isinstance(self.logprobs, array) and list(map(type, delta.logprobs)).count(float) == len(delta.logprobs):
            self.logprobs.fromlist(delta.logprobs)  # half of what extend() costs
        else:
            self.logprobs = [*self.logprobs, *delta.logprobs]

    def part(self, start: int, stop: int) -> tuple[Any, Any]:
        """The tokens start..stop and their log-probs, arrays where they are sound: the store takes those at once, and
        a list number by number. Raises InvalidSegment for a log-prob above 0."""
        ids: Any = np.frombuffer(self.ids[start:stop], dtype=np.int32)
        values = None if self.logprobs is None else self.logprobs[start:stop]
        if values is None:
            return ids, None
        if isinstance(values, array):
            numbers = np.frombuffer(values, dtype=np.float32)
            if numbers.max(initial=0.0) <= MAX_LOGPROB and np.isfinite(numbers).all():
                return ids, numbers
            values = values.tolist()
        _require_no_gain(values)
        return ids, values

    def drop(self, n: int) -> None:
        """The first n are stored. Not before: behind tokens that were refused nothing may be stored, or the response
        would have a hole."""
        self.ids = self.ids[n:]
        self.logprobs = None if self.logprobs is None else self.logprobs[n:]


def _require_no_gain(values: list[Any]) -> None:
    """Probabilities, or logits, in the place of log-probs would be trained on without a word. What is no number is left
    to the store. Raises InvalidSegment naming the position."""
    for at, value in enumerate(values):
        if isinstance(value, int | float) and MAX_LOGPROB < value < math.inf:
            raise InvalidSegment(
                f"log-prob at position {at} is {value!r:.40}: above 0, no log-prob", field="logprobs", position=at
            )


def spans_of(spans: Any, total: int) -> list[tuple[int, int, str]]:
    """The engine's weight_versions, if they tile 0..total; else nothing: they are not trusted half."""
    result, at = [], 0
    for span in spans or []:
        start, stop, label = (span.get(k) for k in ("start", "end", "version")) if isinstance(span, dict) else (0, 0, 0)
        if start != at or not isinstance(stop, int) or stop < start or not isinstance(label, str):
            return []
        result.append((start, stop, label))
        at = stop
    return result if at == total else []
