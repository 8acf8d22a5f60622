"""Samples that were generated elsewhere: responses with their tokens, for offline distillation and the like.

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
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samplestore import arrays, codec
from samplestore.arrays import TEACHER, Prepared
from samplestore.errors import InvalidSegment, SampleStoreError
from samplestore.promptfiles import InvalidRow, PromptFile, PromptFileError, ReadRow
from samplestore.prompts import Prompt, prepare
from samplestore.rowvalues import BadValue, parsed
from samplestore.states import SampleStatus
from samplestore.types import Floats, Ids

DATASET = "imported"
MAX_SAMPLES = 4096  # of a group
MAX_NAMED = 1000  # refused rows that an error holds
LISTED = 20
IDS, LOGPROBS = ("response_ids", "tokens"), ("log_probs", "rollout_log_probs")
FIELDS = (*IDS, *LOGPROBS, "loss_mask", TEACHER, "arrays", "reward", "status")


class InvalidImport(SampleStoreError):
    """Rows that were refused; nothing of the file was stored. `rows` has the first 1000, the message the first 20."""

    def __init__(self, source: str, rows: list[InvalidRow], refused: int) -> None:
        self.source, self.rows, self.refused = source, rows, refused
        listed = "\n".join(f"  {row}" for row in rows[:LISTED])
        more = f"\n  and {refused - LISTED:,} more" if refused > LISTED else ""
        what = "1 row was" if refused == 1 else f"{refused:,} rows were"
        super().__init__(
            f"{source}: {what} refused, nothing of it was stored:\n{listed}{more}\n"
            "Correct the file, and run again: samplestore import-samples FILE --run NAME"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """ids int32 [n]; logprobs float32 [n], 0 where a masked token has none, or None; loss uint8 [n]."""

    ids: Ids
    logprobs: Floats | None
    loss: npt.NDArray[np.uint8]
    named: tuple[Prepared, ...]
    reward: float | None
    status: str


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A group to import. key: hex sha256 of all that it says."""

    key: str
    prompt: Prompt
    responses: tuple[Response, ...]


def read(
    rows: Iterable[ReadRow | Mapping[str, Any]], tokenizer: Any = None, *, dataset: str = DATASET, source: str = "rows"
) -> Iterator[Imported | InvalidRow]:
    """Rows (mappings, or what a PromptFile yields) to groups, one by one; what can't be one becomes an InvalidRow.
    Raises TokenizerNeeded and what loading a tokenizer raises."""
    waiting: deque[tuple[int, Any]] = deque()

    def prompts_only() -> Iterator[Any]:
        for count, given in enumerate(rows, 1):
            line, row = given if isinstance(given, tuple) else (count, given)
            if isinstance(row, Mapping):
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
            responses = _responses(said)
        except BadValue as error:
            yield InvalidRow(source, line, error.field or "(row)", error.reason, error.shown)
            continue
        yield Imported(_key(prompt, responses), prompt, responses)


def _responses(said: dict[str, Any]) -> tuple[Response, ...]:
    if said.get("samples") is None:
        return (_response(said),)
    listed = parsed(said, "samples", list)
    others = [k for k, v in said.items() if k != "samples" and v is not None]
    if others:
        raise BadValue("stands beside samples: a row has one response, or a list of them", field=others[0])
    if not 1 <= len(listed) <= MAX_SAMPLES:
        raise BadValue(f"has {len(listed)} samples, expected 1 to {MAX_SAMPLES}", field="samples")
    made = []
    for i, item in enumerate(listed):
        if not isinstance(item, dict):
            raise BadValue("is not an object", item, f"samples[{i}]")
        unknown = next((k for k in item if k not in FIELDS), None)
        try:
            if unknown is not None:
                raise BadValue(f"is not one of {', '.join(FIELDS)}", item[unknown], str(unknown)[:80])
            made.append(_response(item))
        except BadValue as error:
            raise error.inside(i).inside("samples") from None
    return tuple(made)


def _response(said: Mapping[str, Any]) -> Response:
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
    return Response(tokens, logprobs, loss, named, _reward(said.get("reward")), _status(said.get("status")))


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
        raise BadValue(f"has {mask.size} values for {n} tokens", field="loss_mask")
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise BadValue("must be a finite number", value, "reward")
    return float(value)


def _status(value: Any) -> str:
    if value is None:
        return SampleStatus.COMPLETED.value
    if value not in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
        raise BadValue("must be completed or truncated", value, "status")
    return str(value)


def _key(prompt: Prompt, responses: tuple[Response, ...]) -> str:
    digest = hashlib.sha256(prompt.content_key.encode())
    for r in responses:
        digest.update(f"|{r.ids.size}|{r.logprobs is None}|{r.reward!r}|{r.status}|".encode())
        digest.update(r.ids.tobytes() + r.loss.tobytes() + (b"" if r.logprobs is None else r.logprobs.tobytes()))
        for one in r.named:
            digest.update(f"|{one.name}|{one.dtype}|{one.shape}|".encode() + (one.data or b""))
    return digest.hexdigest()


@contextmanager
def rereadable(rows: Iterable[Any] | str | Path) -> Iterator[tuple[Iterable[Any], str]]:
    """(rows that can be read as often as wanted, their name in messages). A pipe gives its bytes once, and nothing at
    the second reading: it is copied to a temporary file first. Raises PromptFileError."""
    if not isinstance(rows, str | Path):
        yield list(rows), "rows"
        return
    path = Path(rows)
    if path.is_file() or path.is_dir() or not path.exists():
        yield PromptFile(path), str(path)
        return
    with tempfile.NamedTemporaryFile(prefix="samplestore-import-") as copy:
        try:
            with path.open("rb") as pipe:
                shutil.copyfileobj(pipe, copy)
            copy.flush()
        except OSError as error:
            why = f"can't be copied to {copy.name}: {error.strerror or error}. Look at: df -h {tempfile.gettempdir()}"
            raise PromptFileError(str(path), why) from error
        file = PromptFile(copy.name)
        file.name = str(path)
        yield file, str(path)


def digest_of(groups: Iterable[Imported]) -> bytes:
    """Of the keys of all groups, in their order."""
    digest = hashlib.sha256()
    for one in groups:
        digest.update(one.key.encode())
    return digest.digest()


def same(groups: Iterable[Imported], seen: bytes, source: str) -> Iterator[Imported]:
    """The groups; PromptFileError at the end unless their digest is that of the reading before. What is stored is what
    was looked through, and not what a file has become since."""
    digest = hashlib.sha256()
    for one in groups:
        digest.update(one.key.encode())
        yield one
    if digest.digest() != seen:
        raise PromptFileError(source, "was changed while it was read, and nothing of it was stored. Run this again")


def checked(groups: Iterable[Imported | InvalidRow], source: str) -> Iterator[Imported]:
    """The groups, as long as none was refused; at the end InvalidImport, if any was. Nothing is held in memory but the
    first refused rows."""
    refused, kept = 0, []
    for item in groups:
        if isinstance(item, InvalidRow):
            refused += 1
            kept += [item] if refused <= MAX_NAMED else []
        elif not refused:
            yield item
    if refused:
        raise InvalidImport(source, kept, refused)
