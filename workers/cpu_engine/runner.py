"""The model and its key/value rows: prefill, one decoding step for all rows, and the swap to new weights.

Everything here blocks and is called from one thread at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from .checkpoint import Shapes, model_limits, parameter_shapes
from .kvcache import RowCache
from .sampler import Choice, Picked, pick

PREFILL_CHUNK = 512
_KV_BUDGET_BYTES = 2 << 30


class ModelRunner:
    """Runs one causal LM for up to `max_running` rows of at most `context_length` tokens."""

    def __init__(
        self, model: Any, *, max_running: int, context_length: int | None, max_total_tokens: int | None
    ) -> None:
        self.vocab_size, longest, self.layers = model_limits(model)
        if context_length is not None and context_length > longest:
            raise ValueError(f"the context length can be at most {longest} for this model, got {context_length}")
        self.context_length = context_length or longest
        self.max_running = max_running
        self.max_total_tokens = max_total_tokens or self._affordable_tokens(model)
        self.shapes: Shapes = parameter_shapes(model)
        self.cache = RowCache(self.layers)
        self._use(model)

    def _affordable_tokens(self, model: Any) -> int:
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = int(2 * self.layers * heads * width * model.dtype.itemsize)
        affordable = _KV_BUDGET_BYTES // max(per_token, 1)
        return max(self.context_length, min(affordable, self.max_running * self.context_length))

    def _use(self, model: Any) -> None:
        self.model = model
        names = inspect.signature(model.forward).parameters
        # transformers renamed this argument in the course of its fifth major version.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._hidden = torch.finfo(model.dtype).min

    def swap(self, model: Any) -> None:
        """Serve `model` (same shapes) from now on; rows must be prefilled again before they go on."""
        self._use(model)

    def prefill(
        self, row: int, tokens: Sequence[int], choice: Choice | None, score_from: int | None = None
    ) -> tuple[Picked | None, list[float], list[list[tuple[float, int]]]]:
        """Fill `row` with `tokens`; returns (picked next token or None, prompt log-probs, prompt alternatives).

        Without `choice` nothing is picked. `score_from` k asks for the temperature-1 log-probs of tokens k+1, k+2, ...
        given all before them (`choice.top_logprobs` alternatives each).
        """
        with torch.inference_mode():
            self.cache.ensure(max(row + 1, self._rows_to_reserve(row)), len(tokens) + 1, self.context_length)
            picked: Picked | None = None
            scores: list[float] = []
            top: list[list[tuple[float, int]]] = []
            for start in range(0, len(tokens), PREFILL_CHUNK):
                end = min(start + PREFILL_CHUNK, len(tokens))
                scored = score_from is not None and end > score_from
                keep = 0 if scored else 1
                logits = self._forward_chunk(row, tokens[start:end], start, end, keep)
                if scored:
                    assert score_from is not None
                    width = choice.top_logprobs if choice else 0
                    self._score(logits, tokens, start, end, max(score_from, start), width, scores, top)
                if end == len(tokens) and choice is not None:
                    picked = pick(logits[-1:], [choice])
            return picked, scores, top

    def _rows_to_reserve(self, row: int) -> int:
        # Rows double, so a filling batch doesn't copy the whole memory once per request.
        return min(self.max_running, max(1, 1 << (row + 1 - 1).bit_length()))

    def _forward_chunk(self, row: int, tokens: Sequence[int], start: int, end: int, keep: int) -> torch.Tensor:
        positions = torch.arange(start, end)
        hidden = torch.arange(end).unsqueeze(0) > positions.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype).masked_fill_(hidden, self._hidden)
        self.cache.one_row(row, start, end)
        return self._forward(torch.tensor(tokens).unsqueeze(0), positions.unsqueeze(0), mask[None, None], keep)[0]

    @staticmethod
    def _score(
        logits: torch.Tensor,
        tokens: Sequence[int],
        start: int,
        end: int,
        first: int,
        width: int,
        scores: list[float],
        top: list[list[tuple[float, int]]],
    ) -> None:
        targets = torch.tensor(tokens[first + 1 : end + 1])
        if not len(targets):
            return
        logprobs = torch.log_softmax(logits[first - start : first - start + len(targets)].float(), dim=-1)
        scores.extend(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist())
        if width:
            values, ids = logprobs.topk(min(width, logprobs.shape[1]), dim=-1)
            pairs = zip(values.tolist(), ids.tolist(), strict=True)
            top.extend(list(zip(value, index, strict=True)) for value, index in pairs)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], choices: Sequence[Choice]) -> Picked:
        """One step of rows 0..n-1: feed `tokens[i]` at `positions[i]` of row i and pick each row's next token."""
        with torch.inference_mode():
            longest = max(positions) + 1
            self.cache.ensure(len(tokens), longest, self.context_length)
            at = torch.tensor(positions)
            hidden = torch.arange(longest).unsqueeze(0) > at.unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype).masked_fill_(hidden, self._hidden)
            self.cache.all_rows(at, longest)
            logits = self._forward(torch.tensor(tokens).unsqueeze(1), at.unsqueeze(1), mask[:, None, None], 1)
            return pick(logits[:, -1], choices)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        arguments = {self._cache_name: self.cache}
        logits = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=keep, **arguments
        ).logits
        assert isinstance(logits, torch.Tensor)
        return logits
