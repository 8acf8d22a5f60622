"""Episodes in real workers: what is recorded is answered from the record, whoever dies, and wherever."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from samplestore.cli.app import load
from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench
from tests.worker.episode_functions import EPISODE, die, run_to_the_end, said, slow, steps, whole, write_episode
from tests.worker.gates import AT_THE_GATE, Gate


def test_two_turns_and_a_tool(any_bench: Bench) -> None:
    run = any_bench.make_run(samples_per_prompt=2)
    engine = any_bench.engine()
    run_to_the_end(any_bench, engine, write_episode(any_bench))
    for row in any_bench.samples():
        assert (row["status"], row["n_tokens"], row["n_loss_tokens"], row["reward"]) == ("truncated", 18, 10, 6.0)
        whole(any_bench, row["id"])
        told = steps(any_bench, row["id"])
        assert [(s["kind"], s["state"], s["start"], s["stop"]) for s in told] == [
            ("generate", "done", 0, 4), ("step", "done", 4, 4), ("append", "done", 4, 12), ("generate", "done", 12, 18),
        ]  # fmt: skip
        key = f"{run.uuid}/0/{row['index']}/0/1"
        assert told[1]["idempotency_key"] == key and f"tool 4 {key}" in said(any_bench)
    assert len(engine.requests) == 4 and len(said(any_bench)) == 2
    any_bench.sound()
    shown = CliRunner().invoke(load("show"), [str(any_bench.samples()[0]["id"]), "--db", any_bench.url])
    assert shown.exit_code == 0 and "environment" in shown.output, shown.output
    assert all(word in shown.output for word in ("generate", "append", "tool", "same again")), shown.output


@pytest.mark.parametrize("place", ["in-tool", *slow("after-turn", "after-step", "after-append", "at-the-end")])
def test_killed_anywhere(any_bench: Bench, place: str) -> None:
    """Neither an engine nor the tool is asked again for what is recorded. A tool that was begun is, with its key."""
    any_bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1)
    engine = any_bench.engine()
    spec = write_episode(any_bench)
    die(any_bench, engine, spec, place)
    run_to_the_end(any_bench, engine, spec)
    (row,) = any_bench.samples()
    assert (row["status"], row["n_tokens"], row["reward"]) == ("truncated", 18, 6.0)
    whole(any_bench, row["id"])
    assert len(engine.requests) == 2
    calls = said(any_bench)
    assert len(calls) == (2 if place == "in-tool" else 1) and len(set(calls)) == 1, "the same key for every try"
    any_bench.sound()


def test_killed_in_the_middle_of_a_turn(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1)
    engine = any_bench.engine(lambda body, n: Script(stall_after=3, chunk=1) if n == 1 else Script())
    spec = write_episode(any_bench)
    first = any_bench.worker(engine, episode=spec, flush_tokens=1)
    wait_running([engine], 1)
    any_bench.wait_stored(15)
    first.kill()
    run_to_the_end(any_bench, engine, spec)
    (row,) = any_bench.samples()
    whole(any_bench, row["id"])
    assert [len(body["input_ids"]) for body in engine.requests] == [
        PROMPT_TOKENS,
        PROMPT_TOKENS + 12,
        PROMPT_TOKENS + 15,
    ]
    assert len(said(any_bench)) == 1
    any_bench.sound()


def test_an_outcome_that_nobody_knows(any_bench: Bench) -> None:
    """Declared "fail", a step that was begun is not done again; and that is final, also for the next replay."""
    any_bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1, max_attempts=2)
    engine = any_bench.engine()
    spec = write_episode(any_bench, on_unknown="fail")
    die(any_bench, engine, spec, "in-tool")
    run_to_the_end(any_bench, engine, spec)
    (row,) = any_bench.samples()
    assert row["status"] == "failed" and "outcome unknown" in row["error"] and "requeue" in row["error"]
    assert len(said(any_bench)) == 1 and len(engine.requests) == 1
    assert [s["state"] for s in steps(any_bench, row["id"])] == ["done", "failed"]
    any_bench.sound()


def test_an_abort_in_a_turn_is_resumed_from_the_record(any_bench: Bench) -> None:
    run = any_bench.make_run(samples_per_prompt=1)
    engine = any_bench.engine(lambda body, n: Script(stall_after=3) if n == 1 else Script())
    worker = any_bench.worker(engine, episode=write_episode(any_bench), exit_when_done=True)
    wait_running([engine], 1)
    any_bench.wait(lambda: len(engine.requests) == 2, "the second turn runs")
    run.abort_inflight("weights", wait_s=20)
    assert worker.wait(60) == 0, worker.log()
    (row,) = any_bench.samples()
    assert (row["status"], row["n_aborts"], row["n_resumes"]) == ("truncated", 1, 1)
    whole(any_bench, row["id"])
    assert len(said(any_bench)) == 1
    any_bench.sound()


def test_a_replay_that_asks_for_something_else(bench: Bench) -> None:
    """Both values are shown, and nothing is asked of engine or tool."""
    bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1, max_attempts=1)
    engine = bench.engine()
    die(bench, engine, write_episode(bench), "after-append")
    changed = EPISODE.replace("len(first.tokens), on", "99, on")
    run_to_the_end(bench, engine, write_episode(bench, changed))
    (row,) = bench.samples()
    assert row["status"] == "failed"
    assert "[4]" in row["error"] and "[99]" in row["error"] and f"samplestore requeue {row['id']}" in row["error"]
    assert len(engine.requests) == 1 and len(said(bench)) == 1
    bench.sound()


def test_a_zombie_gets_no_further(any_bench: Bench, gate: Gate) -> None:
    """While a tool runs its sample is taken away: the worker that comes back to it stores nothing and asks nothing."""
    text = AT_THE_GATE + EPISODE.replace('die("in-tool")', "wait_at_the_gate()")
    run = any_bench.make_run(samples_per_prompt=1)
    engine = any_bench.engine()
    worker = any_bench.worker(engine, episode=write_episode(any_bench, text))
    any_bench.wait(lambda: said(any_bench), "the tool runs")
    (row,) = any_bench.samples()
    run.pause()
    run.requeue([row["id"]], "taken away")
    gate.open()
    worker.wait_for_log("no longer held")
    assert [s["state"] for s in steps(any_bench, row["id"])] == ["done", "started"]
    assert len(engine.requests) == 1
    assert worker.terminate() == 0, worker.log()
    any_bench.sound()


def test_a_worker_without_the_episode_leaves(bench: Bench) -> None:
    """It would go on with the sample as with a single turn. It gives it back, and says what it lacks."""
    bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1)
    engine = bench.engine()
    spec = write_episode(bench)
    die(bench, engine, spec, "after-append")
    plain = bench.worker(engine)
    assert plain.wait(60) != 0 and "--episode" in plain.log(), plain.log()
    assert bench.samples()[0]["n_tokens"] == 12 and bench.unowned()
    run_to_the_end(bench, engine, spec)
    whole(bench, bench.samples()[0]["id"])
    bench.sound()


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("nowhere", "--episode MODULE:FUNCTION"),
        ("no_such_module:f", "there is no module"),
        ("my_episode.py:nothing", "it has: say, die, tool, episode"),
    ],
)
def test_a_name_that_means_nothing(bench: Bench, spec: str, told: str) -> None:
    bench.make_run()
    write_episode(bench)
    worker = bench.worker("http://127.0.0.1:9", episode=spec)
    assert worker.wait(40) != 0
    assert told in worker.log() and "Traceback" not in worker.log(), worker.log()


GAME = """
import os, pathlib, signal

HERE = pathlib.Path(__file__).parent

class Counter:
    def __init__(self): self.total = 0
    def add(self, n):
        self.total += n
        return self.total
    def save(self): return self.total
    def restore(self, state): self.total = state

async def episode(ctx):
    game = Counter()
    if SNAPSHOT:
        await ctx.snapshot(game.save, game.restore)
    for n in (1, 2, 3, 4):
        seen = await ctx.step(game.add, n, replay="recorded" if SNAPSHOT else "execute")
        armed = HERE / f"die-{n}"
        if armed.exists():
            armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        await ctx.append([seen])
    return float(game.total)
"""


@pytest.mark.parametrize("how", ["snapshot", *slow("execute")])
def test_a_game_keeps_its_state(any_bench: Bench, how: str) -> None:
    """By what was saved with each step, or by doing them again: either way it goes on where it was."""
    any_bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1)
    spec = write_episode(any_bench, GAME.replace("SNAPSHOT", str(how == "snapshot")))
    engine = any_bench.engine()
    for place in (3,) if how == "snapshot" else (2, 3):
        die(any_bench, engine, spec, place)
    run_to_the_end(any_bench, engine, spec)
    (row,) = any_bench.samples()
    assert (row["status"], row["n_tokens"], row["reward"]) == ("completed", 4, 10.0)
    assert any_bench.run.check() == []
