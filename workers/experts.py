"""Routed experts: which experts of a mixture-of-experts model each token went through, as engines return it.

SGLang's `routed_experts` is the base64 of little-endian int32, in C order [rows, layers, top_k]. Row r belongs to the
r-th token of the sequence: prompt and response without its last token, which was never an input. Neither layers nor
top_k are in the answer, so they are read from the model's config.json.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.words import amount
from samplestore.workers.replies import EngineError

# Names by model family: experts that a router chooses from, chosen ones, layers that have no router.
N_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    layers: int
    top_k: int
    n_experts: int


def shape_of(folder: Path) -> ExpertShape | None:
    """The shape that a model folder's config.json tells; None where it has no experts or can't be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    found = [_first(config, N_EXPERTS), _first(config, TOP_K), _first(config, ("num_hidden_layers",))]
    if None in found:
        return None
    n_experts, top_k, layers = (int(v or 0) for v in found)
    return ExpertShape(layers, top_k, n_experts)


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    values = (config.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 2**16), None)


def decode(data: str, shape: ExpertShape, rows: int) -> npt.NDArray[np.int32]:
    """The last `rows` rows of an answer: int32 [rows, layers, top_k]. Raises EngineError("broken")."""
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError("broken", f"routed_experts is no base64: {error}") from None
    width = 4 * shape.layers * shape.top_k
    if len(raw) % width or len(raw) < rows * width:
        raise EngineError(
            "broken",
            f"routed_experts has {amount(len(raw), 'byte')}, expected {amount(rows, 'row')} or more of "
            f"{amount(shape.layers, 'layer')} x top {shape.top_k} in int32",
        )
    table = np.frombuffer(raw, dtype="<i4").reshape(-1, shape.layers, shape.top_k)
    part = table[len(table) - rows :]
    if part.size and not 0 <= int(part.min()) <= int(part.max()) < shape.n_experts:
        raise EngineError(
            "broken", f"routed_experts has {part.min()} to {part.max()}, the model has 0 to {shape.n_experts - 1}"
        )
    return part
