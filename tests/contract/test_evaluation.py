"""Evaluations: served like other samples, never trained on, counted by weight version."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import EvaluationTimeout, InvalidSetting
from samplestore.queries.evaluation import pass_at_k, powers
from samplestore.run import Run
from samplestore.verbs import steps, weights

from ..support import factory as f


def claim_as(run: Run, worker: int, version: int, serves: bool = True) -> list[Any]:
    """Claim as a worker does that believes that the run is at `version`."""
    return run.transact(lambda tx: steps.claim(tx, worker, 2, version, serves))


def made(store: Store, prompts: int = 3, **settings: Any) -> Run:
    """A run with a window that is full of training groups, and a data set to evaluate on."""
    run = f.make_run(store, prompts=6, stages=["reward"], **settings)
    run.add_prompts([{"prompt_ids": [5, i], "label": i} for i in range(prompts)], dataset="test", evaluation=True)
    return run


def generate(run: Run, worker: int, rewards: list[float], n: int, reason: str = "stop") -> list[Any]:
    """Claim n samples, answer and score them."""
    claims = run.claim(worker, n)
    for claim in claims:
        f.answer(run, claim, 4, run.current_version, reason)
    for stage, reward in zip(run.claim_stages(worker, n), rewards, strict=True):
        run.score(stage, reward)
    return claims


@pytest.mark.parametrize(("n", "c", "k"), [(n, c, k) for n in (1, 2, 5) for c in range(n + 1) for k in range(1, n + 1)])
def test_pass_at_k_is_the_part_of_all_choices_that_pass(n: int, c: int, k: int) -> None:
    choices = list(combinations(range(n), k))
    passing = sum(any(i < c for i in chosen) for chosen in choices)
    assert pass_at_k(n, c, k) == pytest.approx(passing / len(choices))


def test_pass_at_k_of_many_samples() -> None:
    assert pass_at_k(10_000, 0, 1) == 0.0 and pass_at_k(10_000, 9_999, 2) == 1.0
    assert 0.09 < pass_at_k(10_000, 10, 100) < 0.1
    assert powers(1) == (1,) and powers(6) == (1, 2, 4, 6) and powers(8) == (1, 2, 4, 8)


def test_prompts_to_evaluate_on_are_never_served_for_training(store: Store) -> None:
    run = made(store, groups_per_step=100)
    assert run.admit() == 0, "all six are admitted, and no more are there"
    assert f.value(run, "SELECT count(*) FROM sample_group") == 6
    assert f.value(run, "SELECT n_prompts FROM run") == 6
    again = run.add_prompts([{"prompt_ids": [5, 0], "label": 0}], dataset="test", evaluation=True)
    assert (again.added, again.existing) == (0, 1)
    for name, evaluation in (("test", False), ("default", True)):
        with pytest.raises(InvalidSetting, match="another name"):
            run.add_prompts([{"prompt_ids": [7]}], dataset=name, evaluation=evaluation)
    positions = f.rows(run, "SELECT position FROM prompt WHERE dataset = 'test' ORDER BY id")
    assert [r["position"] for r in positions] == [-1, -2, -3]


def test_an_evaluation_from_its_start_to_its_numbers(store: Store) -> None:
    run = made(store)
    worker, trainer = f.register(run), f.register(run, "trainer")
    number = run.start_evaluation("test", 2, sampling={"temperature": 0.0}, max_new_tokens=7)
    assert run.start_evaluation("test", 2, sampling={"temperature": 0.0}, max_new_tokens=7) == number
    before = run.admit(), run.why().reasons
    assert before[0] == 0
    claims = run.claim(worker, 6)
    assert [(c.label, c.sampling, c.max_new_tokens) for c in claims] == [
        (i, {"temperature": 0.0}, 7) for i in (0, 0, 1, 1, 2, 2)
    ], "they go first, with settings of their own"
    for claim, reason in zip(claims, ("stop", "stop", "length", "stop", "stop", "stop"), strict=True):
        f.answer(run, claim, 4, 0, reason)
    assert not run.evaluations()[0].done
    for stage, reward in zip(run.claim_stages(worker, 6), (1.0, 0.0, 0.0, 0.0, 1.0, 1.0), strict=True):
        run.score(stage, reward)
    (told,) = run.evaluations()
    assert (told.id, told.dataset, told.version, told.done, told.n_prompts, told.n_scored) == (
        number, "test", 0, True, 3, 6,
    )  # fmt: skip
    assert told.mean_reward == pytest.approx(0.5) and told.truncated == pytest.approx(1 / 6) and told.mean_tokens == 4.0
    assert told.pass_at == {1: pytest.approx(0.5), 2: pytest.approx(2 / 3)}
    assert (told.n_failed, told.n_other_version) == (0, 0)
    assert run.evaluations(pass_reward=0.0)[0].pass_at == {1: 1.0, 2: 1.0}
    assert f.fates(run) == {"dropped": 24}
    assert {r["reason"] for r in f.rows(run, "SELECT reason FROM sample_group WHERE evaluation_id IS NOT NULL")} == {
        "evaluation"
    }
    assert f.lease(run, trainer, 0, 1) is None, "none of it can be trained on"
    assert run.admit() == 0 and f.events(run, "dropped") == []
    f.sound(run)


def test_an_evaluation_takes_nothing_from_the_window(store: Store) -> None:
    alone, beside = made(store, prompts=1), f.make_run(store, "beside", prompts=6, stages=["reward"])
    alone.start_evaluation("test", 3)
    for run in (alone, beside):
        worker, trainer = f.register(run), f.register(run, "trainer")
        for _ in range(3):
            f.finish_all(run, worker)
            batch = f.lease(run, trainer, f.value(run, "SELECT count(*) FROM batch WHERE run_id = :r", r=run.id), 1)
            assert batch is not None
            f.commit(run, batch, trainer)
            run.admit()
    query = (
        "SELECT p.position AS p FROM sample_group g JOIN prompt p ON p.id = g.prompt_id "
        "WHERE g.run_id = :r AND g.evaluation_id IS NULL ORDER BY g.number"
    )
    assert f.rows(alone, query, r=alone.id) == f.rows(beside, query, r=beside.id)


def test_each_version_has_its_own_numbers(store: Store) -> None:
    run = made(store, prompts=1)
    worker = f.register(run)
    first = run.start_evaluation("test", 2)
    generate(run, worker, [0.0, 0.0], 2)
    run.publish_weights(step=0)
    second = run.start_evaluation("test", 2)
    assert second != first
    (claim, late) = run.claim(worker, 2)
    f.answer(run, claim, 4, 1)
    run.publish_weights(step=1)
    run.publish_weights(step=2)
    f.answer(run, late, 4, 2)
    for stage in run.claim_stages(worker, 2):
        run.score(stage, 1.0)
    told = run.evaluations()
    assert [(e.version, e.pass_at[1], e.n_other_version) for e in told] == [(0, 0.0, 0), (1, 1.0, 1)]
    assert f.group(run, claim.group_id)["state"] == "dropped", "versions that go by make none of it stale"
    f.sound(run)


@pytest.mark.parametrize("on_failed", ["drop", "short"])
def test_a_failed_sample_is_left_out_and_told(store: Store, on_failed: str) -> None:
    run = made(store, prompts=2, on_failed=on_failed, max_attempts=1)
    worker = f.register(run)
    run.start_evaluation("test", 2)
    a, b, c, d = run.claim(worker, 4)
    for claim in (a, c, d):
        run.fail(claim, "boom")
    f.answer(run, b)
    (stage,) = run.claim_stages(worker, 4)
    run.score(stage, 1.0)
    (told,) = run.evaluations()
    assert (told.done, told.n_failed, told.n_scored, told.pass_at) == (True, 3, 1, {1: 1.0})
    f.sound(run)


def test_filters_are_not_asked(store: Store) -> None:
    run = made(store, prompts=1, group_filters=["reward_std"])
    run.start_evaluation("test", 2)
    generate(run, f.register(run), [1.0, 1.0], 2)
    assert run.evaluations()[0].pass_at == {1: 1.0, 2: 1.0}


def test_a_sample_of_an_evaluation_can_be_started_afresh(store: Store) -> None:
    run = made(store, prompts=1)
    worker = f.register(run)
    run.start_evaluation("test", 1)
    (claim,) = generate(run, worker, [0.0], 1)
    run.requeue([claim.sample_id], "the verifier was wrong")
    assert not run.evaluations()[0].done
    generate(run, worker, [1.0], 1)
    (told,) = run.evaluations()
    assert told.done and told.mean_reward == 1.0
    f.sound(run)


def test_waiting_for_an_evaluation(store: Store) -> None:
    run = made(store, prompts=1)
    with pytest.raises(EvaluationTimeout, match=r"1 prompt is left.* no rollout worker"):
        run.evaluate("test", 2, timeout=0.0)
    worker = f.register(run)
    run.pause()
    with pytest.raises(EvaluationTimeout, match=r"the run is paused \(samplestore resume\)") as caught:
        run.evaluate("test", 2, timeout=0.0)
    assert "inside the window" not in caught.value.why, "that is about training"
    run.resume()
    generate(run, worker, [1.0, 0.0], 2)
    told = run.evaluate("test", 2, timeout=5.0)
    assert told.pass_at == {1: 0.5, 2: 1.0}
    assert told.as_json()["pass_at"] == {"1": 0.5, "2": 1.0}


def test_a_run_without_rewards_tells_what_it_can(store: Store) -> None:
    run = f.make_run(store, prompts=1, admit=False)
    run.add_prompts([{"prompt_ids": [5]}], dataset="test", evaluation=True)
    run.start_evaluation("test")
    f.answer(run, run.claim(f.register(run), 1)[0], 4, 0, "length")
    (told,) = run.evaluations()
    assert (told.done, told.mean_reward, told.pass_at, told.truncated) == (True, None, {}, 1.0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dataset": "nothing"}, r"data set for evaluation \(test; .*--eval"),
        ({"dataset": "default"}, "data set for evaluation .*default. is for training"),
        ({"samples": 0}, "samples=0"),
        ({"sampling": [1]}, "sampling"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_what_is_asked_is_checked(store: Store, asked: dict[str, Any], said: str) -> None:
    run = made(store)
    with pytest.raises(InvalidSetting, match=said):
        run.start_evaluation(**{"dataset": "test", **asked})
    assert run.evaluations() == []


def test_groups_of_an_evaluation_can_be_dropped_by_an_operator(store: Store) -> None:
    run = made(store, prompts=2)
    run.start_evaluation("test", 1)
    found = f.rows(run, "SELECT id FROM sample_group WHERE evaluation_id IS NOT NULL ORDER BY id")
    run.drop([found[0]["id"]], "too slow")
    generate(run, f.register(run), [1.0], 1)
    (told,) = run.evaluations()
    assert (told.done, told.n_prompts, told.n_prompts_done) == (True, 2, 1)
    f.sound(run)


@pytest.mark.parametrize(
    "settings", [{}, {"mode": "sync"}, {"mode": "partial"}, {"max_inflight_samples": 9}, {"max_inflight_groups": 2}],
    ids=str,
)  # fmt: skip
def test_a_worker_whose_engines_are_not_at_the_version_claims_no_evaluation(
    store: Store, settings: dict[str, Any]
) -> None:
    run = made(store, prompts=1, groups_per_step=6, **settings)
    worker = f.register(run)
    run.publish_weights(step=0)
    run.start_evaluation("test", 2)
    in_steps = "mode" in settings

    def trained(claims: list[Any]) -> bool:
        return [run.release(c, "not that one") for c in claims] == [None] * 2 and all(c.max_new_tokens is None and
            f.group(run, c.group_id)["evaluation_id"] is None for c in claims)  # fmt: skip

    assert trained(claim_as(run, worker, 1, serves=False)), "its engines serve older weights: only samples to train on"
    old = claim_as(run, worker, 0)
    assert old == [] if in_steps else trained(old), "it has not heard of the weights"
    claims = claim_as(run, worker, 1)
    assert [f.group(run, c.group_id)["evaluation_id"] is None for c in claims] == [False, False]
    f.sound(run)


def test_samples_of_other_weights_are_counted_and_told_and_in_no_number(store: Store) -> None:
    run = made(store, prompts=1)
    worker = f.register(run)
    run.publish_weights(step=0)
    run.start_evaluation("test", 4)
    older, mixed, unknown, right = run.claim(worker, 4)
    f.answer(run, older, 50, 0)
    f.add(run, mixed, 25, 0)
    f.answer(run, mixed, 25, 1)
    f.add(run, unknown, 25, None)
    f.answer(run, unknown, 25, 1)
    f.answer(run, right, 4, 1, "length")
    for stage, reward in zip(run.claim_stages(worker, 9), (0.0, 0.0, 0.0, 1.0), strict=True):
        run.score(stage, reward)
    (told,) = run.evaluations()
    assert (told.version, told.n_scored, told.n_other_version, told.n_failed) == (1, 1, 3, 0)
    assert (told.pass_at, told.mean_reward, told.truncated, told.mean_tokens) == ({1: 1.0}, 1.0, 1.0, 4.0)


def test_the_timeout_of_an_evaluation_names_the_engines_that_keep_it_waiting(store: Store) -> None:
    run = made(store, prompts=1)
    run.transact(lambda tx: weights.see_engine(tx, "http://e", "default"))
    run.publish_weights(step=0)
    with pytest.raises(EvaluationTimeout, match=r"http://e serves version 0, the run is at 1"):
        run.evaluate("test", timeout=0.0)


def test_an_evaluation_whose_samples_all_failed_is_begun_again(store: Store) -> None:
    run = made(store, prompts=2, max_attempts=1)
    first = run.start_evaluation("test", samples=1)
    assert run.start_evaluation("test", samples=1, again=True) == first, "it is under way: repeating it is harmless"
    worker = f.register(run)
    for number, claim in enumerate(run.claim(worker, 2)):
        run.fail(claim, f"boom {number}")
    (told,) = run.evaluations()
    assert told.all_failed and told.newest_error == "boom 1" and told.n_failed == 2
    assert run.start_evaluation("test", samples=1) == first
    second = run.start_evaluation("test", samples=1, again=True)
    assert second != first and run.start_evaluation("test", samples=1) == second
    for claim in run.claim(worker, 2):
        f.answer(run, claim)
    for stage in run.claim_stages(worker, 2):
        run.score(stage, 1.0)
    again = run.evaluate("test", samples=1, timeout=0)
    assert (again.id, again.n_scored, again.newest_error, again.all_failed) == (second, 2, None, False)
    assert run.start_evaluation("test", samples=1, again=True) not in (first, second)
    f.sound(run)
