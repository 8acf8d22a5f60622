"""What engines answer, turned into exact, non-overlapping deltas.

SGLang's stream chunks are cumulative, incremental or a mixture of both, by release and flag; chunks coalesce, and
after a retraction and an abort the last one repeats a token. One number is right in all of them: completion_tokens.
So the new tokens of a chunk are its last `completion_tokens - seen` ids and log-probs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from samplestore.errors import SampleStoreError
from samplestore.words import amount

MAX_EVENT_BYTES = 256 * 1024 * 1024  # routed experts of a long sample are tens of megabytes
MAX_NEW_TOKENS_A_CHUNK = 1_000_000
MAX_COUNT = 2**31  # of what engines report for information: more does not fit the database's columns
MAX_TELEMETRY = 64  # numbers in a histogram
MAX_CUMULATIVE_TOKENS = 2048  # of a stream whose chunks repeat all before; 8,000 tokens would be 1.3 GB of JSON
MAX_LOGPROB = 1e-3  # SGLang takes logarithms of numbers up to 1: what is beyond rounding is none of them
MIN_CUMULATIVE_CHUNK = 16  # tokens a chunk, from which on it may be longer


class EngineError(SampleStoreError):
    """An engine or router that did not do what was asked.

    kind  "unreachable" (no answer, or cut off), "busy" (try later), "refused" (this request is wrong),
          "broken" (the answer breaks the protocol), "error" (the engine says itself that it failed),
          "unfit" (its weights are not finite), "setup" (it was started with the wrong flags)
    """

    look = ("doctor",)  # which asks the engines
    unconnected = False  # there was not even a connection: nothing was asked

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        self.kind, self.status, self.message = kind, status, message[:2000]
        shown = f" (HTTP {status})" if status else ""
        super().__init__(f"engine {kind}{shown}: {self.message}")


class PromptRefused(EngineError):
    """No engine of the run can take this prompt: it is too long for their context, or has tokens that are not in their
    vocabulary, or an image that is none, or not one place for each image. Its samples end at once, and it is not served
    again."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__("refused", message, status)
        self.args = (self.message,)


# SGLang's words (0.5.9 to 0.5.23) for what is wrong with a prompt, and not with how the run samples.
OF_PROMPTS = ("longer than the model's context", "Requested token count exceeds", "while loading IMAGE", "aspect ratio")


def refuses_prompt(error: EngineError) -> bool:
    """Whether an engine refused a request for its prompt, which it would each time."""
    return error.kind == "refused" and error.status == 400 and any(words in error.message for words in OF_PROMPTS)


def parse_json(data: bytes) -> Any:
    """JSON as engines write it. orjson is fast; some engines write NaN, which only the standard parser takes."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineError("broken", f"not JSON: {data[:200]!r}") from error


def error_of(body: Any, status: int) -> EngineError:
    """The four shapes of error bodies: {"error": {"message"}}, {"error": "text"}, {"message", "code"}, and pydantic's
    {"detail"}."""
    message, code = "", None
    if isinstance(body, dict):
        inner = body.get("error")
        if isinstance(inner, dict):
            message, code = str(inner.get("message", "")), inner.get("code")
            status = code if type(code) is int else status
        else:
            message, code = str(inner or body.get("message") or body.get("detail") or ""), body.get("code")
    message = message or ("it says no more" if body is None else str(body)[:500])
    if status in (408, 429, 502, 503, 504) or "queue is full" in message:
        return EngineError("busy", message, status)
    if 400 <= status < 500:
        return EngineError("refused", message, status)
    # an engine's own codes are numbers, a router's are words
    return EngineError("error" if type(code) is int else "unreachable", message, status)


@dataclass(slots=True)
class Delta:
    """New tokens of a reply: ids [n], log-probs [n] (None: the engine sent none), the label they were sent under."""

    ids: list[int]
    logprobs: list[Any] | None
    label: str | None


@dataclass(slots=True)
class Totals:
    """What is known of a reply so far.

    spec            counts of speculative decoding and of the prefix cache's levels, under the engine's names
    routed_experts  base64, as the engine sent it
    """

    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    label: str | None = None
    rid: str | None = None
    spans: list[dict[str, Any]] | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    routed_experts: str | None = None


class ReplyReader:
    """Feeds on parsed chunks of one request (a unary answer is a single chunk).

    cumulative  its chunks repeat ids or log-probs of those before; known from the second chunk on
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.chunks = 0
        self.cumulative = False
        self._numbers = self._nulls = False  # whether any log-prob so far is a number, or is none
        self._first: list[Any] = []  # the first log-probs that came

    @property
    def without_numbers(self) -> bool:
        """Whether every log-prob so far is null or NaN, as an engine answers whose weights are not finite."""
        return self._nulls and not self._numbers

    @property
    def unsound(self) -> bool:
        """Whether its log-probs can't be any: all are null or NaN, or the first of them are above 0."""
        return self.without_numbers or any(isinstance(v, int | float) and v > MAX_LOGPROB for v in self._first)

    def too_costly(self) -> str | None:
        """Why this stream should not go on, if so: each chunk repeats all that was sent, and there are many."""
        total = self.totals.completion_tokens
        if not self.cumulative or total <= MAX_CUMULATIVE_TOKENS or total >= MIN_CUMULATIVE_CHUNK * self.chunks:
            return None
        return (
            f"a cumulative stream of {amount(total, 'token')} in {self.chunks} chunks: its bytes grow with the "
            "square of its length. Start the engine with --incremental-streaming-output, or with --stream-interval "
            f"{MIN_CUMULATIVE_CHUNK}, or the worker with --mode sliced"
        )

    def feed(self, chunk: Any) -> Delta:
        """The chunk's new tokens. Raises EngineError where it contradicts itself or carries an error."""
        if (plain := self._plain(chunk)) is not None:
            return plain
        if not isinstance(chunk, dict):
            raise EngineError("broken", f"a chunk is {type(chunk).__name__}, not an object")
        if chunk.get("error") is not None:
            raise _error_in_stream(chunk)
        meta = chunk.get("meta_info")
        if not isinstance(meta, dict):
            raise EngineError("broken", "a chunk has no meta_info")
        reason = None if meta.get("finish_reason") is None else self._finish(meta["finish_reason"])
        ids, entries = chunk.get("output_ids") or [], meta.get("output_token_logprobs") or []
        for name, told in (("output_ids", ids), ("output_token_logprobs", entries)):
            if not isinstance(told, list):
                raise EngineError("broken", f"{name} is {type(told).__name__}, not a list")
        totals, first = self.totals, not self.chunks
        self.chunks += 1
        seen = totals.completion_tokens
        total = _total(meta, ids, seen, reason)
        new = total - seen
        if new and totals.finish_reason is not None:
            raise EngineError("broken", f"{amount(new, 'token')} after its finish_reason {totals.finish_reason!r}")
        if len(ids) < new or (reason == "abort" and len(ids) not in (new, total)):  # an abort may repeat the last id
            ids = _ids_of(entries, seen, total) or ids
        if len(ids) < new or (new and len(ids) not in (new, total)):  # more: all of them again
            raise EngineError("broken", f"{new} new tokens by completion_tokens, but {len(ids)} output_ids")
        fresh = ids if len(ids) == new else ids[len(ids) - new :]
        probs = self._logprobs(meta, entries, fresh, total) if new else []
        if seen and reason is None and (len(ids) > new or len(entries) > new):
            self.cumulative = True
        totals.completion_tokens = total
        if isinstance(label := meta.get("weight_version"), str):
            totals.label = label[:200]
        if first or reason is not None:  # in between they say nothing new, and cost more than all else here
            self._note(meta)
        if reason is not None:
            totals.finish_reason = reason
        return Delta(fresh, probs, totals.label)

    def _plain(self, chunk: Any) -> Delta | None:
        """A chunk like nearly all of them: in the middle of an incremental stream, with new tokens and nothing else
        that is new. Anything unusual in it gives None, and `feed` looks into all, which costs a third more."""
        totals = self.totals
        if not self._numbers or totals.finish_reason is not None:
            return None
        try:
            meta, ids = chunk["meta_info"], chunk["output_ids"]
            entries, total, label = meta["output_token_logprobs"], meta["completion_tokens"], meta["weight_version"]
            usual = (
                meta["finish_reason"] is None
                and label == totals.label
                and type(total) is int
                and 0 < total - totals.completion_tokens == len(ids) == len(entries)
                and meta.get("output_token_logprobs_length", total) == total
                and "error" not in chunk
                and [entry[1] for entry in entries] == ids
            )
            if not usual:
                return None
            values = [entry[0] for entry in entries]
        except (KeyError, TypeError, IndexError, AttributeError):
            return None
        self.chunks += 1
        totals.completion_tokens = total
        return Delta(ids, values, label)

    def _finish(self, reason: Any) -> str:
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if not isinstance(kind, str) or not kind:
            raise EngineError("broken", f"finish_reason is {str(reason)[:200]!r}")
        if isinstance(reason, dict):
            status = reason.get("status_code")
            if kind == "abort" and isinstance(status, int) and status != 200:
                raise error_of({"message": reason.get("message", "")}, status)
            self.totals.finish_message = str(reason.get("message", ""))[:500]
        return kind[:40]

    def _logprobs(self, meta: dict[str, Any], entries: list[Any], ids: list[int], total: int) -> list[Any] | None:
        """The log-probs of `ids`, unchecked values included: the store refuses null and NaN and names the position."""
        if not entries:
            return None
        if len(entries) < len(ids):
            raise EngineError("broken", f"{len(ids)} new tokens, but {len(entries)} output_token_logprobs")
        counted = meta.get("output_token_logprobs_length", total)
        if counted != total:
            raise EngineError(
                "broken", f"{amount(total, 'token')} by completion_tokens, but {str(counted)[:40]} log-probs"
            )
        values = _pairs(entries if len(entries) == len(ids) else entries[-len(ids) :], ids)
        self._first = self._first or values
        if not self._numbers:  # one number settles it: what follows costs nothing
            self._numbers = any(isinstance(v, int | float) and v == v for v in values)
            self._nulls = True
        return values

    def _note(self, meta: dict[str, Any]) -> None:
        t = self.totals
        t.rid = meta["id"] if isinstance(meta.get("id"), str) else t.rid
        t.prompt_tokens = _count(meta.get("prompt_tokens"), t.prompt_tokens)
        t.cached_tokens = _count(meta.get("cached_tokens"), t.cached_tokens)
        t.retractions = _count(meta.get("num_retractions", meta.get("total_retractions")), t.retractions)
        t.e2e_s = _amount(meta.get("e2e_latency"), t.e2e_s)
        t.queue_s = _amount(meta.get("queue_time"), t.queue_s)
        if isinstance(meta.get("weight_versions"), list):
            t.spans = meta["weight_versions"]
        experts = meta.get("routed_experts")
        if experts is not None and not isinstance(experts, str):
            raise EngineError("broken", f"routed_experts is {type(experts).__name__}, not text")
        t.routed_experts = experts if experts is not None else t.routed_experts
        t.spec.update({key: value for key in SPEC if (value := _telemetry(meta.get(key))) is not None})


SPEC = (
    "spec_accept_rate", "spec_accept_length", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct",
    "spec_correct_drafts_histogram", "spec_accept_token_num", "spec_draft_token_num", "cached_tokens_details",
)  # fmt: skip


def _total(meta: dict[str, Any], ids: list[Any], seen: int, reason: str | None) -> int:
    """completion_tokens, or what stands for it where an engine leaves it out."""
    total = meta.get("completion_tokens")
    if total is None and not seen:
        return len(ids)  # a first chunk has no dialect: it is cumulative and incremental at once
    if total is None and reason == "abort":
        return seen  # aborted in the queue after a retraction: no counts, and what it repeats is known
    if not isinstance(total, int) or isinstance(total, bool):
        raise EngineError("broken", f"completion_tokens went from {seen} to {total!r}")
    if total < seen or total - seen > MAX_NEW_TOKENS_A_CHUNK:
        raise EngineError("broken", f"completion_tokens went from {seen} to {total}")
    return total


def _pairs(entries: list[Any], ids: list[int]) -> list[Any]:
    """The values of log-prob entries [value, id, ...] that are of these ids, all of them. Raises EngineError."""
    try:
        if [entry[1] for entry in entries] == ids:
            return [entry[0] for entry in entries]
    except (TypeError, IndexError, KeyError):
        pass  # said below, with its place
    for place, (entry, id) in enumerate(zip(entries, ids, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2:
            raise EngineError("broken", f"log-prob entry {place} is {str(entry)[:100]}")
        if entry[1] != id:
            raise EngineError("broken", f"log-prob entry {place} is of token {entry[1]!r}, output_ids has {id!r}")
    raise EngineError("broken", "output_ids and output_token_logprobs don't compare")


def _count(value: Any, otherwise: int | None) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < MAX_COUNT else otherwise


def _amount(value: Any, otherwise: float | None) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < MAX_COUNT else otherwise


def _telemetry(value: Any) -> Any:
    """A number of information, a list of them, or a table of them; None for anything else: an engine's nonsense about
    itself must not make the store refuse the request's row."""
    if isinstance(value, list) and len(value) <= MAX_TELEMETRY:
        return value if all(_is_number(v) for v in value) else None
    if isinstance(value, dict) and len(value) <= MAX_TELEMETRY:
        return {str(key)[:40].replace("\0", ""): v for key, v in value.items() if _is_number(v)} or None
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _ids_of(entries: list[Any], seen: int, total: int) -> list[Any]:
    """The new ids by their log-probs: SGLang 0.5.9 sends, where chunks coalesce, only the last of the ids, but
    log-prob entries of all."""
    if len(entries) < total:
        return []
    part = entries[seen:total]
    return [entry[1] for entry in part if isinstance(entry, list | tuple) and len(entry) > 1]


def _error_in_stream(chunk: dict[str, Any]) -> EngineError:
    """Older engines give no code with it. Then only a router's word for a connection that broke means that the engine
    is gone; else it is this request's error, and must not be tried for ever."""
    error, inner = error_of(chunk, 500), chunk["error"]
    broke = isinstance(inner, dict) and inner.get("type") == "stream_error"
    return EngineError("error", error.message) if error.kind == "unreachable" and not broke else error


_EVENT_END = re.compile(rb"\n\n|\r\n\r\n")


class EventSplitter:
    """Server-sent events from a byte stream, however it is cut."""

    def __init__(self) -> None:
        self._buffer, self._looked = bytearray(), 0

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is complete now."""
        if not self._buffer and data.endswith(b"\n\n") and b"\r" not in data:  # nearly always: whole events
            parts: list[bytes] = data[:-2].split(b"\n\n")
        else:
            parts = list(self._parts(data))
        return [event for part in parts if (event := _data_of(part)) is not None]

    def _parts(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        start = 0
        while (end := _EVENT_END.search(self._buffer, max(start, self._looked))) is not None:
            yield bytes(self._buffer[start : end.start()])
            start = end.end()
        del self._buffer[:start]
        self._looked = max(0, len(self._buffer) - 3)  # an end may begin in the bytes that are here
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EngineError("broken", f"a stream event of more than {MAX_EVENT_BYTES} bytes")


def _data_of(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
