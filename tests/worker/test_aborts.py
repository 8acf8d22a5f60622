"""Aborting one sample, one group, everything; and engines that do not hear it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from samplestore.errors import AbortTimeout, NotInRun
from samplestore.verbs import aborts
from samplestore.workers.trajectory import Trajectory
from tests.support import factory
from tests.support.router import Router
from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import Bench

STALLED = Script(stall_after=12)


def test_one_sample_or_one_group(bench: Bench) -> None:
    """The others go on: their requests are not even asked."""
    run = bench.make_run(prompts=3, samples_per_prompt=2, groups_per_step=3)
    engine = bench.engine(lambda body, n: STALLED if n < 6 else Script(stall_after=0))
    worker = bench.worker(engine, concurrency=6)
    wait_running([engine], 6)
    bench.wait_stored(8)
    rows = bench.samples()
    one, group = rows[0], rows[2]["group_id"]
    run.pause()
    run.abort_inflight("this one", samples=[one["id"]], wait_s=20)
    assert len(engine.running) == 5 and len(engine.aborts) == 1
    run.abort_inflight("this group", groups=[group], wait_s=20)
    assert len(engine.running) == 3 and len(set(engine.aborts)) == 3
    owned = {row["id"] for row in bench.samples() if row["owner"]}
    assert owned == {rows[1]["id"], *(row["id"] for row in rows if row["group_id"] == rows[4]["group_id"])}
    assert {e["reason"]: e["sample_id"] for e in factory.events(run, "abort")}["this one"] == one["id"]
    run.abort_inflight("all", wait_s=20)
    assert engine.idle(), "when the abort returns, no engine generates for this run"
    assert {row["n_tokens"] for row in bench.samples()} == {12}
    assert worker.terminate() == 0, worker.log()
    bench.exact(12)
    bench.sound()


def test_what_is_not_there_is_refused(bench: Bench) -> None:
    run = bench.make_run()
    with pytest.raises(NotInRun):
        run.abort_inflight("no", samples=[999])
    with pytest.raises(NotInRun):
        run.abort_inflight("no", groups=[999])
    assert factory.events(run, "abort_inflight") == []


def test_nobody_is_there_to_let_go(bench: Bench) -> None:
    run = bench.make_run()
    [claim, _] = run.claim(run.register(), 2)
    with pytest.raises(AbortTimeout) as told:
        run.abort_inflight("quick", samples=[claim.sample_id], wait_s=0.1)
    assert told.value.samples == [claim.sample_id] and "samplestore reap" in str(told.value)
    [(where, n)] = told.value.at
    assert where.startswith(f"worker {claim.owner} (pid ") and where.endswith("without a request") and n == 1


@pytest.mark.parametrize("direct", [True, False])
def test_the_engine_that_goes_on_is_named(any_bench: Bench, direct: bool) -> None:
    """One engine does not hear its aborts, the other does: the error names the one that still generates, or the router,
    which does not tell."""
    bench = any_bench
    run = bench.make_run(prompts=2 if direct else 1, samples_per_prompt=1, groups_per_step=2)
    engines = [bench.engine(Script(stall_after=8, deaf=deaf)) for deaf in ([True, False] if direct else [True])]
    deaf, router = engines[0], None if direct else Router.start(bench.processes, [engines[0].url]).url
    env = {"SAMPLESTORE_WORKER_ABORT_TIMEOUT_S": "60"}
    worker = bench.worker(*(engines if direct else []), router=router, env=env, drain_timeout_s=1)
    wait_running(engines, len(engines))
    run.pause()
    with pytest.raises(AbortTimeout) as told:
        run.abort_inflight("stuck", wait_s=3)
    [(where, n)] = told.value.at
    assert where.startswith(f"{deaf.url}, for worker " if direct else f"an engine behind {router}, for worker ")
    assert n == 1 and where in str(told.value) and "samplestore engines list --live" in str(told.value)
    deaf.release()
    worker.terminate()


def test_abort_all_is_the_last_resort_if_the_run_consents(bench: Bench) -> None:
    """A lost abort: the engine hears only the abort of everything. The partials come back through the open calls."""
    run = bench.make_run(samples_per_prompt=2, abort_all=True)
    engine = bench.engine(Script(stall_after=12, deaf=True))
    worker = bench.worker(engine, flush_tokens=8, flush_seconds=60, env={"SAMPLESTORE_WORKER_ABORT_TIMEOUT_S": "1"})
    wait_running([engine], 2)
    bench.wait_stored(8)
    run.pause()
    run.abort_inflight("lost", wait_s=30)
    assert engine.idle() and "all" in engine.aborts
    assert {row["n_tokens"] for row in bench.samples()} == {12}
    assert {r["lost_reason"] for r in bench.requests()} == {None}
    assert worker.terminate() == 0, worker.log()
    bench.exact(12)
    bench.sound()


def test_without_consent_the_connection_is_cut(bench: Bench) -> None:
    run = bench.make_run(samples_per_prompt=2)
    engine = bench.engine(Script(stall_after=12, deaf=True))
    worker = bench.worker(engine, env={"SAMPLESTORE_WORKER_ABORT_TIMEOUT_S": "1"})
    wait_running([engine], 2)
    bench.wait_stored(8)
    run.pause()
    run.abort_inflight("lost", wait_s=30)
    assert "all" not in engine.aborts
    bench.wait(engine.idle, "the engine sees its clients go")
    assert worker.terminate() == 0, worker.log()
    bench.exact()
    bench.sound()


def test_two_requests_to_abort_at_the_same_moment(bench: Bench) -> None:
    """The worker reads the run's row, and then what was asked: another one may have come in between."""
    run = bench.make_run(samples_per_prompt=3)
    ids = [row["id"] for row in bench.samples()]
    for id in ids:
        run.abort_inflight(f"sample {id}", samples=[id])
    told = [
        [asked.samples for asked in run.database.read(lambda c, n=n: aborts.asked_since(c, run.id, n - 1, n))]
        for n in (1, 2, 3)
    ]
    assert told == [[frozenset([id])] for id in ids]
    assert len(run.database.read(lambda c: aborts.asked_since(c, run.id, 0, 3))) == 3


async def test_an_abort_leaves_a_complete_reply_alone() -> None:
    """Cut while its end is stored, the stages that it keeps would belong to a worker that does not know of them."""
    host: Any = SimpleNamespace(fleet=None, may_abort_all=False, limits=SimpleNamespace(over=lambda *given: None))
    claim: Any = SimpleNamespace(sampling=None, max_new_tokens=None)
    trajectory = Trajectory(claim, host, keep_stages=True)
    request: Any = SimpleNamespace(complete=True, rid="r", engine=None)
    work = asyncio.create_task(asyncio.Event().wait())
    trajectory.request, trajectory.task = request, work  # type: ignore[assignment]
    await trajectory.abort(timeout_s=0.0)
    assert not work.cancelling()
    work.cancel()
