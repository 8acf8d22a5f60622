"""Rewards that are numbers, and that no batch, no view and no database could work with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting
from samplestore.run import Run
from samplestore.types import StageClaim
from tests.support import factory as f


def finished(store: Store, **settings: Any) -> tuple[Run, list[StageClaim]]:
    run = f.make_run(store, prompts=1, groups_per_step=1, stages=["reward"], **settings)
    worker = f.register(run)
    for claim in run.claim(worker, 9):
        f.answer(run, claim)
    return run, run.claim_stages(worker, 9)


@pytest.mark.parametrize("bad", [1e26, -1e300, 10**400, math.inf, math.nan, True, "1", np.complex64(1), None])
def test_what_a_batch_could_not_hold_is_refused(store: Store, bad: Any) -> None:
    """1e39 is no float32, and the square of 1e200 is no float at all."""
    run, stages = finished(store)
    before = f.snapshot(run)
    with pytest.raises(InvalidSetting, match="-1e25 to 1e25"):
        run.score(stages[0], bad)
    assert f.snapshot(run) == before


def test_the_largest_and_the_smallest_rewards(store: Store) -> None:
    run, stages = finished(store, reward_weights={"reward": 1e6})
    for stage, value in zip(stages, (np.float32(1e25), -1e-200), strict=True):
        run.score(stage, value)
    with run.batch(0, 1, timeout=0) as batch:
        for method in ("grpo", "dr_grpo", "rloo", "none", "reinforce_pp", "reinforce_pp_baseline"):
            assert np.isfinite(batch.arrays(advantages=method)["advantages"]).all()
    assert f.value(run, "SELECT min(reward) FROM sample") == 0, "its square would be no number for PostgreSQL"
    assert len(store.frame("version_rewards")) == 1
    assert math.isfinite(run.metrics()["samplestore/batch/reward_std"])
