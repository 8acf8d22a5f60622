"""Engines that do not belong: another model, or weights of nobody's. They are named, and get no requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from samplestore.verbs import weights
from samplestore.workers.engine_state import Server
from samplestore.workers.members import Members, Needs, others
from tests.support import factory
from tests.support.router import Router
from tests.support.scripted_engine import Script, ScriptedEngine, wait_running
from tests.worker.conftest import Bench
from tests.worker.test_fleet_unfit import engine_rows

LLAMA, QWEN = {"architecture": "Llama", "vocabulary": 384}, {"architecture": "Qwen2", "vocabulary": 384}


@pytest.mark.parametrize(
    ("models", "trusted", "odd"),
    [
        ([LLAMA, LLAMA], [], []),
        ([LLAMA, QWEN, LLAMA], [], [1]),
        ([QWEN, LLAMA, LLAMA], [], [0]),
        ([QWEN, LLAMA], [], [1]),  # nobody can tell: the first is kept
        ([QWEN, LLAMA, LLAMA], [0], [1, 2]),  # those that were here before are right
        ([LLAMA, {**LLAMA, "vocabulary": 512}], [], [1]),
        ([LLAMA, {**LLAMA, "hidden size": 64}, {}], [], []),  # what is not told contradicts nothing
        ([], [], []),
    ],
)
def test_the_odd_ones(models: Sequence[dict[str, object]], trusted: list[int], odd: list[int]) -> None:
    told = others({f"http://{n}": model for n, model in enumerate(models)}, [f"http://{n}" for n in trusted])
    assert sorted(told) == [f"http://{n}" for n in odd]
    assert all("it serves another model than" in why for why in told.values())


def members(**servers: Server) -> Members:
    made = Members(Needs(True, 100, frozenset(), frozenset(), routed_experts=False))
    for url, server in servers.items():
        made.learn(url, server, fresh=True)
    return made


def test_limits_are_those_of_the_engines_that_are_there() -> None:
    """A short one that has gone refuses nothing any more: a prompt that is refused does not come again."""
    made = members(short=Server(context_length=100, vocab_size=10), long=Server(context_length=900, vocab_size=20))
    assert (made.context_length, made.vocab_size) == (100, 10)
    made.keep({"long"})
    assert (made.context_length, made.vocab_size) == (900, 20)


def test_an_engine_of_another_model_sets_no_limits() -> None:
    made = members(
        a=Server(model=LLAMA, context_length=900), b=Server(model=LLAMA), z=Server(model=QWEN, context_length=9)
    )
    assert list(made.judge(failed=())) == ["z"] and made.context_length == 900


def test_newer_weights_do_not_make_another_model() -> None:
    """The config.json of a checkpoint may say less, or otherwise; the engine that loaded it is the same."""
    made = members(a=Server(model=LLAMA), b=Server(model=LLAMA))
    made.learn("a", Server(model=QWEN), fresh=False)
    assert made.judge(failed=()) == {}
    made.learn("a", Server(model=QWEN), fresh=True)
    assert list(made.judge(failed=())) == ["a"]


def two(bench: Bench, stall: int | None = None) -> list[ScriptedEngine]:
    engines = [bench.engine(Script(stall_after=stall)) for _ in range(2)]
    for engine in engines:
        engine.architecture = "LlamaForCausalLM"
    return engines


@pytest.mark.parametrize("direct", [True, False])
def test_engines_of_two_models_at_the_start(bench: Bench, direct: bool) -> None:
    """Both say "default": tokens of one would be taken for the other's. Nobody can tell which is right, so the worker
    ends, and names one, what differs, and what to type."""
    bench.make_run()
    engines = two(bench)
    engines[1].architecture = "Qwen2ForCausalLM"
    router = None if direct else Router.start(bench.processes, [e.url for e in engines]).url
    worker = bench.worker(*(engines if direct else []), router=router)
    assert worker.wait(60) != 0
    said = worker.log()
    assert "its architecture is" in said and "Traceback" not in said
    assert any(
        (f"Start the worker without --engine {e.url}" if direct else f"engines unlist {e.url} --router {router}")
        in said
        for e in engines
    )
    assert not any(e.requests for e in engines) and bench.unowned()


def test_unknown_weights_behind_the_router_at_the_start(bench: Bench) -> None:
    bench.make_run()
    first, stranger = two(bench)
    stranger.label = "nobodys"
    router = Router.start(bench.processes, [first.url, stranger.url])
    worker = bench.worker(router=router.url)
    assert worker.wait(60) != 0
    assert f"{stranger.url}: it serves 'nobodys', which this run has not published" in worker.log()
    assert f"samplestore engines unlist {stranger.url} --router {router.url}" in worker.log()
    assert {w["url"] for w in router.workers()} == {first.url, stranger.url} and bench.unowned()


def test_a_router_of_strangers_is_left_alone(bench: Bench) -> None:
    """It may be that of another database: its engines are not taken out because somebody gave the wrong URL."""
    bench.make_run()
    engines = two(bench)
    for engine in engines:
        engine.label = "nobodys"
    router = Router.start(bench.processes, [e.url for e in engines])
    worker = bench.worker(router=router.url)
    bench.wait(lambda: "strange_engines" in dict(bench.run.why().reasons), "why says so")
    looks = [e.looks for e in engines]
    bench.wait(lambda: all(e.looks > n + 1 for e, n in zip(engines, looks, strict=True)), "they were looked at again")
    assert {w["url"] for w in router.workers()} == {e.url for e in engines}
    assert {row["state"] for row in engine_rows(bench).values()} == {"live"} and bench.unowned()
    assert not any(e.requests for e in engines)
    assert worker.terminate() == 0


@pytest.mark.parametrize("what", ["model", "weights"])
def test_a_stranger_behind_the_router(bench: Bench, what: str) -> None:
    """It joins during the run. The router would send it requests: it is taken out of the list, named in the database,
    and comes back when it belongs."""
    bench.make_run(prompts=4, samples_per_prompt=2, groups_per_step=4, max_new_tokens=32)
    first, stranger = two(bench, stall=8)
    router = Router.start(bench.processes, [first.url])
    worker = bench.worker(router=router.url, exit_when_done=True)
    wait_running([first], 8)
    if what == "model":
        stranger.architecture = "Qwen2ForCausalLM"
    else:
        stranger.label = "nobodys"
    router.add_worker(stranger.url, wait=False)
    bench.wait(lambda: engine_rows(bench).get(stranger.url, {}).get("state") == "failed", "it is recorded")
    error = engine_rows(bench)[stranger.url]["error"]
    said = {"model": f"another model than {first.url}", "weights": "'nobodys', which this run has not published"}[what]
    cure = {"model": f"engines unlist {stranger.url} --router {router.url}", "weights": "samplestore engines update"}
    assert said in error and cure[what] in error and stranger.url in str(bench.run.why(groups=99))
    bench.wait(lambda: [w["url"] for w in router.workers()] == [first.url], "it is out of the router's list")
    first.release()
    assert worker.wait(60) == 0, worker.log()
    assert stranger.requests == []
    assert worker.log().count("gets no requests") == 1, "it is said once"
    bench.exact(32)
    bench.sound()


def test_it_comes_back_when_it_belongs(bench: Bench) -> None:
    bench.make_run(prompts=1, samples_per_prompt=1)
    first, stranger = two(bench, stall=8)
    router = Router.start(bench.processes, [first.url])
    bench.worker(router=router.url)
    wait_running([first], 1)
    stranger.label = "nobodys"
    router.add_worker(stranger.url, wait=False)
    bench.wait(lambda: engine_rows(bench).get(stranger.url, {}).get("state") == "failed", "it is out")
    stranger.release()
    stranger.label = "default"  # somebody has brought it to the run's weights
    bench.wait(lambda: engine_rows(bench)[stranger.url]["state"] == "live", "it is found fit", 60)
    bench.wait(lambda: {w["url"] for w in router.workers()} == {first.url, stranger.url}, "the router lists both")
    assert [e["kind"] for e in factory.events(bench.run, "engine_recovered")] == ["engine_recovered"]


def test_a_worker_starts_beside_a_stranger_that_was_taken_out(bench: Bench) -> None:
    """The database knows it as failed: who is right is settled."""
    bench.make_run(prompts=1, samples_per_prompt=1)
    first, stranger = two(bench)
    stranger.architecture = "Qwen2ForCausalLM"
    by = bench.run.register()
    bench.run.transact(lambda tx: weights.see_engine(tx, stranger.url, "default"))
    bench.run.transact(lambda tx: weights.engine_broken(tx, by, stranger.url, "another model"))
    router = Router.start(bench.processes, [first.url])
    worker = bench.worker(router=router.url, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert stranger.requests == [] and engine_rows(bench)[stranger.url]["state"] == "failed"
    bench.exact(32)
