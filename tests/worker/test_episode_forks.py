"""Episodes that end as several samples, in real workers."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from samplestore.examples import tiny_model
from tests.support.scripted_engine import Script, token_at, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench
from tests.worker.episode_functions import FORKS, die, run_to_the_end, slow, write_episode


@pytest.mark.parametrize("place", ["children-done", *slow("nowhere", "forked", "at-the-end")])
def test_forks(any_bench: Bench, place: str) -> None:
    """Three samples of one rollout, generated at the same time; killed anywhere, no engine is asked twice."""
    any_bench.make_run(samples_per_prompt=1, heartbeat_ttl_s=1)
    engine = any_bench.engine()
    spec = write_episode(any_bench, FORKS)
    if place != "nowhere":
        die(any_bench, engine, spec, place)
    run_to_the_end(any_bench, engine, spec)
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
    run_to_the_end(bench, engine, write_episode(bench, FORKS))
    sent = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    told = {tuple(body["input_ids"][:3]): body.get("image_data") for body in engine.requests}
    assert told == {(1, 2, 3): [sent], (20, 21, 22): None}
    bench.sound()


def test_what_a_branch_shares_is_taken_from_its_budget(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, max_new_tokens=10)
    text = (
        "async def episode(ctx):\n    await ctx.generate(max_new_tokens=8)\n    branch = await ctx.fork()\n"
        "    await branch.generate()\n    return 1.0\n"
    )
    run_to_the_end(bench, bench.engine(), write_episode(bench, text))
    with bench.run.batch(step=0, groups=1) as batch:
        assert [s.response_ids.size for s in batch.samples] == [8, 10]
    bench.sound()


def test_a_branch_may_speak_before_its_parent(bench: Bench, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tiny_model.write_tokenizer(model)
    given = {"samples_per_prompt": 1, "groups_per_step": 1, "max_staleness": 0, "epochs": 1, "max_new_tokens": 60}
    bench.run = bench.store.run("r", max_attempts=1, **given)
    bench.run.add_prompts([{"prompt": [{"role": "user", "content": "two and two?"}]}], tokenizer=model)
    text = (
        "async def episode(ctx):\n    await ctx.generate(max_new_tokens=4)\n    branch = await ctx.fork()\n"
        '    await branch.say([{"role": "user", "content": "sure?"}])\n    return 1.0\n'
    )
    spec = write_episode(bench, text)
    run_to_the_end(bench, bench.engine(), spec, tokenizer=model)
    root, branch = bench.samples()
    assert root["error"] is None and branch["status"] == "completed" and branch["n_tokens"] > 0
    bench.sound()
