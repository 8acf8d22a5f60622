"""One sample's generation: requests to the engine, segments to the store, until it ends or is let go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from samplestore.errors import InvalidSegment, LeaseLost, SequenceConflict
from samplestore.run import advance
from samplestore.types import Claim, RequestInfo, StageClaim
from samplestore.verbs import appends, requests, samples
from samplestore.words import amount
from samplestore.workers.dispatch import Target
from samplestore.workers.engine_client import EngineClient, Reply
from samplestore.workers.experts import decode
from samplestore.workers.limits import Limits, carried_temperature, is_greedy
from samplestore.workers.pending import Pending, spans_of
from samplestore.workers.replies import Delta, EngineError, ReplyReader
from samplestore.writer import Call

log = logging.getLogger("samplestore.generation")

Write = Callable[..., Awaitable[Any]]
Together = Callable[[Sequence[Call]], Awaitable[list[Any]]]
Part = tuple[int, int, tuple[str | None, ...]]  # of the pending tokens: from, to, and whose weights made them


class Outcome:
    FINISHED, ABORTED, CUT, BUSY = "finished", "aborted", "cut", "busy"


class Request:
    """One call to an engine for a claimed sample: reads its chunks, flushes segments, closes its row.

    write         one write, acknowledged; `together`: several of the sample, all of them or none
    closing       what ends the sample, told the tokens of this request, why it ended and its last token; None: it goes
                  on. Stored together with the last tokens
    versions      looks a label up: the run's version number, or None
    labels_before the labels that the engines reported just before the call
    why_aborted   the reason to record for an abort of tokens made under a label
    cache_label   where weights change without a flush, a request could be continued from keys and values of other
                  weights. So it shares its cache only with requests of this label (asked when it is sent), or with
                  none if that is None; without the function it shares it with all
    """

    def __init__(
        self, claim: Claim, client: EngineClient, write: Write, together: Together, limits: Limits,
        closing: Callable[[int, str, int], Call | None],
        versions: Callable[[str | None], Awaitable[int | None]], labels_before: set[str | None],
        why_aborted: Callable[[str | None], str], cache_label: Callable[[], str | None] | None = None,
        image_data: Sequence[str] = (), prompt_tokens: int | None = None, turn_start: int = 0,
    ) -> None:  # fmt: skip
        self.engine: str | None = None  # who answers, as far as it is known
        self.error: EngineError | None = None  # what ended it early
        self.claim, self.client, self.write, self.together, self.limits = claim, client, write, together, limits
        self.closing = closing
        self.closed = False  # its row has its end
        self.finished: list[StageClaim] | None = None  # the sample was finished with it: its stages
        self.versions, self.why_aborted, self.cache_label = versions, why_aborted, cache_label
        self.direct = False  # no router between
        self.image_data = image_data  # the prompt's images, as data URLs
        self.prompt_tokens = prompt_tokens  # what the engine must make of prompt and images, where it is known
        self.turn_start = turn_start  # response position where its turn began
        self.shares: str | None = None  # the label whose cache it shares
        self.rid = secrets.token_hex(16)  # fixed length: some engines abort by prefix
        self.reader, self.pending = ReplyReader(), Pending()
        self.certain = 0  # tokens of `pending`, from its start, whose version is certain
        self.certain_label: str | None = None
        known = limits.versions_may_change and len(labels_before) == 1
        self.last_label = next(iter(labels_before)) if known else None
        self.labels_before = labels_before
        self.held = False  # a chunk straddled a change of versions: what follows waits for the final spans
        self.labels_held: set[str | None] = set()  # of those chunks: they may go back, or to and fro
        self.asked = 0  # tokens
        self.stored = 0
        self.first_row = 0  # of the sequence, that routed experts are asked from

    async def run(self, target: Target, budget: int, resumes: bool) -> str:
        """Generate up to `budget` tokens. Returns an Outcome; everything that may be stored is stored.
        Raises LeaseLost, InvalidSegment, EngineError of every kind but "unreachable" and "busy"."""
        temperature = carried_temperature(self.sampling)
        self.engine, self.direct = target.engine, target.engine is not None
        draw = (self.sampling.get("sampling_seed"), is_greedy(self.sampling))
        await self.write(requests.begin_request, self.claim, self.rid, self.engine, temperature, resumes, *draw)
        lost: str | None = "worker failed"
        try:
            outcome = await self._read(target.base, budget)
            lost = self._why_lost() if outcome == Outcome.CUT else None
            return outcome
        except LeaseLost:
            lost = "lease lost"
            raise
        except (InvalidSegment, SequenceConflict) as error:
            lost = f"refused: {type(error).__name__}"  # a reason is counted: no ids in it. The error tells them
            raise
        except EngineError as error:
            lost = f"engine {error.kind}"
            raise
        except asyncio.CancelledError:
            lost = "worker stopped"
            await uninterrupted(self._flush_rest())  # what has come is kept
            raise
        finally:
            if not self.closed:
                await asyncio.shield(self.write(*self._end(lost)))

    def _why_lost(self) -> str | None:
        if self.error is not None and self.error.unconnected:
            return None  # nothing was asked, so nothing was made
        return "stale cache" if self.error is not None and self.error.kind == "stale" else "engine died"

    @property
    def sampling(self) -> dict[str, Any]:
        """Those of its sample: with its seed, where the run has one and no other is given."""
        seed, given = self.limits.sampling_seed, self.limits.sampling
        return given if seed is None else {"sampling_seed": seed + self.claim.index, **given}

    def _body(self, budget: int) -> dict[str, Any]:
        claim, streaming = self.claim, self.limits.mode == "stream"
        n = self.asked = budget if self.limits.mode != "sliced" else min(budget, self.limits.slice_tokens)
        body = {
            "rid": self.rid,
            "input_ids": [*claim.prompt_ids.tolist(), *claim.response_ids.tolist()],
            "sampling_params": {**self.sampling, "max_new_tokens": n, **self._least(n)},
            "return_logprob": True,
            "stream": streaming,
        }
        if self.image_data:
            body["image_data"] = list(self.image_data)
        if self.cache_label is not None:
            self.shares = self.cache_label()
            body["extra_key"] = self.shares or secrets.token_hex(16)
        if self.limits.routed_experts is not None:
            self.first_row = int(claim.prompt_ids.size) + claim.n_tokens - 1 if claim.n_tokens else 0
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = self.first_row
        return body

    def _least(self, most: int) -> dict[str, int]:
        """An engine counts min_new_tokens from its prompt's end: what earlier requests of the turn have made is part
        of it. It refuses a least that is beyond the most, as that of a slice would be."""
        wanted = self.sampling.get("min_new_tokens")
        if not wanted:
            return {}
        return {"min_new_tokens": max(0, min(most, wanted - (self.claim.n_tokens - self.turn_start)))}

    async def _read(self, base: str, budget: int) -> str:
        """Read to the end. A reply is complete by its finish_reason alone: some routers say [DONE] after an error."""
        body, reader = self._body(budget), self.reader
        try:
            reply = self.client.generate(base, body, f"{self.claim.run_id}-{self.claim.group_id}")
            async with contextlib.aclosing(reply):  # an error must end the call now: the engine stops when it is cut
                await self._receive(reply)
        except EngineError as error:
            self.error = error
            if error.kind == "busy" and not reader.totals.completion_tokens:
                return Outcome.BUSY
            if error.kind == "stale":  # none of it is kept, though it may be complete
                self._warn(error, base)
                self.pending = Pending()
                return Outcome.CUT
            if error.kind not in ("unreachable", "busy", "error"):
                await self._flush_rest()  # what came before the error is good
                raise
            self._warn(error, base)
        experts = self._experts()  # before the end is stored: a reply whose experts are wrong is not complete
        reason = reader.totals.finish_reason
        if reason is None:
            if self.error is None:
                self._warn("the answer ended without a finish_reason", base)
            await self._flush_rest()
            return Outcome.CUT
        await uninterrupted(self._conclude(reason, experts))
        return Outcome.ABORTED if reason == "abort" else Outcome.FINISHED

    def _warn(self, said: Any, base: str) -> None:
        log.warning("engine=%s sample=%d rid=%s %s", self.engine or base, self.claim.sample_id, self.rid, said)

    async def _conclude(self, reason: str, experts: Any) -> None:
        """Store the end of a complete reply, its row, and the end of the sample where this is it: one write."""
        claim, parts, made = self.claim, self._rest(), self.stored + len(self.pending.ids)
        then: list[Call] = []
        if experts is not None:
            n = self.limits.routed_experts.n_experts if self.limits.routed_experts else 0
            if self.limits.prepare_array is not None:  # on the disk before the row that names it
                experts = await asyncio.to_thread(self.limits.prepare_array, "routed_experts", experts, n)
            then.append((samples.attach, claim, "routed_experts", experts, n, self.first_row))
        if reason == "abort" and claim.n_tokens and not parts:  # else the last segment tells it
            then.append((appends.note_abort, claim, self.why_aborted(self.reader.totals.label), self.rid))
        then.append(self._end(None, made))
        ids = self.pending.ids if self.pending.ids else claim.response_ids
        ends = None if reason == "abort" else self.closing(made, reason, int(ids[-1]) if len(ids) else -1)
        # after an attach in a write of its own: said twice with it, the attach would find the sample ended
        last = [] if ends is None or experts is not None else [ends]
        results = await self._send(parts, [*then, *last])
        self.closed, claim.finish_reason = True, reason
        if ends:
            self.finished = results[-1] if last else await self.write(*ends)

    async def _receive(self, reply: Reply) -> None:
        """Take what comes, and flush it in time, also while nothing more comes: an engine may be paused for long. One
        timer serves all the reads up to a flush: one for each would cost more than the reading."""
        more = self._take_all(reply, await reply.read())  # whole: before the first chunk nothing can be due
        while more and not self.complete:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limits.flush_seconds):
                    while more and not self._flush_due() and not self.complete:
                        more = self._take_all(reply, await reply.read())
            if more and not self.complete:  # the rest of a reply is flushed by its spans
                await self._flush(self.certain, self.certain_label)
        while more:
            more = self._take_all(reply, await reply.read())

    @property
    def complete(self) -> bool:
        """Whether its reply is, whatever is still to be stored."""
        return self.reader.totals.finish_reason is not None

    def _flush_due(self) -> bool:
        return self.certain >= self.limits.flush_tokens or self._due_in() == 0

    def _take_all(self, reply: Reply, chunks: list[Any]) -> bool:
        """Take the chunks of one read; whether there were any."""
        self.engine = reply.engine or self.engine
        reader, before = self.reader, self.reader.totals.completion_tokens
        for chunk in chunks:
            delta = reader.feed(chunk)
            if (made := reader.totals.completion_tokens) > self.asked:
                raise EngineError("broken", f"{amount(made, 'token')}, and {self.asked:,} were asked for")
            self._take(delta)
            if reader.chunks == 1:
                self._require_own_answer()
                self._require_own_cache()
                self._require_own_prompt()
            if reader.cumulative and (cost := reader.too_costly()) is not None:
                raise EngineError("setup", cost)
        if reader.totals.completion_tokens > before:
            reply.got_on()
        return bool(chunks)

    # -- versions

    def _take(self, delta: Delta) -> None:
        """Tokens between two chunks of one label are certain. A chunk that straddles a change is held, and all that
        follows it, until the final spans: segments are stored in order, and never relabelled. Where weights only
        change between requests (modes abort and drain) the first chunk's label is certain too."""
        self.pending.add(delta)
        first = self.last_label is None and not self.limits.versions_may_change
        if delta.label != self.last_label and not first:
            self.held = True
        if self.held:
            self.labels_held.add(delta.label)
        else:
            self.certain, self.certain_label = len(self.pending.ids), delta.label
        self.last_label = delta.label

    def _require_own_answer(self) -> None:
        """Raises EngineError("broken") for the answer to another call, as a proxy that mixes them up would give."""
        told = self.reader.totals.rid
        if told is not None and told != self.rid:
            self.pending = Pending()  # none of it is kept
            raise EngineError("broken", f"the answer is that of the call {told[:100]!r}, not of {self.rid}")

    def _require_own_cache(self) -> None:
        """The weights may have changed between this request's key and its start: then its prefix could come from keys
        and values of the old ones, and no version would describe its tokens. Raises EngineError("stale")."""
        told = self.reader.totals
        if self.shares is None or not told.cached_tokens:
            return
        spans = spans_of(told.spans, told.completion_tokens)
        if (spans[0][2] if spans else told.label) != self.shares:
            raise EngineError("stale", f"it was continued from a cache of {self.shares}, under other weights")

    def _require_own_prompt(self) -> None:
        """The engine continues the tokens that it was sent, not others of the same text. Raises
        EngineError("refused")."""
        told, sent = self.reader.totals.prompt_tokens, self.prompt_tokens
        if told is None or sent is None or told == sent:
            return
        self.pending = Pending()  # none of it is kept
        raise EngineError(
            "refused",
            f"the engine made {told} tokens of a prompt with images that had {sent}: it encoded the text anew. For "
            "such a model, make the run with resume=False",
        )

    def _due_in(self) -> float | None:
        """Seconds until the next flush must be; None: nothing can be flushed. A change of versions ends a segment."""
        if not self.certain:
            return None
        if self.held:
            return 0.0
        return max(0.0, self.pending.since + self.limits.flush_seconds - time.monotonic())

    async def _flush(self, n: int, *labels: str | None) -> None:
        """Store the first n pending tokens, made by the weights that `labels` name: one, or a range of them."""
        if n:
            await uninterrupted(self._send([(0, n, labels)]))

    async def _flush_rest(self) -> None:
        if parts := self._rest():
            await uninterrupted(self._send(parts))

    def _rest(self) -> list[Part]:
        """The end of a reply: by its spans where the engine gave them, else by the labels that were seen."""
        parts: list[Part] = []
        at, stop = 0, len(self.pending.ids)
        for begin, end, label in spans_of(self.reader.totals.spans, self.reader.totals.completion_tokens):
            upto = min(end - self.stored, stop)
            if upto > at and begin <= self.stored + at:
                parts.append((at, upto, (label,)))
                at = upto
        if at < (certain := min(self.certain, stop)):
            parts.append((at, certain, (self.certain_label,)))
            at = certain
        if at < stop:
            before = {self.certain_label} if self.certain_label else self.labels_before
            parts.append((at, stop, tuple({*before, *self.labels_held, self.reader.totals.label})))
        return parts

    async def _send(self, parts: Sequence[Part], then: Sequence[Call] = ()) -> list[Any]:
        """Store the first pending tokens, part by part, and what `then` says: all of it or nothing. Not to be cut in
        the middle: a write that is made without this object knowing would be made again. Returns the results."""
        if parts and self.reader.without_numbers:
            raise EngineError("unfit", "every log-prob of its answer is null or NaN: its weights are not finite")
        claim, calls, reason = self.claim, [], self.reader.totals.finish_reason
        for number, (start, stop, labels) in enumerate(parts):
            ids, probs = self.pending.part(start, stop)
            ended = reason if stop == len(self.pending.ids) else None
            calls.append((
                appends.append, claim, claim.seq + number, ids, probs, await self._version(labels), ended, "generated",
                None, self.rid, None, self.why_aborted(labels[0]),
            ))  # fmt: skip
        results = await self.together([*calls, *then])
        for call in calls:
            _, _, seq, ids, _, _, ended, *_ = call
            advance(claim, seq, len(ids), ended)
        if calls:
            claim.response_ids = np.concatenate([claim.response_ids, *(call[3] for call in calls)])
            n = parts[-1][1]
            self.pending.drop(n)
            self.stored += n
            self.certain = max(0, self.certain - n)
            self.pending.since = time.monotonic()
        return results

    async def _version(self, labels: tuple[str | None, ...]) -> Any:
        numbers = [await self.versions(label) for label in labels]
        known = [v for v in numbers if v is not None]
        return None if len(known) < len(numbers) else (min(known), max(known))

    def _experts(self) -> Any:
        """The experts to store beside the request's last segment: those of its new tokens, and of the prompt where it
        is the first. What an earlier request stored stays as it was: the weights may have been others then. None
        where there are none. Raises EngineError."""
        shape, told = self.limits.routed_experts, self.reader.totals
        if shape is None or told.finish_reason is None or not self.stored + len(self.pending.ids):
            return None
        if told.routed_experts is None:
            if told.finish_reason == "abort":
                return None  # aborted in the queue after a retraction: the engine has dropped them
            raise EngineError(
                "setup",
                f"{self.engine or 'an engine'} told no routed experts. Start it with: --enable-return-routed-experts",
            )
        tokens = int(self.claim.prompt_ids.size) + self.claim.n_tokens + len(self.pending.ids)
        return decode(told.routed_experts, shape, tokens - 1 - self.first_row)

    # -- the request's row

    def _end(self, lost: str | None, kept: int | None = None) -> Call:
        """The write that ends the request's row. kept: tokens that are stored by then; those of now if left out."""
        t = self.reader.totals
        complete = t.finish_reason is not None
        missing = t.completion_tokens - (self.stored if kept is None else kept)
        info = RequestInfo(
            rid=self.rid, prompt_tokens=t.prompt_tokens, cached_tokens=t.cached_tokens,
            # what the engine made after its last word is not known; no answer at all is zero as far as we know
            generated_tokens=t.completion_tokens if complete or lost in (None, "engine refused") else None,
            retractions=t.retractions, queue_s=t.queue_s, e2e_s=t.e2e_s, finish_reason=t.finish_reason,
            spec=t.spec or None, engine=self.engine, lost_reason=lost if missing or not complete else None,
        )  # fmt: skip
        return requests.end_request, info


async def uninterrupted(work: Coroutine[Any, Any, Any]) -> None:
    """Finish `work` even if this task is cancelled meanwhile; then be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise
