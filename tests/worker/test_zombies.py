"""Worker processes that are half alive: suspended until others have their work, or stuck with a beating heart."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import factory
from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import Bench
from tests.worker.test_deaths import suspend_until_reaped

TTL_S = 1

# What a zombie may still tell: what its engine did.
TOLD = (*factory.OF_WORKERS, "request", "request_total", "engine")


def worker_states(bench: Bench) -> list[str]:
    return [row["state"] for row in factory.rows(bench.run, "SELECT state FROM worker ORDER BY id")]


def test_a_suspended_worker_whose_samples_another_finished(any_bench: Bench) -> None:
    """It wakes up in the middle of its requests. Every write it tries is refused, it tells the engine to stop, and the
    samples stay as the other one has left them."""
    run = any_bench.make_run(samples_per_prompt=3, epochs=1, heartbeat_ttl_s=TTL_S)
    slow = any_bench.engine(lambda body, n: Script(stall_after=12) if n < 3 else Script())
    fast = any_bench.engine()
    zombie = any_bench.worker(slow, flush_tokens=4, name="zombie")
    wait_running([slow], 3)
    any_bench.wait_stored(12)
    suspend_until_reaped(any_bench, zombie)
    other = any_bench.worker(fast, name="other")
    any_bench.wait_all()
    before = factory.snapshot(run, leave_out=TOLD)
    slow.release()  # its answers are complete when it wakes up: it has much to write
    zombie.signal(signal.SIGCONT)
    any_bench.wait(lambda: worker_states(any_bench).count("live") == 2, "it registered anew")
    any_bench.wait(slow.idle, "nothing runs for it at the engine")
    assert "is no longer held at attempt" in zombie.log(), zombie.log()
    assert factory.snapshot(run, leave_out=TOLD) == before
    assert len(fast.requests) == 3 and len(slow.requests) == 3, "nothing was generated twice"
    assert zombie.terminate() == 0 and other.terminate() == 0
    any_bench.exact(32)
    any_bench.sound()


def test_a_suspended_worker_cancels_what_still_runs(any_bench: Bench) -> None:
    """The engine is asked: every request of the zombie was aborted by its id, while another serves the samples."""
    any_bench.make_run(samples_per_prompt=3, epochs=1, heartbeat_ttl_s=TTL_S)
    slow = any_bench.engine(Script(stall_after=12))
    fast = any_bench.engine()
    zombie = any_bench.worker(slow, flush_tokens=4)
    wait_running([slow], 3)
    any_bench.wait_stored(12)
    suspend_until_reaped(any_bench, zombie)
    other = any_bench.worker(fast)
    any_bench.wait_all()
    assert len(slow.running) == 3, "they still run for nobody"
    held = {body["rid"] for body in slow.requests}
    zombie.signal(signal.SIGCONT)
    any_bench.wait(slow.idle, "the zombie has stopped them")
    assert held <= set(slow.aborts)
    assert zombie.terminate() == 0 and other.terminate() == 0
    any_bench.exact(32)
    any_bench.sound()


def test_a_worker_whose_loop_hangs_is_replaced_while_its_heart_lives(any_bench: Bench) -> None:
    run = any_bench.make_run(samples_per_prompt=4, epochs=1, heartbeat_ttl_s=TTL_S)
    engine = any_bench.engine()
    stuck = any_bench.worker(engine, env={"SAMPLESTORE_FAULTS": "claimed=hang@1"}, name="stuck")
    any_bench.wait(lambda: not any_bench.unowned(), "it has claimed, and hangs")
    other = any_bench.worker(engine, name="other", exit_when_done=True)
    assert other.wait(60) == 0, other.log()
    any_bench.exact(32)
    assert stuck.alive(), "nobody killed it"
    assert len(os.listdir(f"/proc/{stuck.pid}/task")) > 1, "its other threads live: the heart's among them"
    assert worker_states(any_bench) == ["dead", "gone"]
    assert {e["worker_id"] for e in factory.events(run, "worker_dead")} == {1}
    assert len(engine.requests) == 4
    any_bench.sound()


@pytest.mark.slow
def test_workers_of_one_name_that_do_not_stream(bench: Bench) -> None:
    """Three workers of one name; two of them are suspended amid whole and sliced answers. One wakes up to answers that
    are complete, and may write none of them; the other one's still run, and are stopped at their engine."""
    run = bench.make_run(samples_per_prompt=4, epochs=1, heartbeat_ttl_s=TTL_S)
    whole = bench.engine(Script(stall_after=12))
    sliced = bench.engine(lambda body, n: Script(stall_after=None if n < 2 else 4))
    fast = bench.engine()
    zombies = [
        bench.worker(whole, mode="unary", concurrency=2, name="one"),
        bench.worker(sliced, mode="sliced", slice_tokens=8, concurrency=2, name="one"),
    ]
    wait_running([whole], 2)
    wait_running([sliced], 2)
    bench.wait(lambda: sorted(r["n_tokens"] for r in bench.samples()) == [0, 0, 8, 8], "two slices are stored")
    for zombie in zombies:
        suspend_until_reaped(bench, zombie)
    other = bench.worker(fast, name="one")
    bench.wait_all()
    before = factory.snapshot(run, leave_out=TOLD)
    whole.release()
    for zombie in zombies:
        zombie.signal(signal.SIGCONT)
    bench.wait(lambda: worker_states(bench).count("live") == 3, "both registered anew")
    bench.wait(lambda: whole.idle() and sliced.idle(), "nothing runs for them at their engines")
    assert {body["rid"] for body in sliced.requests[2:]} <= set(sliced.aborts)
    assert "is no longer held at attempt" in zombies[0].log(), zombies[0].log()
    assert factory.snapshot(run, leave_out=TOLD) == before
    assert (len(whole.requests), len(sliced.requests), len(fast.requests)) == (2, 4, 4), "nothing was asked for twice"
    assert [worker.terminate() for worker in (*zombies, other)] == [0, 0, 0]
    bench.exact(32)
    bench.sound()
