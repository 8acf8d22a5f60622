"""Choosing tokens from logits, one independent choice per row, with the log-probs that training needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position of the token in its sequence) alone.

    Because nothing else enters, a row's choice can't depend on its batch mates, and a request that is resumed with
    the tokens it already has goes on exactly as it would have without the interruption.
    """
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 16) / float(1 << 48)


@dataclass(frozen=True)
class Choice:
    """How to choose one row's token. `draw` is uniform in [0, 1); `forbidden` ids can't be chosen."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    draw: float
    forbidden: tuple[int, ...] = ()
    top_logprobs: int = 0

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass
class Picked:
    """The token of each row, its log-prob, and (where asked) the likeliest alternatives as (log-prob, id)."""

    tokens: list[int]
    logprobs: list[float]
    top: dict[int, list[tuple[float, int]]] = field(default_factory=dict)


def pick(logits: torch.Tensor, choices: Sequence[Choice]) -> Picked:
    """Choose a token for each row of `logits` (float [rows, vocabulary]).

    The reported log-prob is log_softmax(logits / temperature) at the token, before top-k, top-p, min-p and
    `forbidden` remove anything; greedy rows use temperature 1. Rows of NaN give token 0 with a NaN log-prob.
    """
    scale = [1.0 if choice.greedy else choice.temperature for choice in choices]
    logits = logits.float()
    if any(value != 1.0 for value in scale):
        logits = logits / torch.tensor(scale, dtype=torch.float32).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.empty(len(choices), dtype=torch.long)
    candidates = _without_forbidden(logprobs, choices)
    greedy = [row for row, choice in enumerate(choices) if choice.greedy]
    plain = [row for row, choice in enumerate(choices) if not choice.greedy and not choice.filters]
    filtered = [row for row, choice in enumerate(choices) if not choice.greedy and choice.filters]
    if greedy:
        tokens[greedy] = candidates[greedy].argmax(dim=-1)
    if plain:
        tokens[plain] = _invert(candidates[plain].exp(), [choices[row].draw for row in plain])
    if filtered:
        tokens[filtered] = _pick_filtered(candidates[filtered], [choices[row] for row in filtered])
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    picked = Picked(tokens.tolist(), chosen.tolist())
    for row, choice in enumerate(choices):
        if choice.top_logprobs:
            values, ids = logprobs[row].topk(min(choice.top_logprobs, logprobs.shape[1]))
            picked.top[row] = list(zip(values.tolist(), ids.tolist(), strict=True))
    return picked


def _without_forbidden(logprobs: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    if not any(choice.forbidden for choice in choices):
        return logprobs
    masked = logprobs.clone()
    for row, choice in enumerate(choices):
        if choice.forbidden:
            masked[row, list(choice.forbidden)] = -torch.inf
    return masked


def _invert(weights: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
    """Index where the cumulated weights (any positive scale, [rows, n]) pass draw x total; [rows] int64."""
    cumulated = weights.double().cumsum(dim=-1)
    target = torch.tensor(draws, dtype=torch.float64).unsqueeze(1) * cumulated[:, -1:]
    # The first index whose sum exceeds the target has a weight above zero, so a removed token is never chosen.
    index = torch.searchsorted(cumulated, target, right=True).squeeze(1)
    index = index.clamp_(max=weights.shape[-1] - 1)
    # NaN weights (a damaged checkpoint) compare false everywhere; token 0 keeps the id valid and its log-prob is NaN.
    return torch.where(cumulated[:, -1].isnan(), torch.zeros_like(index), index)


def _pick_filtered(logprobs: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    probs, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    size = probs.shape[-1]
    top_k = torch.tensor([choice.top_k if choice.top_k > 0 else size for choice in choices]).unsqueeze(1)
    top_p = torch.tensor([choice.top_p for choice in choices], dtype=torch.float64).unsqueeze(1)
    min_p = torch.tensor([choice.min_p for choice in choices], dtype=torch.float64).unsqueeze(1)
    weights = probs.double()
    removed = torch.arange(size).unsqueeze(0) >= top_k
    removed |= (weights.cumsum(dim=-1) - weights) > top_p
    removed |= weights < weights[:, :1] * min_p
    weights = weights.masked_fill(removed, 0.0)
    index = _invert(weights, [choice.draw for choice in choices])
    return order.gather(1, index.unsqueeze(1)).squeeze(1)
