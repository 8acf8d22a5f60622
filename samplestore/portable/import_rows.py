"""Rows of prompts and responses from elsewhere, for offline distillation and the like: groups to import.

A row is a prompt, as `add_prompts` takes it, and one response, or under `samples` a list of them, which become a group:

    response_ids        token ids, at least one; or tokens
    log_probs           finite numbers, one a token; or rollout_log_probs. Without, the sample is flagged, and a batch
                        that needs log-probs refuses it
    loss_mask           0 or 1, one a token; 1 everywhere if left out
    teacher_log_probs   finite numbers, one a token
    arrays              {name: [rows, ...]}, one row a token: other named arrays (samplestore.arrays)
    reward              a finite number: settles the stage "reward" of a run that has one
    status              completed | truncated
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from samplestore import arrays, codec
from samplestore.arrays import TEACHER, Prepared
from samplestore.errors import InvalidSegment
from samplestore.portable.samples import Piece, PortableSample, Reward
from samplestore.promptfiles import InvalidRow, ReadRow
from samplestore.prompts import Prompt, RowKeys, prepare
from samplestore.rowvalues import BadValue, is_finite, parsed
from samplestore.statements.staleness import UNFINISHED
from samplestore.states import CLAIMABLE, SampleStatus, SegmentKind
from samplestore.types import Floats
from samplestore.verbs.imports import REWARD_STAGE
from samplestore.verbs.stages import OK
from samplestore.words import amount, did_you_mean

DATASET = "imported"
MAX_SAMPLES = 4096  # of a group
IDS, LOGPROBS = ("response_ids", "tokens"), ("log_probs", "rollout_log_probs")
FIELDS = (*IDS, *LOGPROBS, "loss_mask", TEACHER, "arrays", "reward", "status")
OF_A_ROW = (*RowKeys().known(), *FIELDS, "samples")


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A group to import. key: hex sha256 of all that it says; origin: run_uuid/group of the store that it comes from,
    None where it comes from none."""

    key: str
    prompt: Prompt
    samples: tuple[PortableSample, ...]
    origin: str | None = None

    @property
    def import_key(self) -> str:
        """What the database knows it by, and whether this run's weights finish it (staleness.IMPORTED)."""
        mark = UNFINISHED if any(one.status in CLAIMABLE for one in self.samples) else ""
        return mark + (self.key if self.origin is None else f"{self.origin}:{self.key}")


Groups: TypeAlias = "Iterator[Imported | InvalidRow]"


def read(
    rows: Iterable[ReadRow | Mapping[str, Any]], tokenizer: Any = None, *, dataset: str = DATASET, source: str = "rows"
) -> Iterator[Imported | InvalidRow]:
    """Rows (mappings, or what a PromptFile yields) to groups, one by one; what can't be one becomes an InvalidRow.
    Raises TokenizerNeeded and what loading a tokenizer raises."""
    waiting: deque[tuple[int, Any]] = deque()

    def prompts_only() -> Iterator[Any]:
        for count, given in enumerate(rows, 1):
            line, row = given if isinstance(given, tuple) else (count, given)
            if isinstance(row, Mapping) and (refused := _unknown(row, OF_A_ROW)) is not None:
                waiting.append((line, None))
                yield line, InvalidRow(source, line, refused.field, refused.reason, refused.shown)
            elif isinstance(row, Mapping):
                waiting.append((line, {k: v for k, v in row.items() if k in FIELDS or k == "samples"}))
                yield line, {k: v for k, v in row.items() if k not in FIELDS and k != "samples"}
            else:
                waiting.append((line, None))
                yield row

    for prompt in prepare(prompts_only(), tokenizer, dataset=dataset, source=source):
        line, said = waiting.popleft()
        if isinstance(prompt, InvalidRow):
            yield prompt
            continue
        try:
            samples = _samples(said, prompt)
        except BadValue as error:
            yield InvalidRow(source, line, error.field or "(row)", error.reason, error.shown)
            continue
        yield Imported(_key(prompt, samples), prompt, samples)


def _samples(said: dict[str, Any], prompt: Prompt) -> tuple[PortableSample, ...]:
    if said.get("samples") is None:
        return (_response(said, prompt, 0),)
    listed = parsed(said, "samples", list)
    others = [k for k, v in said.items() if k != "samples" and v is not None]
    if others:
        raise BadValue("stands beside samples: a row has one response, or a list of them", field=others[0])
    if not 1 <= len(listed) <= MAX_SAMPLES:
        raise BadValue(f"has {amount(len(listed), 'sample')}, expected 1 to {MAX_SAMPLES}", field="samples")
    made = []
    for i, item in enumerate(listed):
        if not isinstance(item, dict):
            raise BadValue("is not an object", item, f"samples[{i}]")
        try:
            if (refused := _unknown(item, FIELDS)) is not None:
                raise refused
            made.append(_response(item, prompt, i))
        except BadValue as error:
            raise error.inside(i).inside("samples") from None
    return tuple(made)


def _unknown(row: Mapping[str, Any], known: Sequence[str]) -> BadValue | None:
    key = next((k for k in row if k not in known), None)
    if key is None:
        return None
    name = str(key)[:80]
    return BadValue(f"is not one of {', '.join(known)}.{did_you_mean(name, known)}".rstrip("."), row[key], name)


def _response(said: Mapping[str, Any], prompt: Prompt, place: int) -> PortableSample:
    """No weights of the run made its tokens: they are an environment's."""
    ids_key, ids = _one_of(said, IDS)
    if ids is None:
        raise BadValue(f"is missing; give {' or '.join(IDS)}, or samples", field=IDS[0])
    probs_key, probs = _one_of(said, LOGPROBS)
    try:
        tokens = codec.token_ids(ids, ids_key)
        if not tokens.size:
            raise BadValue("has no tokens", field=ids_key)
        loss = _mask(said.get("loss_mask"), tokens.size)
        logprobs = None if probs is None else _logprobs(probs_key, probs, loss)
        named = _named(said, tokens.size)
    except InvalidSegment as error:
        raise BadValue(error.reason, field=error.field or ids_key) from error
    pieces = tuple(
        Piece(stop - start, SegmentKind.ENVIRONMENT.value, int(loss[start]), log_probs=logprobs is not None)
        for start, stop in codec.runs_of(loss)
    )
    status, reward = _status(said.get("status")), _reward(said.get("reward"))
    return PortableSample(
        sample=place, prompt_ids=prompt.prompt_ids, response_ids=tokens, rollout_log_probs=logprobs, pieces=pieces,
        named=tuple((len(pieces) - 1, one) for one in named), reward=reward, status=status,
        rewards=() if reward is None else (Reward(REWARD_STAGE, outcome=OK, value=reward),),
        finish_reason="length" if status == SampleStatus.TRUNCATED else "stop",
    )  # fmt: skip


def _one_of(said: Mapping[str, Any], keys: tuple[str, str]) -> tuple[str, Any]:
    given = [k for k in keys if said.get(k) is not None]
    if len(given) > 1:
        raise BadValue(f"stands beside {given[0]}", field=given[1])
    return (given[0], said[given[0]]) if given else (keys[0], None)


def _mask(value: Any, n: int) -> npt.NDArray[np.uint8]:
    if value is None:
        return np.ones(n, np.uint8)
    mask = codec.token_ids(value, "loss_mask")
    if mask.size != n:
        raise BadValue(f"has {amount(mask.size, 'value')} for {amount(n, 'token')}", field="loss_mask")
    if mask.size and int(mask.max()) > 1:
        raise BadValue("must be 0 or 1", int(mask.max()), "loss_mask")
    return mask.astype(np.uint8)


def _logprobs(key: str, value: Any, loss: npt.NDArray[np.uint8]) -> Floats:
    """Masked tokens may have none (null): no model made them."""
    if isinstance(value, list | tuple) and len(value) == loss.size:
        if None in value:
            value = [0.0 if v is None and not keep else v for v, keep in zip(value, loss.tolist(), strict=True)]
        value = np.asarray(value, np.float64) if _numbers(value) else value
    try:
        probs = codec.finite_logprobs(value, loss.size, required=True)
    except InvalidSegment as error:
        raise BadValue(error.reason, field=key) from error
    assert probs is not None
    return probs


def _named(said: Mapping[str, Any], n: int) -> tuple[Prepared, ...]:
    given: dict[str, Any] = {} if said.get(TEACHER) is None else {TEACHER: said[TEACHER]}
    for name, value in (parsed(dict(said), "arrays", dict) or {}).items():
        if name in (TEACHER, arrays.EXPERTS):
            raise BadValue(f"can't be given under arrays: {name}", field=f"arrays.{name}")
        given[name] = value
    made = []
    for name, value in given.items():
        array = np.asarray(value, np.float32) if name == TEACHER and _numbers(value) else value
        one = arrays.prepare(name, array)
        arrays.require_rows(one, 0, n, rows=n)
        made.append(one)
    return tuple(made)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int, float}  # no bool; a list of 10,000 at C's speed


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not is_finite(value):
        raise BadValue(f"must be {codec.REWARDS}", value, "reward")
    return codec.reward(value)


def _status(value: Any) -> str:
    if value is None:
        return SampleStatus.COMPLETED.value
    if value not in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
        raise BadValue("must be completed or truncated", value, "status")
    return str(value)


def _key(prompt: Prompt, samples: tuple[PortableSample, ...]) -> str:
    digest = hashlib.sha256(prompt.content_key.encode())
    for one in samples:
        probs = one.rollout_log_probs
        digest.update(f"|{one.response_ids.size}|{probs is None}|{one.reward!r}|{one.status}|".encode())
        digest.update(one.response_ids.tobytes() + one.loss_mask.astype(np.uint8).tobytes())
        digest.update(b"" if probs is None else probs.tobytes())
        for _, array in one.named:
            digest.update(f"|{array.name}|{array.dtype}|{array.shape}|".encode() + (array.data or b""))
    return digest.hexdigest()
