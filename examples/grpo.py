"""GRPO on samples that several weight versions wrote. Pure functions on torch tensors, written to be read.

Names used throughout: B samples in a batch, L positions (prompt and response, padded), T trained tokens.

    pi_new   the weights being trained
    pi_old   the weights that wrote a token, whichever version that was: its log-prob was stored with the token
    A        the advantage of a sample, the same for all its tokens

A sample that was interrupted by a weight update and resumed was written by more than one pi_old. That needs no special
case here: every token carries the log-prob under the weights that wrote it.

Papers:
    GRPO       Shao et al. 2024, DeepSeekMath, arXiv:2402.03300
    PPO clip   Schulman et al. 2017, arXiv:1707.06347
    dual clip  Ye et al. 2020, arXiv:1912.09729
    clip-higher and the token-level mean    Yu et al. 2025, DAPO, arXiv:2503.14476
    k3 estimator of KL    Schulman 2020, "Approximating KL divergence"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """What `train_step` needs to know beyond the tensors.

    clip_low, clip_high   pi_new / pi_old may leave 1 by so much before a token stops pulling further
    dual_clip             bound (above 1) on the ratio of tokens with a negative advantage, see `policy_loss`
    entropy_bonus         weight of the mean entropy that is added to the objective; 0 is off
    max_grad_norm         gradients are scaled down to this length
    epochs                optimizer steps on the same batch
    micro_batch           samples per forward pass (0: all at once); bounds memory, changes nothing else
    temperature           the temperature that the samples were drawn with, so that log-probs are comparable
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    entropy_bonus: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = 1
    micro_batch: int = 0
    temperature: float = 1.0


def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean(r of its group)) / (std(r of its group) + eps)   (GRPO, section 4.1).

    The group is its own baseline, so no value network is needed. std has n in the denominator. A group whose rewards
    are all equal, or of one sample, teaches nothing: its advantages are 0. So is that of a sample whose reward could
    not be had (NaN); its loss_mask is 0, and the others get theirs as if it were not there. What
    `batch.tensors()["advantages"]` holds (NaN there) is computed here so that the algorithm can be read in one place.

    rewards float32 [B], group_ids int64 [B] (any numbers, in any order) -> float32 [B]
    """
    advantages = torch.zeros_like(rewards)
    known = ~rewards.isnan()
    for group in sorted(set(group_ids[known].tolist())):
        members = known & (group_ids == group)
        values = rewards[members]
        centred = values - values.mean()
        if bool((values != values[0]).any()):
            advantages[members] = centred / (values.std(correction=0) + eps)
    return advantages


def token_log_probs(
    model: torch.nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log pi(token_t | tokens before t) and the entropy of that distribution, both float32 [B, L].

    Column t speaks about tokens[:, t]; column 0 is 0, because nothing predicts the first token. Padding may stand on
    either side: positions are counted over attended tokens only, so a padded row gives what it gives alone. The entropy
    has no gradient unless asked for: with a large vocabulary that gradient costs as much memory as the rest.

    tokens int64 [B, L], attention_mask int64 [B, L]
    """
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
    log_probs = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    chosen = log_probs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    first = torch.zeros_like(chosen[:, :1])
    return torch.cat([first, chosen], dim=1), torch.cat([first, entropy], dim=1)


def policy_loss(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, config: GrpoConfig
) -> tuple[Tensor, Tensor]:
    """Clipped importance-ratio loss per token, float32 [B, L] (0 where loss_mask is 0), and which tokens were clipped.

        ratio = pi_new(token) / pi_old(token) = exp(log_probs - rollout_log_probs)
        gain  = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)          PPO, eq. 7
        gain  = max(gain, dual_clip * A)                 where A < 0                  dual clip, eq. 5
        loss  = -gain

    The ratio corrects for pi_old not being pi_new: a stale token counts by how likely it still is. PPO's min leaves one
    side open: a token with A < 0 that pi_new likes far better than a stale pi_old did has an unbounded ratio, and one
    such token would dominate the batch. The dual clip cuts that side, at the price of a little bias.

    log_probs, rollout_log_probs, loss_mask float32 [B, L]; advantages float32 [B]
    """
    # Padding has no rollout log-prob; without the mask its ratio could overflow and inf * 0 is NaN, not 0.
    ratio = torch.exp((log_probs - rollout_log_probs) * loss_mask)
    advantage = advantages.unsqueeze(1)
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage
    gain = torch.minimum(unclipped, clipped)
    gain = torch.where(advantage < 0, torch.maximum(gain, config.dual_clip * advantage), gain)
    was_clipped = (gain != unclipped) & (loss_mask > 0)
    return -gain * loss_mask, was_clipped


def kl_estimate(log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """KL(pi_old || pi_new) per token by the k3 estimator, ratio - 1 - log(ratio): unbiased, never negative. [B, L]"""
    log_ratio = (log_probs - rollout_log_probs) * loss_mask
    return (log_ratio.exp() - 1 - log_ratio) * loss_mask


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    config: GrpoConfig | None = None,
) -> dict[str, float]:
    """`config.epochs` optimizer steps on one batch; returns what is worth plotting.

    tensors: tokens, attention_mask int64 [B, L]; loss_mask, rollout_log_probs float32 [B, L]; rewards float32 [B];
    group_ids int64 [B]: what `batch.tensors(layout="padded")` gives.

    The loss is the mean over all T trained tokens of the batch (DAPO's token-level mean), so a long answer weighs as
    many tokens as it has. Raises ValueError if no token is trained or the loss is not finite; the weights are then
    as before the failing optimizer step.
    """
    config = config or GrpoConfig()
    trained = float(tensors["loss_mask"].sum())
    if trained == 0:
        raise ValueError("no token of this batch has loss_mask 1; there is nothing to learn from")
    advantages = group_advantages(tensors["rewards"], tensors["group_ids"])
    metrics: dict[str, float] = {}
    model.train()
    for _ in range(config.epochs):
        optimizer.zero_grad(set_to_none=True)
        metrics = _accumulate(model, tensors, advantages, trained, config)
        if not math.isfinite(metrics["loss"]):
            raise ValueError(f"the loss is {metrics['loss']}; weights are unchanged. Lower the learning rate")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        metrics["grad_norm"] = float(norm)
    metrics["reward"] = float(tensors["rewards"].nanmean())
    metrics["trained_tokens"] = trained
    metrics["useless_samples"] = float((advantages == 0).float().mean())
    return metrics


def _accumulate(
    model: torch.nn.Module, tensors: Mapping[str, Tensor], advantages: Tensor, trained: float, config: GrpoConfig
) -> dict[str, float]:
    """Gradients of the whole batch, micro-batch by micro-batch, each weighed by the tokens of the whole batch."""
    samples = len(advantages)
    size = config.micro_batch or samples
    sums = dict.fromkeys(("loss", "clipped", "kl", "entropy"), 0.0)
    for start in range(0, samples, size):
        part = slice(start, start + size)
        # Columns that are padding in every row of this part cost a forward pass and teach nothing.
        used = tensors["attention_mask"][part].any(dim=0).nonzero()
        columns = slice(int(used[0]), int(used[-1]) + 1)
        mask, old = tensors["loss_mask"][part, columns], tensors["rollout_log_probs"][part, columns]
        log_probs, entropy = token_log_probs(
            model,
            tensors["tokens"][part, columns],
            tensors["attention_mask"][part, columns],
            config.temperature,
            entropy_gradient=config.entropy_bonus != 0,
        )
        losses, clipped = policy_loss(log_probs, old, advantages[part], mask, config)
        loss = (losses - config.entropy_bonus * entropy * mask).sum() / trained
        loss.backward()  # type: ignore[no-untyped-call]
        sums["loss"] += float(loss.detach())
        sums["clipped"] += float(clipped.sum()) / trained
        sums["kl"] += float(kl_estimate(log_probs.detach(), old, mask).sum()) / trained
        sums["entropy"] += float((entropy.detach() * mask).sum()) / trained
    return sums


def reward_rise(group_means: Sequence[float]) -> tuple[float, float, float]:
    """Did training help? (mean of the first fifth, mean of the last fifth, standard error of their difference).

    `group_means` are the mean rewards of the trained groups in the order of consumption. The unit is the group, not the
    sample: samples of a group share a prompt, so they are not independent and would make the error look too small. The
    error is Welch's, sqrt(var_first / n + var_last / n) with unbiased variances; a trend inside a fifth only enlarges
    it. Raises ValueError with fewer than 10 groups, where a fifth has no variance.
    """
    fifth = len(group_means) // 5
    if fifth < 2:
        raise ValueError(f"{len(group_means)} groups are too few to compare fifths; train on at least 10")
    first, last = list(group_means[:fifth]), list(group_means[-fifth:])
    error = math.sqrt(variance(first) / fifth + variance(last) / fifth)
    return fmean(first), fmean(last), error


def staleness(weight_versions: Tensor, loss_mask: Tensor, current_version: int) -> dict[str, Any]:
    """How old the trained tokens of a batch are, in versions: {"mean": float, "max": int, "mixed": float}.

    mixed is the share of samples whose trained tokens come from more than one version, that is of samples that were
    interrupted and resumed. Numbers for a log line: the store's own measure counts along timelines.

    weight_versions int32 [B, L] (-1: unknown, left out), loss_mask float32 [B, L]
    """
    known = (loss_mask > 0) & (weight_versions >= 0)
    if not bool(known.any()):
        return {"mean": math.nan, "max": -1, "mixed": 0.0}
    ages = (current_version - weight_versions)[known]
    lowest = torch.where(known, weight_versions, torch.iinfo(weight_versions.dtype).max).amin(dim=1)
    highest = torch.where(known, weight_versions, -1).amax(dim=1)
    mixed = (highest > lowest) & known.any(dim=1)
    return {"mean": float(ages.float().mean()), "max": int(ages.max()), "mixed": float(mixed.float().mean())}
