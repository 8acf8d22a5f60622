"""Signals and orders: what is in flight is kept, given back, and stopped at the engine."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.support import factory
from tests.support.processes import Process
from tests.support.scripted_engine import Script, ScriptedEngine, wait_running
from tests.worker.conftest import Bench

STALLED = Script(stall_after=12)  # 12 tokens, then silence until the test or an abort ends it


def in_flight(
    bench: Bench, script: Script = STALLED, samples: int = 4, heartbeat_ttl_s: float = 30.0, **flags: Any
) -> tuple[Process, ScriptedEngine]:
    """A worker with all samples in flight, each with some tokens stored."""
    bench.make_run(samples_per_prompt=samples, heartbeat_ttl_s=heartbeat_ttl_s)
    engine = bench.engine(script)
    worker = bench.worker(engine, **flags)
    wait_running([engine], samples)
    if flags.get("mode") != "unary":
        bench.wait_stored(8)
    return worker, engine


@pytest.mark.parametrize("mode", ["stream", "unary"])
def test_sigterm_keeps_what_is_in_flight(any_bench: Bench, mode: str) -> None:
    worker, engine = in_flight(any_bench, mode=mode)
    worker.signal(signal.SIGTERM)
    assert worker.wait(20) == 0, worker.log()
    assert engine.idle()
    assert set(any_bench.statuses()) == {"aborted"} and any_bench.unowned()
    any_bench.exact(12)
    reasons = {event["reason"] for event in factory.events(any_bench.run, "abort")}
    assert reasons == {"worker got SIGTERM"}
    assert len(any_bench.run.claim(any_bench.run.register(), 10)) == 4, "resumable by the next worker"
    any_bench.sound()


def test_a_worker_leaves_a_database_that_was_migrated(any_bench: Bench) -> None:
    """Its statements are those of another schema."""
    worker, engine = in_flight(any_bench, heartbeat_ttl_s=2)
    now = factory.value(any_bench.run, "SELECT version_num FROM alembic_version")
    factory.execute(any_bench.run, "UPDATE alembic_version SET version_num = '9999'")
    assert worker.wait(30) == 0, worker.log()
    assert "schema revision 9999" in worker.log() and "Start it again" in worker.log()
    factory.execute(any_bench.run, "UPDATE alembic_version SET version_num = :v", v=now)
    assert engine.idle()
    assert set(any_bench.statuses()) == {"aborted"} and any_bench.unowned()
    any_bench.sound()


def test_a_retracted_request_that_is_aborted_repeats_nothing(bench: Bench) -> None:
    worker, _ = in_flight(bench, Script(stall_after=12, repeat_last=True, dialect="incremental"))
    assert worker.terminate(20) == 0, worker.log()
    bench.exact(12)
    bench.sound()


def test_sigterm_with_an_engine_that_hears_no_abort(bench: Bench) -> None:
    """The connection is cut instead; what had come is stored, flushed or not."""
    worker, engine = in_flight(bench, Script(stall_after=20, deaf=True), flush_tokens=8, flush_seconds=60)
    assert worker.terminate(30) == 0, worker.log()
    bench.wait(engine.idle, "the engine sees its clients go")
    assert set(bench.statuses()) == {"aborted"} and bench.unowned()
    bench.exact(20)
    assert {r["lost_reason"] for r in bench.requests()} == {"worker stopped"}
    bench.sound()


def test_a_second_sigterm_leaves_at_once(bench: Bench) -> None:
    worker, engine = in_flight(
        bench, Script(stall_after=12, deaf=True), env={"SAMPLESTORE_WORKER_ABORT_TIMEOUT_S": "120"}
    )
    worker.signal(signal.SIGTERM)
    bench.wait(lambda: len(engine.aborts) >= 4, "the first signal is followed")
    assert worker.alive()
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait(10) == 130
    assert time.monotonic() - began < 5
    assert "second signal" in worker.log()


def test_sigterm_while_nothing_is_there_to_do(bench: Bench) -> None:
    bench.make_run(prompts=0)
    engine = bench.engine()
    worker = bench.worker(engine)
    worker.wait_for(lambda: "ready" in worker.log(), what="it registered", timeout=30)
    assert worker.terminate(20) == 0
    assert factory.value(bench.run, "SELECT state FROM worker") == "gone"


def test_pause_and_resume(any_bench: Bench) -> None:
    """Paused: nothing new is claimed, what is in flight goes on. Resumed: the rest is generated."""
    any_bench.make_run(samples_per_prompt=4)
    engine = any_bench.engine(STALLED)
    worker = any_bench.worker(engine, concurrency=2)
    wait_running([engine], 2)
    any_bench.run.pause("look at it")
    engine.release()
    any_bench.wait(lambda: any_bench.statuses().count("truncated") == 2, "what was in flight is finished")
    row = "SELECT abort_seq FROM run"
    assert factory.value(any_bench.run, row) == 0
    assert any_bench.unowned() and len(engine.requests) == 2
    any_bench.run.resume()
    any_bench.wait_all()
    assert len(engine.requests) == 4
    assert worker.terminate() == 0
    any_bench.exact(32)
    any_bench.sound()


def test_drain(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=4)
    engine = any_bench.engine(STALLED)
    worker = any_bench.worker(engine, concurrency=2)
    wait_running([engine], 2)
    any_bench.run.drain("maintenance")
    engine.release()
    assert worker.wait(30) == 0, worker.log()
    assert sorted(any_bench.statuses()) == ["pending", "pending", "truncated", "truncated"]
    any_bench.exact()
    any_bench.sound()


def test_abort_inflight_and_go_on(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=4)
    engine = any_bench.engine(lambda body, n: STALLED if n < 4 else Script())
    worker = any_bench.worker(engine, concurrency=4)
    wait_running([engine], 4)
    any_bench.wait_stored(12)
    any_bench.run.abort_inflight("batch complete")
    any_bench.wait_all()
    assert worker.terminate() == 0
    assert len(engine.requests) == 8, "each was resumed once, from its tokens"
    assert {len(body["input_ids"]) for body in engine.requests[4:]} == {3 + 12}
    assert {e["reason"] for e in factory.events(any_bench.run, "abort")} == {"batch complete"}
    assert {row["n_aborts"] for row in any_bench.samples()} == {1}
    assert {row["failures"] for row in any_bench.samples()} == {0}
    any_bench.exact(32)
    any_bench.sound()


def test_a_dropped_group_is_no_longer_generated(bench: Bench) -> None:
    """The owner learns at its next word to the store, and stops the engine."""
    bench.make_run(samples_per_prompt=2, max_new_tokens=64)
    engine = bench.engine(lambda body, n: Script(stall_after=12, chunk=1))
    worker = bench.worker(engine, flush_tokens=4)
    wait_running([engine], 2)
    bench.wait_stored(12)
    bench.run.drop([bench.samples()[0]["group_id"]], "not wanted")
    engine.release()
    bench.wait(engine.idle, "the engine stopped")
    bench.wait(lambda: all(r["finished_at"] for r in bench.requests()), "the requests are settled")
    assert {row["n_tokens"] for row in bench.samples()} == {12}
    assert worker.terminate() == 0
    bench.sound()


def test_somebody_holds_the_database(bench: Bench) -> None:
    """A long foreign lock makes a worker wait, not leave, and nothing is lost."""
    bench.make_run(samples_per_prompt=2)
    engine = bench.engine(STALLED)
    worker = bench.worker(engine)
    wait_running([engine], 2)
    bench.wait_stored(8)
    with bench.store.database.writing():
        engine.release()
        bench.wait(engine.idle, "the answers are complete")
        assert worker.alive()
    bench.wait_all()
    assert worker.terminate() == 0
    bench.exact(32)
    bench.sound()
