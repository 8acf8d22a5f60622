"""What a setting of the sampler means over all the requests of one sample."""

from __future__ import annotations

import pytest

from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import Bench


@pytest.mark.parametrize("least", [20, 32])
def test_a_least_length_counts_what_is_stored(bench: Bench, least: int) -> None:
    """The engine counts from its prompt's end, which is the resumed response, and refuses a least beyond the most."""
    bench.make_run(samples_per_prompt=1, sampling={"min_new_tokens": least})
    engine = bench.engine(lambda body, n: Script(stall_after=12) if n == 0 else Script())
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 1)
    bench.wait_stored(12)
    bench.run.abort_inflight("in the middle", wait_s=30)
    assert worker.wait(60) == 0, worker.log()
    asked = [body["sampling_params"] for body in engine.requests]
    assert [(a["min_new_tokens"], a["max_new_tokens"]) for a in asked] == [(least, 32), (least - 12, 20)]
    bench.exact(32)


def test_a_least_length_in_slices(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, sampling={"min_new_tokens": 20})
    engine = bench.engine()
    worker = bench.worker(engine, exit_when_done=True, mode="sliced", slice_tokens=8)
    assert worker.wait(60) == 0, worker.log()
    asked = [body["sampling_params"] for body in engine.requests]
    assert [(a["min_new_tokens"], a["max_new_tokens"]) for a in asked] == [(8, 8), (8, 8), (4, 8), (0, 8)]
    bench.exact(32)


def test_without_one_nothing_is_asked(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1)
    engine = bench.engine()
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert "min_new_tokens" not in engine.requests[0]["sampling_params"]


@pytest.mark.parametrize(("resume", "mode"), [(True, "stream"), (False, "sliced")])
def test_a_grammar_that_would_begin_in_the_middle(bench: Bench, resume: bool, mode: str) -> None:
    """SGLang holds each request to its grammar from the first symbol on: it tells it of the generated tokens alone."""
    bench.make_run(samples_per_prompt=1, resume=resume, sampling={"json_schema": "{}"})
    engine = bench.engine()
    worker = bench.worker(engine, mode=mode)
    assert worker.wait(60) != 0
    assert "json_schema begins anew" in worker.log() and "resume=False" in worker.log()
    assert engine.requests == [] and bench.unowned()


def test_a_grammar_of_whole_responses(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, resume=False, sampling={"json_schema": "{}", "stop": ["x"]})
    engine = bench.engine()
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert engine.requests[0]["sampling_params"]["json_schema"] == "{}" and "heed this" not in worker.log()


def test_what_counts_within_a_request_is_told(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1, sampling={"stop": ["x"], "presence_penalty": 0.5, "repetition_penalty": None})
    worker = bench.worker(bench.engine(), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert worker.log().count("stop, presence_penalty: engines heed this within a request") == 1
