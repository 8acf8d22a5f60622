"""Filters in a real worker: built in, the user's own, slime's; and what becomes of one that fails."""

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
from types import SimpleNamespace

HERE = Path(__file__).parent

def by_label(sample):  # a reward that is the same for all samples of prompts with an even label
    return float(sample.index) if int(sample.label) % 2 else 1.0

def like_slime(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    assert args.n_samples_per_prompt == len(samples)
    keep = max(rewards) > min(rewards)
    return SimpleNamespace(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")

async def alone(samples):
    return samples[0].response_length == len(samples[0].tokens) - 3 and samples[0].status.value == "completed"

def mark_second(args, groups):
    for group in groups:
        group[1].remove_sample = True

def hangs(samples):
    if not (HERE / "hung").exists():
        (HERE / "hung").touch()
        while True:
            pass
    return True

def waits(samples):
    (HERE / f"began-{os.getpid()}").touch()
    wait_at_the_gate()
    return True

def dies(samples):
    os._exit(3)

def says_nothing_useful(samples):
    return "x" * 5000 if samples[0].index == 0 else object()
"""
)


def make(bench: Bench, **settings: Any) -> None:
    """Four prompts, of which those with labels 0 and 2 have one reward for all samples."""
    bench.make_run(prompts=4, groups_per_step=4, stages=["reward"], epochs=1, max_attempts=2, **settings)


def work(bench: Bench, tokenizer: Path, functions: Path, **flags: Any) -> Any:
    engine = bench.engine(Script(tokens=20))
    worker = bench.worker(engine, tokenizer=tokenizer, reward=f"{functions}:by_label", exit_when_done=True, **flags)
    assert worker.wait(60) == 0, worker.log()
    bench.sound()
    return worker


def groups(bench: Bench) -> dict[str, tuple[str, str | None]]:
    """State and reason by the prompt's label."""
    query = (
        "SELECT p.label AS label, g.state AS state, g.reason AS reason FROM sample_group g "
        "JOIN prompt p ON p.id = g.prompt_id"
    )
    return {str(r["label"]).strip('"'): (r["state"], r["reason"]) for r in factory.rows(bench.run, query)}


ZERO = ("dropped", "filter: zero reward std")
KEPT = ("ready", None)


def test_a_built_in_filter(any_bench: Bench, tokenizer: Path, functions: Path) -> None:
    make(any_bench, group_filters=["reward_std"])
    work(any_bench, tokenizer, functions)
    assert groups(any_bench) == {"0": ZERO, "1": KEPT, "2": ZERO, "3": KEPT}


def test_filters_written_for_slime(bench: Bench, tokenizer: Path, functions: Path) -> None:
    make(bench, group_filters=["custom"], sample_filters=["custom"])
    work(bench, tokenizer, functions, group_filter=f"{functions}:like_slime", sample_filter=f"{functions}:mark_second")
    dropped = ("dropped", "filter: zero_std_1.0")
    assert groups(bench) == {"0": dropped, "1": KEPT, "2": dropped, "3": KEPT}
    assert [s["removed"] for s in bench.samples()] == [None, "custom filter"] * 4
    assert factory.value(bench.run, "SELECT count(*) FROM stage WHERE name = 'filter' AND failures > 0") == 0


def test_a_filter_with_one_argument(bench: Bench, tokenizer: Path, functions: Path) -> None:
    make(bench, group_filters=["custom"])
    work(bench, tokenizer, functions, group_filter=f"{functions}:alone")
    assert set(groups(bench).values()) == {KEPT}


def test_a_filter_that_hangs_is_killed_and_asked_again(bench: Bench, tokenizer: Path, functions: Path) -> None:
    make(bench, group_filters=["custom"])
    work(bench, tokenizer, functions, group_filter=f"{functions}:hangs", filter_timeout_s=1.0)
    assert set(groups(bench).values()) == {KEPT}
    (failed,) = factory.events(bench.run, "stage_failed")
    assert "no answer after 1 s" in failed["reason"]


def test_a_worker_that_is_killed_while_it_filters_loses_nothing(
    any_bench: Bench, tokenizer: Path, functions: Path, gate: Gate
) -> None:
    make(any_bench, group_filters=["custom"], heartbeat_ttl_s=1)
    engine = any_bench.engine(Script(tokens=20))
    flags: dict[str, Any] = {"tokenizer": tokenizer, "reward": f"{functions}:by_label"}
    first = any_bench.worker(engine, group_filter=f"{functions}:waits", **flags)
    any_bench.wait(lambda: list(functions.parent.glob("began-*")), "it filters")
    first.kill()
    gate.open()
    second = any_bench.worker(engine, group_filter=f"{functions}:waits", **flags)
    any_bench.wait(lambda: set(groups(any_bench).values()) == {KEPT}, "another has filtered all of them")
    assert second.terminate(30) == 0, second.log()
    stages = factory.rows(any_bench.run, "SELECT failures, attempt FROM stage WHERE name = 'filter'")
    assert len(stages) == 4 and {s["failures"] for s in stages} == {0} and max(s["attempt"] for s in stages) >= 3
    any_bench.sound()


def test_a_filter_that_dies_drops_the_group_with_its_error(bench: Bench, tokenizer: Path, functions: Path) -> None:
    make(bench, group_filters=["custom"])
    work(bench, tokenizer, functions, group_filter=f"{functions}:dies")
    assert set(groups(bench).values()) == {("dropped", "stage filter failed")}
    errors = {r["error"] for r in factory.rows(bench.run, "SELECT error FROM stage WHERE name = 'filter'")}
    assert len(errors) == 1 and "exited with code 3" in errors.pop()


def test_what_a_filter_returns_is_checked(bench: Bench, tokenizer: Path, functions: Path) -> None:
    make(bench, group_filters=["custom"])
    work(bench, tokenizer, functions, group_filter=f"{functions}:says_nothing_useful")
    found = groups(bench)
    first = factory.rows(bench.run, "SELECT reason FROM sample_group ORDER BY number LIMIT 1")[0]["reason"]
    assert first.startswith("filter: xxx") and len(first) <= 220
    assert sorted({reason for _, reason in found.values()} - {first}) == ["stage filter failed"]


def test_a_worker_without_the_function_leaves_the_groups_to_others(
    bench: Bench, tokenizer: Path, functions: Path
) -> None:
    make(bench, group_filters=["custom"])
    engine = bench.engine(Script(tokens=20))
    worker = bench.worker(engine, tokenizer=tokenizer, reward=f"{functions}:by_label")
    bench.wait(
        lambda: factory.value(bench.run, "SELECT count(*) FROM stage WHERE name = 'filter'") == 4, "all wait for it"
    )
    codes = dict(bench.run.why().reasons)
    assert "4 groups wait for their filter" in codes["unfiltered"] and "--group-filter" in codes["unfiltered"]
    other = bench.worker(engine, group_filter=f"{functions}:alone")
    bench.wait(lambda: set(groups(bench).values()) == {KEPT}, "the other has filtered them")
    assert worker.terminate(30) == 0 and other.terminate(30) == 0
    bench.sound()


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"group_filters": ["custom"]}, {"group_filter": "nowhere:f"}, "no module 'nowhere'"),
        ({"group_filters": ["custom"]}, {"group_filter": "nothing"}, "MODULE:FUNCTION"),
        ({"group_filters": ["reward_std"]}, {"group_filter": "json:loads"}, "would never be asked"),
        ({}, {"sample_filter": "json:loads"}, "sample_filters"),
    ],
)
def test_a_function_that_is_none_is_told_at_the_start(
    bench: Bench, settings: dict[str, Any], flags: dict[str, str], said: str
) -> None:
    bench.make_run(**settings)
    engine = bench.engine(Script(tokens=20))
    worker = bench.worker(engine, **flags)
    assert worker.wait(40) != 0 and said in worker.log(), worker.log()


def test_a_worker_that_filters_stays_while_others_score(bench: Bench) -> None:
    """With --exit-when-done, too: when the last score comes nobody else might be there to filter."""
    run = bench.make_run(prompts=2, groups_per_step=2, stages=["judge"], epochs=1, group_filters=["reward_std"])
    worker = bench.worker(bench.engine(Script(tokens=20)), exit_when_done=True)
    me = factory.register(run, "reward")
    held: list[Any] = []

    def all_of_them() -> bool:
        held.extend(run.claim_stages(me, 100, ["judge"]))
        return len(held) == 4

    bench.wait(all_of_them, "all samples wait for their judge")
    looks = "SELECT count(*) FROM worker WHERE kind = 'rollout' AND state = 'live'"
    seen = factory.value(run, "SELECT heartbeat FROM worker WHERE kind = 'rollout'")
    bench.wait(
        lambda: factory.value(run, "SELECT heartbeat FROM worker WHERE kind = 'rollout'") > seen or not worker.alive(),
        "the worker has gone on",
    )
    assert worker.alive() and factory.value(run, looks) == 1, worker.log()
    for number, stage in enumerate(held):
        run.score(stage, float(number))
    assert worker.wait(60) == 0, worker.log()
    assert factory.states(run) == ["ready", "ready"]
    bench.sound()
