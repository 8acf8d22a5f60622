"""Named per-token arrays beside segments: routed experts, teacher log-probs, top-k log-probs, entropy, values, ...

Row r of an array belongs to a token, so the first dimension is tokens. An array is stored with the last segment that
there is, and its last row is of that segment's last token: what a request brings at its end covers all its segments.

| name | shape, dtype | |
| --- | --- | --- |
| `routed_experts` | [rows, layers, top_k], whole numbers | row r: while the token after r was made, so rows end with the last but one |
| `teacher_log_probs` | [rows], floats | nats, finite |
| `trainer_log_probs` | [rows], floats | nats; NaN where the trainer had none. `batch.record_logprobs` stores it |
| `topk_log_probs` | [rows, k], floats | nats; -inf where fewer than k were told |
| `topk_ids` | [rows, k], whole numbers from 0 | the tokens of `topk_log_probs` |
| `entropy` | [rows], floats from 0 | nats |
| `values` | [rows], floats | finite |
| any other | [rows, ...] | one of the dtypes of codec.py |
"""  # noqa: E501

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore import codec
from samplestore.errors import InvalidSegment
from samplestore.words import amount

EXPERTS, TEACHER, TRAINER = "routed_experts", "teacher_log_probs", "trainer_log_probs"
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# What a batch calls its own tensors (tensors.py): an array of this name could not be handed out beside them.
RESERVED = frozenset(
    "tokens position_ids loss_mask rollout_log_probs weight_versions cu_seqlens attention_mask prompt_lengths "
    "response_lengths rewards advantages group_ids sample_ids rollout_ids rollout_mask_sums n_trained_tokens "
    "n_rollouts images".split()
)
MAX_DIMS, MAX_BYTES = 4, 1 << 30
ROUNDING = 1e-3  # an entropy of a float16 softmax may come out a little below 0


@dataclass(frozen=True, slots=True)
class Rule:
    """What an array of a known name must look like. kinds: numpy's letters of dtypes."""

    dims: int
    kinds: str
    low: float = -np.inf
    infinite: bool = False
    missing: bool = False  # NaN: it has none there


KNOWN = {
    EXPERTS: Rule(3, "iu", 0),
    TEACHER: Rule(1, "f"),
    TRAINER: Rule(1, "f", missing=True),
    "topk_log_probs": Rule(2, "f", infinite=True),
    "topk_ids": Rule(2, "iu", 0),
    "entropy": Rule(1, "f", -ROUNDING),
    "values": Rule(1, "f"),
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked array on its way into the store: its bytes, or the name of the file that holds them already."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes | None
    sidecar: str | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def n_bytes(self) -> int:
        return size_of(self.dtype, self.shape)


def size_of(dtype: str, shape: list[int]) -> int:
    """Bytes of an array."""
    size = codec.dtype_of(dtype).itemsize
    for n in shape:
        size *= n
    return size


def prepare(name: str, array: Any, n_experts: int | None = None) -> Prepared:
    """Check a named array and encode it. `n_experts`: of "routed_experts", which are narrowed by it. Raises
    InvalidSegment naming what is wrong and where."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidSegment(f"{str(name)[:80]!r} is no name of an array: a-z, 0-9 and _, from a letter", field="name")
    if name in RESERVED:
        raise InvalidSegment(f"{name!r} is what a batch calls its own tensor; use another name", field="name")
    try:
        given = np.asarray(array)
    except ValueError as error:  # lists of different lengths
        raise InvalidSegment(f"{name} is no array: {str(error)[:200]}", field=name) from error
    if name == EXPERTS:
        if n_experts is None:
            raise InvalidSegment("routed_experts needs n_experts", field=name)
        rows = given.shape[0] if given.ndim else 0
        given = codec.pack_experts(given, n_experts, rows=rows)
    _check(name, given)
    dtype, shape, data = codec.encode_array(given)
    if len(data) > MAX_BYTES:
        raise InvalidSegment(f"{name} has {amount(len(data), 'byte')}; an array has at most {MAX_BYTES:,}", field=name)
    return Prepared(name, dtype, shape, data)


def stored(name: str, dtype: str, shape: list[int], data: bytes) -> Prepared:
    """An array as another store kept it: the same dtype and bytes, checked as those that are new. Raises
    InvalidSegment, ValueError where the bytes are none of that dtype and shape."""
    if not NAME.fullmatch(name) or name in RESERVED:
        raise InvalidSegment(f"{name[:80]!r} is no name of an array", field="name")
    if len(data) > MAX_BYTES or len(data) != size_of(dtype, shape):
        raise InvalidSegment(f"{name} has {amount(len(data), 'byte')} for {dtype} {shape}", field=name)
    _check(name, codec.decode_array(dtype, shape, data))
    return Prepared(name, dtype, shape, data)


def _check(name: str, array: npt.NDArray[Any]) -> None:
    rule = KNOWN.get(name)
    if not 1 <= array.ndim <= MAX_DIMS or (rule is not None and array.ndim != rule.dims):
        wanted = f"{rule.dims}" if rule else f"1 to {MAX_DIMS}"
        raise InvalidSegment(f"{name} has shape {array.shape}, expected {wanted} dimensions", field=name)
    if array.size == 0 and len(array):  # one without rows is refused where it is known how many there should be
        raise InvalidSegment(f"{name} has shape {array.shape}: nothing in it", field=name)
    if rule is None:
        return
    if array.dtype.kind not in rule.kinds:
        what = "floats" if rule.kinds == "f" else "whole numbers"
        raise InvalidSegment(f"{name} has dtype {array.dtype}, expected {what}", field=name)
    bad = array < rule.low
    if rule.kinds == "f":
        bad = bad & ~np.isneginf(array) if rule.infinite else bad
        bad |= np.isnan(array) | np.isposinf(array) if rule.infinite else ~np.isfinite(array)
        if rule.missing:
            bad &= ~np.isnan(array)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InvalidSegment(f"{name} has {array[at]} at {list(at)}", field=name, position=at[0])


def last_row(name: str, prompt_tokens: int, response_tokens: int) -> int:
    """Place in prompt and response that the row after the last one would have, for an array that is stored now."""
    return prompt_tokens + response_tokens - (name == EXPERTS)


def first_place(name: str, prompt_tokens: int) -> int:
    """The first place in prompt and response that an array may have a row of: experts are known of prompts too."""
    return 0 if name == EXPERTS else prompt_tokens


def require_rows(made: Prepared, prompt_tokens: int, response_tokens: int, rows: int | None = None) -> None:
    """Raises InvalidSegment where an array has no rows, or more than there are tokens, or not as many as `rows`."""
    room = last_row(made.name, prompt_tokens, response_tokens) - first_place(made.name, prompt_tokens)
    if not 1 <= made.rows <= room or (rows is not None and made.rows != rows):
        expected = f"{rows}" if rows is not None else f"1 to {room}"
        raise InvalidSegment(f"{made.name} has {amount(made.rows, 'row')}, expected {expected}", field=made.name)
