"""What a worker is told reaches the engine, whichever way it was told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samplestore.workers.limits import carried_temperature
from tests.support import factory
from tests.support.scripted_engine import Script
from tests.worker.conftest import PROMPT_TOKENS, Bench


def test_file_environment_and_flags_reach_the_engine(bench: Bench, tmp_path: Path) -> None:
    bench.make_run(samples_per_prompt=1, epochs=1, sampling={"temperature": 1.0, "top_p": 1.0, "min_p": 0.125})
    engine = bench.engine()
    here = tmp_path / "here"
    here.mkdir()
    (here / "samplestore.toml").write_text(
        f'[database]\nurl = "{bench.url}"\n[worker]\nrun = "r"\nengines = ["{engine.url}"]\nconcurrency = 3\n'
        "max_new_tokens = 99\n[worker.sampling]\ntemperature = 0.8\ntop_k = 7\n"
    )
    worker = bench.worker(
        cwd=here, exit_when_done=True, max_new_tokens=24, sampling='{"top_k": 5}', name="a worker",
        env={"SAMPLESTORE_WORKER_SAMPLING__TOP_P": "0.9", "SAMPLESTORE_WORKER_MAX_NEW_TOKENS": "50"},
    )  # fmt: skip
    assert worker.wait(40) == 0, worker.log()
    [body] = engine.requests
    wanted = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.125, "top_k": 5, "max_new_tokens": 24}
    assert body["sampling_params"] == wanted, "run, file, environment, flags: the later wins, key by key"
    assert body["return_logprob"] is True and len(body["rid"]) == 32
    row = factory.rows(bench.run, "SELECT * FROM worker")[0]
    assert (row["name"], row["kind"], row["state"]) == ("a worker", "rollout", "gone")
    assert [r["temperature"] for r in bench.requests()] == [0.8], "the temperature that its log-probs carry"
    assert [r["engine"] for r in bench.requests()] == [engine.url]


def test_an_unknown_key_ends_with_2_and_the_allowed_names(bench: Bench, tmp_path: Path) -> None:
    bench.make_run()
    here = tmp_path / "here"
    here.mkdir()
    (here / "samplestore.toml").write_text("[worker]\nconcurency = 3\n")
    worker = bench.worker("http://127.0.0.1:9", cwd=here)
    assert worker.wait(30) == 2
    assert "concurency" in worker.log() and "Did you mean concurrency?" in worker.log()
    assert "flush_tokens" in worker.log()


def test_without_engines_it_says_what_to_type(bench: Bench) -> None:
    bench.make_run()
    worker = bench.worker(sampling='{"top_p": 0.9, "temprature": 0.5, "max_tokens": 8, "max_new_tokens": 8}')
    assert worker.wait(30) not in (0, None)
    for said in ("Did you mean temperature?", "inside sampling does nothing", "Did you mean max_new_tokens"):
        assert said in worker.log(), "what no engine takes is said at the start, not with each request"
    assert "'top_p'" not in worker.log()
    assert "--router" in worker.log() and "--engine" in worker.log() and "Traceback" not in worker.log()


def test_mode_sliced(bench: Bench) -> None:
    """Calls of slice_tokens each: every slice is stored, the last is what is left of the budget."""
    bench.make_run(samples_per_prompt=2, epochs=1)
    engine = bench.engine()
    worker = bench.worker(engine, mode="sliced", slice_tokens=10, exit_when_done=True, concurrency=1)
    assert worker.wait(40) == 0, worker.log()
    assert [b["sampling_params"]["max_new_tokens"] for b in engine.requests] == [10, 10, 10, 2] * 2
    assert {b["stream"] for b in engine.requests} == {False}
    assert bench.statuses() == ["truncated"] * 2
    assert {r["n_resumes"] for r in bench.samples()} == {0}, "a slice is not an interruption"
    bench.exact(32)
    bench.sound()


def test_a_short_answer_in_mode_sliced_is_complete(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, epochs=1)
    engine = bench.engine(lambda body, n: Script(tokens=17 - (len(body["input_ids"]) - PROMPT_TOKENS)))
    worker = bench.worker(engine, mode="sliced", slice_tokens=10, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert bench.statuses() == ["completed"] and len(engine.requests) == 2
    bench.exact(17)


def test_every_dialect_of_an_engine(bench: Bench) -> None:
    """Through HTTP, with chunks of many sizes, in one run."""
    bench.make_run(samples_per_prompt=9, epochs=1)
    dialects = ("incremental", "cumulative", "delta_ids")
    engine = bench.engine(lambda body, n: Script(dialect=dialects[n % 3], chunk=(1, 3, 100)[n // 3]))  # type: ignore[arg-type]
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    bench.exact(32)
    bench.sound()


def test_the_context_of_the_engine_bounds_the_budget(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, epochs=1, max_new_tokens=100_000)
    engine = bench.engine(Script(tokens=10))
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    [body] = engine.requests
    assert body["sampling_params"]["max_new_tokens"] == 4096 - PROMPT_TOKENS - 6


@pytest.mark.parametrize(
    ("sampling", "carried"),
    [
        ({}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0}, 1.0),  # greedy: the engine computes log-probs at 1
        ({"temperature": 0.7, "top_k": 1}, None),  # greedy only if the whole batch is
        ({"temperature": 1.0, "top_k": 1}, 1.0),
    ],
)
def test_the_temperature_that_log_probs_carry(sampling: dict[str, Any], carried: float | None) -> None:
    assert carried_temperature(sampling) == carried
