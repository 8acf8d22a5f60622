"""A store with a run of the tiny task, whose samples a stand-in for a worker has finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import samplestore
from samplestore.examples import tiny_model, tiny_task, trainer

N_STEPS = 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with samplestore.open(str(tmp_path / "rollouts.db")) as opened:
        yield opened


@pytest.fixture
def config(tmp_path: Path) -> trainer.TrainerConfig:
    tiny_model.build(tmp_path / "model", seed=0)
    return trainer.TrainerConfig(
        model=tmp_path / "model", checkpoints=tmp_path / "checkpoints", steps=N_STEPS, timeout_s=5
    )


@pytest.fixture
def run(store: Any, config: trainer.TrainerConfig) -> Any:
    """A run with enough finished and scored groups for N_STEPS steps of two groups."""
    made = store.run("demo", samples_per_prompt=2, groups_per_step=2, max_staleness=N_STEPS, stages=["reward"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    made.add_prompts(tiny_task.prompts(50, seed=0), tokenizer=tokenizer)
    made.admit()
    worker = made.register("rollout")
    for claim in made.claim(worker, 100):
        made.append(claim, np.arange(5, 15) + claim.index, np.full(10, -3.8), 0, finish_reason="length")
        made.finish(claim)
    for stage in made.claim_stages(worker, 100):
        made.score(stage, float(stage.index))
    return made
