"""The second trainer: packed batches give what padded ones do, and what it learns from is what its pieces say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from samplestore.examples import checkpoints, grpo, reasoning, tiny_model, trainer
from tests.examples.conftest import N_STEPS


@pytest.fixture
def model(tmp_path: Path) -> Any:
    tiny_model.build(tmp_path / "tiny", seed=0)
    return checkpoints.load_model(tmp_path / "tiny")


def packed(lengths: list[int], prompt: int = 2) -> dict[str, torch.Tensor]:
    """Samples of random tokens; the first half of each group of two is good, the other bad."""
    made = torch.Generator().manual_seed(0)
    at = torch.tensor([0, *lengths]).cumsum(0)
    places = torch.cat([torch.arange(n) for n in lengths])
    return {
        "tokens": torch.randint(5, 30, (int(at[-1]),), generator=made),
        "position_ids": places,
        "cu_seqlens": at.to(torch.int32),
        "loss_mask": (places >= prompt).float(),
        "rollout_log_probs": torch.full((int(at[-1]),), -3.0),
        "advantages": torch.tensor([1.0, -1.0] * (len(lengths) // 2)),
        "rewards": torch.tensor([1.0, 0.0] * (len(lengths) // 2)),
    }


def test_a_packed_row_gives_what_its_samples_give_alone(model: Any) -> None:
    data = packed([5, 9, 3, 4])
    together = reasoning.packed_log_probs(model, data["tokens"], data["position_ids"])
    for start, stop in zip(data["cu_seqlens"][:-1].tolist(), data["cu_seqlens"][1:].tolist(), strict=True):
        tokens = data["tokens"][None, start:stop]
        alone, _ = grpo.token_log_probs(model, tokens, torch.ones_like(tokens))
        assert torch.allclose(together[start:stop], alone[0], atol=1e-5)


def test_micro_batches_change_nothing_but_memory(tmp_path: Path, model: Any) -> None:
    data, states = packed([5, 9, 3, 4]), []
    for tokens in (9, 1000):
        config = reasoning.Config(trainer.TrainerConfig(tmp_path, tmp_path), tokens=tokens)
        copy = checkpoints.load_model(tmp_path / "tiny")
        numbers = reasoning.update(copy, torch.optim.SGD(copy.parameters(), lr=0.1), data, config)
        states.append((numbers, [p.detach().clone() for p in copy.parameters()]))
    (few, small), (all_at_once, large) = states
    assert few["loss"] == pytest.approx(all_at_once["loss"], abs=1e-5)
    assert torch.allclose(few["log_probs"], all_at_once["log_probs"], atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(small, large, strict=True))


def test_good_answers_become_likelier_and_bad_ones_less(tmp_path: Path, model: Any) -> None:
    data, config = packed([6, 6]), reasoning.Config(trainer.TrainerConfig(tmp_path, tmp_path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = reasoning.update(model, optimizer, data, config)["log_probs"]
    after = reasoning.packed_log_probs(model, data["tokens"], data["position_ids"]).detach()
    change = (after - before) * data["loss_mask"]
    assert float(change[:6].sum()) > 0 > float(change[6:].sum())


def test_nothing_to_learn_from_is_said(tmp_path: Path, model: Any) -> None:
    data = packed([4, 4], prompt=9)
    with pytest.raises(ValueError, match="nothing to learn from"):
        reasoning.update(model, None, data, reasoning.Config(trainer.TrainerConfig(tmp_path, tmp_path)))  # type: ignore[arg-type]


def test_it_trains_records_its_log_probs_and_goes_on(store: Any, run: Any, config: trainer.TrainerConfig) -> None:
    first = reasoning.train(store, run, reasoning.Config(config))
    numbers = [next(first), next(first)]
    first.close()  # the process ends here
    numbers += list(reasoning.train(store, run, reasoning.Config(config)))
    assert [n["step"] for n in numbers] == [1, 2, 3] == list(range(1, N_STEPS + 1))
    assert all(np.isfinite(list(n.values())).all() for n in numbers)
    assert run.current_version == N_STEPS and run.check() == []
    for sample in run.replay(2).samples:
        rows, present = run.array(sample.sample_id, "trainer_log_probs")
        assert present.all() and rows.shape == (10,) and (rows < 0).all()


def test_rows_and_score_fit_each_other() -> None:
    row = reasoning.rows(3, seed=1)[0]
    assert row == reasoning.rows(3, seed=1)[0] != reasoning.rows(3, seed=2)[0]

    def reward(response: str) -> float:
        return reasoning.score(SimpleNamespace(response=response, label=row["label"]))["reward"]

    assert reward(row["label"]) == 1.0
    assert reward("no idea") == 0.0
    assert 0.3 < reward("x" * 80 + row["label"]) < 1.0
    assert reward(str(int(row["label"]) + 1)) == 0.1


def test_rows_are_written_as_json_lines() -> None:
    command = [sys.executable, "-m", "samplestore.examples.reasoning", "rows", "2"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [set(json.loads(line)) for line in said.splitlines()] == [{"prompt", "label", "metadata"}] * 2
