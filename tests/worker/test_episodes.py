"""Episodes in real workers: what is recorded is answered from the record, whoever dies, and wherever."""

from __future__ import annotations

import base64
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from samplestore.cli.app import load
from samplestore.examples import tiny_model
from tests.support import factory
from tests.support.scripted_engine import Script, token_at, wait_running
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
        from samplestore import codec

        made = codec.decode(part["payload"])[0].tolist()
        if part["kind"] == "environment":
            assert part["loss"] == 0 and made == [7] * len(made)
        else:
            assert made == [token_at(PROMPT_TOKENS + len(ids) + i) for i in range(len(made))]
        ids += made
    assert len(ids) == 18 and ids[4:12] == [7] * 8


def test_two_turns_and_a_tool(any_bench: Bench) -> None:
    run = any_bench.make_run(samples_per_prompt=2)
    engine = any_bench.engine()
    worker = any_bench.worker(engine, episode=write_episode(any_bench), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
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
    (any_bench.folder / f"die-{place}").touch()
    first = any_bench.worker(engine, episode=spec)
    assert first.wait(40) == -signal.SIGKILL, first.log()
    second = any_bench.worker(engine, episode=spec, exit_when_done=True)
    assert second.wait(60) == 0, second.log()
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
    second = any_bench.worker(engine, episode=spec, exit_when_done=True)
    assert second.wait(60) == 0, second.log()
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
    (any_bench.folder / "die-in-tool").touch()
    first = any_bench.worker(engine, episode=spec)
    assert first.wait(40) == -signal.SIGKILL, first.log()
    second = any_bench.worker(engine, episode=spec, exit_when_done=True)
    assert second.wait(60) == 0, second.log()
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


def test_a_replay_that_asks_for_something_else(bench: Bench) -> None:
    """Both values are shown, and nothing is asked of engine or tool."""
    bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1, max_attempts=1)
    engine = bench.engine()
    (bench.folder / "die-after-append").touch()
    first = bench.worker(engine, episode=write_episode(bench))
    assert first.wait(40) == -signal.SIGKILL, first.log()
    changed = EPISODE.replace("len(first.tokens), on", "99, on")
    second = bench.worker(engine, episode=write_episode(bench, changed), exit_when_done=True)
    assert second.wait(60) == 0, second.log()
    (row,) = bench.samples()
    assert row["status"] == "failed"
    assert "[4]" in row["error"] and "[99]" in row["error"] and f"samplestore requeue {row['id']}" in row["error"]
    assert len(engine.requests) == 1 and len(said(bench)) == 1
    bench.sound()


def test_a_zombie_gets_no_further(any_bench: Bench) -> None:
    """While a tool runs its sample is taken away: the worker that comes back to it stores nothing and asks nothing."""
    text = EPISODE.replace('die("in-tool")', "import time\n    while not (HERE / 'go').exists(): time.sleep(0.02)")
    run = any_bench.make_run(samples_per_prompt=1)
    engine = any_bench.engine()
    worker = any_bench.worker(engine, episode=write_episode(any_bench, text))
    any_bench.wait(lambda: said(any_bench), "the tool runs")
    (row,) = any_bench.samples()
    run.pause()
    run.requeue([row["id"]], "taken away")
    (any_bench.folder / "go").touch()
    worker.wait_for_log("no longer held")
    assert [s["state"] for s in steps(any_bench, row["id"])] == ["done", "started"]
    assert len(engine.requests) == 1
    assert worker.terminate() == 0, worker.log()
    any_bench.sound()


@pytest.mark.parametrize(("budget", "n"), [(10, 10), pytest.param(12, 12, marks=pytest.mark.slow), (14, 14)])
def test_what_has_no_room_is_cut(bench: Bench, budget: int, n: int) -> None:
    """The tool's eight tokens overflow, fill the budget exactly, or leave two for the last turn."""
    bench.make_run(samples_per_prompt=1, max_new_tokens=budget)
    engine = bench.engine()
    worker = bench.worker(engine, episode=write_episode(bench), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    (row,) = bench.samples()
    assert (row["status"], row["n_tokens"], row["finish_reason"]) == ("truncated", n, "length")
    assert [len(body["input_ids"]) for body in engine.requests] == [3, 15][: 2 if budget > 12 else 1]
    bench.sound()


def test_the_context_clamps_too(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, max_new_tokens=1000)
    engine = bench.engine()
    engine.server["context_length"] = 6 + PROMPT_TOKENS + 14
    worker = bench.worker(engine, episode=write_episode(bench), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert bench.samples()[0]["n_tokens"] == 14
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.requests] == [4, 2]
    bench.sound()


def test_a_worker_without_the_episode_leaves(bench: Bench) -> None:
    """It would go on with the sample as with a single turn. It gives it back, and says what it lacks."""
    bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1)
    engine = bench.engine()
    spec = write_episode(bench)
    (bench.folder / "die-after-append").touch()
    first = bench.worker(engine, episode=spec)
    assert first.wait(40) == -signal.SIGKILL, first.log()
    plain = bench.worker(engine)
    assert plain.wait(60) != 0 and "--episode" in plain.log(), plain.log()
    assert bench.samples()[0]["n_tokens"] == 12 and bench.unowned()
    last = bench.worker(engine, episode=spec, exit_when_done=True)
    assert last.wait(60) == 0, last.log()
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
        (any_bench.folder / f"die-{place}").touch()
        worker = any_bench.worker(engine, episode=spec)
        assert worker.wait(40) == -signal.SIGKILL, worker.log()
    worker = any_bench.worker(engine, episode=spec, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    (row,) = any_bench.samples()
    assert (row["status"], row["n_tokens"], row["reward"]) == ("completed", 4, 10.0)
    assert any_bench.run.check() == []


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


@pytest.mark.parametrize("place", ["children-done", *slow("nowhere", "forked", "at-the-end")])
def test_forks(any_bench: Bench, place: str) -> None:
    """Three samples of one rollout, generated at the same time; killed anywhere, no engine is asked twice."""
    any_bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1)
    engine = any_bench.engine()
    spec = write_episode(any_bench, FORKS)
    if place != "nowhere":
        (any_bench.folder / f"die-{place}").touch()
        first = any_bench.worker(engine, episode=spec)
        assert first.wait(40) == -signal.SIGKILL, first.log()
    second = any_bench.worker(engine, episode=spec, exit_when_done=True)
    assert second.wait(60) == 0, second.log()
    root, branch, agent = any_bench.samples()
    told = [(s["status"], s["n_tokens"], s["reward"], s["parent_id"]) for s in (root, branch, agent)]
    assert told == [
        ("truncated", 12, 1.0, None), ("truncated", 3, 1.0, root["id"]), ("truncated", 11, 0.25, root["id"]),
    ]  # fmt: skip
    sent = sorted(body["input_ids"] for body in engine.requests)
    first_turn = [token_at(PROMPT_TOKENS + i) for i in range(4)]
    made = [token_at(5 + i) for i in range(6)]
    prompt = sent[0]
    assert sent == sorted([prompt, prompt + first_turn[:2], [20, 21, 22, 23, 24], prompt + first_turn + made])
    with any_bench.run.batch(step=0, groups=1) as batch:
        assert [s.response_ids.size for s in batch.samples] == [12, 5, 6]
        assert batch.samples[2].prompt_ids.tolist() == [20, 21, 22, 23, 24]
        assert batch.samples[1].loss_mask.tolist() == [0, 0, 1, 1, 1]
    any_bench.sound()


def test_an_abort_stops_forks_too(any_bench: Bench) -> None:
    """Requests of forks are aborted with those of their parent, and resumed through it."""
    run = any_bench.make_run(samples_per_prompt=1)
    engine = any_bench.engine(lambda body, n: Script(stall_after=1, chunk=1) if n in (1, 2) else Script())
    worker = any_bench.worker(engine, episode=write_episode(any_bench, FORKS), exit_when_done=True)
    wait_running([engine], 2)
    run.abort_inflight("weights", wait_s=20)
    assert worker.wait(60) == 0, worker.log()
    assert [s["n_tokens"] for s in any_bench.samples()] == [12, 3, 11]
    assert len(engine.requests) == 6
    any_bench.sound()


def test_a_fork_that_is_taken_away(bench: Bench) -> None:
    """Its parent goes back, and forks anew."""
    run = bench.make_run(samples_per_prompt=1)
    engine = bench.engine(lambda body, n: Script(stall_after=1, chunk=1) if n in (1, 2) else Script())
    worker = bench.worker(engine, episode=write_episode(bench, FORKS), exit_when_done=True, flush_tokens=1)
    wait_running([engine], 2)
    bench.wait_stored(1)
    run.requeue([bench.samples()[1]["id"]], "taken away")
    engine.release()
    assert worker.wait(60) == 0, worker.log()
    assert [(s["n_tokens"], s["status"]) for s in bench.samples()] == [
        (12, "truncated"),
        (3, "truncated"),
        (11, "truncated"),
    ]
    assert {s["incarnation"] for s in bench.samples()} >= {1}
    bench.sound()


def test_images_are_sent_with_the_prompt(bench: Bench) -> None:
    """With every request of it, turn by turn; not with a fork that has a prompt of its own."""
    png = b"\x89PNG\r\n\x1a\n" + b"a picture"
    bench.run = run = bench.store.run(
        "r", samples_per_prompt=1, groups_per_step=1, max_staleness=0, epochs=1, max_new_tokens=40
    )
    run.add_prompts([{"prompt_ids": [1, 2, 3], "images": [png]}])
    engine = bench.engine()
    worker = bench.worker(engine, episode=write_episode(bench, FORKS), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    sent = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    told = {tuple(body["input_ids"][:3]): body.get("image_data") for body in engine.requests}
    assert told == {(1, 2, 3): [sent], (20, 21, 22): None}
    bench.sound()


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


def test_a_refused_call_is_recorded(any_bench: Bench) -> None:
    """The function goes on after it, and finds the same place when it runs again."""
    any_bench.make_run(samples_per_prompt=1, max_new_tokens=10, heartbeat_ttl_s=1, max_attempts=1)
    engine, spec = any_bench.engine(), write_episode(any_bench, FULL)
    (any_bench.folder / "die-here").touch()
    first = any_bench.worker(engine, episode=spec)
    assert first.wait(40) == -signal.SIGKILL, first.log()
    second = any_bench.worker(engine, episode=spec, exit_when_done=True)
    assert second.wait(60) == 0, second.log()
    (row,) = any_bench.samples()
    assert (row["status"], row["reward"], row["error"]) == ("truncated", 0.5, None)
    any_bench.sound()


def test_out_of_room_where_nobody_scores(bench: Bench) -> None:
    """The function could give no reward: its stage is settled without one, and does not hold up the run."""
    bench.make_run(samples_per_prompt=1, max_new_tokens=10, stages=("reward",))
    text = "async def episode(ctx):\n    while True:\n        await ctx.generate(max_new_tokens=4)\n"
    worker = bench.worker(bench.engine(), episode=write_episode(bench, text), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
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
    worker = bench.worker(engine, episode=write_episode(bench, text), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    (row,) = bench.samples()
    assert row["status"] == "failed" and told in row["error"]
    bench.wait(engine.idle, "the engine was told to stop")
    bench.sound()


def test_a_step_longer_than_the_progress_deadline(bench: Bench) -> None:
    """While it runs, its sample gets on: nobody takes it away and calls the tool again."""
    bench.make_run(samples_per_prompt=1, progress_deadline_s=1, heartbeat_ttl_s=1, max_attempts=1)
    text = EPISODE.replace('die("in-tool")', "import time\n    while not (HERE / 'go').exists(): time.sleep(0.02)")
    worker = bench.worker(bench.engine(), episode=write_episode(bench, text), exit_when_done=True)
    bench.wait(lambda: said(bench), "the tool runs")
    began = factory.rows(bench.run, "SELECT progress_at FROM sample")[0]["progress_at"]
    bench.wait(lambda: bench.samples()[0]["progress_at"] > began + 2.5, "it is kept beyond the deadline")
    (bench.folder / "go").touch()
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
    worker = bench.worker(engine, episode=write_episode(bench), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert "a prompt of 3 tokens leaves no room in a context of 8" in bench.samples()[0]["error"]
    bench.sound()


def test_what_a_branch_shares_is_taken_from_its_budget(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, max_new_tokens=10)
    text = (
        "async def episode(ctx):\n    await ctx.generate(max_new_tokens=8)\n    branch = await ctx.fork()\n"
        "    await branch.generate()\n    return 1.0\n"
    )
    worker = bench.worker(bench.engine(), episode=write_episode(bench, text), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    with bench.run.batch(step=0, groups=1) as batch:
        assert [s.response_ids.size for s in batch.samples] == [8, 10]
    bench.sound()


def test_a_branch_may_speak_before_its_parent(bench: Bench, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tiny_model._write_tokenizer(model)
    given = {"samples_per_prompt": 1, "groups_per_step": 1, "max_staleness": 0, "epochs": 1, "max_new_tokens": 60}
    bench.run = bench.store.run("r", max_attempts=1, **given)
    bench.run.add_prompts([{"prompt": [{"role": "user", "content": "two and two?"}]}], tokenizer=model)
    text = (
        "async def episode(ctx):\n    await ctx.generate(max_new_tokens=4)\n    branch = await ctx.fork()\n"
        '    await branch.say([{"role": "user", "content": "sure?"}])\n    return 1.0\n'
    )
    spec = write_episode(bench, text)
    worker = bench.worker(bench.engine(), episode=spec, exit_when_done=True, tokenizer=model)
    assert worker.wait(60) == 0, worker.log()
    root, branch = bench.samples()
    assert root["error"] is None and branch["status"] == "completed" and branch["n_tokens"] > 0
    bench.sound()
