"""What bounds an episode in a real worker: its budget, the context, aborts, time; and calls that are misused."""

from __future__ import annotations

import pytest

from tests.support import factory
from tests.support.scripted_engine import Script
from tests.worker.conftest import PROMPT_TOKENS, Bench
from tests.worker.episode_functions import EPISODE, die, run_to_the_end, said, write_episode
from tests.worker.gates import AT_THE_GATE, Gate

FULL = """
import os, pathlib, signal
from samplestore.errors import EpisodeTruncated

HERE = pathlib.Path(__file__).parent

def judge(calls): return 0.5

async def episode(ctx):
    try:
        while True:
            await ctx.generate(max_new_tokens=4)
            await ctx.append([7] * 4)
    except EpisodeTruncated:
        pass
    value = await ctx.step(judge, ctx.calls)
    armed = HERE / "die-here"
    if armed.exists():
        armed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return value
"""


def test_too_many_aborts(bench: Bench) -> None:
    run = bench.make_run(samples_per_prompt=1, max_attempts=1)
    engine = bench.engine(Script(stall_after=1, chunk=1))
    worker = bench.worker(engine, episode=write_episode(bench), episode_max_aborts=1, exit_when_done=True)
    for n in (1, 2):
        bench.wait(lambda n=n: len(engine.requests) == n and engine.running, f"request {n}")
        run.abort_inflight("again", wait_s=20)
    assert worker.wait(60) == 0, worker.log()
    (row,) = bench.samples()
    assert row["status"] == "failed" and "--episode-max-aborts" in row["error"] and "2 times" in row["error"]
    bench.sound()


@pytest.mark.parametrize(("budget", "n"), [(10, 10), pytest.param(12, 12, marks=pytest.mark.slow), (14, 14)])
def test_what_has_no_room_is_cut(bench: Bench, budget: int, n: int) -> None:
    """The tool's eight tokens overflow, fill the budget exactly, or leave two for the last turn."""
    bench.make_run(samples_per_prompt=1, max_new_tokens=budget)
    engine = bench.engine()
    run_to_the_end(bench, engine, write_episode(bench))
    (row,) = bench.samples()
    assert (row["status"], row["n_tokens"], row["finish_reason"]) == ("truncated", n, "length")
    assert [len(body["input_ids"]) for body in engine.requests] == [3, 15][: 2 if budget > 12 else 1]
    bench.sound()


def test_the_context_clamps_too(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, max_new_tokens=1000)
    engine = bench.engine()
    engine.server["context_length"] = 6 + PROMPT_TOKENS + 14
    run_to_the_end(bench, engine, write_episode(bench))
    assert bench.samples()[0]["n_tokens"] == 14
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.requests] == [4, 2]
    bench.sound()


def test_a_refused_call_is_recorded(any_bench: Bench) -> None:
    """The function goes on after it, and finds the same place when it runs again."""
    any_bench.make_run(samples_per_prompt=1, max_new_tokens=10, heartbeat_ttl_s=1, max_attempts=1)
    engine, spec = any_bench.engine(), write_episode(any_bench, FULL)
    die(any_bench, engine, spec, "here")
    run_to_the_end(any_bench, engine, spec)
    (row,) = any_bench.samples()
    assert (row["status"], row["reward"], row["error"]) == ("truncated", 0.5, None)
    any_bench.sound()


def test_out_of_room_where_nobody_scores(bench: Bench) -> None:
    """The function could give no reward: its stage is settled without one, and does not hold up the run."""
    bench.make_run(samples_per_prompt=1, max_new_tokens=10, stages=("reward",))
    text = "async def episode(ctx):\n    while True:\n        await ctx.generate(max_new_tokens=4)\n"
    run_to_the_end(bench, bench.engine(), write_episode(bench, text))
    (row,) = bench.samples()
    assert (row["status"], row["reward"]) == ("truncated", None)
    assert [s["outcome"] for s in factory.rows(bench.run, "SELECT * FROM stage")] == ["unparsed"]
    bench.sound()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("await asyncio.wait_for(ctx.generate(max_new_tokens=9), 0.3)", "it cancelled ctx.generate"),
        ("asyncio.create_task(ctx.generate(max_new_tokens=9)); await asyncio.sleep(0.3)", "while ctx.generate ran"),
    ],
)
def test_a_call_that_is_not_awaited_to_its_end(bench: Bench, body: str, told: str) -> None:
    """Its sample is neither completed with half an answer nor generated for ever."""
    bench.make_run(samples_per_prompt=1, max_attempts=1)
    engine = bench.engine(Script(stall_after=2, chunk=1))
    text = (
        "import asyncio\nasync def episode(ctx):\n    try:\n"
        f"        {body}\n    except TimeoutError:\n        pass\n    return 1.0\n"
    )
    run_to_the_end(bench, engine, write_episode(bench, text))
    (row,) = bench.samples()
    assert row["status"] == "failed" and told in row["error"]
    bench.wait(engine.idle, "the engine was told to stop")
    bench.sound()


def test_a_step_longer_than_the_progress_deadline(bench: Bench, gate: Gate) -> None:
    """While it runs, its sample gets on: nobody takes it away and calls the tool again."""
    bench.make_run(samples_per_prompt=1, progress_deadline_s=1, heartbeat_ttl_s=1, max_attempts=1)
    text = AT_THE_GATE + EPISODE.replace('die("in-tool")', "wait_at_the_gate()")
    worker = bench.worker(bench.engine(), episode=write_episode(bench, text), exit_when_done=True)
    bench.wait(lambda: said(bench), "the tool runs")
    began = factory.rows(bench.run, "SELECT progress_at FROM sample")[0]["progress_at"]
    bench.wait(lambda: bench.samples()[0]["progress_at"] > began + 2.5, "it is kept beyond the deadline")
    gate.open()
    assert worker.wait(60) == 0, worker.log()
    assert len(said(bench)) == 1 and bench.samples()[0]["attempt"] == 1, "nobody else had it"
    assert factory.events(bench.run, "reap") == []
    bench.sound()


def test_hung_steps_hold_up_nobody(bench: Bench) -> None:
    """More of them than the event loop has threads: each has its time limit, and the worker leaves when it is told."""
    bench.make_run(samples_per_prompt=24)
    text = (
        "import threading\nfrom samplestore.errors import StepFailed\n"
        "def hang(): threading.Event().wait()\n"
        "async def episode(ctx):\n    await ctx.generate(max_new_tokens=4)\n    try:\n"
        "        await ctx.step(hang, timeout_s=0.5)\n    except StepFailed:\n        return 0.0\n"
    )
    worker = bench.worker(bench.engine(), episode=write_episode(bench, text), concurrency=24)
    bench.wait_all("completed")
    assert worker.terminate() == 0, worker.log()
    assert {s["error"] for s in factory.rows(bench.run, "SELECT * FROM episode_step WHERE kind = 'step'")} == {
        "it took too long"
    }
    bench.sound()


def test_a_prompt_that_leaves_no_room_says_so(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, max_attempts=1)
    engine = bench.engine()
    engine.server["context_length"] = 8
    run_to_the_end(bench, engine, write_episode(bench))
    assert "a prompt of 3 tokens leaves no room in a context of 8" in bench.samples()[0]["error"]
    bench.sound()
