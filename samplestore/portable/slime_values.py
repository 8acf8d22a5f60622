"""Values of slime's samples that no column has: kept as JSON and given back, arrays and tensors by dtype and bytes."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from samplestore import codec
from samplestore.errors import InvalidSegment
from samplestore.rowvalues import MAX_DEPTH, MAX_ROW_BYTES, BadValue, plain

ARRAY = "samplestore.array"  # {ARRAY: dtype, "shape", "base64", "torch"} stands for an array, or a tensor
MAX_PARTS = 2_000_000  # of one sample: lists, objects, and KiB of arrays


def count(value: Any, left: int = MAX_PARTS, depth: int = 0) -> int:
    """How many parts more there may be. Raises BadValue: a few bytes of a pickle can be a tree without end, since what
    is in it twice stands there once, and a tensor of any size, since a stride may be 0."""
    if isinstance(value, Mapping | list | tuple):
        inner = list(value.values()) if isinstance(value, Mapping) else value
        left -= 1
        if depth <= MAX_DEPTH and left >= 0 and not set(map(type, inner)) <= {int, float, str, bool, type(None)}:
            for one in inner:
                left = count(one, left, depth + 1)
    else:
        left -= getattr(value, "nbytes", 0) >> 10
    if depth > MAX_DEPTH or left < 0:
        raise BadValue(f"has more than {MAX_PARTS:,} lists and KiB of arrays, or more than {MAX_DEPTH} levels")
    return left


def as_numpy(value: Any, key: str) -> Any:
    """Tensors as numpy arrays, numpy's numbers as Python's; everything else as it is. Raises BadValue with the key."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or not hasattr(value, "detach"):
        return value
    try:
        return value.detach().cpu().numpy()
    except TypeError as error:  # bfloat16 and the like
        raise BadValue(f"is a tensor that numpy does not know: {error}", field=key) from error


def kept(value: Any, key: str) -> Any:
    """A value as JSON holds it; arrays and tensors with dtype and bytes. Raises BadValue."""
    array = as_numpy(value, key)
    if isinstance(array, np.ndarray):
        try:
            dtype, shape, data = codec.encode_array(array)
        except InvalidSegment as error:
            raise BadValue(error.reason, field=key) from error
        torch = array is not value
        return {ARRAY: dtype, "shape": shape, "base64": base64.b64encode(data).decode(), "torch": torch}
    if isinstance(value, Mapping):
        return {str(k): kept(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > 64 and not any(isinstance(v, Mapping | list | tuple) or hasattr(v, "dtype") for v in value):
            return _checked(list(value), key)
        return [kept(v, f"{key}[{i}]") for i, v in enumerate(value)]
    return _checked(value, key)


def _checked(value: Any, key: str) -> Any:
    try:
        return plain(value, MAX_ROW_BYTES)
    except BadValue as error:
        raise error.inside(key) from None


def back(value: Any, torch: Any) -> Any:
    """What `kept` was given. An object that only looks like an array of ours stays an object."""
    if isinstance(value, Mapping):
        if ARRAY in value:
            try:
                data = base64.b64decode(value["base64"])
                array = codec.decode_array(value[ARRAY], list(value["shape"]), data).copy()
            except (KeyError, TypeError, ValueError):
                return dict(value)
            return torch.from_numpy(array) if torch is not None and value.get("torch") else array
        return {k: back(v, torch) for k, v in value.items()}
    return [back(v, torch) for v in value] if isinstance(value, list) else value


def equal(a: Any, b: Any) -> bool:
    """Whether two fields are the same to whoever reads them: 1 is no True, and a list no array."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    try:
        return type(a) is type(b) and bool(a == b)
    except (ValueError, RuntimeError):  # arrays or tensors somewhere within
        return False
