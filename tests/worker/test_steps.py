"""Modes sync and partial with a real worker: what engines are told, and that nothing is generated twice. And limits on
what is in flight."""

from __future__ import annotations

from typing import Any

from samplestore import codec
from samplestore.workers.dispatch import Dispatcher, EngineLimits
from tests.support import factory
from tests.support.scripted_engine import Plan, Script, ScriptedEngine, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench
from tests.worker.test_weights import loads, versions


def prompt_of(bench: Bench, number: int) -> int:
    """What stands last in the prompt of the run's group `number`."""
    sql = "SELECT p.prompt_ids FROM sample_group g JOIN prompt p ON p.id = g.prompt_id WHERE g.number = :n"
    return int(codec.ids_from(factory.value(bench.run, sql, n=number))[-1])


def slow_prompt(prompt: int, after: int = 12) -> Plan:
    """Its first requests stall; a request that goes on from stored tokens, and all others, are answered at once."""

    def plan(body: dict[str, Any], n: int) -> Script:
        first = len(body["input_ids"]) == PROMPT_TOKENS
        return Script(stall_after=after) if first and body["input_ids"][-1] == prompt else Script()

    return plan


def train(bench: Bench, step: int, path: str | None) -> None:
    run, trainer = bench.run, factory.register(bench.run, "trainer")
    made: list[int] = []

    def leased() -> bool:
        made.extend(filter(None, [factory.lease(run, trainer, step, groups=run.settings.groups_per_step)]))
        return bool(made)

    bench.wait(leased, f"a batch of step {step}")
    factory.commit(run, made[0], trainer)
    run.publish_weights(path, step=step)


def partial(bench: Bench, **settings: Any) -> None:
    bench.make_run(
        prompts=4, mode="partial", groups_per_step=1, over_sampling_batch_size=2, max_staleness=4, **settings
    )


def test_partial_aborts_the_rest_and_resumes_it_first_under_the_new_weights(any_bench: Bench) -> None:
    bench = any_bench
    partial(bench)
    late = prompt_of(bench, 1)
    engine = bench.engine(slow_prompt(late))
    worker = bench.worker(engine, concurrency=4)
    bench.wait(lambda: factory.events(bench.run, "step_over"), "the step is over")
    bench.wait(bench.unowned, "what is not needed has gone back")
    bench.wait(engine.idle, "the engine has heard of it")
    assert len(engine.aborts) >= 2
    assert [row["status"] for row in bench.samples()] == ["truncated"] * 2 + ["aborted"] * 2
    assert [row["n_tokens"] for row in bench.samples()] == [32, 32, 12, 12]
    [asked] = factory.events(bench.run, "abort_inflight")
    assert asked["worker_id"] is not None and asked["reason"].startswith("step over")
    aborted = factory.events(bench.run, "abort")
    assert {(e["reason"], e["tokens"], e["worker_id"]) for e in aborted} == {(asked["reason"], 12, asked["worker_id"])}
    before = len(engine.requests)
    assert before == 4, "nothing new was started meanwhile"
    train(bench, 0, "/weights/1")
    bench.wait(lambda: len(factory.events(bench.run, "step_over")) == 2, "the second step is over too")
    lengths = [len(b["input_ids"]) for b in engine.requests[before : before + 4]]
    assert lengths.count(PROMPT_TOKENS + 12) == 2, "the partials are among the first: claims take them before others"
    # Whether both are done when the step is over is not said: another group may have been stored before.
    assert [(old, new[:2]) for old, new in versions(bench)[2:4]] == [((0, 0, 12), (1, 1))] * 2
    assert len(loads(engine)) == 1
    assert worker.terminate() == 0, worker.log()
    twice = sum(r["lost_tokens"] or 0 for r in bench.requests())
    assert twice == 0, "every generated token is stored, once"
    bench.exact()
    bench.sound()


def test_a_sample_that_was_aborted_often_enough_goes_on_into_the_next_step(bench: Bench) -> None:
    """max_aborts: the end of a step leaves it running; only the change of weights interrupts it."""
    partial(bench, max_aborts=1, samples_per_prompt=1, weight_update="keep")
    late = prompt_of(bench, 1)

    def plan(body: dict[str, Any], n: int) -> Script:
        if body["input_ids"][PROMPT_TOKENS - 1] != late:
            return Script()
        at = len(body["input_ids"]) - PROMPT_TOKENS
        return Script(stall_after=8) if at <= 8 else Script()

    engine = bench.engine(plan)
    worker = bench.worker(engine, concurrency=4)
    bench.wait(lambda: factory.events(bench.run, "step_over") and bench.unowned(), "the first step is over")
    train(bench, 0, None)
    bench.wait(lambda: len(factory.events(bench.run, "step_over")) == 2, "the second step is over")
    wait_running([engine], 1)
    train(bench, 1, None)
    bench.wait(lambda: len(factory.events(bench.run, "step_over")) == 3, "and the third")
    held = [row for row in bench.samples() if row["owner"]]
    assert [(row["n_aborts"], row["n_tokens"]) for row in held] == [(1, 16)], "it was asked back once, and no more"
    assert len(factory.events(bench.run, "abort_inflight")) == 1
    engine.release()
    bench.wait(lambda: bench.samples()[1]["status"] == "truncated", "it runs to its end")
    assert worker.terminate() == 0, worker.log()
    bench.exact()
    bench.sound()


def test_sync_changes_weights_only_when_nothing_is_in_flight(any_bench: Bench) -> None:
    """A trainer that publishes too early waits with its engines, and every sample has one version."""
    bench = any_bench
    run = bench.make_run(prompts=4, mode="sync", groups_per_step=2, max_staleness=1)
    late = prompt_of(bench, 1)
    engine = bench.engine(slow_prompt(late))
    running_at_load: list[int] = []
    engine.on_load = lambda: running_at_load.append(len(engine.running))
    worker = bench.worker(engine, concurrency=8)
    bench.wait(lambda: [s["n_tokens"] for s in bench.samples()] == [32, 32, 12, 12], "the late ones are in mid-answer")
    run.publish_weights("/weights/1", step=0)
    bench.wait(lambda: worker_knows(worker, engine), "the worker has heard of them")
    assert loads(engine) == [] and len(engine.running) == 2
    engine.release()
    trainer = factory.register(run, "trainer")
    bench.wait(lambda: factory.lease(run, trainer, 1, groups=2, max_staleness=1), "the batch of the early step")
    run.publish_weights("/weights/2", step=1)
    bench.wait(lambda: [s["status"] for s in bench.samples()] == ["truncated"] * 8, "the next step is generated")
    assert worker.terminate() == 0, worker.log()
    assert running_at_load and set(running_at_load) == {0}
    assert engine.aborts == []
    assert {len(runs) for runs in versions(bench)} == {1}, "no sample spans two versions"
    assert {runs[0][0] for runs in versions(bench)[4:]} == {2}
    bench.exact(32)
    bench.sound()


def worker_knows(worker: Any, engine: ScriptedEngine) -> bool:
    """It has asked for the engine's weights at least twice since: once it polls, it looks every second."""
    seen: int = engine.looks
    worker.looked = max(getattr(worker, "looked", seen), 0) or seen
    return engine.looks >= worker.looked + 2


def test_without_resume_what_is_aborted_starts_again(bench: Bench) -> None:
    run = bench.make_run(samples_per_prompt=2, resume=False)
    engine = bench.engine(lambda body, n: Script(stall_after=12) if n < 2 else Script())
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 2)
    bench.wait_stored(12)
    run.abort_inflight("start over")
    assert worker.wait(40) == 0, worker.log()
    assert [len(b["input_ids"]) for b in engine.requests] == [PROMPT_TOKENS] * 4, "from the prompt"
    assert {(s["n_tokens"], s["incarnation"], s["n_resumes"]) for s in bench.samples()} == {(32, 1, 0)}
    assert factory.fates(run) == {"superseded": 24, "ready": 64}
    bench.sound()


def test_without_resume_a_change_of_weights_starts_samples_again(bench: Bench) -> None:
    run = bench.make_run(samples_per_prompt=2, resume=False, max_staleness=2)
    engine = bench.engine(lambda body, n: Script(stall_after=12) if n < 2 else Script())
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 2)
    bench.wait_stored(12)
    run.publish_weights("/weights/1", step=0)
    assert worker.wait(40) == 0, worker.log()
    assert {(s["version_min"], s["version_max"], s["n_tokens"]) for s in bench.samples()} == {(1, 1, 32)}
    bench.sound()


def test_a_budget_that_is_used_up_ends_the_sample_without_a_request(bench: Bench) -> None:
    """Counted from stored tokens: 32 of 32 are there, and their worker died before it could say so."""
    run = bench.make_run(samples_per_prompt=1)
    gone = run.register()
    [claim] = run.claim(gone, 1)
    run.append(claim, [1] * 32, [-0.5] * 32, 0, "abort")
    run.release(claim, "its worker left")
    engine = bench.engine()
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert (bench.statuses(), engine.requests) == (["truncated"], [])
    bench.sound()


# -- flow control


def test_the_runs_limit_holds_over_two_workers(any_bench: Bench) -> None:
    bench = any_bench
    bench.make_run(prompts=6, samples_per_prompt=2, groups_per_step=6, max_inflight_samples=3)
    engine = bench.engine(Script(stall_after=8))
    workers = [bench.worker(engine, exit_when_done=True, concurrency=8) for _ in range(2)]
    wait_running([engine], 3)
    for worker in workers:
        worker.wait_for_log("ready")
    assert len(engine.running) == 3
    engine.release()
    for worker in workers:
        assert worker.wait(60) == 0, worker.log()
    assert engine.most_running == 3
    bench.exact(32)
    bench.sound()


def test_each_engine_is_held_to_its_limit(bench: Bench) -> None:
    bench.make_run(prompts=4, samples_per_prompt=2, groups_per_step=4, max_samples_per_engine=2)
    engines = [bench.engine(Script(stall_after=8)) for _ in range(2)]
    worker = bench.worker(*engines, exit_when_done=True, concurrency=16)
    wait_running(engines, 4)
    for engine in engines:
        engine.release()
    assert worker.wait(60) == 0, worker.log()
    assert [engine.most_running for engine in engines] == [2, 2]
    bench.exact(32)
    bench.sound()


def test_nothing_is_claimed_while_engines_queue(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=2)
    engine = bench.engine()
    engine.queued = 5
    worker = bench.worker(engine, exit_when_done=True, max_queued=4)
    worker.wait_for_log("engines queue: nothing more is claimed")
    assert engine.requests == []
    engine.queued = 4
    assert worker.wait(40) == 0, worker.log()
    assert "engines have room" in worker.log()
    bench.exact(32)


def test_groups_stay_together_until_their_engine_is_full() -> None:
    fit = ["a", "b"]
    dispatcher = Dispatcher(EngineLimits(samples=2, groups=1))
    with dispatcher.place(1, fit) as first, dispatcher.place(1, fit) as second:
        assert first == second == "a"
        with dispatcher.place(1, fit) as third, dispatcher.place(2, fit) as other:
            assert third == "b", "its engine has all it may"
            assert other in fit, "all are full: it is sent all the same"
    with dispatcher.place(1, fit), dispatcher.place(2, fit) as other:
        assert other == "a", "one group an engine"
