"""Weights, engines, control flags, and why()."""

from __future__ import annotations

from pathlib import Path

import pytest

from samplestore import Store
from samplestore.errors import EngineInUse, InvalidSetting, LeaseLost, SampleStoreError
from samplestore.run import Run
from samplestore.verbs import weights

from ..support import factory as f

URL = "http://127.0.0.1:3000"


def see(run: Run, label: str | None = "default", url: str = URL) -> dict[str, object]:
    return run.transact(lambda tx: weights.see_engine(tx, url, label))


def claim_engine(run: Run, worker: int, url: str = URL) -> dict[str, object] | None:
    return run.transact(lambda tx: weights.claim_engine(tx, worker, url))


def test_publishing_sets_the_current_version(store: Store) -> None:
    run = f.make_run(store)
    assert run.current_version == 0
    first = run.publish_weights(path="/w/1", step=1)
    assert (first.version, first.parent, first.timeline, first.path, first.step) == (1, 0, 0, "/w/1", 1)
    second = run.publish_weights(path="/w/2", step=2, label="two")
    assert (second.version, second.label) == (2, "two")
    assert first.label != second.label
    assert run.current_version == 2
    assert run.publish_weights(path="/w/2", step=2).version == 2, "the same step and path again is the same version"
    assert len(f.events(run, "publish")) == 2


def test_labels_are_unique_within_a_run(store: Store) -> None:
    run = f.make_run(store)
    run.publish_weights(step=1, label="x")
    with pytest.raises((SampleStoreError, InvalidSetting)):
        run.publish_weights(step=2, label="x")
    assert run.current_version == 1


def test_another_label_is_another_call(store: Store) -> None:
    """It was acknowledged as a repetition, and the label dropped: an engine that reports it had an unknown version."""
    run = f.make_run(store)
    one = run.publish_weights(step=1, label="one")
    assert run.publish_weights(step=1) == run.publish_weights(step=1, label="one") == one
    with pytest.raises(InvalidSetting, match="label='default' is not allowed; use one that version 0 does not have"):
        run.publish_weights(step=1, label="default")
    run.publish_weights(step=2, label="two")
    again = run.publish_weights(step=1, label="three")
    assert (again.version, again.label, run.current_version) == (3, "three", 3)
    assert run.publish_weights(step=1, label="one") == one and run.current_version == 3, "said late"


def test_a_trainer_names_the_weights_that_a_rewind_restored(store: Store) -> None:
    """They are the same weights: what waits for its batch is no version further behind."""
    run = f.make_run(store, prompts=4, groups_per_step=1, max_staleness=0)
    worker, trainer = f.register(run), f.register(run, "trainer")
    for step in range(2):
        f.finish_all(run, worker)
        f.commit(run, f.lease(run, trainer, step, 1), trainer)
        run.publish_weights(step=step, label=f"before {step}")
        run.admit()
    restored = run.rewind(0)
    named = run.publish_weights(step=0, label="after 0")
    assert (named.version, named.label, named.parent) == (restored.version + 1, "after 0", restored.version)
    assert run.current_version == named.version and see(run, "after 0")["version"] == named.version
    assert run.publish_weights(step=0, label="after 0") == named == run.publish_weights(step=0)
    depths = "SELECT version, depth, common_depth FROM weight_version ORDER BY version"
    assert [(r["depth"], r["common_depth"]) for r in f.rows(run, depths)][-2:] == [(1, 1), (1, 1)]
    assert run.publish_weights(step=1, label="after 1").version == named.version + 1
    assert f.rows(run, depths)[-1]["depth"] == 2
    f.sound(run)


def test_a_trainer_that_names_weights_by_their_step_begins_again(store: Store) -> None:
    """The name is taken, by these very weights: it was refused, and the trainer could not begin."""
    run = f.make_run(store, prompts=4, groups_per_step=1)
    worker, trainer = f.register(run), f.register(run, "trainer")
    for step in range(2):
        f.finish_all(run, worker)
        f.commit(run, f.lease(run, trainer, step, 1), trainer)
        run.publish_weights(f"/w/{step}", step, f"step-{step}")
        run.admit()
    restored = run.rewind(0)
    with pytest.raises(InvalidSetting, match="one that version 2 does not have"):
        run.publish_weights("/w/0", 0, "step-1")
    assert run.publish_weights("/w/0", 0, "step-0") == restored
    assert run.current_version == restored.version and see(run, "step-0")["version"] == 1
    with pytest.raises(InvalidSetting, match="one that version 2 does not have"):
        run.publish_weights("/w/1", 1, "step-1")


def test_weights_with_two_names_come_along_with_an_export(store: Store, tmp_path: Path) -> None:
    run = f.make_run(store, prompts=4, groups_per_step=1)
    f.finish_all(run, f.register(run))
    run.publish_weights(step=0, label="one")
    run.publish_weights(step=0, label="two")
    run.export(str(tmp_path / "out"))
    there = store.run("there", samples_per_prompt=2, groups_per_step=1, max_staleness=9)
    assert there.import_samples(str(tmp_path / "out")).added
    assert [(v.version, v.label) for v in there.weight_versions()] == [(0, "default"), (1, "one"), (2, "two")]
    f.sound(there)


@pytest.mark.parametrize("path", [None, "/w/{}"])
def test_versions_that_came_with_an_import_are_no_publications_of_this_run(
    store: Store, path: str | None, tmp_path: Path
) -> None:
    """Their trainer counts steps from 0 as well: each of its first publishes was taken for one of theirs."""
    told = f.make_run(store, "told", prompts=3, groups_per_step=1, max_staleness=3)
    worker, trainer = f.register(told), f.register(told, "trainer")
    for step in range(3):
        f.finish_all(told, worker)
        f.commit(told, f.lease(told, trainer, step, 1), trainer)
        told.publish_weights(path and path.format(step), step)
    told.export(str(tmp_path / "out"))
    run = store.run("new", samples_per_prompt=2, groups_per_step=1, max_staleness=9, epochs=1)
    run.import_samples(str(tmp_path / "out"))
    assert run.current_version == 3
    for step in range(3):
        made = run.publish_weights(path and path.format(step), step)
        assert made.version == run.current_version == 4 + step
        assert run.publish_weights(path and path.format(step), step) == made
    assert len(f.events(run, "publish")) == 3


def test_groups_beyond_the_window_expire_at_a_publish(store: Store) -> None:
    run = f.make_run(store, prompts=3, groups_per_step=3, max_staleness=1)
    worker = f.register(run)
    f.finish_all(run, worker)
    run.publish_weights(step=1)
    assert f.states(run) == ["ready"] * 3
    run.publish_weights(step=2)
    assert f.states(run) == ["stale"] * 3
    assert f.fates(run) == {"stale": 18}
    f.sound(run)


def test_an_open_group_beyond_the_window_expires_too(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_staleness=0)
    claim = run.claim(f.register(run), 1)[0]
    f.add(run, claim, 2, 0)
    run.publish_weights(step=1)
    assert f.states(run) == ["stale"]
    with pytest.raises(LeaseLost):
        f.add(run, claim, 2, 1)
    f.sound(run)


def test_nothing_expires_where_stale_tokens_are_masked(store: Store) -> None:
    run = f.make_run(store, prompts=1, max_staleness=0, stale="mask")
    f.finish_all(run, f.register(run))
    run.publish_weights(step=1)
    assert f.states(run) == ["ready"]


def test_an_engine_is_updated_by_one_and_seen(store: Store) -> None:
    run = f.make_run(store)
    a, b = f.register(run), f.register(run)
    assert see(run)["version"] == 0
    assert claim_engine(run, a) is None, "it serves the current version"
    run.publish_weights(path="/w/1", step=1)
    held = claim_engine(run, a)
    assert held is not None and (held["path"], held["version"], held["was"]) == ("/w/1", 1, "default")
    assert claim_engine(run, b) is None
    run.transact(lambda tx: weights.engine_updated(tx, held, str(held["label"])))
    assert f.value(run, "SELECT version FROM engine") == 1
    with pytest.raises(LeaseLost):
        run.transact(lambda tx: weights.engine_updated(tx, {**held, "attempt": 0}, "x"))


def test_a_dead_driver_is_reaped_and_its_late_word_refused(store: Store) -> None:
    run = f.make_run(store)
    a, b = f.register(run), f.register(run)
    see(run)
    run.publish_weights(path="/w/1", step=1)
    held = claim_engine(run, a)
    f.silence(run, a)
    assert run.reap().engines == 1
    assert held is not None and claim_engine(run, b) is not None
    with pytest.raises(LeaseLost):
        run.transact(lambda tx: weights.engine_updated(tx, held, str(held["label"])))


def test_an_engine_that_failed_waits(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    see(run)
    run.publish_weights(path="/w/1", step=1)
    held = claim_engine(run, worker)
    assert held is not None
    run.transact(lambda tx: weights.engine_updated(tx, held, None, "404\x00"))
    assert f.rows(run, "SELECT state, failures, version FROM engine") == [
        {"state": "failed", "failures": 1, "version": None}
    ]
    assert claim_engine(run, worker) is None


def test_weights_without_a_path_move_no_engine(store: Store) -> None:
    run = f.make_run(store)
    see(run)
    run.publish_weights(step=1)
    assert claim_engine(run, f.register(run)) is None


def test_an_engine_serves_one_run(store: Store) -> None:
    run, other = f.make_run(store), f.make_run(store, "other")
    see(run)
    with pytest.raises(SampleStoreError, match="belongs to run 'r'"):
        see(other)
    assert run.transact(lambda tx: weights.forget_engine(tx, URL)) == 1
    assert see(other)["run_id"] == other.id


def test_an_engine_is_not_forgotten_under_workers_that_would_take_it_back(store: Store) -> None:
    """Forgotten, seen by their worker, refused to the other run's, forgotten, ..."""
    run, other = f.make_run(store), f.make_run(store, "other")
    see(run)
    run.register("rollout", "elsewhere", {"engines": ["http://another"], "router": None})
    user = run.register("rollout", "mine", {"engines": [URL], "router": None})
    for take in (lambda: see(other), lambda: run.transact(lambda tx: weights.forget_engine(tx, URL))):
        with pytest.raises(EngineInUse, match="samplestore drain --run r") as caught:
            take()
        assert [id for id, _, _ in caught.value.workers] == [user] and caught.value.run == "r"
    f.silence(run, user)  # killed
    assert run.transact(lambda tx: weights.forget_engine(tx, URL)) == 1
    see(other)
    behind_router = other.register("rollout", "routed", {"engines": [], "router": "http://router"})
    with pytest.raises(EngineInUse, match=f"{behind_router} \\(pid"):
        other.transact(lambda tx: weights.forget_engine(tx, URL))
    assert other.transact(lambda tx: weights.forget_engine(tx, URL, anyway=True)) == 1


def test_a_label_of_nobody_is_an_unknown_version(store: Store) -> None:
    run = f.make_run(store)
    assert see(run, "what")["version"] is None
    assert see(run, None)["version"] is None


def test_abort_inflight_is_numbered(store: Store) -> None:
    run = f.make_run(store)
    assert [run.abort_inflight("a"), run.abort_inflight("b")] == [1, 2]
    with pytest.raises(InvalidSetting):
        run.abort_inflight("")


def codes(run: Run, groups: int | None = None) -> list[str]:
    return [code for code, _ in run.why(groups).reasons]


def test_why_names_what_is_missing(store: Store) -> None:
    run = store.run("r", samples_per_prompt=2, groups_per_step=2, max_staleness=0, epochs=1, stages=["reward"])
    assert codes(run) == ["no_prompts"]
    run.add_prompts([{"prompt_ids": [1, i]} for i in range(2)])
    assert codes(run) == ["no_workers", "nothing_admitted"]
    worker = f.register(run)
    run.admit()
    assert codes(run)[:2] == ["no_engine", "waiting"]
    claims = run.claim(worker, 2)
    assert {"waiting", "in_flight"} <= set(codes(run))
    run.pause()
    assert codes(run)[0] == "run_not_running"
    run.resume()
    for claim in claims:
        f.answer(run, claim)
    assert "unscored" in codes(run)
    f.silence(run, worker)
    assert "silent_workers" in codes(run)
    run.heartbeat(worker)
    rest = run.claim(worker, 9)
    run.fail(rest[0], "x", backoff_s=1000.0)
    assert "backing_off" in codes(run)
    f.answer(run, rest[1])
    for stage in run.claim_stages(worker, 9):
        run.score(stage, 1.0)
    assert run.why(1).ready_in_window == 1
    assert codes(run, 1) == []
    assert "1 of 1 group is ready" in str(run.why(1))
    f.execute(run, "UPDATE sample SET not_before = 0")
    f.finish_all(run, worker)
    trainer = f.register(run, "trainer")
    f.lease(run, trainer, 0)
    assert "leased" in codes(run) and "prompts_used_up" in codes(run)


def test_why_tells_too_stale_and_too_small(store: Store) -> None:
    run = f.make_run(store, prompts=8, groups_per_step=1, max_staleness=0, stale="mask", epochs=None)
    worker = f.register(run)
    f.finish_all(run, worker)
    run.publish_weights(step=1)
    assert codes(run) == [], "masked, they are delivered"
    assert run.why(stale="skip").reasons[0][0] == "too_stale"
    assert "window_too_small" in codes(run, 5)
