"""Is a checkpoint complete? A scheduler that loads a truncated file dies, and its server with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samplestore.errors import SampleStoreError

MAX_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"


def require_complete(path: Path) -> int:
    """Raises SampleStoreError where a model folder lacks config.json or weights, or a weights file is shorter than its
    header says. Returns the bytes of its weights."""
    if not path.is_dir():
        raise _incomplete(path, "it is no folder on this machine")
    if not isinstance(_json(path, path / "config.json"), dict):
        raise _incomplete(path, "config.json is no JSON object")
    files = set(path.glob("*.safetensors"))
    if (path / INDEX).exists():
        index = _json(path, path / INDEX)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise _incomplete(path, f"{INDEX} names no files")
        files = {path / name for name in shards.values()}
    if not files:
        raise _incomplete(path, "it has no *.safetensors")
    return sum(_whole(path, file) for file in sorted(files))


def _whole(path: Path, file: Path) -> int:
    """The size of a safetensors file: 8 bytes of header length, the header, and tensors up to the last offset."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise _incomplete(path, f"{file.name} has no header: {size} bytes")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise _incomplete(path, f"{file.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _incomplete(path, f"{file.name} has a broken header") from error
    tensors = [t for name, t in header.items() if name != "__metadata__"] if isinstance(header, dict) else [None]
    ends = [end for tensor in tensors if (end := _end(tensor)) is not None]
    if len(ends) < len(tensors):
        raise _incomplete(path, f"{file.name} has a broken header")
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise _incomplete(path, f"{file.name} has {size:,} of {needed:,} bytes")
    return size


def _end(tensor: Any) -> int | None:
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(n, int) for n in offsets):
        return int(offsets[1])
    return None


def _json(path: Path, file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise _incomplete(path, f"{file.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _incomplete(path, f"{file.name} is not JSON") from error


def _incomplete(path: Path, why: str) -> SampleStoreError:
    return SampleStoreError(
        f"{path} is no complete checkpoint: {why}. An engine that loads it may die; write it whole, under another "
        f"name, and rename it. Look at it with: ls -l {path}"
    )
