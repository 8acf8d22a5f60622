"""The tokens of a delivered response, piece by piece as the store keeps them: joined once, where they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from samplestore.types import Floats, Ids


class Run(NamedTuple):
    """Neighbouring tokens that are alike. ids: int32 [n]; logprobs: float32 [n], 0.0 where there is none; trained:
    loss mask 1; version: of the weights that made them, -1 where unknown or not generated."""

    ids: Ids
    logprobs: Floats
    trained: bool
    version: int

    def untrained(self) -> Run:
        return self._replace(trained=False)


Runs = tuple[Run, ...]


def length(runs: Sequence[Run]) -> int:
    return sum([run.ids.size for run in runs])


def n_trained(runs: Sequence[Run]) -> int:
    return sum(run.ids.size for run in runs if run.trained)


def ids(runs: Sequence[Run]) -> Ids:
    """int32 [n]"""
    return np.concatenate([run.ids for run in runs]) if runs else np.empty(0, np.int32)


def until(runs: Sequence[Run], stop: int) -> Runs:
    """The first `stop` tokens."""
    kept, at = [], 0
    for run in runs:
        left = stop - at
        if left <= 0:
            break
        kept.append(run if run.ids.size <= left else run._replace(ids=run.ids[:left], logprobs=run.logprobs[:left]))
        at += run.ids.size
    return tuple(kept)


def since(runs: Sequence[Run], start: int) -> Runs:
    """All but the first `start` tokens."""
    kept, at = [], 0
    for run in runs:
        skip = start - at
        at += run.ids.size
        if skip < run.ids.size:
            kept.append(run if skip <= 0 else run._replace(ids=run.ids[skip:], logprobs=run.logprobs[skip:]))
    return tuple(kept)
