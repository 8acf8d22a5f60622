"""Whoever dies - worker, engine, router, database server - no stored token is lost, and the work goes on."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import migrations
from samplestore.engine import Database
from samplestore.errors import StoreBusy
from tests.support import factory
from tests.support.postgres import PostgresServer
from tests.support.processes import Process, Processes
from tests.support.router import Router
from tests.support.scripted_engine import Plan, Script, logprob_at, token_at, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench, made_bench


def test_kill_9_of_a_worker_loses_only_what_was_not_flushed(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=4, heartbeat_ttl_s=1)
    engine = any_bench.engine(lambda body, n: Script(stall_after=20) if n < 4 else Script())
    first = any_bench.worker(engine, flush_tokens=8, flush_seconds=60)
    wait_running([engine], 4)
    any_bench.wait_stored(16)
    first.kill()
    # one read may bring all that has come, or the last four may have come alone and wait for more
    stored = {row["n_tokens"] for row in any_bench.samples()}
    assert stored <= {16, 20}
    second = any_bench.worker(engine)
    any_bench.wait_all()
    assert {len(body["input_ids"]) for body in engine.requests[4:]} == {PROMPT_TOKENS + n for n in stored}
    assert len(engine.requests) == 8
    assert second.terminate() == 0
    any_bench.exact(32)
    assert {r["lost_reason"] for r in any_bench.requests()[:4]} == {"worker dead"}
    assert [e["kind"] for e in factory.events(any_bench.run, "worker_dead")] == ["worker_dead"]
    any_bench.wait(engine.idle, "the engine noticed that its client is gone")
    any_bench.sound()


def test_a_worker_that_died_before_it_could_finish_a_complete_answer(any_bench: Bench) -> None:
    """The next one finishes the sample as it is: not a token more."""
    run = any_bench.make_run(samples_per_prompt=1)
    dead = run.register()
    [claim] = run.claim(dead, 1)
    places = range(PROMPT_TOKENS, PROMPT_TOKENS + 10)
    run.append(claim, [token_at(p) for p in places], [logprob_at(p) for p in places], 0, "stop")
    factory.kill(run, dead)
    engine = any_bench.engine()
    worker = any_bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert any_bench.statuses() == ["completed"] and engine.requests == []
    any_bench.exact(10)
    any_bench.sound()


def suspend_until_reaped(bench: Bench, worker: Process) -> None:
    """SIGSTOP outside of any transaction, past its ttl. With the SQLite gate in its hand it would stop everybody, and
    on PostgreSQL its locks would keep its samples until idle_in_transaction_session_timeout ends them."""
    for _ in range(10):
        bench.wait(lambda: between_writes(bench), "nobody writes")
        worker.signal(signal.SIGSTOP)
        if between_writes(bench):
            bench.wait(lambda: bench.run.reap().workers, "it is reaped")
            return
        worker.signal(signal.SIGCONT)
    raise AssertionError("never caught outside a transaction")


def between_writes(bench: Bench) -> bool:
    probe = Database(bench.url, busy_s=1.0)
    try:
        with probe.writing() as connection:
            return probe.is_sqlite or not connection.execute(sa.text(OPEN_TRANSACTIONS)).scalar()
    except StoreBusy:
        return False
    finally:
        probe.close()


OPEN_TRANSACTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND application_name LIKE 'samplestore %' AND xact_start IS NOT NULL"
)


def test_a_suspended_worker_comes_back_to_nothing(any_bench: Bench) -> None:
    """Dead is final: it stops its requests, registers anew, and works on under another id."""
    any_bench.make_run(samples_per_prompt=3, heartbeat_ttl_s=1)
    engine = any_bench.engine(lambda body, n: Script(stall_after=12) if n < 3 else Script())
    worker = any_bench.worker(engine, flush_tokens=4)
    wait_running([engine], 3)
    any_bench.wait_stored(12)
    suspend_until_reaped(any_bench, worker)
    assert set(any_bench.statuses()) == {"aborted"} and any_bench.unowned()
    held = [body["rid"] for body in engine.requests]
    worker.signal(signal.SIGCONT)
    any_bench.wait_all()
    assert set(held[:3]) <= set(engine.aborts), "its old requests were stopped at the engine"
    assert worker.alive()
    states = [row["state"] for row in factory.rows(any_bench.run, "SELECT state FROM worker ORDER BY id")]
    assert states == ["dead", "live"]
    assert worker.terminate() == 0, worker.log()
    any_bench.exact(32)
    assert {row["failures"] for row in any_bench.samples()} == {0}
    any_bench.sound()


@pytest.mark.parametrize("way", ["router", "direct"])
def test_an_engine_dies_in_mid_stream(bench: Bench, processes: Processes, way: str) -> None:
    """What it said is kept, and the sample goes on at the other engine."""
    bench.make_run(samples_per_prompt=4, prompts=2, groups_per_step=2)
    dying, living = bench.engine(Script(stall_after=12)), bench.engine(Script(stall_after=8))
    router = Router.start(processes, [dying.url, living.url]) if way == "router" else None
    worker = bench.worker(*([] if router else [dying, living]), router=router.url if router else None)
    wait_running([dying, living], 8)
    bench.wait(lambda: sorted(r["n_tokens"] for r in bench.samples()) == [8] * 4 + [12] * 4, "all is stored")
    dying.close()
    bench.wait(lambda: len(living.running) == 8, "the other engine takes them")
    assert {len(b["input_ids"]) for b in living.requests[4:]} == {PROMPT_TOKENS + 12}
    living.release()
    bench.wait_all()
    assert worker.terminate() == 0
    bench.exact(32)
    assert "engine died" in {r["lost_reason"] for r in bench.requests()}
    assert {row["failures"] for row in bench.samples()} == {0}, "nobody's fault"
    bench.sound()


def by_prompt(scripts: list[Script], times: int) -> Plan:
    """The first `times` requests of prompt i are answered by scripts[i], those after it well."""
    seen: Counter[int] = Counter()

    def plan(body: dict[str, Any], n: int) -> Script:
        prompt = body["input_ids"][PROMPT_TOKENS - 1]
        seen[prompt] += 1
        return scripts[prompt] if seen[prompt] <= times else Script()

    return plan


def one_prompt_each(bench: Bench, n: int, **settings: Any) -> None:
    """Sample i has prompt i."""
    bench.make_run(prompts=n, samples_per_prompt=1, groups_per_step=n, epochs=1, **settings)
    order = factory.rows(bench.run, "SELECT g.id, p.position FROM sample_group g JOIN prompt p ON p.id = g.prompt_id")
    bench.prompt_of = {row["id"]: row["position"] for row in order}


def test_a_reply_without_an_end_is_gone_on_with(bench: Bench) -> None:
    """A cut connection, [DONE] without a finish_reason, an error chunk and then [DONE]: all mean that it broke off."""
    one_prompt_each(bench, 3)
    engine = bench.engine(by_prompt([Script(die_after=13), Script(done_after=13), Script(error_after=13)], 1))
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert len(engine.requests) == 6
    for prompt in range(3):
        first, second = [b for b in engine.requests if b["input_ids"][PROMPT_TOKENS - 1] == prompt]
        kept = next(r["stored_tokens"] for r in bench.requests() if r["rid"] == first["rid"])
        assert kept >= 8 and (kept == 13 or prompt == 0), "a connection that is cut may take its last bytes along"
        assert len(second["input_ids"]) == PROMPT_TOKENS + kept
    bench.exact(32)
    assert {row["n_resumes"] for row in bench.samples()} == {1}
    bench.sound()


BUSY = [
    Script(status=503, body={"object": "error", "message": "The request queue is full.", "type": "x", "code": 503}),
    Script(status=503, body={"error": {"message": "none", "code": "no_available_workers"}}),
    Script(raw=[{"text": "", "output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": {
        "type": "abort", "status_code": 503, "message": "The request queue is full."}}}]),
    Script(status=500, body={"error": {"message": "boom"}}),
    Script(raw=[]),
]  # fmt: skip


def test_a_busy_engine_is_asked_again(bench: Bench) -> None:
    one_prompt_each(bench, len(BUSY))
    engine = bench.engine(by_prompt(BUSY, 2))
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert len(engine.requests) == 3 * len(BUSY)
    assert len({body["rid"] for body in engine.requests}) == 3 * len(BUSY), "every call has an id of its own"
    assert {(r["status"], r["failures"]) for r in bench.samples()} == {("truncated", 0)}
    bench.exact(32)
    bench.sound()


WRONG = [
    (Script(status=400, body={"error": {"message": "the prompt is too long"}}), "the prompt is too long"),
    (Script(status=400, body={"error": "unknown sampling parameter foo"}), "unknown sampling parameter foo"),
    (Script(status=400, body={"object": "error", "message": "bad value", "code": 400}), "bad value"),
    (Script(raw=[{"error": {"message": "not in a stream", "code": 400, "retryable": False}}]), "not in a stream"),
    (Script(raw=["{not json"]), "not JSON"),
    (Script(raw=[None]), "not an object"),
    (Script(raw=[{"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 2,
     "output_token_logprobs": [[-0.5, 1, None], [-0.5, 3, None]]}}]), "token 3"),
    (Script(tokens=3, wrong={2: 10**400}), "position 2 is 10000"),
]  # fmt: skip


def test_a_request_that_fails_by_itself_fails_the_sample(bench: Bench) -> None:
    """A refused request or a reply that can't be right is the sample's failure: counted, its error kept, and given up
    after max_attempts instead of tried for ever."""
    one_prompt_each(bench, len(WRONG), max_attempts=2)
    engine = bench.engine(by_prompt([script for script, _ in WRONG], 99))
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert set(factory.states(bench.run)) == {"dropped"}
    for row in bench.samples():
        said = WRONG[bench.prompt_of[row["group_id"]]][1]
        assert (row["status"], row["failures"]) == ("failed", 2) and said in row["error"], row["error"]
    asked = [body for body in engine.requests if body["sampling_params"]["max_new_tokens"] > 1]  # no probes
    assert len(asked) == 2 * len(WRONG)
    bench.sound()


def test_the_router_dies_and_comes_back(bench: Bench, processes: Processes) -> None:
    bench.make_run(samples_per_prompt=4)
    engine = bench.engine(Script(stall_after=12))
    router = Router.start(processes, [engine.url])
    worker = bench.worker(router=router.url)
    wait_running([engine], 4)
    bench.wait_stored(12)
    router.process.kill()
    bench.wait(engine.idle, "the engine's clients are gone")
    assert worker.alive()
    engine.release()
    again = processes.start(router.process.popen.args, name="router")  # type: ignore[arg-type]
    router = Router(again, router.url)
    again.wait_for(router.healthy, what="the router answers", timeout=60)
    router.add_worker(engine.url)
    bench.wait_all()
    assert worker.terminate() == 0
    bench.exact(32)
    bench.sound()


def test_the_database_server_is_killed_while_a_worker_works(
    postgres_crash_server: PostgresServer, processes: Processes, tmp_path: Path
) -> None:
    url = postgres_crash_server.url(postgres_crash_server.create())
    migrations.upgrade(url)
    with made_bench(url, processes, tmp_path) as bench:
        bench.make_run(samples_per_prompt=4, prompts=3, groups_per_step=3)
        engine = bench.engine(lambda body, n: Script(stall_after=12) if n < 4 else Script())
        worker = bench.worker(engine, concurrency=4)
        wait_running([engine], 4)
        bench.wait(lambda: sorted(r["n_tokens"] for r in bench.samples())[-4:] == [12] * 4, "12 tokens each are stored")
        postgres_crash_server.kill()
        engine.release()
        bench.wait(engine.idle, "the answers are complete while the database is away")
        began = time.monotonic()
        postgres_crash_server.start()
        bench.wait_all()
        assert worker.alive(), worker.log()
        assert factory.value(bench.run, "SELECT count(*) FROM worker") == 1, f"away {time.monotonic() - began:.0f} s"
        assert worker.terminate() == 0, worker.log()
        bench.exact(32)
        bench.sound()


def test_two_workers_share_without_doing_anything_twice(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=8, prompts=3, groups_per_step=3, max_new_tokens=40, epochs=1)
    engine = any_bench.engine()
    workers = [any_bench.worker(engine, concurrency=4, exit_when_done=True) for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0], workers[0].log() + workers[1].log()
    assert len(engine.requests) == 24
    assert factory.states(any_bench.run) == ["ready"] * 3
    any_bench.exact(40)
    any_bench.sound()
    assert samplestore.open(any_bench.url).existing_run("r").ledger(exact=True)["generated"] == 24 * 40
