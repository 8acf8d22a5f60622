"""Stages: rewards on finished samples, claimed, fenced and freed like samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting, LeaseLost
from samplestore.run import Run
from samplestore.types import StageClaim

from ..support import factory as f


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


def ends(run: Run, stage: StageClaim) -> dict[str, Callable[[], object]]:
    return {
        "score": lambda: run.score(stage, 1.0),
        "another score": lambda: run.score(stage, 0.0),
        "unparsed": lambda: run.unparsed(stage, "timeout"),
        "complete": lambda: run.complete_stage(stage),
        "fail": lambda: run.fail_stage(stage, "timeout", backoff_s=0.0),
        "fail, timed out": lambda: run.fail_stage(stage, "timeout", "verifier_timeout", backoff_s=0.0),
        "fail, another error": lambda: run.fail_stage(stage, "boom", backoff_s=0.0),
        "release": lambda: run.release_stage(stage),
    }


@pytest.mark.parametrize("max_attempts", [1, 5])
@pytest.mark.parametrize("first", list(ends(None, None)))  # type: ignore[arg-type]
def test_only_the_very_same_end_again_passes(store: Store, first: str, max_attempts: int) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"], max_attempts=max_attempts, on_failed="short")
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    calls = ends(run, run.claim_stages(worker, 1)[0])
    said = calls[first]()
    before = f.snapshot(run)
    for name, call in calls.items():
        if name == first:
            assert call() == said, "its acknowledgement was lost"
            continue
        with pytest.raises(LeaseLost):
            call()
            pytest.fail(f"{name} passed after {first}")
    assert f.snapshot(run) == before
    f.sound(run)


def test_a_failure_after_a_release_is_not_taken_for_that_of_an_earlier_attempt(run: Run) -> None:
    """The stage still has the outcome and the error of the earlier one: the second would not be counted."""
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    (first,) = run.claim_stages(worker, 1)
    run.fail_stage(first, "timeout", backoff_s=0.0)
    (second,) = run.claim_stages(worker, 1)
    run.release_stage(second)
    with pytest.raises(LeaseLost):
        run.fail_stage(second, "timeout", backoff_s=0.0)
    with pytest.raises(LeaseLost):
        run.fail_stage(first, "timeout", backoff_s=0.0)
    assert f.value(run, "SELECT failures FROM stage") == 1


def test_a_release_is_repeated_after_the_group_was_dropped(run: Run) -> None:
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    f.answer(run, claim)
    (stage,) = run.claim_stages(worker, 1)
    run.release_stage(stage)
    run.drop([claim.group_id], "bad prompt")
    before = f.snapshot(run)
    run.release_stage(stage)
    assert f.snapshot(run) == before


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


def test_other_details_under_the_same_claim_are_refused(run: Run) -> None:
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    (stage,) = run.claim_stages(worker, 1)
    for _ in range(2):  # a repetition passes: JSON makes lists of tuples, and text of keys
        run.score(stage, 1.0, {"parsed": (7, 1e20), "by": {3: 0.5}})
    with pytest.raises(LeaseLost):
        run.score(stage, 1.0, {"parsed": (8, 1e20), "by": {3: 0.5}})
    with pytest.raises(LeaseLost):
        run.score(stage, 1.0)
    assert f.value(run, "SELECT n_unscored FROM sample_group") == 0


def test_other_scores_of_a_group_under_the_same_claim_are_refused(store: Store) -> None:
    """They are stored as settled stages of the samples: the group's own row has no value."""
    run = f.make_run(store, prompts=1, group_stages=["rank"])
    worker = f.register(run)
    for claim in run.claim(worker, 2):
        f.answer(run, claim)
    (stage,) = run.claim_stages(worker, 9)
    for _ in range(2):
        run.score_group(stage, [1.0, None])
    for other in ([5.0, None], [1.0, 0.0], [None, None]):
        with pytest.raises(LeaseLost):
            run.score_group(stage, other)
    with pytest.raises(LeaseLost):
        run.unparsed(stage, "too long")
    assert [r["reward"] for r in f.rows(run, "SELECT reward FROM sample ORDER BY id")] == [1.0, None]
    f.sound(run)


def test_scores_of_a_group_after_its_answer_could_not_be_read_are_refused(store: Store) -> None:
    run = f.make_run(store, prompts=1, group_stages=["rank"])
    worker = f.register(run)
    for claim in run.claim(worker, 2):
        f.answer(run, claim)
    (stage,) = run.claim_stages(worker, 9)
    for _ in range(2):
        run.unparsed(stage, "?")
    for late in (lambda: run.score_group(stage, [1.0, 0.0]), lambda: run.unparsed(stage, "!")):
        with pytest.raises(LeaseLost):
            late()
    f.sound(run)


@pytest.mark.parametrize("in_files", [False, True])
def test_another_array_under_the_same_claim_is_refused(store: Store, tmp_path: Path, in_files: bool) -> None:
    files = {"array_url": f"file://{tmp_path}", "array_file_bytes": 1} if in_files else {}
    run = f.make_run(store, prompts=1, samples_per_prompt=1, stages=["teacher"], **files)
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    (stage,) = run.claim_stages(worker, 1)
    n = stage.response_ids.size
    for _ in range(2):
        run.complete_stage(stage, array=("teacher_log_probs", [-1.0] * n))
    for other in (("teacher_log_probs", [-2.0] * n), ("entropy", [1.0] * n)):
        with pytest.raises(LeaseLost):
            run.complete_stage(stage, array=other)
    assert run.array(stage.sample_id, "teacher_log_probs")[0].tolist() == [-1.0] * n
    assert f.value(run, "SELECT count(sidecar) FROM segment_array") == int(in_files)
    f.sound(run)


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


# -- names, weights, and answers that cannot be read


def test_a_worker_claims_the_stages_that_it_serves(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, stages=["reward", "judge"])
    worker, judge = f.register(run), f.register(run, "reward")
    claim = run.claim(worker, 1)[0]
    f.add(run, claim, finish_reason="stop")
    (kept,) = run.finish(claim, keep_stages=["reward"])
    assert kept.name == "reward"
    assert run.claim_stages(worker, 9, names=["reward"]) == []
    (late,) = run.claim_stages(judge, 9, names=["judge"])
    assert (late.name, late.owner) == ("judge", judge)
    run.score(kept, 1.0)
    assert f.states(run) == ["scoring"]
    run.score(late, 0.5)
    assert f.states(run) == ["ready"]
    f.sound(run)


def test_a_reward_is_the_weighted_sum(store: Store) -> None:
    run = f.make_run(
        store, prompts=1, samples_per_prompt=1, stages=["math", "format", "length"],
        reward_weights={"format": 0.25, "length": 0},
    )  # fmt: skip
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    for stage, value in zip(run.claim_stages(worker, 9), (1.0, 2.0, 512.0), strict=True):
        run.score(stage, value)
    assert f.value(run, "SELECT reward FROM sample") == 1.5
    assert [r["value"] for r in f.rows(run, "SELECT value FROM stage ORDER BY id")] == [1.0, 2.0, 512.0]


@pytest.mark.parametrize("weights", [{"typo": 1.0}, {"reward": math.nan}, {"reward": "1"}, ["reward"]])
def test_weights_are_of_stages_that_there_are(store: Store, weights: object) -> None:
    with pytest.raises(InvalidSetting, match="reward_weights"):
        f.make_run(store, prompts=1, stages=["reward"], reward_weights=weights)


def test_an_answer_that_cannot_be_read_counts_as_nothing(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=3, groups_per_step=1, stages=["judge"])
    worker = f.register(run)
    for claim in run.claim(worker, 3):
        f.answer(run, claim)
    a, b, c = run.claim_stages(worker, 9)
    run.score(a, 1.0)
    run.score(b, 0.0)
    run.unparsed(c, "the judge said: well, perhaps")
    run.unparsed(c, "the judge said: well, perhaps")  # a repetition
    with pytest.raises(LeaseLost):
        run.score(c, 0.0)
    row = f.rows(run, "SELECT status, outcome, value, error, failures FROM stage WHERE id = :i", i=c.stage_id)[0]
    assert row == {
        "status": "done", "outcome": "unparsed", "value": None, "error": "the judge said: well, perhaps", "failures": 0,
    }  # fmt: skip
    assert f.sample(run, c.sample_id)["reward"] is None
    group = f.group(run, c.group_id)
    assert (group["state"], group["reward_mean"], group["reward_std"]) == ("ready", 0.5, 0.5)
    with run.batch(step=0, groups=1, max_staleness=1) as batch:
        arrays = batch.arrays(layout="padded")
    assert arrays["rewards"][:2].tolist() == [1.0, 0.0]
    assert arrays["advantages"][:2] == pytest.approx([1.0, -1.0], abs=1e-4), "as if the third were not there"
    assert math.isnan(arrays["rewards"][2]) and math.isnan(arrays["advantages"][2])
    assert arrays["loss_mask"].sum(axis=1).tolist() == [3, 3, 0]
    f.sound(run)


def test_what_weighs_nothing_may_be_unreadable(store: Store) -> None:
    run = f.make_run(
        store, prompts=1, samples_per_prompt=1, stages=["math", "judge"], reward_weights={"judge": 0.0}
    )  # fmt: skip
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    math_stage, judge = run.claim_stages(worker, 9)
    run.unparsed(judge, "?")
    run.score(math_stage, 1.0)
    assert f.value(run, "SELECT reward FROM sample") == 1.0


def test_a_stage_may_give_no_number(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, stages=["reward", "teacher"])
    worker = f.register(run)
    f.answer(run, run.claim(worker, 1)[0])
    reward, teacher = run.claim_stages(worker, 9)
    run.complete_stage(teacher, {"model": "teacher"})
    run.complete_stage(teacher, {"model": "teacher"})
    run.score(reward, 0.25)
    assert f.value(run, "SELECT reward FROM sample") == 0.25
    assert f.states(run) == ["ready"]
    f.sound(run)


# -- stages of groups


@pytest.fixture
def grouped(store: Store) -> Run:
    return f.make_run(
        store, prompts=1, stages=["reward"], group_stages=["rank", "last"], reward_weights={"rank": 0.5},
        max_attempts=2,
    )  # fmt: skip


def scored(run: Run, worker: int) -> None:
    for claim in run.claim(worker, 9):
        f.answer(run, claim, 4)
    for stage in run.claim_stages(worker, 9):
        run.score(stage, 1.0)


def test_the_stages_of_a_group_come_one_after_the_other(grouped: Run) -> None:
    worker = f.register(grouped)
    for claim in grouped.claim(worker, 9):
        f.answer(grouped, claim, 4)
    first, second = grouped.claim_stages(worker, 9)
    grouped.score(first, 1.0)
    assert grouped.claim_stages(worker, 9) == [], "a sample is not scored yet"
    grouped.score(second, 0.0)
    (rank,) = grouped.claim_stages(worker, 9)
    assert (rank.name, rank.sample_id, rank.group_id) == ("rank", 0, first.group_id)
    assert [(m.sample_id, m.reward, m.response_ids.tolist()) for m in rank.members] == [
        (first.sample_id, 1.0, f.ids_of(4)), (second.sample_id, 0.0, f.ids_of(4)),
    ]  # fmt: skip
    assert f.states(grouped) == ["scoring"]
    for _ in range(2):
        grouped.score_group(rank, [1.0, None], {"order": [0, 1]})
    rewards = [f.sample(grouped, m.sample_id)["reward"] for m in rank.members]
    assert rewards == [1.5, None], "the second could not be ranked"
    (kept,) = grouped.claim_stages(worker, 9, names=["last"])
    grouped.complete_stage(kept)
    group = f.group(grouped, rank.group_id)
    assert (group["state"], group["reward_mean"], group["n_unscored"]) == ("ready", 1.5, 0)
    f.sound(grouped)


@pytest.mark.parametrize("values", [[1.0], [1.0, math.nan], [1.0, True], [1.0, 1.0, 1.0], ["1", 1.0]])
def test_a_group_gets_a_number_for_each_sample(grouped: Run, values: list[object]) -> None:
    worker = f.register(grouped)
    scored(grouped, worker)
    (rank,) = grouped.claim_stages(worker, 9)
    with pytest.raises(InvalidSetting, match="2 values, each a finite number"):
        grouped.score_group(rank, values)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="work on a group"):
        grouped.score(rank, 1.0)
    grouped.score_group(rank, [0.0, 1.0])


def test_a_group_whose_stage_fails_for_good_is_dropped(grouped: Run) -> None:
    worker = f.register(grouped)
    scored(grouped, worker)
    for _ in range(2):
        (rank,) = grouped.claim_stages(worker, 9)
        grouped.fail_stage(rank, "the reward model is away", backoff_s=0.0)
    group = f.group(grouped, rank.group_id)
    assert (group["state"], group["reason"]) == ("dropped", "stage rank failed")
    f.sound(grouped)


def test_the_stage_of_a_dead_worker_s_group_goes_to_another(grouped: Run) -> None:
    worker, other = f.register(grouped), f.register(grouped)
    scored(grouped, worker)
    (rank,) = grouped.claim_stages(worker, 9)
    f.kill(grouped, worker)
    (again,) = grouped.claim_stages(other, 9)
    assert (again.stage_id, again.attempt) == (rank.stage_id, rank.attempt + 2)
    with pytest.raises(LeaseLost):
        grouped.score_group(rank, [1.0, 1.0])
    grouped.score_group(again, [0.5, 0.5])
    f.sound(grouped)


def test_a_sample_that_starts_afresh_brings_the_group_s_stages_again(grouped: Run) -> None:
    worker = f.register(grouped)
    scored(grouped, worker)
    (rank,) = grouped.claim_stages(worker, 9)
    grouped.score_group(rank, [1.0, 0.0])
    (held,) = grouped.claim_stages(worker, 9)
    one, two = (m.sample_id for m in rank.members)
    grouped.requeue([two], "once more")
    with pytest.raises(LeaseLost):
        grouped.complete_stage(held)
    f.sound(grouped)
    scored(grouped, worker)
    (again,) = grouped.claim_stages(worker, 9)
    assert (again.name, again.incarnation) == ("rank", 1)
    grouped.score_group(again, [3.0, 5.0])
    assert [f.sample(grouped, i)["reward"] for i in (one, two)] == [2.5, 3.5]
    grouped.complete_stage(grouped.claim_stages(worker, 9)[0])
    assert f.states(grouped) == ["ready"]
    f.sound(grouped)
