"""Modes sync and partial: a step is one version of the weights; what is aborted at its end, by whom; and limits."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest

import samplestore
from samplestore import Store
from samplestore.errors import InvalidSetting, RunSettingsConflict
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import aborts, evaluation, steps, weights

from ..support import factory as f

PARTIAL: dict[str, Any] = {"mode": "partial", "groups_per_step": 2, "over_sampling_batch_size": 4, "max_staleness": 8}


def tend(run: Run) -> bool:
    return run.transact(steps.tend)


def of_group(run: Run, claims: list[Claim], number: int) -> list[Claim]:
    return [c for c in claims if c.group_number == number]


def end(run: Run, claims: list[Claim], *numbers: int) -> None:
    """Answer all samples of these groups."""
    for number in numbers:
        for claim in of_group(run, claims, number):
            f.answer(run, claim, version=run.current_version)


# -- sync


def test_sync_creates_what_a_step_wants_and_waits_for_the_next_weights(store: Store) -> None:
    run = f.make_run(store, prompts=12, mode="sync", groups_per_step=2, max_staleness=3)
    worker, trainer = f.register(run), f.register(run, "trainer")
    assert f.states(run) == ["open"] * 2, "one step's groups, whatever the window is"
    f.finish_all(run, worker)
    assert run.admit() == 0 and run.claim(worker, 9) == []
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    assert run.admit() == 0, "taken under these weights: the step has all it wants"
    f.commit(run, batch, trainer)
    assert run.admit() == 0
    run.publish_weights(step=0)
    assert run.admit() == 2
    assert {c.group_number for c in run.claim(worker, 9)} == {2, 3}
    f.sound(run)


def test_sync_serves_several_batches_of_one_step(store: Store) -> None:
    run = f.make_run(store, prompts=12, mode="sync", groups_per_step=2)
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    for step in (0, 1):
        batch = f.lease(run, trainer, step, groups=1)
        assert batch is not None
        f.commit(run, batch, trainer)
        assert run.admit() == 0
    run.publish_weights()
    assert run.admit() == 2


def test_sync_replaces_groups_that_are_dropped(store: Store) -> None:
    run = f.make_run(store, prompts=12, mode="sync", groups_per_step=2)
    worker = f.register(run)
    f.finish_all(run, worker)
    assert tend(run) and run.admit() == 0
    run.drop([f.group_id(run, 0)], "no signal")
    assert run.admit() == 1 and not tend(run)
    assert {c.group_number for c in run.claim(worker, 9)} == {2}
    assert [e["version"] for e in f.events(run, "step_goes_on")] == [0]


def test_sync_updates_no_engine_while_samples_are_in_flight(store: Store) -> None:
    """And none is started while an engine is updated, or by a worker that has not heard of the weights."""
    run = f.make_run(store, prompts=12, mode="sync", groups_per_step=1)
    worker = f.register(run)
    run.transact(lambda tx: weights.see_engine(tx, "http://e", "default"))
    [one, two] = run.claim(worker, 9)
    run.publish_weights(path="/w/1", step=0)

    def claim_engine() -> Any:
        return run.transact(lambda tx: weights.claim_engine(tx, worker, "http://e"))

    assert claim_engine() is None
    f.answer(run, one)
    assert claim_engine() is None
    run.release(two, "let go")
    held = claim_engine()
    assert held is not None
    assert run.claim(worker, 9) == [], "the engine is on its way to other weights"
    run.transact(lambda tx: weights.engine_updated(tx, held, held["label"]))
    assert run.transact(lambda tx: steps.claim(tx, worker, 9, 0)) == [], "it does not know the weights of now"
    assert [c.sample_id for c in run.transact(lambda tx: steps.claim(tx, worker, 9, 1))] == [two.sample_id]


# -- partial


def test_partial_starts_more_and_aborts_the_rest(store: Store) -> None:
    """Four groups are started for a step of two. The third and fourth are asked back when two are ready, resumed
    first in the next step, and filled up to four again."""
    run = f.make_run(store, prompts=20, **PARTIAL)
    worker, trainer = f.register(run), f.register(run, "trainer")
    assert f.states(run) == ["open"] * 4
    claims = run.claim(worker, 99)
    for claim in [*of_group(run, claims, 1), *of_group(run, claims, 3)]:
        f.add(run, claim, 5)
    end(run, claims, 0)
    assert not tend(run) and f.events(run, "abort_inflight") == []
    end(run, claims, 2)
    assert tend(run) and tend(run)
    [asked] = f.events(run, "abort_inflight")
    rest = [*of_group(run, claims, 1), *of_group(run, claims, 3)]
    assert asked["reason"] == steps.OVER
    [told] = run.database.read(lambda c: aborts.asked_since(c, run.id, 0, 99))
    assert told.samples == {c.sample_id for c in rest}
    for claim in rest:
        run.release(claim, told.reason)
    assert run.claim(worker, 99) == [], "nothing is started between two steps"
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    f.commit(run, batch, trainer)
    assert run.admit() == 0 and run.claim(worker, 99) == []
    run.publish_weights(step=0)
    assert run.admit() == 2, "with the two that were left it is four again"
    again = run.claim(worker, 99)
    assert [c.group_number for c in again] == [1, 1, 3, 3, 4, 4, 5, 5], "what was aborted goes first"
    assert [c.n_tokens for c in again] == [5] * 4 + [0] * 4
    f.sound(run)


def test_the_lease_ends_a_step_too(store: Store) -> None:
    """A trainer that takes its batch before any worker has looked."""
    run = f.make_run(store, prompts=20, **PARTIAL)
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims = run.claim(worker, 99)
    end(run, claims, 0, 1)
    assert f.lease(run, trainer, 0) is not None
    [asked] = f.events(run, "abort_inflight")
    assert asked["worker_id"] == trainer
    assert [e["version"] for e in f.events(run, "step_over")] == [0]


def test_a_surplus_of_ready_groups_goes_into_the_next_step(store: Store) -> None:
    """slime throws away what is finished beyond the batch; here it waits, and counts."""
    run = f.make_run(store, prompts=20, **PARTIAL)
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    f.commit(run, batch, trainer)
    run.publish_weights(step=0)
    assert tend(run) and run.admit() == 0, "the next step is full already"
    assert f.lease(run, trainer, 1) is not None


def test_filtered_groups_are_replaced_in_whole_sampling_batches(store: Store) -> None:
    """slime's rule: when fewer groups are left than the step wants, over_sampling_batch_size more are started."""
    run = f.make_run(store, prompts=40, mode="partial", groups_per_step=3, over_sampling_batch_size=2, max_staleness=8)
    f.register(run)
    assert len(f.states(run)) == 4
    run.drop([f.group_id(run, 0)], "no signal")
    assert run.admit() == 0, "three are left, and three are wanted"
    run.drop([f.group_id(run, 1)], "no signal")
    assert run.admit() == 2
    run.drop([f.group_id(run, n) for n in (2, 3, 4, 5)], "no signal")
    assert run.admit() == 4


def test_a_batch_that_is_given_back_keeps_the_step_over(store: Store) -> None:
    run = f.make_run(store, prompts=20, **PARTIAL)
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims = run.claim(worker, 99)
    end(run, claims, 0, 1)
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    f.release(run, batch, trainer)
    assert tend(run) and len(f.events(run, "abort_inflight")) == 1


def test_a_rewind_begins_a_step_with_what_comes_back(store: Store) -> None:
    run = f.make_run(store, prompts=20, **PARTIAL)
    worker, trainer = f.register(run), f.register(run, "trainer")
    for step in range(2):
        run.admit()
        f.finish_all(run, worker)
        batch = f.lease(run, trainer, step)
        assert batch is not None
        f.commit(run, batch, trainer)
        run.publish_weights(step=step)
    run.rewind(step=0)
    assert tend(run) and run.admit() == 0, "the groups of step 1 are ready again: the step has enough"
    assert f.lease(run, trainer, 1, max_staleness=9) is not None
    f.sound(run)


def test_who_asked_for_an_abort_is_noted(store: Store) -> None:
    run = f.make_run(store)
    run.abort_inflight("look at it")
    [event] = f.events(run, "abort_inflight")
    details = json.loads(event["details"]) if isinstance(event["details"], str) else event["details"]
    assert details["by"].startswith(f"process {os.getpid()} on ")


def test_a_sample_that_was_aborted_often_enough_runs_to_its_end(store: Store) -> None:
    run = f.make_run(store, prompts=20, max_aborts=1, **PARTIAL)
    worker, trainer = f.register(run), f.register(run, "trainer")
    for step in range(2):
        run.admit()
        claims = run.claim(worker, 99)
        late = [c for c in claims if c.index == 1 and c.group_number < 2]
        for claim in claims:
            if claim in late:
                f.add(run, claim, 2, run.current_version)
            else:
                f.answer(run, claim, version=run.current_version)
        assert tend(run)
        if step == 0:
            assert _last_asked(run) == {c.sample_id for c in late}
            for claim in late:
                run.release(claim, steps.OVER)
            batch = f.lease(run, trainer, step)
            assert batch is not None
            f.commit(run, batch, trainer)
            run.publish_weights(step=step)
    assert len(f.events(run, "abort_inflight")) == 1, "the second end of a step leaves them alone"
    for claim in late:
        f.answer(run, claim, version=run.current_version)
    f.sound(run)


def _last_asked(run: Run) -> set[int]:
    asked = run.database.read(lambda c: aborts.asked_since(c, run.id, 0, 99))
    return set(asked[0].samples or ())


def test_partial_with_a_window_of_nothing_is_refused(store: Store) -> None:
    """Every sample that it resumes would be too old when it is done."""
    with pytest.raises(InvalidSetting, match="max_staleness"):
        store.run("p", mode="partial", max_staleness=0)
    assert store.run("p", mode="partial", max_staleness=0, stale="mask").settings.window_groups == 8
    with pytest.raises(InvalidSetting, match=r"sync \| partial \| async"):
        store.run("q", mode="fast")
    with pytest.raises(RunSettingsConflict, match="mode"):
        store.run("p", mode="sync", max_staleness=0, stale="mask")


def test_async_knows_no_steps(store: Store) -> None:
    run = f.make_run(store, prompts=20)
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    assert f.lease(run, trainer, 0) is not None
    assert run.admit() == 2 and not tend(run)
    assert f.events(run, "step_over") == f.events(run, "abort_inflight") == []


# -- resume=False


def test_without_resume_an_aborted_sample_starts_again_from_its_prompt(store: Store) -> None:
    run = f.make_run(store, prompts=1, groups_per_step=1, max_staleness=0, resume=False)
    worker = f.register(run)
    [one, two] = run.claim(worker, 9)
    f.add(run, one, 5)
    f.add(run, two, 3, finish_reason="stop")
    run.release(one, "abort")
    run.release(two, "its worker left before it could finish it")
    [again, complete] = sorted(run.claim(worker, 9), key=lambda c: c.index)
    assert (again.n_tokens, again.seq, again.incarnation, again.status) == (0, 0, 1, "pending")
    assert again.response_ids.size == 0 and again.finish_reason is None
    assert (complete.n_tokens, complete.incarnation) == (3, 0), "it is whole: nothing was aborted"
    assert f.fates(run) == {"superseded": 5, "in_flight": 3}
    [event] = f.events(run, "restart")
    assert (event["sample_id"], event["tokens"], event["worker_id"]) == (one.sample_id, 5, worker)
    assert f.sample(run, one.sample_id)["n_aborts"] == 1, "it is counted on"
    run.finish(complete)
    f.answer(run, again, 4)
    assert f.states(run) == ["ready"]
    assert f.fates(run) == {"superseded": 5, "ready": 7}
    f.sound(run)


def test_without_resume_a_dead_workers_samples_start_again_too(store: Store) -> None:
    run = f.make_run(store, prompts=1, groups_per_step=1, max_staleness=0, resume=False, max_new_tokens=7)
    first, second = f.register(run), f.register(run)
    [one, two] = run.claim(first, 9)
    f.add(run, one, 7, finish_reason="length")
    f.add(run, two, 6, finish_reason="length")
    f.kill(run, first)
    claims = {c.index: c for c in run.claim(second, 9)}
    assert claims[0].n_tokens == 7, "its budget is used up: it is only to be finished"
    assert claims[1].n_tokens == 0, "a slice of it was"
    with pytest.raises(samplestore.LeaseLost):
        f.add(run, two, 1)
    run.finish(claims[0])
    f.answer(run, claims[1], 2)
    f.sound(run)


def test_evaluations_go_on_between_two_steps(store: Store) -> None:
    """And no end of a step asks them back."""
    run = f.make_run(store, prompts=20, **PARTIAL)
    run.add_prompts([{"prompt_ids": [5, i], "label": i} for i in range(2)], dataset="test", evaluation=True)
    worker = f.register(run)
    claims = run.claim(worker, 99)
    run.transact(lambda tx: evaluation.start(tx, "test", 2))
    first = run.claim(worker, 2)
    end(run, claims, 0, 1)
    assert tend(run)
    assert _last_asked(run) == {c.sample_id for c in claims if c.group_number > 1}
    for claim in claims:
        if claim.group_number > 1:
            run.release(claim, steps.OVER)
    rest = run.claim(worker, 99)
    assert len(rest) == 2 and {c.sample_id for c in rest}.isdisjoint({c.sample_id for c in [*claims, *first]})
    for claim in [*first, *rest]:
        f.answer(run, claim)
    f.sound(run)


# -- limits on what is in flight


def test_no_more_samples_in_flight_than_the_run_says(store: Store) -> None:
    run = f.make_run(store, prompts=4, max_inflight_samples=3)
    first, second = f.register(run), f.register(run)
    held = run.claim(first, 2)
    assert len(held) == 2
    assert len(run.claim(second, 9)) == 1
    assert run.claim(second, 9) == []
    f.answer(run, held[0])
    assert len(run.claim(second, 9)) == 1
    f.sound(run)


def test_no_more_groups_in_flight_than_the_run_says(store: Store) -> None:
    """A group that is begun may be gone on with; another is begun when one has no sample in flight any more."""
    run = f.make_run(store, prompts=4, samples_per_prompt=3, max_inflight_groups=2)
    worker, other = f.register(run), f.register(run)
    first = run.claim(worker, 4)
    assert [c.group_number for c in first] == [0, 0, 0, 1]
    assert [c.group_number for c in run.claim(other, 9)] == [1, 1]
    assert run.claim(other, 9) == []
    for claim in of_group(run, first, 0):
        f.answer(run, claim)
    assert [c.group_number for c in run.claim(other, 9)] == [2, 2, 2]
    f.sound(run)


def test_a_trainer_that_never_publishes_is_told(store: Store) -> None:
    run = f.make_run(store, prompts=12, mode="sync", groups_per_step=2)
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    f.commit(run, batch, trainer)
    with pytest.raises(samplestore.BatchTimeout, match="publish_weights"):
        run.batch(step=1, timeout=0)
    codes = [code for code, _ in run.why().reasons]
    assert codes[0] == "step_over" and "nothing_admitted" not in codes


def test_claims_and_the_end_of_a_step_at_the_same_moment(store: Store) -> None:
    """What a claim takes is either asked back or was refused: one that looked before the end and took after it would
    generate on in a step that is over, and nobody would stop it."""
    for n in range(6):
        rules = {"mode": "partial", "groups_per_step": 1, "over_sampling_batch_size": 8, "max_staleness": 8}
        run = f.make_run(store, f"r{n}", prompts=20, samples_per_prompt=1, **rules)
        worker = f.register(run)
        [first] = run.claim(worker, 1)
        f.answer(run, first)
        go = threading.Barrier(4)

        def claim(run: Run = run, worker: int = worker, go: threading.Barrier = go) -> None:
            go.wait()
            while run.claim(worker, 1):
                pass

        threads = [threading.Thread(target=claim) for _ in range(3)]
        for thread in threads:
            thread.start()
        go.wait()
        assert tend(run)
        for thread in threads:
            thread.join()
        held = {r["id"] for r in f.rows(run, "SELECT id FROM sample WHERE run_id = :r AND owner > 0", r=run.id)}
        asked = _last_asked(run) if f.events(run, "abort_inflight") else set()
        assert held == asked


def test_claims_at_the_same_moment_keep_the_limits(store: Store) -> None:
    """Two claims that count before either has taken would both fit."""
    for n, (limit, most_groups) in enumerate([({"max_inflight_samples": 3}, 8), ({"max_inflight_groups": 2}, 2)]):
        run = f.make_run(store, f"r{n}", prompts=16, samples_per_prompt=3, groups_per_step=8, **limit)
        worker, go = f.register(run), threading.Barrier(6)

        def claim(run: Run = run, worker: int = worker, go: threading.Barrier = go) -> None:
            go.wait()
            run.claim(worker, 2)

        threads = [threading.Thread(target=claim) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = f.rows(run, "SELECT group_id FROM sample WHERE run_id = :r AND owner > 0", r=run.id)
        assert 0 < len(held) <= limit.get("max_inflight_samples", 6)
        assert len({row["group_id"] for row in held}) <= most_groups
