"""What an episode may return as its reward."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samplestore.workers.episode_runs import EpisodeFailed, number

CLAIM: Any = SimpleNamespace(sample_id=7)


@pytest.mark.parametrize("value", [1, 0.5, -1e25, np.float32(0.5), np.float64(0.5), np.int64(3)])
def test_a_number_is_one(value: Any) -> None:
    told = number(CLAIM, value)
    assert type(told) is float and told == value


def test_none_can_be_told() -> None:
    assert math.isnan(number(CLAIM, math.nan))


@pytest.mark.parametrize("value", [True, "1", math.inf, -1e26, 10**400, [1.0]])
def test_nothing_else(value: Any) -> None:
    with pytest.raises(EpisodeFailed, match=r"an episode gives a finite number, from -1e25 to 1e25, NaN or None"):
        number(CLAIM, value)
