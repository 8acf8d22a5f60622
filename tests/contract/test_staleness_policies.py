"""Groups that are too old, under every policy: the cases that a person would look for. The general rule is in
test_staleness_definition.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting, LeaseLost
from samplestore.run import Run

from ..support import factory as f

MODES, POLICIES = ("oldest", "newest", "mean"), ("skip", "mask", "expire", "regenerate")


def aged(store: Store, stale: str, publishes: int = 2, **more: Any) -> tuple[Run, int, int]:
    """Two groups of two samples that version 0 wrote, and a run that is `publishes` versions on."""
    run = f.make_run(store, prompts=2, stale=stale, **{"max_staleness": 1, "groups_per_step": 1, **more})
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    for step in range(publishes):
        run.publish_weights(step=step)
    return run, worker, trainer


def test_skip_leaves_a_group_for_a_batch_that_takes_it(store: Store) -> None:
    run, _, trainer = aged(store, "skip")
    assert f.lease(run, trainer, 5, 1) is None
    assert f.states(run) == ["ready"] * 2 and f.fates(run) == {"ready": 12}
    batch = f.lease(run, trainer, 5, 1, max_staleness=2)
    assert batch is not None
    assert f.value(run, "SELECT staleness FROM batch_group") == 2
    f.sound(run)


def test_what_skip_keeps_does_not_stop_admission(store: Store) -> None:
    run, worker, trainer = aged(store, "skip")
    run.add_prompts([{"prompt_ids": [7, i]} for i in range(4)])
    assert run.admit() == 2, "the two old groups take no room"
    f.finish_all(run, worker)
    assert run.admit() == 0
    assert f.lease(run, trainer, 5, 2) is not None
    assert f.states(run) == ["ready", "ready", "leased", "leased"]
    f.sound(run)


def test_expire_closes_and_makes_room(store: Store) -> None:
    run, worker, trainer = aged(store, "expire", publishes=1)
    assert f.states(run) == ["ready"] * 2, "inside the run's window"
    assert f.lease(run, trainer, 5, 1, max_staleness=0) is None
    assert f.states(run) == ["stale"] * 2 and f.fates(run) == {"stale": 12}
    assert [e["reason"] for e in f.events(run, "stale")] == ["more than 0 versions behind"] * 2
    run.add_prompts([{"prompt_ids": [7, i]} for i in range(4)])
    assert run.admit() == 2
    f.finish_all(run, worker)
    assert f.lease(run, trainer, 5, 2, max_staleness=0) is not None
    f.sound(run)


def test_regenerate_begins_a_new_life(store: Store) -> None:
    run, worker, trainer = aged(store, "regenerate", publishes=1, stages=["reward"], group_deadline_s=1000.0)
    f.execute(run, "UPDATE sample_group SET created_at = created_at - 2000")
    assert f.lease(run, trainer, 5, 1, max_staleness=0) is None
    assert f.states(run) == ["open"] * 2
    assert f.fates(run) == {"superseded": 12}
    assert [(e["tokens"], e["group_id"]) for e in f.events(run, "regenerate")] == [
        (6, f.group_id(run, n)) for n in (0, 1)
    ]
    assert run.reap().stragglers == 0, "a new life has a deadline of its own"
    claims = f.finish_all(run, worker)
    assert [(c.incarnation, c.response_ids.size) for c in claims] == [(1, 0)] * 4
    assert run.reap().stragglers == 0
    batch = f.lease(run, trainer, 5, 2, max_staleness=0)
    assert batch is not None
    assert f.states(run) == ["leased"] * 2, "the same groups, in their old place"
    f.commit(run, batch, trainer)
    assert f.fates(run) == {"superseded": 12, "consumed": 12}
    f.sound(run)


def test_a_publish_regenerates_what_is_being_written(store: Store) -> None:
    """Its oldest token will never be fresher; a sibling that has no token yet goes on as it is."""
    run = f.make_run(store, prompts=1, stale="regenerate", max_staleness=0, groups_per_step=1)
    worker = f.register(run)
    begun, waiting = run.claim(worker, 2)
    f.add(run, begun, 4, 0)
    run.publish_weights(step=0)
    with pytest.raises(LeaseLost):
        f.add(run, begun, 1, 1)
    f.answer(run, waiting, 2, 1)
    (again,) = run.claim(worker, 9)
    assert (again.sample_id, again.incarnation, again.n_tokens) == (begun.sample_id, 1, 0)
    f.answer(run, again, 2, 1)
    assert f.states(run) == ["ready"]
    f.sound(run)


@pytest.mark.parametrize("mode", ["newest", "mean"])
def test_what_may_become_fresher_is_not_judged_before_it_is_finished(store: Store, mode: str) -> None:
    run = f.make_run(
        store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=0 if mode == "newest" else 1,
        staleness_mode=mode,
    )  # fmt: skip
    worker, trainer = f.register(run), f.register(run, "trainer")
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 2, 0)
    for step in (0, 1):
        run.publish_weights(step=step)
    f.add(run, claim, 2, 2, "stop")
    run.finish(claim)
    assert run.admit() == 0
    assert f.states(run) == ["ready"]
    with run.batch(step=5, groups=1, timeout=0) as batch:  # the run's measure, where none is named
        assert batch.policy["staleness"] == mode
        assert batch.groups[0].staleness == (0 if mode == "newest" else 1)
    assert trainer
    f.sound(run)


@pytest.mark.parametrize("mode", ["newest", "mean"])
def test_what_is_finished_and_too_old_by_another_measure_goes(store: Store, mode: str) -> None:
    run, _, _ = aged(store, "expire", staleness_mode=mode)
    assert f.states(run) == ["stale"] * 2
    f.sound(run)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_unknown_is_never_taken_for_fresh(store: Store, mode: str, policy: str) -> None:
    run = f.make_run(
        store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=9, staleness_mode=mode, stale=policy
    )
    worker, trainer = f.register(run), f.register(run, "trainer")
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 3, 0)
    f.add(run, claim, 1, None, "stop")
    run.finish(claim)
    assert f.lease(run, trainer, 0, 1) is None
    assert "unknown_version" in {code for code, _ in run.why(1).reasons}
    run.admit()
    assert f.states(run) == ["open" if policy == "regenerate" else "stale"]
    assert f.lease(run, trainer, 0, 1) is None
    assert policy == "regenerate" or "unknown_version" in {code for code, _ in run.why(1).reasons}
    f.sound(run)


@pytest.mark.parametrize("name, wrong", [("staleness_mode", "median"), ("stale", "drop"), ("max_staleness", -1)])
def test_a_policy_is_checked_before_anything_waits(store: Store, name: str, wrong: Any) -> None:
    run = f.make_run(store)
    with pytest.raises(InvalidSetting, match=name):
        run.batch(step=0, timeout=0, **{name: wrong})
    with pytest.raises(InvalidSetting, match=name):
        store.run("other", **{name: wrong})
    assert f.rows(run, "SELECT id FROM batch") == []


def test_a_replay_keeps_its_mask_when_the_versions_it_saw_are_left_behind(store: Store) -> None:
    """Versions without a step are left by a rewind. Counted from the tree of today, token and batch would then be
    further apart than they were."""
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1, stale="mask", max_staleness=1)
    worker, trainer = f.register(run), f.register(run, "trainer")
    (claim,) = run.claim(worker, 1)
    f.add(run, claim, 2, 0)
    run.publish_weights(), run.publish_weights()
    f.add(run, claim, 3, 1, "stop")
    run.finish(claim)
    batch = f.lease(run, trainer, 0, 1)
    assert batch is not None
    was = f.batch_of(run, batch, trainer).arrays()
    assert was["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    f.commit(run, batch, trainer)
    assert run.rewind(0).parent == 0
    run.publish_weights(path="/w/b", step=1)
    f.same_arrays(run.replay(0).arrays(), was)
    assert np.array_equal(run.replay(0).arrays(layout="padded")["loss_mask"][0], was["loss_mask"])
    f.sound(run)


@pytest.mark.parametrize("mode", MODES)
def test_trained_tokens_of_an_environment_have_no_age(store: Store, mode: str) -> None:
    """No weights made them: they make nothing unknown, and no window masks them."""
    run = f.make_run(
        store, prompts=1, samples_per_prompt=1, stale="mask", staleness_mode=mode, max_staleness=0, groups_per_step=1
    )
    [claim] = run.claim(f.register(run), 1)
    run.append(claim, f.ids_of(2), f.logprobs_of(2), 0)
    run.append(claim, f.ids_of(3), f.logprobs_of(3), None, kind="environment", loss=True)  # type: ignore[arg-type]
    run.finish(claim, "completed")
    run.publish_weights(step=0)
    with run.batch(1, 1, timeout=20) as batch:
        assert batch.arrays(layout="padded")["loss_mask"][0].tolist()[-5:] == [0, 0, 1, 1, 1]
    f.sound(run)
