"""The GRPO of the demo: values computed by hand, directions of gradients, and what a trained group must not do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from samplestore.advantages import advantages
from samplestore.examples import grpo
from samplestore.examples.grpo import GrpoConfig


class Unigram(torch.nn.Module):  # type: ignore[misc]
    """Logits that do not depend on the input: every expected number can be worked out on paper."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids: Any, **_: Any) -> Any:
        class Output:
            logits = self.logits.expand(*input_ids.shape, -1)

        return Output


def batch(rows: list[list[int]], rewards: list[float], groups: list[int], old: float) -> dict[str, Any]:
    """Rows of equal length whose first token is the prompt and whose other tokens were drawn with log-prob `old`."""
    tokens = torch.tensor(rows)
    mask = torch.ones(tokens.shape)
    mask[:, 0] = 0
    return {
        "tokens": tokens,
        "attention_mask": torch.ones_like(tokens),
        "loss_mask": mask,
        "rollout_log_probs": mask * old,
        "rewards": torch.tensor(rewards),
        "group_ids": torch.tensor(groups),
    }


def test_advantages_by_hand() -> None:
    # group 7: 1, 3 -> mean 2, std (n in the denominator) 1; group 2: all equal -> 0; members need not be neighbours
    got = grpo.group_advantages(torch.tensor([1.0, 0.5, 3.0, 0.5]), torch.tensor([7, 2, 7, 2]))
    assert got.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-5)


def test_equal_rewards_give_exact_zeros_and_a_lone_sample_too() -> None:
    got = grpo.group_advantages(torch.tensor([0.1, 0.1, 0.1, 5.0]), torch.tensor([1, 1, 1, 2]))
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_advantages_agree_with_the_store() -> None:
    rewards, ids = torch.rand(40), torch.arange(40) % 5
    assert torch.allclose(
        grpo.group_advantages(rewards, ids), torch.from_numpy(advantages(rewards.numpy(), ids.numpy())), atol=1e-4
    )


def test_log_probs_and_entropy_by_hand() -> None:
    model = Unigram([math.log(0.5), math.log(0.25), math.log(0.25)])
    log_probs, entropy = grpo.token_log_probs(model, torch.tensor([[1, 0, 2]]), torch.ones(1, 3, dtype=torch.int64))
    assert log_probs[0].tolist() == pytest.approx([0, math.log(0.5), math.log(0.25)])
    assert entropy[0].tolist() == pytest.approx([0, 1.5 * math.log(2), 1.5 * math.log(2)])


def test_temperature_is_applied_before_the_softmax() -> None:
    model = Unigram([0.0, 2.0])
    got, _ = grpo.token_log_probs(model, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.int64), temperature=2.0)
    assert got[0, 1].item() == pytest.approx(1 - math.log(1 + math.e))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (2.0, 1.0, -1.28, True),  # already far more likely: stops pulling
        (0.5, 1.0, -0.5, False),  # good but now unlikely: pulls on
        (0.5, -1.0, 0.8, True),  # already far less likely: stops pushing
        (2.0, -1.0, 2.0, False),  # bad and more likely: pushes
        (9.0, -1.0, 3.0, True),  # bad, and a stale log-prob makes the ratio huge: dual clip
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    new, old, mask = torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.ones(1, 1)
    got, was_clipped = grpo.policy_loss(new, old, torch.tensor([advantage]), mask, GrpoConfig())
    assert got.item() == pytest.approx(loss)
    assert bool(was_clipped) is clipped


def test_a_clipped_token_has_no_gradient() -> None:
    new = torch.tensor([[math.log(9.0), 0.0]], requires_grad=True)
    losses, _ = grpo.policy_loss(new, torch.zeros(1, 2), torch.tensor([-1.0]), torch.ones(1, 2), GrpoConfig())
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad[0, 0] == 0
    assert new.grad[0, 1] == pytest.approx(1.0)


def test_masked_tokens_cannot_poison_the_batch() -> None:
    new, mask = torch.tensor([[500.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 1.0]])
    losses, clipped = grpo.policy_loss(new, torch.zeros(1, 2), torch.tensor([1.0]), mask, GrpoConfig())
    losses.sum().backward()
    assert new.grad is not None
    assert losses[0, 0] == 0 and not bool(clipped[0, 0])
    assert torch.isfinite(new.grad).all() and new.grad[0, 0] == 0


def test_kl_estimate_by_hand() -> None:
    got = grpo.kl_estimate(torch.tensor([[math.log(2.0), 3.0]]), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    assert got[0].tolist() == pytest.approx([1 - math.log(2), 0])


def test_a_step_makes_rewarded_tokens_likelier_and_punished_ones_rarer() -> None:
    model = Unigram([0.0, 0.0, 0.0, 0.0])
    tensors = batch([[0, 1, 1], [0, 2, 2]], [1.0, 0.0], [1, 1], math.log(0.25))
    metrics = grpo.train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), tensors)
    prompt, good, bad, absent = model.logits.tolist()
    assert good > absent == prompt > bad
    assert metrics["reward"] == 0.5 and metrics["trained_tokens"] == 4 and metrics["useless_samples"] == 0
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)


def test_the_entropy_bonus_flattens_the_distribution() -> None:
    spread = []
    for bonus in (0.0, 1.0):
        model = Unigram([2.0, 0.0, 0.0])
        tensors = batch([[0, 1, 1], [0, 2, 2]], [1.0, 1.0], [1, 1], math.log(0.1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        grpo.train_step(model, optimizer, tensors, GrpoConfig(entropy_bonus=bonus))
        spread.append(float(model.logits.detach().max() - model.logits.detach().min()))
    assert spread[0] == pytest.approx(2.0)
    assert spread[1] < 1.9


def test_a_group_without_differences_changes_nothing() -> None:
    model = Unigram([0.3, 0.1, 0.2])
    tensors = batch([[0, 1, 1], [0, 2, 2]], [1.0, 1.0], [1, 1], math.log(0.25))
    metrics = grpo.train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), tensors)
    assert model.logits.tolist() == pytest.approx([0.3, 0.1, 0.2])
    assert metrics["useless_samples"] == 1


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    rows, rewards, groups = [[0, 1, 1, 2], [0, 2, 1, 2], [0, 1, 0, 0], [0, 2, 2, 2]], [1.0, 0.0, 0.2, 0.9], [1, 1, 2, 2]
    results = []
    for size in (0, 1, 3):
        model = Unigram([0.3, 0.1, 0.2])
        tensors = batch(rows, rewards, groups, math.log(0.3))
        tensors["attention_mask"][2, 3] = 0
        tensors["loss_mask"][2, 3] = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        metrics = grpo.train_step(model, optimizer, tensors, GrpoConfig(micro_batch=size))
        results.append([*model.logits.tolist(), metrics["loss"], metrics["entropy"]])
    assert results[1] == pytest.approx(results[0], abs=1e-6)
    assert results[2] == pytest.approx(results[0], abs=1e-6)


def test_what_cannot_be_trained_is_refused_before_the_weights_change() -> None:
    model = Unigram([0.3, 0.1, 0.2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tensors = batch([[0, 1, 1], [0, 2, 2]], [1.0, 0.0], [1, 1], math.log(0.25))
    with pytest.raises(ValueError, match="nothing to learn"):
        grpo.train_step(model, optimizer, {**tensors, "loss_mask": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="weights are unchanged"):
        grpo.train_step(model, optimizer, {**tensors, "rollout_log_probs": torch.full((2, 3), math.nan)})
    assert model.logits.tolist() == pytest.approx([0.3, 0.1, 0.2])


def test_reward_rise_by_hand() -> None:
    # fifths of two: (0, 2) and (4, 8); unbiased variances 2 and 8; error sqrt(2/2 + 8/2)
    first, last, error = grpo.reward_rise([0, 2, 1, 1, 1, 1, 1, 1, 4, 8])
    assert (first, last, error) == pytest.approx((1, 6, math.sqrt(5)))
    with pytest.raises(ValueError, match="too few"):
        grpo.reward_rise([1.0] * 9)


def test_staleness_counts_trained_tokens_with_a_known_version() -> None:
    versions = torch.tensor([[-1, 3, 4], [-1, 4, 4], [-1, -1, 1]])
    mask = torch.tensor([[0.0, 1, 1], [0.0, 1, 1], [0.0, 1, 0]])
    assert grpo.staleness(versions, mask, 5) == pytest.approx({"mean": 1.25, "max": 2, "mixed": 1 / 3})
    nothing = grpo.staleness(versions, torch.zeros(3, 3), 5)
    assert math.isnan(nothing["mean"]) and nothing["max"] == -1
