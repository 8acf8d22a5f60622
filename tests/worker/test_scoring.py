"""Rewards in a real worker: verifiers that fail are recorded as such, and a crash loses no score and doubles none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import factory
from tests.support.scripted_engine import Script
from tests.worker.conftest import Bench
from tests.worker.gates import AT_THE_GATE, Gate

FUNCTIONS = (
    AT_THE_GATE
    + """
import os
from pathlib import Path

HERE = Path(__file__).parent

def length(sample):
    return {"reward": float(sample.response_length), "index": sample.index}

def broken(sample):
    raise ValueError(f"my verifier broke on sample {sample.index}")

def broken_for_the_first(sample):
    return 1.0 if sample.index else broken(sample)

def hangs(sample):
    while True:
        pass

def broken_once(sample):
    with open(HERE / f"called-{sample.sample_id}", "a") as file:
        file.write("x")
    if (HERE / f"called-{sample.sample_id}").stat().st_size == 1:
        raise ValueError("only this once")
    return 0.5

def waits(sample):
    (HERE / f"began-{sample.sample_id}-{os.getpid()}").touch()
    wait_at_the_gate()
    return 0.25
"""
)


def start(bench: Bench, tokenizer: Path, functions: Path, name: str, **flags: Any) -> Any:
    engine = bench.engines[0] if bench.engines else bench.engine(Script(tokens=20))
    return bench.worker(engine, tokenizer=tokenizer, reward=f"{functions}:{name}", **flags)


def stages(bench: Bench) -> list[dict[str, Any]]:
    return factory.rows(bench.run, "SELECT * FROM stage ORDER BY id")


def test_rewards_are_stored_with_their_details(any_bench: Bench, tokenizer: Path, functions: Path) -> None:
    any_bench.make_run(samples_per_prompt=3, stages=["reward"], epochs=1)
    worker = start(any_bench, tokenizer, functions, "length", exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert [row["reward"] for row in any_bench.samples()] == [20.0] * 3
    assert [(s["status"], s["outcome"], s["value"]) for s in stages(any_bench)] == [("done", "ok", 20.0)] * 3
    assert factory.states(any_bench.run) == ["ready"]
    group = factory.rows(any_bench.run, "SELECT reward_mean, reward_std FROM sample_group")[0]
    assert group == {"reward_mean": 20.0, "reward_std": 0.0}
    any_bench.sound()


@pytest.mark.parametrize(
    ("on_failed", "name", "state", "statuses"),
    [
        ("drop", "broken_for_the_first", "dropped", ["failed", "completed", "completed"]),
        ("short", "broken_for_the_first", "ready", ["failed", "completed", "completed"]),
    ],
)
def test_case_poison(
    any_bench: Bench, tokenizer: Path, functions: Path, on_failed: str, name: str, state: str, statuses: list[str]
) -> None:
    any_bench.make_run(samples_per_prompt=3, stages=["reward"], epochs=1, max_attempts=3, on_failed=on_failed)
    worker = start(any_bench, tokenizer, functions, name, exit_when_done=True)
    any_bench.wait(lambda: factory.states(any_bench.run) == [state], f"the group is {state}")
    assert worker.wait(40) == 0, worker.log()
    assert any_bench.statuses() == statuses
    first = any_bench.samples()[0]
    assert "my verifier broke on sample 0" in first["error"] and first["reward"] is None
    stage = next(s for s in stages(any_bench) if s["sample_id"] == first["id"])
    assert (stage["status"], stage["outcome"], stage["failures"], stage["value"]) == (
        "failed",
        "verifier_error",
        3,
        None,
    )
    assert len(any_bench.engines[0].requests) == 3, "the answer is not generated again for a broken verifier"
    any_bench.sound()


def test_a_verifier_that_hangs_is_a_timeout(bench: Bench, tokenizer: Path, functions: Path) -> None:
    bench.make_run(samples_per_prompt=1, stages=["reward"], epochs=1, max_attempts=1)
    worker = start(bench, tokenizer, functions, "hangs", reward_timeout_s=0.5, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    [stage] = stages(bench)
    assert (stage["status"], stage["outcome"], stage["value"]) == ("failed", "verifier_timeout", None)
    assert bench.statuses() == ["failed"] and "0.5 s" in bench.samples()[0]["error"]
    assert factory.states(bench.run) == ["dropped"]
    bench.sound()


def test_exit_when_done_waits_for_the_second_attempt_of_a_verifier(
    bench: Bench, tokenizer: Path, functions: Path
) -> None:
    bench.make_run(samples_per_prompt=2, stages=["reward"], epochs=1)
    worker = start(bench, tokenizer, functions, "broken_once", exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert [row["reward"] for row in bench.samples()] == [0.5, 0.5]
    assert [(s["failures"], s["outcome"]) for s in stages(bench)] == [(1, "ok")] * 2
    assert factory.states(bench.run) == ["ready"]


def test_a_crash_between_finish_and_score(any_bench: Bench, tokenizer: Path, functions: Path, gate: Gate) -> None:
    """Another worker scores what the dead one held: once, and nothing is generated again."""
    any_bench.make_run(samples_per_prompt=2, stages=["reward"], heartbeat_ttl_s=1)
    first = start(any_bench, tokenizer, functions, "waits", reward_processes=2)
    began = functions.parent
    any_bench.wait(lambda: len(list(began.glob("began-*"))) == 2, "both are being scored")
    assert any_bench.statuses() == ["completed"] * 2 and factory.states(any_bench.run) == ["scoring"]
    first.kill()
    gate.open()
    second = start(any_bench, tokenizer, functions, "waits")
    any_bench.wait(lambda: factory.states(any_bench.run) == ["ready"], "the group is ready")
    assert second.terminate() == 0, second.log()
    assert [row["reward"] for row in any_bench.samples()] == [0.25] * 2
    assert [(s["status"], s["failures"]) for s in stages(any_bench)] == [("done", 0)] * 2
    assert all(s["attempt"] >= 3 for s in stages(any_bench)), "claimed, reaped, claimed"
    assert len(any_bench.engines[0].requests) == 2
    any_bench.sound()


def test_sigterm_while_a_verifier_works(bench: Bench, tokenizer: Path, functions: Path, gate: Gate) -> None:
    """The stage goes back undone: no failure is counted for a shutdown."""
    bench.make_run(samples_per_prompt=1, stages=["reward"])
    worker = start(bench, tokenizer, functions, "waits", drain_timeout_s=0.5)
    bench.wait(lambda: list(functions.parent.glob("began-*")), "it is being scored")
    assert worker.terminate(30) == 0, worker.log()
    [stage] = stages(bench)
    assert (stage["status"], stage["owner"], stage["failures"]) == ("pending", None, 0)
    bench.sound()
