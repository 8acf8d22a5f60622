"""slime's debug rollout files: torch.save of {"rollout_id": N, "samples": [Sample.to_dict(), ...]}.

Written so that slime's --load-debug-rollout-data reads them. A file that is read is somebody else's pickle: it is taken
apart by torch's own restricted unpickler, which makes tensors and plain values; here numpy's numbers and arrays of
numbers too, and nothing else. What else it asks for is named, and refused.
"""

from __future__ import annotations

import re
import string
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from samplestore import codec
from samplestore.errors import InvalidSetting, MissingExtra, SampleStoreError
from samplestore.promptfiles import show

MAX_PICKLE = 1 << 30  # bytes of the file's pickled part; the numbers of tensors lie beside it
MAX_TENSORS = 64 << 30
MAX_MEMBERS = 100_000
FIELD = "rollout_id"
_CLASS = re.compile(r"(?:GLOBAL|class|function) <?(?:class )?'?([\w.]+)")  # in what torch says of a refusal
_DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64".split()


class SlimeFileError(SampleStoreError):
    """A debug rollout file that is not read. Nothing of it was stored."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            f"{path}: {reason}. Nothing of it was stored. Write it again with slime's --save-debug-rollout-data, and "
            "then: samplestore import FILE --run NAME"
        )


def torch_module() -> Any:
    """Raises MissingExtra."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("slime's .pt files", "trainer") from error
    return torch


def path_of(template: str, rollout_id: int) -> Path:
    """The file of a step by slime's template, such as "dump/rollout_{rollout_id}.pt". Raises InvalidSetting."""
    names = []
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if names == [FIELD]:
            return Path(template.format(rollout_id=rollout_id))
    except (ValueError, KeyError, IndexError):
        pass
    raise InvalidSetting("to", template, "a path with {rollout_id} in it, such as dump/rollout_{rollout_id}.pt")


def write(path: Path, rollout_id: int, samples: Iterable[dict[str, Any]]) -> int:
    """Write one file; how many samples. A step is held in memory, as slime holds it."""
    torch = torch_module()
    listed = list(samples)
    for sample in listed:
        if (experts := sample.get("rollout_routed_experts")) is not None and not isinstance(experts, torch.Tensor):
            sample["rollout_routed_experts"] = torch.from_numpy(experts.copy())
    torch.save({FIELD: rollout_id, "samples": listed}, path)
    return len(listed)


def is_one(path: Path) -> bool:
    """Whether it looks like a file of torch.save, of new ones (zip) or old ones (a bare pickle)."""
    with path.open("rb") as file:
        head = file.read(4)
    return (
        head == b"PK\x03\x04" or head[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05") or path.suffix in (".pt", ".pth")
    )


def is_ours(path: Path) -> bool:
    """Whether `write` made it: a rollout with what the store says of its samples. Nothing of it is unpickled."""
    try:
        with zipfile.ZipFile(path) as file:
            (pickled,) = (m for m in file.infolist() if m.filename.endswith("data.pkl"))
            if pickled.file_size > MAX_PICKLE or pickled.compress_type != zipfile.ZIP_STORED:
                return False
            said = file.read(pickled)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False
    return FIELD.encode() in said and (b"samplestore" in said or b"tokens" not in said)


def read(path: Path) -> tuple[int, list[Mapping[str, Any]]]:
    """(rollout_id, samples) of a file. Raises SlimeFileError, MissingExtra."""
    _bounded(path)
    said = _load(path)
    if not isinstance(said, Mapping) or not {FIELD, "samples"} <= said.keys():
        raise SlimeFileError(str(path), "is no debug rollout: it has not the keys rollout_id and samples")
    number, samples = said[FIELD], said["samples"]
    if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) <= 10:
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
        raise SlimeFileError(str(path), f"rollout_id: must be a whole number from 0 (got {show(number)})")
    if not isinstance(samples, list) or not all(isinstance(s, Mapping) for s in samples):
        raise SlimeFileError(str(path), "samples: must be a list of Sample.to_dict()")
    return number, samples


def _bounded(path: Path) -> None:
    """Refuse what unpacks to more than a rollout has: the sizes stand in the file, and zip's reader holds to them."""
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
    except FileNotFoundError as error:
        raise SlimeFileError(str(path), "no such file") from error
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise SlimeFileError(str(path), f"is no whole file of torch.save: {error}") from error
    pickles = sum(m.file_size for m in members if m.filename.endswith(".pkl"))
    total = sum(m.file_size for m in members)
    if len(members) > MAX_MEMBERS or pickles > MAX_PICKLE or total > MAX_TENSORS:
        raise SlimeFileError(
            str(path), f"is too large: {len(members):,} members, {pickles:,} bytes pickled, {total:,} bytes in all"
        )
    if any(m.compress_type != zipfile.ZIP_STORED for m in members):  # torch never compresses: this is a bomb
        raise SlimeFileError(str(path), "has compressed members, which torch.save does not write")


def _allowed() -> list[Any]:
    """What numpy's pickles of numbers call, by its names of today and of before."""
    import _codecs

    import numpy as np
    from numpy._core import multiarray

    made: list[Any] = [np.ndarray, np.dtype, _codecs.encode, *(type(np.dtype(name)) for name in _DTYPES)]
    for name in ("_reconstruct", "scalar"):
        made += [getattr(multiarray, name), (getattr(multiarray, name), f"numpy.core.multiarray.{name}")]
    return made


def _load(path: Path) -> Any:
    import pickle

    torch = torch_module()
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _CLASS.search(str(error))
        name = codec.clean_text(found[1], 200) if found else None
        why = f"asks for {name}, and only numbers, text and tensors are read" if name else "its pickle is damaged"
        raise SlimeFileError(str(path), why) from error
    except RecursionError as error:
        raise SlimeFileError(str(path), "is nested too deeply") from error
    except (RuntimeError, MemoryError, EOFError, LookupError, ValueError, TypeError, AttributeError, OSError) as error:
        # what torch and numpy raise of bytes that are cut or turned: none of it is ours
        first = str(error).partition("\n")[0][:200] or type(error).__name__
        raise SlimeFileError(str(path), f"is damaged: {first}") from error


def numbered(template: str) -> Iterator[tuple[int, Path]]:
    """(rollout_id, file) of the files that a template names, by number."""
    folder, name = Path(template).parent, re.escape(Path(template).name)
    pattern = re.compile(name.replace(re.escape("{rollout_id}"), r"(\d{1,9})"))
    found = [(int(m[1]), p) for p in folder.glob("*") if (m := pattern.fullmatch(p.name))]
    yield from sorted(found)
