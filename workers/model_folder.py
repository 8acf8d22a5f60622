"""What a model folder's JSON files tell, where an engine's path exists on this machine too."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from samplestore.workers.replies import MAX_COUNT

MAX_CONFIG_BYTES = 2**20
SIZES = ("hidden_size", "num_hidden_layers")  # tell models of one family apart


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """stop_ids: end tokens, as an engine takes them: those of config.json and of generation_config.json. image_token:
    what stands for an image in a prompt. sizes: of SIZES. None, or empty, where it can't be read."""

    vocab_size: int | None = None
    stop_ids: frozenset[int] = frozenset()
    image_token: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)


def read(path: str) -> ModelFolder:
    config = _parts_of(path, "config.json")
    return ModelFolder(
        vocab_size=_first(config, "vocab_size") or None,
        stop_ids=_stop_ids([*config, *_parts_of(path, "generation_config.json")]),
        image_token=_first(config, "image_token_id", "image_token_index"),  # by the families' names
        sizes={name: size for name in SIZES if (size := _first(config, name)) is not None},
    )


def count(value: Any) -> int | None:
    """A whole number that fits the database's columns; None for anything else."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < MAX_COUNT else None


def _stop_ids(parts: list[dict[str, Any]]) -> frozenset[int]:
    told = [part.get("eos_token_id") for part in parts]
    listed = [id for one in told for id in (one if isinstance(one, list) else [one])]
    return frozenset(id for id in map(count, listed) if id is not None)


def _first(parts: list[dict[str, Any]], *names: str) -> int | None:
    found = (count(part.get(name)) for part in parts for name in names)
    return next((value for value in found if value is not None), None)


def _parts_of(path: str, name: str) -> list[dict[str, Any]]:
    """A JSON object of a model folder, and the language model's part of it."""
    try:
        with open(os.path.join(path, name), "rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    return [part for part in parts if isinstance(part, dict)]
