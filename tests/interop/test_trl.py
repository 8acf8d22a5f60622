"""The real TRL trains on a store: GRPOTrainer with a rollout_func, its checkpoints, and a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samplestore.interop import trl as interop

from ..support import factory as f


def trainer_of(folder: Path, model: Path, rollouts: interop.StoreRollouts, steps: int) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=2, max_steps=steps, save_steps=1,
        learning_rate=0.01, use_cpu=True, report_to=[], eval_strategy="no", logging_steps=1, disable_tqdm=True,
        max_completion_length=8, beta=0.0,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), args=config, reward_funcs=interop.stored_reward,
        train_dataset=Dataset.from_dict({"prompt": ["the store says what comes"] * 16}),
        processing_class=AutoTokenizer.from_pretrained(model), rollout_func=rollouts,
        callbacks=[rollouts.callback()],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_trains_on_what_the_store_has(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite only: what the store does is tested on both databases elsewhere, this is about TRL."""
    import samplestore
    from samplestore.examples import tiny_model

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tiny_model.build(tmp_path / "model", 0)
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=8, stages=["reward"], max_staleness=9)
        worker = f.register(run)
        for i, claim in enumerate(run.claim(worker, 99)):
            f.answer(run, claim, 3 + i % 3)
        for i, stage in enumerate(run.claim_stages(worker, 99)):
            run.unparsed(stage, "no number") if i == 3 else run.score(stage, float(i % 2))
        trainer = trainer_of(tmp_path / "out", tmp_path / "model", interop.StoreRollouts(run, timeout=30), 2)
        trainer.train()
        assert f.states(run) == ["consumed"] * 4 + ["ready"] * 4
        steps = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert [e["rewards/stored_reward/mean"] for e in steps] == [pytest.approx(1 / 3), 0.5]
        assert steps[0]["completions/mean_length"] == 3.0, "of the tokens that env_mask has"
        assert steps[0]["grad_norm"] > 0
        resumed(run, tmp_path)


def resumed(run: Any, tmp_path: Path) -> None:
    """From the checkpoint of global step 1: the groups that it has not seen are trained on again."""
    again = trainer_of(tmp_path / "out", tmp_path / "model", interop.StoreRollouts(run, timeout=30), 3)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert f.states(run) == ["consumed"] * 6 + ["ready"] * 2
    assert [r["step"] for r in f.rows(run, "SELECT step FROM batch WHERE state = 'committed' ORDER BY step")] == [
        0,
        1,
        2,
    ]
    assert f.value(run, "SELECT count(*) AS n FROM batch WHERE state = 'rewound'") == 1
    f.sound(run)


def test_stored_reward_gives_what_is_there() -> None:
    assert interop.stored_reward(["a", "b"], [1.0, None], label=[1, 2]) == [1.0, None]
