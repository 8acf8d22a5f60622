"""One sample's generation: requests to the engine, segments to the store, until it ends or is let go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samplestore.errors import InvalidSegment, LeaseLost, SequenceConflict
from samplestore.run import advance
from samplestore.types import Claim, RequestInfo
from samplestore.verbs import samples
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import Delta, EngineError, ReplyReader

log = logging.getLogger("samplestore.generation")

Write = Callable[..., Awaitable[Any]]
_END = object()
CONTEXT_MARGIN = 6  # SGLang refuses prompts within 6 tokens of its context, and stops 2 before it


@dataclass(frozen=True, slots=True)
class Limits:
    """How a worker generates. Tokens and seconds."""

    mode: str
    slice_tokens: int
    flush_tokens: int
    flush_seconds: float
    max_new_tokens: int
    sampling: dict[str, Any]
    versions_may_change: bool  # weights change under running requests (weight_update="keep")


@dataclass(slots=True)
class Pending:
    """Tokens that the engine has sent and the store has not acknowledged, in order."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = field(default_factory=list)
    since: float = 0.0

    def add(self, delta: Delta) -> None:
        if not delta.ids:
            return
        if not self.ids:
            self.since, self.logprobs = time.monotonic(), []
        self.ids += delta.ids
        if self.logprobs is None or delta.logprobs is None:
            self.logprobs = None
        else:
            self.logprobs += delta.logprobs

    def first(self, n: int) -> tuple[list[int], list[Any] | None]:
        """The first n tokens and their log-probs."""
        return self.ids[:n], None if self.logprobs is None else self.logprobs[:n]

    def drop(self, n: int) -> None:
        """The first n are stored. Not before: behind tokens that were refused nothing may be stored, or the response
        would have a hole."""
        self.ids = self.ids[n:]
        self.logprobs = None if self.logprobs is None else self.logprobs[n:]


class Outcome:
    FINISHED, ABORTED, CUT, BUSY = "finished", "aborted", "cut", "busy"


class Request:
    """One call to an engine for a claimed sample: reads its chunks, flushes segments, closes its row.

    versions      looks a label up: the run's version number, or None
    labels_before the labels that the engines reported just before the call
    why_aborted   the reason to record for an abort of tokens made under a label
    cache_key     requests of different keys share no prefix cache. Where weights change without a flush, a request
                  would else be continued from keys and values of other weights
    """

    def __init__(
        self, claim: Claim, client: EngineClient, write: Write, limits: Limits,
        versions: Callable[[str | None], Awaitable[int | None]], labels_before: set[str | None],
        why_aborted: Callable[[str | None], str], cache_key: str | None = None,
    ) -> None:  # fmt: skip
        self.claim, self.client, self.write, self.limits = claim, client, write, limits
        self.versions, self.why_aborted, self.cache_key = versions, why_aborted, cache_key
        self.rid = secrets.token_hex(16)  # fixed length: some engines abort by prefix
        self.reader, self.pending = ReplyReader(), Pending()
        self.certain = 0  # tokens of `pending`, from its start, whose version is certain
        self.certain_label: str | None = None
        known = limits.versions_may_change and len(labels_before) == 1
        self.last_label = next(iter(labels_before)) if known else None
        self.labels_before = labels_before
        self.held = False  # a chunk straddled a change of versions: what follows waits for the final spans
        self.abort_told = False
        self.stored = 0

    async def run(self, base: str, budget: int, resumes: bool, engine: str | None = None) -> str:
        """Generate up to `budget` tokens. Returns an Outcome; everything that may be stored is stored.
        `engine`: which one `base` is, where it is not a router.
        Raises LeaseLost, InvalidSegment, EngineError("refused" | "broken")."""
        temperature = float(self.limits.sampling.get("temperature", 1.0))
        await self.write(samples.begin_request, self.claim, self.rid, engine, temperature, resumes)
        lost: str | None = "worker failed"
        try:
            outcome = await self._read(base, budget)
            lost = "engine died" if outcome == Outcome.CUT else None
            return outcome
        except LeaseLost:
            lost = "lease lost"
            raise
        except (InvalidSegment, SequenceConflict) as error:
            lost = f"refused: {error}"[:200]
            raise
        except EngineError as error:
            lost = f"engine {error.kind}"
            raise
        except asyncio.CancelledError:
            lost = "worker stopped"
            await uninterrupted(self._flush_rest())  # what has come is kept
            raise
        finally:
            await asyncio.shield(self._close(lost))

    def _body(self, budget: int) -> dict[str, Any]:
        claim, streaming = self.claim, self.limits.mode == "stream"
        n = budget if self.limits.mode != "sliced" else min(budget, self.limits.slice_tokens)
        body = {
            "rid": self.rid,
            "input_ids": [*claim.prompt_ids.tolist(), *claim.response_ids.tolist()],
            "sampling_params": {**self.limits.sampling, "max_new_tokens": n},
            "return_logprob": True,
            "stream": streaming,
        }
        if self.cache_key is not None:
            body["extra_key"] = self.cache_key
        return body

    async def _read(self, base: str, budget: int) -> str:
        """Read to the end. A reply is complete by its finish_reason alone: some routers say [DONE] after an error."""
        body, reader = self._body(budget), self.reader
        try:
            chunks = self.client.generate(base, body, f"{self.claim.run_id}-{self.claim.group_id}")
            async with contextlib.aclosing(chunks):  # an error must end the call now: the engine stops when it is cut
                await self._receive(chunks)
        except EngineError as error:
            if error.kind == "busy" and not reader.totals.completion_tokens:
                return Outcome.BUSY
            if error.kind in ("refused", "broken"):
                await self._flush_rest()  # what came before the error is good
                raise
            log.warning("sample=%d rid=%s %s", self.claim.sample_id, self.rid, error)
        await self._flush_rest()
        reason = reader.totals.finish_reason
        if reason is None:
            return Outcome.CUT
        if reason == "abort" and self.claim.n_tokens and not self.abort_told:
            await self.write(samples.note_abort, self.claim, self.why_aborted(reader.totals.label))
        self.claim.finish_reason = reason
        return Outcome.ABORTED if reason == "abort" else Outcome.FINISHED

    async def _receive(self, chunks: AsyncGenerator[Any, None]) -> None:
        """Take what comes, and flush it in time, also while nothing more comes: an engine may be paused for long."""
        while True:
            arriving = asyncio.ensure_future(anext(chunks, _END))
            try:
                while not (await asyncio.wait([arriving], timeout=self._due_in()))[0]:
                    await self._flush(self.certain, self.certain_label)
            finally:
                if not arriving.done():
                    arriving.cancel()
                    await asyncio.wait([arriving])  # a generator that runs can't be closed
            if (chunk := arriving.result()) is _END:
                return
            self._take(self.reader.feed(chunk))
            if self.certain >= self.limits.flush_tokens or self._due_in() == 0:
                await self._flush(self.certain, self.certain_label)

    # -- versions

    def _take(self, delta: Delta) -> None:
        """Tokens between two chunks of one label are certain. A chunk that straddles a change is held, and all that
        follows it, until the final spans: segments are stored in order, and never relabelled. Where weights only
        change between requests (modes abort and drain) the first chunk's label is certain too."""
        self.pending.add(delta)
        first = self.last_label is None and not self.limits.versions_may_change
        if delta.label != self.last_label and not first:
            self.held = True
        if not self.held:
            self.certain, self.certain_label = len(self.pending.ids), delta.label
        self.last_label = delta.label

    def _due_in(self) -> float | None:
        """Seconds until the next flush must be; None: nothing can be flushed."""
        if not self.certain:
            return None
        return max(0.0, self.pending.since + self.limits.flush_seconds - time.monotonic())

    async def _flush(self, n: int, *labels: str | None) -> None:
        """Store the first n pending tokens, made by the weights that `labels` name: one, or a range of them."""
        if n:
            # Not to be cut in the middle: a write that is made without this object knowing would be made again.
            await uninterrupted(self._store(n, labels))

    async def _store(self, n: int, labels: tuple[str | None, ...]) -> None:
        numbers = [await self.versions(label) for label in labels]
        known = [v for v in numbers if v is not None]
        version: Any = None if len(known) < len(numbers) else (min(known), max(known))
        ended = self.reader.totals.finish_reason if n == len(self.pending.ids) else None
        ids, probs = self.pending.first(n)
        claim, seq = self.claim, self.claim.seq
        reason = self.why_aborted(labels[0])
        await self.write(samples.append, claim, seq, ids, probs, version, ended, rid=self.rid, abort_reason=reason)
        self.pending.drop(n)
        self.abort_told = ended == "abort"
        advance(claim, seq, len(ids), ended)
        claim.response_ids = _joined(claim.response_ids, ids)
        self.stored += len(ids)
        self.certain = max(0, self.certain - n)
        self.pending.since = time.monotonic()

    async def _flush_rest(self) -> None:
        """The end of a reply: by its spans where the engine gave them, else by the labels that were seen."""
        for start, stop, label in _spans(self.reader.totals.spans, self.reader.totals.completion_tokens):
            n = min(stop, self.stored + len(self.pending.ids)) - max(start, self.stored)
            if n > 0 and start <= self.stored:
                await self._flush(n, label)
        if self.pending.ids:
            await self._flush(self.certain, self.certain_label)
        if self.pending.ids:
            before = {self.certain_label} if self.certain_label else self.labels_before
            await self._flush(len(self.pending.ids), *{*before, self.reader.totals.label})

    # -- the request's row

    async def _close(self, lost: str | None) -> None:
        t = self.reader.totals
        complete = t.finish_reason is not None
        missing = t.completion_tokens - self.stored
        await self.write(
            samples.end_request,
            RequestInfo(
                rid=self.rid, prompt_tokens=t.prompt_tokens, cached_tokens=t.cached_tokens,
                # what the engine made after its last word is not known; no answer at all is zero as far as we know
                generated_tokens=t.completion_tokens if complete or lost != "engine died" else None,
                retractions=t.retractions, queue_s=t.queue_s, e2e_s=t.e2e_s, finish_reason=t.finish_reason,
                lost_reason=lost if missing or not complete else None,
            ),
        )  # fmt: skip


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if this task is cancelled meanwhile; then be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise


def _joined(ids: Any, more: list[int]) -> Any:
    return np.concatenate([ids, np.asarray(more, dtype=np.int32)])


def _spans(spans: Any, total: int) -> list[tuple[int, int, str]]:
    """The engine's weight_versions, if they tile 0..total; else nothing: they are not trusted half."""
    result, at = [], 0
    for span in spans or []:
        start, stop, label = (span.get(k) for k in ("start", "end", "version")) if isinstance(span, dict) else (0, 0, 0)
        if start != at or not isinstance(stop, int) or stop < start or not isinstance(label, str):
            return []
        result.append((start, stop, label))
        at = stop
    return result if at == total else []
