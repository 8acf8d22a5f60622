"""What engines answer, turned into exact, non-overlapping deltas.

SGLang's stream chunks are cumulative, incremental or a mixture of both, by release and flag; chunks coalesce, and
after a retraction and an abort the last one repeats a token. One number is right in all of them: completion_tokens.
So the new tokens of a chunk are its last `completion_tokens - seen` ids and log-probs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from samplestore.errors import SampleStoreError

MAX_EVENT_BYTES = 64 * 1024 * 1024
MAX_NEW_TOKENS_A_CHUNK = 1_000_000
MAX_COUNT = 2**31  # of what engines report for information: more does not fit the database's columns


class EngineError(SampleStoreError):
    """An engine or router that did not do what was asked.

    kind  "unreachable" (no answer, or cut off), "busy" (try later), "refused" (this request is wrong),
          "broken" (the answer breaks the protocol)
    """

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        self.kind, self.status, self.message = kind, status, message[:2000]
        shown = f" (HTTP {status})" if status else ""
        super().__init__(f"engine {kind}{shown}: {self.message}")


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
    message = ""
    if isinstance(body, dict):
        inner = body.get("error")
        if isinstance(inner, dict):
            message = str(inner.get("message", ""))
            status = int(inner["code"]) if isinstance(inner.get("code"), int) else status
        else:
            message = str(inner or body.get("message") or body.get("detail") or "")
    message = message or str(body)[:500]
    if status in (408, 429, 502, 503, 504) or "queue is full" in message:
        return EngineError("busy", message, status)
    if 400 <= status < 500:
        return EngineError("refused", message, status)
    return EngineError("unreachable", message, status)


@dataclass(slots=True)
class Delta:
    """New tokens of a reply: ids [n], log-probs [n] (None: the engine sent none), the label they were sent under."""

    ids: list[int]
    logprobs: list[Any] | None
    label: str | None


@dataclass(slots=True)
class Totals:
    """What is known of a reply so far."""

    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    label: str | None = None
    spans: list[dict[str, Any]] | None = None


class ReplyReader:
    """Feeds on parsed chunks of one request (a unary answer is a single chunk)."""

    def __init__(self) -> None:
        self.totals = Totals()

    def feed(self, chunk: Any) -> Delta:
        """The chunk's new tokens. Raises EngineError where it contradicts itself or carries an error."""
        if not isinstance(chunk, dict):
            raise EngineError("broken", f"a chunk is {type(chunk).__name__}, not an object")
        if chunk.get("error") is not None:
            raise error_of(chunk, 500)
        meta = chunk.get("meta_info")
        if not isinstance(meta, dict):
            raise EngineError("broken", "a chunk has no meta_info")
        reason = self._finish(meta)
        ids, logprobs = chunk.get("output_ids") or [], meta.get("output_token_logprobs")
        if not isinstance(ids, list):
            raise EngineError("broken", f"output_ids is {type(ids).__name__}, not a list")
        seen = self.totals.completion_tokens
        new = self._total(meta, ids, seen, reason) - seen
        if len(ids) < new:
            raise EngineError("broken", f"{new} new tokens by completion_tokens, but {len(ids)} output_ids")
        fresh = ids[len(ids) - new :]
        probs = _logprobs(logprobs, fresh) if new else []
        self._note(meta, seen + new)
        if reason is not None:
            self.totals.finish_reason = reason
        return Delta(fresh, probs, self.totals.label)

    @staticmethod
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

    def _finish(self, meta: dict[str, Any]) -> str | None:
        reason = meta.get("finish_reason")
        if reason is None:
            return None
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if not isinstance(kind, str) or not kind:
            raise EngineError("broken", f"finish_reason is {str(reason)[:200]!r}")
        if isinstance(reason, dict):
            status = reason.get("status_code")
            if kind == "abort" and isinstance(status, int) and status != 200:
                raise error_of({"message": reason.get("message", "")}, status)
            self.totals.finish_message = str(reason.get("message", ""))[:500]
        return kind[:40]

    def _note(self, meta: dict[str, Any], total: int) -> None:
        t = self.totals
        t.completion_tokens = total
        for name, key in (("prompt_tokens", "prompt_tokens"), ("cached_tokens", "cached_tokens")):
            if isinstance(meta.get(key), int) and 0 <= meta[key] < MAX_COUNT:
                setattr(t, name, meta[key])
        retractions = meta.get("num_retractions", meta.get("total_retractions"))
        if isinstance(retractions, int) and 0 <= retractions < MAX_COUNT:
            t.retractions = retractions
        for name, key in (("e2e_s", "e2e_latency"), ("queue_s", "queue_time")):
            if isinstance(meta.get(key), int | float) and 0 <= meta[key] < MAX_COUNT:
                setattr(t, name, float(meta[key]))
        if isinstance(meta.get("weight_version"), str):
            t.label = meta["weight_version"][:200]
        if isinstance(meta.get("weight_versions"), list):
            t.spans = meta["weight_versions"]


def _logprobs(entries: Any, ids: list[int]) -> list[Any] | None:
    """The log-probs of `ids`, unchecked values included: the store refuses null and NaN and names the position."""
    if entries is None or entries == []:
        return None
    if not isinstance(entries, list) or len(entries) < len(ids):
        raise EngineError("broken", f"{len(ids)} new tokens, but {len(entries)} output_token_logprobs")
    values = []
    for position, (entry, id) in enumerate(zip(entries[-len(ids) :], ids, strict=True)):
        if not isinstance(entry, list | tuple) or len(entry) < 2:
            raise EngineError("broken", f"log-prob entry {position} is {entry!r}")
        if entry[1] != id:
            raise EngineError("broken", f"log-prob entry {position} is of token {entry[1]!r}, output_ids has {id!r}")
        values.append(entry[0])
    return values


_EVENT_END = re.compile(rb"\n\n|\r\n\r\n")


class EventSplitter:
    """Server-sent events from a byte stream: yields the data of each complete event."""

    def __init__(self) -> None:
        self._buffer, self._looked = bytearray(), 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while (end := _EVENT_END.search(self._buffer, self._looked)) is not None:
            event = bytes(self._buffer[: end.start()])
            del self._buffer[: end.end()]
            self._looked = 0
            lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        self._looked = max(0, len(self._buffer) - 3)  # an end may begin in the bytes that are here
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EngineError("broken", f"a stream event of more than {MAX_EVENT_BYTES} bytes")
