"""Stages: rewards on finished samples, claimed, fenced and freed like samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting, LeaseLost
from samplestore.run import Run
from tests.support import factory as f


@pytest.fixture
def run(store: Store) -> Run:
    return f.make_run(store, prompts=1, stages=["reward"], max_attempts=3)


def test_a_group_waits_for_its_last_reward(run: Run) -> None:
    worker = f.register(run)
    for claim in run.claim(worker, 2):
        f.answer(run, claim, 4)
    assert f.states(run) == ["scoring"]
    assert f.fates(run) == {"awaiting_stage": 8}
    a, b = run.claim_stages(worker, 9)
    assert (a.name, f.tokens_of(a), a.label, a.attempt) == ("reward", f.ids_of(4), "0", 1)
    run.score(a, 1.0, {"parsed": "7"}, 0.25)
    assert f.states(run) == ["scoring"]
    run.score(b, np.float32(0.5))
    group = f.group(run, a.group_id)
    assert (group["state"], group["reward_mean"], group["reward_std"]) == ("ready", 0.75, 0.25)
    assert f.sample(run, a.sample_id)["reward"] == 1.0
    f.sound(run)


def test_the_reward_is_the_sum_over_stages(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, stages=["math", "format"])
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    for stage, value in zip(run.claim_stages(worker, 9), (1.0, -0.25), strict=True):
        run.score(stage, value)
    assert f.value(run, "SELECT reward FROM sample") == 0.75
    assert f.states(run) == ["ready"]


def test_a_worker_may_keep_the_stages_of_what_it_finished(run: Run) -> None:
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    f.add(run, claim)
    (kept,) = run.finish(claim, keep_stages=True)
    assert run.claim_stages(worker, 9) == []
    run.score(kept, 1.0)
    f.sound(run)


@pytest.mark.parametrize("value", [math.nan, math.inf, True, None, "1"])
def test_only_finite_numbers_are_rewards(run: Run, value: object) -> None:
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    (stage,) = run.claim_stages(worker, 1)
    with pytest.raises(InvalidSetting, match="fail_stage"):
        run.score(stage, value)  # type: ignore[arg-type]
    run.score(stage, 0.0)


def test_a_verifier_that_fails_is_no_reward(run: Run) -> None:
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    f.answer(run, claim)
    for attempt in (1, 2):
        (stage,) = run.claim_stages(worker, 1)
        assert (stage.failures, stage.attempt) == (attempt - 1, 2 * attempt - 1)
        assert run.fail_stage(stage, f"boom {attempt}", "verifier_timeout", backoff_s=0.0) == "pending"
    (stage,) = run.claim_stages(worker, 1)
    assert run.fail_stage(stage, "boom 3") == "failed"
    row = f.sample(run, claim.sample_id)
    assert (row["status"], row["reward"], row["error"]) == ("failed", None, "boom 3")
    assert f.states(run) == ["dropped"]
    assert len(f.events(run, "stage_failed")) == 3
    f.sound(run)


def test_a_failed_stage_waits(run: Run) -> None:
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    run.fail_stage(run.claim_stages(worker, 1)[0], "boom", backoff_s=1000.0)
    assert run.claim_stages(worker, 1) == []


def test_a_failed_stage_takes_the_sample_s_other_stages_along(store: Store) -> None:
    run = f.make_run(store, prompts=1, stages=["a", "b"], max_attempts=1, on_failed="short")
    worker = f.register(run)
    for claim in run.claim(worker, 2):
        f.answer(run, claim)
    a, b, c, d = run.claim_stages(worker, 9)
    run.fail_stage(a, "boom")
    with pytest.raises(LeaseLost):
        run.score(b, 1.0)
    f.sound(run)
    run.score(c, 1.0), run.score(d, 1.0)
    assert f.states(run) == ["ready"]
    assert f.value(run, "SELECT reward_mean FROM sample_group") == 2.0
    f.sound(run)


def test_a_dead_scorer_loses_its_stages(run: Run) -> None:
    worker, scorer = f.register(run), f.register(run, "reward")
    for claim in run.claim(worker, 2):
        f.answer(run, claim)
    held = run.claim_stages(scorer, 9)
    f.silence(run, scorer)
    reaped = run.reap()
    assert (reaped.workers, reaped.stages, reaped.samples) == ([scorer], 2, 0)
    before = f.snapshot(run)
    for late in (
        lambda: run.score(held[0], 1.0),
        lambda: run.fail_stage(held[0], "x"),
        lambda: run.release_stage(held[0]),
    ):
        with pytest.raises(LeaseLost):
            late()
    assert f.snapshot(run) == before
    for stage in run.claim_stages(worker, 9):
        assert stage.attempt == 3
        run.score(stage, 1.0)
    f.sound(run)


def test_a_released_stage_counts_no_failure(run: Run) -> None:
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    run.release_stage(run.claim_stages(worker, 1)[0])
    (again,) = run.claim_stages(worker, 1)
    assert again.failures == 0


def test_a_score_after_its_timeout_was_recorded_is_refused(run: Run) -> None:
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    (stage,) = run.claim_stages(worker, 1)
    run.fail_stage(stage, "too slow", "verifier_timeout")
    with pytest.raises(LeaseLost):
        run.score(stage, 1.0)
    assert f.value(run, "SELECT status FROM stage") == "pending"


def test_another_score_under_the_same_claim_is_refused(run: Run) -> None:
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    (stage,) = run.claim_stages(worker, 1)
    run.score(stage, 1.0)
    with pytest.raises(LeaseLost):
        run.score(stage, 0.0)
    assert f.value(run, "SELECT value FROM stage") == 1.0


def test_dropping_cancels_and_requeueing_restores_stages(run: Run) -> None:
    worker = f.register(run)
    a, b = run.claim(worker, 2)
    f.answer(run, a), f.answer(run, b)
    held = run.claim_stages(worker, 1)[0]
    run.drop([a.group_id], "unwanted")
    with pytest.raises(LeaseLost):
        run.score(held, 1.0)
    assert run.claim_stages(worker, 9) == []
    f.sound(run)
    run.requeue([b.sample_id], "after all")
    f.sound(run)
    f.finish_all(run, worker)
    assert f.states(run) == ["ready"]
    f.sound(run)
