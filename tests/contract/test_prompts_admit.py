"""add_prompts stores, admit creates groups up to the window, in an order that is the same everywhere."""

from __future__ import annotations

from collections import Counter

import pytest

import samplestore
from samplestore import Store
from samplestore.errors import InvalidSetting, RunNotFound, RunSettingsConflict
from samplestore.order import permuted
from samplestore.prompts import InvalidPrompts

from ..support import factory as f


def served(run: samplestore.run.Run) -> list[tuple[int, int]]:
    """(epoch, position) of all groups in creation order."""
    found = f.rows(
        run,
        "SELECT g.epoch, p.position FROM sample_group g JOIN prompt p ON p.id = g.prompt_id "
        "WHERE g.run_id = :r ORDER BY g.number",
        r=run.id,
    )
    return [(r["epoch"], r["position"]) for r in found]


def consume(run: samplestore.run.Run, worker: int, trainer: int, step: int) -> None:
    f.finish_all(run, worker)
    batch = f.lease(run, trainer, step)
    assert batch is not None
    f.commit(run, batch, trainer)


def test_prompts_are_stored_once_and_admit_nothing(store: Store) -> None:
    run = f.make_run(store, prompts=3, admit=False)
    again = run.add_prompts([{"prompt_ids": [1, 2, 0], "label": "0"}, {"prompt_ids": [9]}, {"prompt_ids": [9]}])
    assert (again.added, again.existing) == (1, 2)
    assert f.value(run, "SELECT n_prompts FROM run") == 4
    assert f.states(run) == []
    assert [r["position"] for r in f.rows(run, "SELECT position FROM prompt ORDER BY id")] == [0, 1, 2, 3]


def test_a_bad_row_stores_nothing(store: Store) -> None:
    run = store.run("r")
    with pytest.raises(InvalidPrompts):
        run.add_prompts([{"prompt_ids": [1]}, {"prompt_ids": []}])
    assert f.value(run, "SELECT n_prompts FROM run") == 0


def test_a_thousand_prompts_in_one_call(store: Store) -> None:
    run = store.run("r")
    assert run.add_prompts([{"prompt_ids": [1, i]} for i in range(1201)]).added == 1201
    assert f.value(run, "SELECT max(position) FROM prompt") == 1200


def test_admission_fills_the_window_and_no_more(store: Store) -> None:
    run = f.make_run(store, prompts=10, admit=False, max_staleness=2, groups_per_step=2)
    assert run.admit() == 6
    assert run.admit() == 0
    assert f.value(run, "SELECT count(*) FROM sample WHERE status = 'pending'") == 12
    worker, trainer = f.register(run), f.register(run, "trainer")
    f.finish_all(run, worker)
    assert run.admit() == 0, "ready groups inside the window count"
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    assert run.admit() == 2, "leased groups have left the window"
    f.commit(run, batch, trainer)
    assert run.admit() == 0
    f.sound(run)


def test_paused_and_draining_runs_admit_nothing(store: Store) -> None:
    run = f.make_run(store, admit=False)
    for stop in (run.pause, run.drain):
        stop()
        assert run.admit() == 0
    run.resume()
    assert run.admit() == 4


def test_every_epoch_serves_every_prompt_once(store: Store) -> None:
    run = f.make_run(store, prompts=5, epochs=2, groups_per_step=1, max_staleness=0)
    worker, trainer = f.register(run), f.register(run, "trainer")
    for step in range(10):
        f.finish_all(run, worker)
        batch = f.lease(run, trainer, step, 1)
        assert batch is not None
        f.commit(run, batch, trainer)
        run.admit()
    order = served(run)
    assert [e for e, _ in order] == [0] * 5 + [1] * 5
    assert Counter(p for _, p in order) == dict.fromkeys(range(5), 2)
    assert run.admit() == 0
    assert "prompts_used_up" in {code for code, _ in run.why().reasons}


def test_prompts_added_in_the_middle_of_an_epoch_are_served_in_it(store: Store) -> None:
    run = f.make_run(store, prompts=3, epochs=1, groups_per_step=4, max_staleness=0)
    run.add_prompts([{"prompt_ids": [7, i]} for i in range(2)])
    worker, trainer = f.register(run), f.register(run, "trainer")
    run.admit()
    consume(run, worker, trainer, 0)
    run.admit()
    assert sorted(served(run)) == [(0, i) for i in range(5)]


def test_the_order_depends_on_the_seed_only(store: Store) -> None:
    runs = [
        f.make_run(store, n, prompts=40, groups_per_step=40, max_staleness=0, seed=s)
        for n, s in zip("abc", (1, 1, 2), strict=True)
    ]
    a, b, c = (served(run) for run in runs)
    assert a == b
    assert a != c
    assert [p for _, p in a] != list(range(40))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
def test_the_order_is_a_permutation(n: int) -> None:
    assert sorted(permuted(i, n, "key") for i in range(n)) == list(range(n))


def test_groups_that_cannot_come_back_do_not_count(store: Store) -> None:
    run = f.make_run(store, prompts=20, max_staleness=1, groups_per_step=1)
    worker = f.register(run)
    f.finish_all(run, worker)
    for step in (1, 2):
        run.publish_weights(step=step)
    assert f.states(run) == ["stale", "stale"]
    assert run.admit() == 2
    f.sound(run)


def test_settings_are_stored_once(store: Store) -> None:
    store.run("r", samples_per_prompt=4, stages=["reward"])
    assert store.run("r").settings.samples_per_prompt == 4
    assert store.run("r", stages=("reward",)).settings.stages == ("reward",)
    with pytest.raises(RunSettingsConflict, match="samples_per_prompt: stored 4, given 5"):
        store.run("r", samples_per_prompt=5)
    with pytest.raises(InvalidSetting, match="max_stalenes"):
        store.run("r", max_stalenes=1)
    with pytest.raises(RunNotFound, match="no run named 'x'"):
        store.existing_run("x")
