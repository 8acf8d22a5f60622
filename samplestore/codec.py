"""Bytes of the store: segment payloads, token ids, named arrays, and text that both databases can hold.

Payload of a segment: one format byte, then n token ids (int32, little-endian), then n log-probs (float32,
little-endian). Format 1 has log-probs, format 2 has none (environment tokens, imports that lack them). Format 0 is what
`samplestore prune` leaves: the byte alone; the row still says how many tokens it had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore.errors import InvalidSegment, TokensPruned
from samplestore.types import Floats, Ids
from samplestore.words import amount

PRUNED, WITH_LOGPROBS, IDS_ONLY = 0, 1, 2
PRUNED_PAYLOAD = bytes([PRUNED])
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")
_from = np.frombuffer
HAS_LOGPROBS, _IDS_ONLY = bytes([WITH_LOGPROBS]), bytes([IDS_ONLY])
MAX_SEGMENT_TOKENS = 16_777_216
MAX_TOKEN_ID = 2**31 - 1


def as_ids(tokens: Any, field: str = "tokens") -> npt.NDArray[np.integer[Any]]:
    """Whole numbers [n], of any such dtype; `encode_many` looks whether they are token ids. Raises InvalidSegment."""
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
    if array.size > MAX_SEGMENT_TOKENS:
        raise InvalidSegment(
            f"{amount(array.size, 'token')}; a segment holds at most {MAX_SEGMENT_TOKENS}", field=field
        )
    return array


def as_logprobs(logprobs: Any, n: int, *, required: bool) -> Floats | None:
    """float32 [n], or None; `encode_many` looks whether they are finite. Raises InvalidSegment naming what is missing.

    required: these tokens are trained on, so that each needs a log-prob (promise 4).
    """
    if logprobs is None:
        if required and n:
            raise InvalidSegment(f"output_token_logprobs is missing for {n} generated tokens", field="logprobs")
        return None
    if isinstance(logprobs, dict | set | str | bytes) or getattr(logprobs, "dtype", np.float32) == np.complex128:
        raise InvalidSegment(f"log-probs are a {type(logprobs).__name__}, not a list of numbers", field="logprobs")
    if isinstance(logprobs, np.ndarray) and logprobs.dtype.kind in "fiu":
        values: Any = logprobs
    elif isinstance(logprobs, list) and set(map(type, logprobs)) == {float}:  # most are: looked at with C's speed
        values = logprobs
    else:
        try:
            values = [_number_or_nan(v) for v in logprobs]
        except TypeError as error:
            raise InvalidSegment(f"log-probs are a {type(logprobs).__name__}, not a list", field="logprobs") from error
    if getattr(values, "dtype", None) == np.float32:
        array: Floats = values.astype("<f4", copy=False)
    else:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype="<f4")
    if array.shape != (n,):
        raise InvalidSegment(f"{amount(n, 'token')} but {amount(array.size, 'log-prob')}", field="logprobs")
    return array


def token_ids(tokens: Any, field: str = "tokens") -> Ids:
    """int32 [n] from any sequence of token ids. Raises InvalidSegment naming the first bad position."""
    ids = as_ids(tokens, field)
    if ids.size:
        _check_ids(ids, field)
    return ids.astype("<i4", copy=False)


def finite_logprobs(logprobs: Any, n: int, *, required: bool) -> Floats | None:
    """float32 [n], all finite, or None. Raises InvalidSegment naming what is missing and where."""
    probs = as_logprobs(logprobs, n, required=required)
    if probs is not None:
        _check_logprobs(probs, logprobs)
    return probs


def _check_ids(ids: npt.NDArray[np.integer[Any]], field: str = "tokens") -> None:
    """Raises InvalidSegment naming the first bad position."""
    if np.minimum.reduce(ids) < 0 or np.maximum.reduce(ids) > MAX_TOKEN_ID:
        at = int(np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID))[0])
        raise InvalidSegment(f"{field} has {int(ids[at])} at position {at}", field=field, position=at)


def _check_logprobs(logprobs: Floats, said: Any) -> None:
    """Raises InvalidSegment naming the first position whose number is not finite, and what was given there."""
    if not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        shown = repr(said[at])[:80]
        raise InvalidSegment(f"log-prob at position {at} is {shown}, not finite", field="logprobs", position=at)


def _number_or_nan(value: Any) -> float:
    """Null, text and booleans become NaN here, so that the caller can name their position."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def encode_many(
    segments: Sequence[tuple[npt.NDArray[np.integer[Any]], Floats | None]], said: Sequence[Any]
) -> tuple[list[bytes], list[float]]:
    """(payloads, sums of their log-probs) of segments: (as_ids, as_logprobs), each of one token or more. Looked
    through together: numpy takes longer to be called than to look at a segment.

    said   the log-probs as they were given, for the message
    Raises InvalidSegment for the first that holds what is no token id, or no finite log-prob.
    """
    for ids, _ in segments:
        if ids.dtype != np.int32:
            _check_ids(ids)
    whole = [ids.astype("<i4", copy=False) for ids, _ in segments]
    there = [probs for _, probs in segments if probs is not None]
    if np.minimum.reduce(_joined(whole)) < 0:
        for ids in whole:
            _check_ids(ids)
    # As float64 a sum of float32 can't overflow: it is finite if they all are.
    sums: list[float] = []
    if there:
        starts = list(accumulate((probs.size for probs in there[:-1]), initial=0))
        sums = np.add.reduceat(_joined(there), starts, dtype=np.float64).tolist()
    if not all(map(math.isfinite, sums)):
        for (_, probs), given in zip(segments, said, strict=True):
            if probs is not None:
                _check_logprobs(probs, given)
    left = iter(sums)
    return (
        [encode(ids, probs) for ids, (_, probs) in zip(whole, segments, strict=True)],
        [0.0 if probs is None else next(left) for _, probs in segments],
    )


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def encode(ids: Ids, logprobs: Floats | None) -> bytes:
    # join copies the arrays once
    if logprobs is None:
        return b"".join((_IDS_ONLY, np.ascontiguousarray(ids, "<i4").data))
    return b"".join((HAS_LOGPROBS, np.ascontiguousarray(ids, "<i4").data, np.ascontiguousarray(logprobs, "<f4").data))


def runs_of(mask: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """[start, stop) of neighbours with one value: a segment has one loss mask."""
    if not mask.size:
        return []
    turns = (np.flatnonzero(np.diff(mask)) + 1).tolist()
    return list(zip([0, *turns], [*turns, len(mask)], strict=True))


def payload_tokens(payload_length: int, fmt: int) -> int | None:
    """Tokens of a payload of this many bytes, or None where the length can't be right."""
    width = {WITH_LOGPROBS: 8, IDS_ONLY: 4}.get(fmt)
    return (payload_length - 1) // width if width and (payload_length - 1) % width == 0 else None


def split(payload: bytes) -> tuple[memoryview, memoryview | None]:
    """The bytes of its ids, and of its log-probs or None: views into `payload`. Raises ValueError if it is damaged,
    TokensPruned."""
    size, whole = len(payload), memoryview(payload)
    if size > 8 and size & 7 == 1 and payload[0] == WITH_LOGPROBS:  # most are
        middle = (size >> 1) + 1
        return whole[1:middle], whole[middle:]
    if payload == PRUNED_PAYLOAD:
        raise TokensPruned("this segment")
    n = payload_tokens(size, payload[0]) if payload else None
    if n is None:
        raise ValueError(f"damaged segment payload of {amount(size, 'byte')}")
    return whole[1 : 1 + 4 * n], whole[1 + 4 * n :] if payload[0] == WITH_LOGPROBS else None


def decode(payload: bytes) -> tuple[Ids, Floats | None]:
    """(int32 [n], float32 [n] or None), read-only views into `payload`. Raises what `split` does."""
    ids, probs = split(payload)
    return _from(ids, _I4), None if probs is None else _from(probs, _F4)


def own(value: Any) -> Any:
    """A copy of a JSON value. Siblings share a prompt that was decoded once: what one of them changes in place, such as
    a list of messages that grows, must not reach the others."""
    if isinstance(value, dict):
        return {key: own(item) for key, item in value.items()}
    return [own(item) for item in value] if isinstance(value, list) else value


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


def pack_experts(experts: Any, n_experts: int, *, rows: int) -> npt.NDArray[Any]:
    """Routed experts [rows, layers, top_k] in their narrowest dtype.

    Raises InvalidSegment where the rows or the values don't fit.
    """
    array = np.asarray(experts)
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


def dtype_of(name: str) -> np.dtype[Any]:
    """The little-endian dtype of a stored array. Raises ValueError."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return np.dtype(name).newbyteorder("<")


def decode_array(dtype: str, shape: list[int], data: bytes) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype=dtype_of(dtype)).reshape(shape)


MAX_REWARD, MIN_REWARD = 1e25, 1e-100
REWARDS = "a finite number, from -1e25 to 1e25"  # for messages


def reward(value: Any) -> float | None:
    """A reward, or a stage's value, as it is stored; None for what is none: no number, or beyond +-1e25. A batch has
    rewards as float32, weighted and added up, and their spread is made of squares: what is nearer to 0 than 1e-100 is
    0, whose square PostgreSQL can take."""
    if isinstance(value, np.number):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        return None
    return float(value) if abs(value) >= MIN_REWARD else 0.0


def clean_text(value: object, limit: int = 4000) -> str:
    """Text of untrusted origin as both databases can hold it: no NUL, no lone surrogate, bounded."""
    shown = str(value).encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")
    return shown if len(shown) <= limit else shown[: limit - 12] + " [shortened]"
