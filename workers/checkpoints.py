"""Is a checkpoint complete, and does it fit the model that an engine serves? A scheduler that loads a truncated file,
or a tensor of another shape, dies, and its server with it. What else does not fit it loads without a word."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from samplestore.errors import SampleStoreError
from samplestore.words import amount

log = logging.getLogger("samplestore.fleet")

MAX_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # engines turn one into the other


class Tensor(NamedTuple):
    """What a header tells: dtype as safetensors names it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


def require_loadable(path: str, served: str | None) -> None:
    """Look at a checkpoint before an engine is told of it, as far as it can be seen from this machine: whether it is
    complete, and whether its tensors are those of the folder that the engine serves now. Raises SampleStoreError."""
    missing = held_against(path, served)
    if missing:
        log.warning(
            "%s lacks %s of %s (%s): engines keep the values that they have",
            path, amount(len(missing), "tensor"), served, missing[0],
        )  # fmt: skip


def held_against(path: str, served: str | None) -> list[str] | None:
    """The names that a checkpoint lacks of the folder that an engine serves now. None: that it fits can't be seen from
    this machine. Raises SampleStoreError where it can be seen not to fit, or not to be complete."""
    if not os.path.isdir(path):  # Path.is_dir raises where a folder above may not be read
        return None
    new = tensors(Path(path))
    if served is None or os.path.realpath(served) == os.path.realpath(path) or not os.path.isdir(served):
        return None
    try:
        old = tensors(Path(served))
    except SampleStoreError:
        return None  # pruned meanwhile, or of another format
    return require_fits(path, new, served, old)


def require_fits(path: str, new: dict[str, Tensor], served: str, old: dict[str, Tensor]) -> list[str]:
    """Raises SampleStoreError for a tensor of another shape, one that is quantised where the other is not, and for a
    checkpoint that shares no name with the one served: an engine would die of the first, and keep or spoil its old
    weights under the new label with the others. Returns the names that the new one lacks."""
    common = sorted(new.keys() & old.keys())
    if not common and old:
        raise _unfit(path, served, f"none of its tensors ({min(new, default='none')}) has a name of that one's")
    for name in common:
        kinds = {new[name].dtype, old[name].dtype}
        if new[name].shape != old[name].shape or (len(kinds) > 1 and not kinds <= FLOATS):
            raise _unfit(path, served, f"{name} is {new[name]}, and there {old[name]}")
    return sorted(old.keys() - new.keys())


def _unfit(path: str, served: str, why: str) -> SampleStoreError:
    return SampleStoreError(
        f"{path} does not fit the model that is served, {served}: {why}. No engine was told. Publish weights of the "
        "same model: run.publish_weights(PATH)"
    )


def require_complete(path: Path) -> int:
    """Raises SampleStoreError where a model folder lacks config.json or weights, or a weights file is shorter than its
    header says. Returns the bytes of its weights."""
    return sum(size for size, _ in _files(path))


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a model folder, by name, as its headers tell. Raises SampleStoreError where it is not complete."""
    return {name: tensor for _, told in _files(path) for name, tensor in told.items()}


def _files(path: Path) -> list[tuple[int, dict[str, Tensor]]]:
    """Of each weights file its size and tensors. Raises SampleStoreError."""
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
    return [_whole(path, file) for file in sorted(files)]


def _whole(path: Path, file: Path) -> tuple[int, dict[str, Tensor]]:
    """A safetensors file: 8 bytes of header length, the header, and tensors up to the last offset."""
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
    told = {name: t for name, t in header.items() if name != "__metadata__"} if isinstance(header, dict) else {"": None}
    entries = {name: entry for name, t in told.items() if (entry := _entry(t)) is not None}
    if len(entries) < len(told):
        raise _incomplete(path, f"{file.name} has a broken header")
    needed = 8 + length + max((end for end, _ in entries.values()), default=0)
    if size < needed:
        raise _incomplete(path, f"{file.name} has {size:,} of {needed:,} bytes")
    return size, {name: tensor for name, (_, tensor) in entries.items()}


def _entry(told: Any) -> tuple[int, Tensor] | None:
    """Where a tensor's bytes end, and what it is; None where its entry is broken."""
    if not isinstance(told, dict):
        return None
    offsets, shape = (_whole_numbers(told.get(key)) for key in ("data_offsets", "shape"))
    if offsets is None or shape is None or len(offsets) != 2:
        return None
    return offsets[1], Tensor(str(told.get("dtype")), shape)


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(isinstance(n, int) for n in value) else None


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
