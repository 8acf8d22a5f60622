"""One generation request: what was asked, what has been generated, and how it is told to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .params import SamplingParams
from .sampler import Choice, Picked, uniform

Alternatives = list[tuple[float, int]]
_MOST_PENDING = 64


class TextStream:
    """Turns a growing list of token ids into text, holding back bytes that don't form a character yet."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown_from = 0
        self._shown_to = 0
        self.text = ""

    def push(self, ids: Sequence[int]) -> None:
        """Add ids; `text` grows by what they complete."""
        self._ids.extend(ids)
        before, after = self._window()
        pending = len(self._ids) - self._shown_to
        if len(after) > len(before) and (not after.endswith("\ufffd") or pending > _MOST_PENDING):
            self.text += after[len(before) :]
            self._shown_from, self._shown_to = self._shown_to, len(self._ids)

    def complete(self) -> str:
        """All text, with replacement characters for a last character that never got its bytes."""
        before, after = self._window()
        return self.text + after[len(before) :]

    def _window(self) -> tuple[str, str]:
        # The last shown tokens are decoded again as context: some tokenizers write a token differently at the start.
        start = self._shown_from
        return self._decode(self._ids[start : self._shown_to]), self._decode(self._ids[start:])


@dataclass(eq=False)
class Request:
    """State of one request; changed only on the event loop."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    eos: frozenset[int]
    stream: bool = False
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    text_in_logprobs: bool = False
    text_stream: TextStream | None = None
    decode_one: Callable[[int], str] | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Alternatives] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    prompt_top: list[Alternatives] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    final_text: str = ""
    queued_abort: bool = False
    abort_wanted: bool = False
    stale_rows: bool = False
    retractions: int = 0
    order: int = 0
    created: float = field(default_factory=time.monotonic)
    finished_at: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def choice(self) -> Choice:
        """How to choose the next token."""
        params = self.params
        short = len(self.output) < params.min_new_tokens
        return Choice(
            greedy=params.greedy,
            temperature=1.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            draw=0.0 if params.greedy else uniform(self.seed, self.length),
            forbidden=tuple(self.eos | params.stop_token_ids) if short else (),
            top_logprobs=self.top_logprobs if self.return_logprob else 0,
        )

    def take(self, picked: Picked, row: int, version: str) -> None:
        """Append row `row` of a step that ran under weight version `version`; may set `finish`."""
        token = picked.tokens[row]
        self.output.append(token)
        self.logprobs.append(picked.logprobs[row])
        if self.top_logprobs and self.return_logprob:
            self.top.append(picked.top.get(row, []))
        count = len(self.output)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], count)
        else:
            self.spans.append((version, count - 1, count))
        ended = not self.params.ignore_eos and (token in self.eos or token in self.params.stop_token_ids)
        # SGLang's order: a request that reaches its limit is "length" even if its last token is an end token.
        ended = ended and count < self.limit
        if self._incremental and self.text_stream is not None and not (ended and not self.params.no_stop_trim):
            self.text_stream.push([token])
        if count >= self.limit:
            self.close({"type": "length", "length": count})
        elif ended:
            self.close({"type": "stop", "matched": token})
        elif self.params.stop and self.text_stream is not None and count >= self.params.min_new_tokens:
            hit = first_stop(self.text_stream.text, self.params.stop)
            if hit is not None:
                self.close({"type": "stop", "matched": hit[1]}, cut=hit)

    @property
    def _incremental(self) -> bool:
        return self.stream or bool(self.params.stop)

    def close(self, reason: dict[str, Any], cut: tuple[int, str] | None = None) -> None:
        """Finish with `reason`; later calls change nothing. `cut` = (position, stop string) ends the text there."""
        if self.finish is not None:
            return
        self.finish = reason
        self.finished_at = time.monotonic()
        if self.text_stream is not None:
            if not self._incremental:
                # An end token has no place in the text, even where it is an ordinary token that decodes to letters.
                trim = isinstance(reason.get("matched"), int) and not self.params.no_stop_trim
                self.text_stream.push(self.output[:-1] if trim else self.output)
            text = self.text_stream.complete()
            if cut is not None:
                text = text[: cut[0] + (len(cut[1]) if self.params.no_stop_trim else 0)]
            self.final_text = text
        self.changed.set()

    def visible_text(self) -> str:
        """Text that may be shown now: the final one, or all but a tail that could become a stop string."""
        if self.text_stream is None:
            return ""
        if self.finish is not None:
            return self.final_text
        text = self.text_stream.text
        for keep in range(max((len(stop) for stop in self.params.stop), default=1) - 1, 0, -1):
            tail = text[-keep:]
            if len(tail) == keep and any(stop.startswith(tail) for stop in self.params.stop):
                return text[:-keep]
        return text


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(position, stop string) of the stop string that appears first in `text`, or None."""
    hits = [(text.find(stop), stop) for stop in stops]
    return min((hit for hit in hits if hit[0] >= 0), default=None)
