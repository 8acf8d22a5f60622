"""The log-probs that an engine has to report, by a plain forward pass over everything."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 1e-3  # float32, other kernels and batch shapes


@functools.cache
def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def expected(folder: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of each output token under the weights in `folder`, given the prompt and the tokens before it."""
    with torch.inference_mode():
        logits = _load(folder)(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0].double()
    told = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
    return [told[place, token].item() for place, token in enumerate(output)]
