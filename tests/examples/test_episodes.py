"""The examples of episodes, each on the embedded engine with a tiny model; a worker is killed in each."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samplestore import codec
from samplestore.examples import calculator, guessing_game, tiny_model, two_agents
from samplestore.tokenizers import load_tokenizer
from tests.engine.conftest import RunningEngine, start_engine
from tests.support import factory
from tests.support.processes import Processes
from tests.worker.conftest import Bench, made_bench


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.build(folder, 0)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RunningEngine]:
    started = start_engine(model, "--weight-version", "default", "--incremental-streaming-output")
    yield started
    started.process.kill()
    started.process.wait(10)


@pytest.fixture
def bench(sqlite_url: str, processes: Processes, tmp_path: Path) -> Iterator[Bench]:
    with made_bench(sqlite_url, processes, tmp_path) as made:
        yield made


def play(bench: Bench, engine: RunningEngine, model: Path, name: str, row: dict[str, Any], **settings: Any) -> None:
    """Two samples of one prompt, with the second of two workers: the first is killed on the way."""
    given = {"samples_per_prompt": 2, "groups_per_step": 1, "max_staleness": 0, "epochs": 1, "max_new_tokens": 400}
    bench.run = bench.store.run("r", heartbeat_ttl_s=1, sampling_seed=1, **{**given, **settings})
    bench.run.add_prompts([row], tokenizer=model)
    flags: dict[str, Any] = {"episode": f"samplestore.examples.{name}:episode", "tokenizer": model}
    faults = {"SAMPLESTORE_FAULTS": "committed=kill@9"}
    first = bench.worker(engine.url, env=faults, **flags)
    assert first.wait(60) == -signal.SIGKILL, first.log()
    second = bench.worker(engine.url, exit_when_done=True, **flags)
    assert second.wait(90) == 0, second.log()
    assert not {"pending", "aborted", "failed"} & set(bench.statuses()), second.log()
    bench.sound()


def texts(bench: Bench, model: Path, sample_id: int, kind: str) -> list[str]:
    tokenizer = load_tokenizer(model)
    parts = [p for p in factory.segments(bench.run, sample_id) if p["kind"] == kind]
    return [tokenizer.decode(codec.decode(part["payload"])[0]) for part in parts]


def test_calculator(bench: Bench, engine: RunningEngine, model: Path) -> None:
    row = {"messages": [{"role": "user", "content": "what is 12 - 7?"}], "label": 5}
    play(bench, engine, model, "calculator", row)
    for sample in bench.samples():
        said = texts(bench, model, sample["id"], "environment")
        assert len(said) == calculator.MAX_TURNS and sample["reward"] == 0.0
        assert all(text.endswith("<assistant>") for text in said), "each opens the next turn, as the template does"


def test_what_the_calculator_computes() -> None:
    assert calculator.calculate("2 * (3 - 5) / 4") == -1.0
    for wrong in ("__import__('os').getcwd()", "2 **", "x", "9 ** 9 ** 9", "True"):
        with pytest.raises((ValueError, SyntaxError)):
            calculator.calculate(wrong)


def test_two_agents(bench: Bench, engine: RunningEngine, model: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a or b?"}], "label": "a"}
    play(bench, engine, model, "two_agents", row)
    rows = bench.samples()
    assert len(rows) == 2 * (two_agents.SOLVERS + 1)
    roots = {row["id"] for row in rows if row["parent_id"] is None}
    assert len(roots) == 2
    for root in roots:
        forks = [row for row in rows if row["parent_id"] == root]
        assert [row["parent_upto"] for row in forks] == [0, None]
        (prompt,) = texts(bench, model, forks[1]["id"], "environment")
        assert prompt.count("<user>") == 1 and prompt.count("<assistant>") == 1 and "<eos>" not in prompt
    with bench.run.batch(step=0, groups=1) as batch:
        made = batch.arrays()
        assert sorted(set(made["rollout_ids"].tolist())) == sorted(roots)
        assert {s.prompt_ids.size for s in batch.samples if s.index >= 2} > {batch.samples[0].prompt_ids.size}


def test_a_judgment_that_cannot_be_read_shapes_nothing() -> None:
    selector, solvers = two_agents.shape([1.0, 0.0], None)
    assert math.isnan(selector) and solvers == [1.0, 0.0]
    assert two_agents.shape([1.0, 0.0], 1) == (0.0, [0.8, 0.0])
    assert two_agents.shape([1.0, 0.0], 0) == (1.0, [1.0, 0.0])
    assert two_agents.judgment("judgment: 1", 2) == 1
    assert (
        two_agents.judgment("judgment: IDX.AUTHOR / Index ID: 4", 2) is None
        and two_agents.judgment("judgment: 7", 2) is None
    )


def test_guessing_game(bench: Bench, engine: RunningEngine, model: Path) -> None:
    play(bench, engine, model, "guessing_game", {"prompt": "guess: ", "label": 4}, samples_per_prompt=4)
    for sample in bench.samples():
        calls = factory.rows(
            bench.run, "SELECT * FROM episode_step WHERE sample_id = :s ORDER BY number", s=sample["id"]
        )
        moves = [c for c in calls if c["kind"] == "step"]
        assert 1 <= len(moves) <= guessing_game.TURNS and calls[0]["kind"] == "snapshot"
        found = " yes! " in texts(bench, model, sample["id"], "environment")[-1]
        assert sample["reward"] == (1.0 - (len(moves) - 1) / guessing_game.TURNS if found else 0.0)
