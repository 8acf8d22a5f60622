"""The tokens of a delivered sample, piece by piece as the store keeps them: joined once, where they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplestore import codec
from samplestore.errors import MissingLogprobs
from samplestore.types import Floats, Ids


class Run(NamedTuple):
    """Neighbouring tokens that are alike, n of them, as bytes of a payload. A batch has thousands and joins them all:
    arrays of numpy for each would take half as long again. Can be pickled.

    tokens    n int32, little-endian
    probs     n float32, little-endian; 0.0 where a token has no log-prob
    trained   loss mask 1
    version   of the weights that made them, -1 where unknown or not generated
    """

    tokens: Bytes
    probs: Bytes
    trained: bool
    version: int

    def __reduce__(self) -> Any:
        return Run, (bytes(self.tokens), bytes(self.probs), self.trained, self.version)

    @property
    def size(self) -> int:
        return len(self.tokens) // 4

    @property
    def logprobs(self) -> Floats:
        """float32 [n]"""
        return np.frombuffer(self.probs, "<f4")

    def untrained(self) -> Run:
        return self._replace(trained=False)


Bytes = bytes | memoryview
Runs = tuple[Run, ...]
_run = partial(tuple.__new__, Run)  # what Run._make does, without a call of Python for each


def of(pieces: Sequence[Any], trained: Sequence[bool] | None = None, missing: float | None = 0.0) -> Runs:
    """Of a sample's segments in order.

    trained   which of them carry loss; None: as they were stored
    missing   log-prob of a trained token that came without one; None: there must be none such
    Raises MissingLogprobs, and what codec.split does.
    """
    made = []
    for place, piece in enumerate(pieces):
        taken = piece.loss != 0 if trained is None else trained[place]
        tokens, probs = codec.split(piece.payload)
        if probs is None:
            if taken and missing is None:
                raise MissingLogprobs(piece.sample_id)
            probs = memoryview(np.full(len(tokens) // 4, missing if taken else 0.0, "<f4").tobytes())
        version = piece.version_min
        made.append(_run((tokens, probs, taken, -1 if version is None else version)))
    return tuple(made)


def prompt(ids: bytes) -> Run:
    """Of ids as a prompt has them: int32, little-endian."""
    return Run(ids, bytes(len(ids)), False, -1)


def length(runs: Sequence[Run]) -> int:
    return sum([run.size for run in runs])


def ids(runs: Sequence[Run]) -> Ids:
    """int32 [n]"""
    return joined([run.tokens for run in runs], "<i4")


def logprobs(runs: Sequence[Run]) -> Floats:
    """float32 [n]"""
    return joined([run.probs for run in runs], "<f4")


def joined(parts: Iterable[Bytes], dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(bytearray().join(parts), dtype)


def versions(runs: Sequence[Run]) -> Ids:
    """int32 [n]"""
    return np.repeat(np.array([run.version for run in runs], np.int32), [run.size for run in runs])


def loss_mask(runs: Sequence[Run]) -> npt.NDArray[np.uint8]:
    """uint8 [n]"""
    return np.repeat(np.array([run.trained for run in runs], np.uint8), [run.size for run in runs])


def until(runs: Sequence[Run], stop: int) -> Runs:
    """The first `stop` tokens."""
    kept, at = [], 0
    for run in runs:
        left = 4 * (stop - at)
        if left <= 0:
            break
        fits = len(run.tokens) <= left
        kept.append(run if fits else run._replace(tokens=run.tokens[:left], probs=run.probs[:left]))
        at += run.size
    return tuple(kept)


def since(runs: Sequence[Run], start: int) -> Runs:
    """All but the first `start` tokens."""
    kept, at = [], 0
    for run in runs:
        skip = 4 * (start - at)
        at += run.size
        if skip < len(run.tokens):
            kept.append(run if skip <= 0 else run._replace(tokens=run.tokens[skip:], probs=run.probs[skip:]))
    return tuple(kept)
