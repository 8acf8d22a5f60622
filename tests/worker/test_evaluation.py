"""Workers serve the samples of evaluations with their own sampling parameters, and the trainer gets the numbers."""

from __future__ import annotations

from tests.support import factory
from tests.support.scripted_engine import Script
from tests.worker.conftest import Bench


def test_a_worker_serves_an_evaluation_beside_training(any_bench: Bench) -> None:
    run = any_bench.make_run(prompts=2, groups_per_step=2, sampling={"temperature": 1.0, "top_p": 0.9})
    run.add_prompts([{"prompt_ids": [5, 5, i]} for i in range(2)], dataset="test", evaluation=True)
    number = run.start_evaluation("test", 2, sampling={"temperature": 0.0}, max_new_tokens=5)
    engine = any_bench.engine(Script(tokens=200))
    worker = any_bench.worker(engine, concurrency=8, exit_when_done=True)
    told = run.evaluate("test", 2, sampling={"temperature": 0.0}, max_new_tokens=5, timeout=60)
    assert worker.wait(60) == 0, worker.log()
    assert (told.id, told.done, told.truncated, told.mean_tokens) == (number, True, 1.0, 5.0)
    asked = {body["input_ids"][0]: body["sampling_params"] for body in engine.requests}
    assert asked[5] == {"temperature": 0.0, "top_p": 0.9, "max_new_tokens": 5}
    assert asked[1] == {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 32}
    assert sorted(factory.states(run)) == ["dropped", "dropped", "ready", "ready"]
    any_bench.sound()
