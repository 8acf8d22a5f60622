"""Which engine gets a request, and what becomes of requests when a router goes."""

from __future__ import annotations

from collections import defaultdict

from tests.support.router import Router
from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench


def groups_at(bench: Bench) -> dict[str, set[int]]:
    """Engine -> the groups whose requests it got, by their prompt."""
    return {e.url: {body["input_ids"][PROMPT_TOKENS - 1] for body in e.requests} for e in bench.engines}


def test_direct_dispatch_keeps_siblings_together_and_shares_the_load(bench: Bench) -> None:
    """Engines come from the router's list, requests go to them directly, four groups each."""
    bench.make_run(prompts=8, samples_per_prompt=4, groups_per_step=8)
    engines = [bench.engine(Script(stall_after=8)) for _ in range(2)]
    router = Router.start(bench.processes, [e.url for e in engines])
    worker = bench.worker(router=router.url, dispatch="direct", exit_when_done=True)
    wait_running(engines, 32)
    for engine in engines:
        engine.release()
    assert worker.wait(60) == 0, worker.log()
    at = groups_at(bench)
    assert [len(groups) for groups in at.values()] == [4, 4]
    assert set.intersection(*at.values()) == set()
    served = defaultdict(set)
    for row in bench.requests():
        served[row["engine"]].add(row["sample_id"])
    assert {url: len(ids) for url, ids in served.items()} == {e.url: 16 for e in engines}
    bench.exact(32)
    bench.sound()


def test_smg_routes_too_and_says_who_answered(bench: Bench) -> None:
    bench.make_run(prompts=4, samples_per_prompt=2, groups_per_step=4)
    engines = [bench.engine() for _ in range(2)]
    router = Router.start(bench.processes, [e.url for e in engines], kind="smg")
    worker = bench.worker(router=router.url, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    # one that smg itself refused, before it was ready, has none
    assert {row["engine"] for row in bench.requests() if row["stored_tokens"]} <= {e.url for e in engines}
    assert sum(len(e.requests) for e in engines) == 8
    bench.exact(32)
    bench.sound()


def test_dispatch_router_needs_one(bench: Bench) -> None:
    bench.make_run()
    worker = bench.worker(bench.engine(), dispatch="router")
    assert worker.wait(60) != 0
    assert "--dispatch router needs a router" in worker.log()


def test_a_router_given_as_an_engine_is_refused(bench: Bench) -> None:
    bench.make_run()
    router = Router.start(bench.processes, [bench.engine().url])
    worker = bench.worker(router.url)
    assert worker.wait(60) != 0
    assert f"is a router, not an engine. Say --router {router.url}" in worker.log()


def test_direct_dispatch_outlives_its_router(bench: Bench) -> None:
    bench.make_run(prompts=2, samples_per_prompt=2, groups_per_step=2)
    engine = bench.engine(
        lambda body, n: Script(die_after=8) if n < 2 else Script(stall_after=8) if n < 4 else Script()
    )
    router = Router.start(bench.processes, [engine.url])
    worker = bench.worker(router=router.url, dispatch="direct", exit_when_done=True, concurrency=2)
    wait_running([engine], 2)
    router.stop()
    engine.release()
    assert worker.wait(60) == 0, worker.log()
    bench.exact(32)


def test_a_router_that_is_away_is_not_asked_by_every_sample(bench: Bench) -> None:
    """Samples go back and wait; nothing counts as lost, since nothing was asked."""
    bench.make_run(prompts=2, samples_per_prompt=4, groups_per_step=2)
    engine = bench.engine(lambda body, n: Script(stall_after=8) if n < 8 else Script())
    router = Router.start(bench.processes, [engine.url])
    worker = bench.worker(router=router.url, exit_when_done=True)
    wait_running([engine], 8)
    bench.wait_stored(8)
    router.stop()
    bench.wait(bench.unowned, "all have been given back")
    asked = len(bench.requests())
    worker.wait_for_log("/workers")
    assert len(bench.requests()) <= asked + 8
    assert {r["lost_reason"] for r in bench.requests()[8:]} <= {None}
    again = Router.start(bench.processes, [engine.url], port=int(router.url.rpartition(":")[2]))
    assert again.url == router.url
    assert worker.wait(60) == 0, worker.log()
    bench.exact(32)
    bench.sound()


def test_a_resume_counts_once_however_busy_the_engine_is(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1)
    busy = Script(status=503, body={"error": {"message": "later"}})
    engine = bench.engine(lambda body, n: Script(die_after=12) if n == 0 else busy if n < 4 else Script())
    router = Router.start(bench.processes, [engine.url])
    worker = bench.worker(router=router.url, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    [row] = bench.samples()
    assert row["n_resumes"] == 1
    bench.exact(32)
