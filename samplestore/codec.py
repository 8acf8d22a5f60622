"""Bytes of the store: segment payloads, token ids, named arrays, and text that both databases can hold.

Payload of a segment: one format byte, then n token ids (int32, little-endian), then n log-probs (float32,
little-endian). Format 1 has log-probs, format 2 has none (environment tokens, imports that lack them).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.errors import InvalidSegment
from samplestore.types import Floats, Ids

WITH_LOGPROBS, IDS_ONLY = 1, 2
MAX_SEGMENT_TOKENS = 16_777_216
MAX_TOKEN_ID = 2**31 - 1


def as_ids(tokens: Any, field: str = "tokens") -> Ids:
    """int32 [n] from any sequence of whole numbers. Raises InvalidSegment naming the first bad position."""
    try:
        array = np.asarray(tokens)
    except ValueError as error:  # lists within lists
        raise InvalidSegment(f"{field} must be a flat list of whole numbers", field=field) from error
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1:
        raise InvalidSegment(f"{field} must have one dimension, not shape {array.shape}", field=field)
    if array.dtype.kind not in "iu":
        raise InvalidSegment(f"{field} must be whole numbers, not {array.dtype}", field=field)
    bad = np.flatnonzero((array < 0) | (array > MAX_TOKEN_ID))
    if bad.size:
        at = int(bad[0])
        raise InvalidSegment(f"{field} has {int(array[at])} at position {at}", field=field, position=at)
    return array.astype("<i4", copy=False)


def as_logprobs(logprobs: Any, n: int, *, required: bool) -> Floats | None:
    """float32 [n], finite, or None. Raises InvalidSegment naming what is missing and where.

    required: these tokens are trained on, so that each needs a finite log-prob (promise 4).
    """
    if logprobs is None:
        if required and n:
            raise InvalidSegment(f"output_token_logprobs is missing for {n} generated tokens", field="logprobs")
        return None
    if isinstance(logprobs, dict | set | str | bytes) or getattr(logprobs, "dtype", np.float32) == np.complex128:
        raise InvalidSegment(f"log-probs are a {type(logprobs).__name__}, not a list of numbers", field="logprobs")
    if isinstance(logprobs, np.ndarray) and logprobs.dtype.kind in "fiu":
        values: Any = logprobs
    else:
        try:
            values = [_number_or_nan(v) for v in logprobs]
        except TypeError as error:
            raise InvalidSegment(f"log-probs are a {type(logprobs).__name__}, not a list", field="logprobs") from error
    with np.errstate(over="ignore"):
        array = np.asarray(values, dtype="<f4")
    if array.shape != (n,):
        raise InvalidSegment(f"{n} tokens but {array.size} log-probs", field="logprobs")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        at = int(bad[0])
        shown = repr(logprobs[at])[:80]
        raise InvalidSegment(f"log-prob at position {at} is {shown}, not finite", field="logprobs", position=at)
    return array


def _number_or_nan(value: Any) -> float:
    """Null, text and booleans become NaN here, so that the caller can name their position."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def encode(ids: Ids, logprobs: Floats | None) -> bytes:
    if ids.size > MAX_SEGMENT_TOKENS:
        raise InvalidSegment(f"{ids.size} tokens; a segment holds at most {MAX_SEGMENT_TOKENS}", field="tokens")
    if logprobs is None:
        return bytes([IDS_ONLY]) + ids.astype("<i4", copy=False).tobytes()
    return bytes([WITH_LOGPROBS]) + ids.astype("<i4", copy=False).tobytes() + logprobs.astype("<f4").tobytes()


def payload_tokens(payload_length: int, fmt: int) -> int | None:
    """Tokens of a payload of this many bytes, or None where the length can't be right."""
    width = {WITH_LOGPROBS: 8, IDS_ONLY: 4}.get(fmt)
    return (payload_length - 1) // width if width and (payload_length - 1) % width == 0 else None


def decode(payload: bytes) -> tuple[Ids, Floats | None]:
    """(int32 [n], float32 [n] or None), read-only views into `payload`. Raises ValueError if it is damaged."""
    n = payload_tokens(len(payload), payload[0]) if payload else None
    if n is None:
        raise ValueError(f"damaged segment payload of {len(payload)} bytes")
    ids = np.frombuffer(payload, dtype="<i4", count=n, offset=1)
    if payload[0] == IDS_ONLY:
        return ids, None
    return ids, np.frombuffer(payload, dtype="<f4", count=n, offset=1 + 4 * n)


def ids_bytes(ids: Ids) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()


def ids_from(data: bytes) -> Ids:
    return np.frombuffer(data, dtype="<i4")


def experts_dtype(n_experts: int) -> np.dtype[Any]:
    """The narrowest dtype that holds expert ids 0..n_experts-1."""
    if n_experts <= 0:
        raise ValueError(f"n_experts must be above 0, not {n_experts}")
    if n_experts <= 256:
        return np.dtype("uint8")
    return np.dtype("<u2") if n_experts <= 65536 else np.dtype("<i4")


def pack_experts(experts: Any, n_experts: int, *, prompt_tokens: int, response_tokens: int) -> npt.NDArray[Any]:
    """Routed experts [rows, layers, top_k] in their narrowest dtype; rows = prompt + response tokens - 1.

    Raises InvalidSegment where the rows or the values don't fit.
    """
    array = np.asarray(experts)
    rows = prompt_tokens + response_tokens - 1
    if array.ndim != 3 or array.shape[0] != rows:
        got = array.shape[0] if array.ndim == 3 else f"shape {array.shape}"
        raise InvalidSegment(f"routed_experts has {got} rows, expected {rows}", field="routed_experts")
    if array.dtype.kind not in "iu":
        raise InvalidSegment(f"routed_experts must be whole numbers, not {array.dtype}", field="routed_experts")
    if array.size and (int(array.min()) < 0 or int(array.max()) >= n_experts):
        raise InvalidSegment(
            f"routed_experts has values {int(array.min())}..{int(array.max())}, expected 0..{n_experts - 1}",
            field="routed_experts",
        )
    return array.astype(experts_dtype(n_experts))


_DTYPES = {"uint8", "uint16", "int32", "int64", "float16", "float32", "float64", "int8"}


def encode_array(array: npt.NDArray[Any]) -> tuple[str, list[int], bytes]:
    """(dtype name, shape, little-endian C-order bytes)."""
    name = array.dtype.newbyteorder("=").name
    if name not in _DTYPES:
        raise InvalidSegment(
            f"arrays of dtype {array.dtype} are not stored; use one of {sorted(_DTYPES)}", field="dtype"
        )
    return name, list(array.shape), np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()


def decode_array(dtype: str, shape: list[int], data: bytes) -> npt.NDArray[Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)


def clean_text(value: object, limit: int = 4000) -> str:
    """Text of untrusted origin as both databases can hold it: no NUL, no lone surrogate, bounded."""
    shown = str(value).encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")
    return shown if len(shown) <= limit else shown[: limit - 12] + " [shortened]"
