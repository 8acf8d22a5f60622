"""Engines that get no requests any more: why, that no sample suffers, and how they come back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import factory
from tests.support.router import Router
from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import Bench


def engine_rows(bench: Bench) -> dict[str, dict[str, Any]]:
    return {row["url"]: row for row in factory.rows(bench.run, "SELECT * FROM engine")}


def test_an_engine_that_fails_its_update_is_taken_out_and_comes_back(bench: Bench) -> None:
    """Its samples go to the other one meanwhile; the router lists it no more, until it serves the right weights."""
    bench.make_run(prompts=6, samples_per_prompt=4, groups_per_step=3, max_staleness=1)
    engines = [bench.engine(Script(stall_after=8)) for _ in range(2)]
    bad, good = engines
    bad.load_fails = 3
    router = Router.start(bench.processes, [e.url for e in engines])
    worker = bench.worker(router=router.url, exit_when_done=True)
    wait_running(engines, 24)
    made = bench.run.publish_weights("/weights/1", step=1)
    bench.wait(lambda: engine_rows(bench)[bad.url]["state"] == "failed", "the failure is recorded")
    assert "no such checkpoint" in engine_rows(bench)[bad.url]["error"]
    bench.wait(lambda: [w["url"] for w in router.workers()] == [good.url], "the router has one engine left")
    bench.wait(lambda: engine_rows(bench)[bad.url]["version"] == 1, "it serves the new weights at last", 60)
    bench.wait(lambda: {w["url"] for w in router.workers()} == {bad.url, good.url}, "the router has both again")
    assert (bad.label, engine_rows(bench)[bad.url]["state"]) == (made.label, "live")
    for engine in engines:
        engine.release()
    assert worker.wait(60) == 0, worker.log()
    assert {(r["status"], r["failures"]) for r in bench.samples()} == {("truncated", 0)}
    assert [e["reason"] for e in factory.events(bench.run, "engine_failed")] != []
    bench.exact(32)
    bench.sound()


def test_no_engine_is_told_of_a_checkpoint_that_is_not_complete(bench: Bench) -> None:
    """Loading a truncated file kills a server. When the rest is there, the update goes on by itself."""
    bench.make_run(prompts=2, samples_per_prompt=2, groups_per_step=1, max_staleness=1)
    engine = bench.engine(Script(stall_after=8))
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 4)
    folder = bench.folder / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(weights[:-1])
    bench.run.publish_weights(str(folder), step=1)
    bench.wait(lambda: engine_rows(bench)[engine.url]["state"] == "failed", "it is refused")
    assert "no complete checkpoint" in engine_rows(bench)[engine.url]["error"]
    assert "update_weights_from_disk" not in [name for name, _ in engine.calls]
    (folder / "model.safetensors").write_bytes(weights)
    bench.wait(lambda: engine_rows(bench)[engine.url]["version"] == 1, "the update is tried again", 60)
    engine.release()
    assert worker.wait(60) == 0, worker.log()
    bench.sound()


def test_an_engine_that_did_not_hear_its_continue_is_woken(bench: Bench) -> None:
    """The weights are the right ones, so no update is due, but it is frozen and counts as failed: a probe wakes it."""
    bench.make_run(prompts=2, samples_per_prompt=2, groups_per_step=1, max_staleness=1)
    engine = bench.engine(lambda body, n: Script(stall_after=8) if n < 4 else Script())
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 4)
    engine.continue_fails = 1
    bench.run.publish_weights("/weights/1", step=1)
    bench.wait(lambda: engine_rows(bench)[engine.url]["state"] == "failed", "its update has failed")
    assert worker.wait(60) == 0, worker.log()
    assert engine_rows(bench)[engine.url]["state"] == "live" and not engine.paused
    bench.exact(32)
    bench.sound()


@pytest.mark.parametrize("direct", [True, False])
def test_weights_that_are_not_numbers_are_the_engines_failure(bench: Bench, direct: bool) -> None:
    """One engine is reported and left out; no sample has failed, and the other engine finishes them all."""
    bench.make_run(prompts=4, samples_per_prompt=4, groups_per_step=4, max_staleness=1)
    sick, well = (bench.engine() for _ in range(2))
    sick.nan_paths = {"scripted"}
    router = Router.start(bench.processes, [sick.url, well.url])
    worker = bench.worker(router=router.url, dispatch="direct" if direct else "router", exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert {(r["status"], r["failures"]) for r in bench.samples()} == {("truncated", 0)}
    assert engine_rows(bench)[sick.url]["state"] == "failed"
    assert "not finite" in engine_rows(bench)[sick.url]["error"]
    assert [w["url"] for w in router.workers()] == [well.url]
    assert len(factory.events(bench.run, "engine_failed")) == 1, "one failure, not one for each sample"
    # By its reason, not by a count: of a reply that was left in the middle nobody knows how much was made.
    assert "engine unfit" in {r["lost_reason"] for r in bench.requests()}
    bench.exact(32)
    bench.sound()


def test_a_sick_engine_gets_well_with_new_weights(bench: Bench) -> None:
    """With no other engine samples wait, unharmed; good weights are published, and they are finished."""
    bench.make_run(prompts=1, samples_per_prompt=4, groups_per_step=1, max_staleness=1)
    engine = bench.engine()
    engine.nan_paths = {"scripted"}
    worker = bench.worker(engine, exit_when_done=True)
    bench.wait(lambda: engine_rows(bench).get(engine.url, {}).get("state") == "failed", "it is found unfit")
    bench.wait(bench.unowned, "nothing is claimed for it")
    assert "not finite" in str(bench.run.why())
    bench.run.publish_weights("/weights/1", step=1)
    assert worker.wait(60) == 0, worker.log()
    assert {(r["status"], r["failures"]) for r in bench.samples()} == {("truncated", 0)}
    assert engine_rows(bench)[engine.url]["state"] == "live"
    bench.exact(32)
    bench.sound()


def test_a_sick_engine_that_somebody_repaired(bench: Bench) -> None:
    """It serves the right label all the time, so no update is due: a probe finds that it is fit again."""
    bench.make_run(prompts=1, samples_per_prompt=2, groups_per_step=1)
    engine = bench.engine()
    engine.nan_paths = {"scripted"}
    worker = bench.worker(engine, exit_when_done=True)
    bench.wait(lambda: engine_rows(bench).get(engine.url, {}).get("state") == "failed", "it is found unfit")
    engine.nan_paths = set()
    assert worker.wait(60) == 0, worker.log()
    assert [e["kind"] for e in factory.events(bench.run, "engine_recovered")] == ["engine_recovered"]
    bench.exact(32)


def test_one_log_prob_that_is_no_number_is_the_samples_failure(bench: Bench) -> None:
    bench.make_run(prompts=1, samples_per_prompt=1, groups_per_step=1, max_attempts=1)
    engine = bench.engine(Script(tokens=6, wrong={4: None}))
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    [row] = bench.samples()
    assert row["status"] == "failed" and "position 4" in row["error"]
    assert engine_rows(bench)[engine.url]["state"] == "live"
