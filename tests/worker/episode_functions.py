"""Episodes for tests of real workers, and what happened to them."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from samplestore import codec
from tests.support import factory
from tests.support.processes import Process
from tests.support.scripted_engine import ScriptedEngine, token_at
from tests.worker.conftest import PROMPT_TOKENS, Bench

# Two turns with a tool between them. It writes down what it is called for, and can die at one place, once.
EPISODE = """
import os, pathlib, signal

HERE = pathlib.Path(__file__).parent

def say(text):
    with open(HERE / "said.txt", "a") as file:
        file.write(text + "\\n")

def die(place):
    armed = HERE / f"die-{place}"
    if armed.exists():
        armed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

def tool(x, idempotency_key):
    say(f"tool {x} {idempotency_key}")
    die("in-tool")
    return {"value": x * 2}

async def episode(ctx):
    first = await ctx.generate(max_new_tokens=4)
    die("after-turn")
    answer = await ctx.step(tool, len(first.tokens), on_unknown=ON_UNKNOWN)
    die("after-step")
    await ctx.append([7] * answer["value"])
    die("after-append")
    last = await ctx.generate(max_new_tokens=6)
    die("at-the-end")
    return float(len(last.tokens))
"""


FORKS = """
import asyncio, os, pathlib, signal

HERE = pathlib.Path(__file__).parent

def die(place):
    armed = HERE / f"die-{place}"
    if armed.exists():
        armed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

async def episode(ctx):
    await ctx.generate(max_new_tokens=4)
    branch = await ctx.fork(upto=2)
    die("forked")
    agent = await ctx.fork(prompt=[20, 21, 22, 23, 24])
    one, two = await asyncio.gather(branch.generate(max_new_tokens=3), agent.generate(max_new_tokens=6))
    die("children-done")
    await ctx.append(two.tokens.tolist())
    last = await ctx.generate(max_new_tokens=2)
    die("at-the-end")
    agent.reward = 0.25
    return 1.0
"""


def slow(*places: str) -> list[Any]:
    """The same thing at other places: seconds each, for `make test-all`."""
    return [pytest.param(place, marks=pytest.mark.slow) for place in places]


def write_episode(bench: Bench, text: str = EPISODE, on_unknown: str = "retry") -> str:
    path = bench.folder / "my_episode.py"
    path.write_text(text.replace("ON_UNKNOWN", repr(on_unknown)))
    return f"{path}:episode"


def said(bench: Bench) -> list[str]:
    path = bench.folder / "said.txt"
    return path.read_text().splitlines() if path.exists() else []


def steps(bench: Bench, sample_id: int) -> list[dict[str, Any]]:
    return factory.rows(bench.run, "SELECT * FROM episode_step WHERE sample_id = :s ORDER BY number", s=sample_id)


def whole(bench: Bench, sample_id: int) -> None:
    """Four generated tokens, eight of the tool, six generated: as the engine makes them at their places."""
    parts = factory.segments(bench.run, sample_id)
    ids: list[int] = []
    for part in parts:
        made = codec.decode(part["payload"])[0].tolist()
        if part["kind"] == "environment":
            assert part["loss"] == 0 and made == [7] * len(made)
        else:
            assert made == [token_at(PROMPT_TOKENS + len(ids) + i) for i in range(len(made))]
        ids += made
    assert len(ids) == 18 and ids[4:12] == [7] * 8


def die(bench: Bench, engine: ScriptedEngine, spec: str, place: str, **flags: Any) -> None:
    """A worker that is killed by its episode at this place."""
    (bench.folder / f"die-{place}").touch()
    worker = bench.worker(engine, episode=spec, **flags)
    assert worker.wait(40) == -signal.SIGKILL, worker.log()


def run_to_the_end(bench: Bench, engine: ScriptedEngine, spec: str, **flags: Any) -> Process:
    """A worker that leaves when all is done."""
    worker = bench.worker(engine, episode=spec, exit_when_done=True, **flags)
    assert worker.wait(60) == 0, worker.log()
    return worker
