"""One claimed sample, from its claim to its end: finished, given back, or failed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any, Protocol

from samplestore.errors import LeaseLost, SampleStoreError
from samplestore.types import Claim, StageClaim
from samplestore.verbs import samples
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.fleet import Fleet
from samplestore.workers.generation import CONTEXT_MARGIN, Limits, Outcome, Request
from samplestore.workers.replies import EngineError

log = logging.getLogger("samplestore.worker")

MAX_CUTS = 5  # requests in a row that died without a token, after which a sample is given back
BACKOFF_S = 0.25


class Host(Protocol):
    """What a trajectory needs of the worker that runs it."""

    client: EngineClient
    limits: Limits
    fleet: Fleet
    current_label: tuple[str, str | None] | None

    async def write(self, verb: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any: ...

    async def version_of(self, label: str | None) -> int | None: ...


class LetGo(Exception):
    """Generation ends, and the sample goes back, for the reason given."""


class Trajectory:
    """A claimed sample and the task that generates it.

    keep_stages   its rewards are scored by this worker: `run` returns them
    """

    def __init__(self, claim: Claim, host: Host, keep_stages: bool) -> None:
        self.claim, self.host, self.keep_stages = claim, host, keep_stages
        self.request: Request | None = None  # the running one
        self.told: str | None = None  # why it is to stop and go back
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> list[StageClaim]:
        """Generate until the sample ends; its stages, if it was finished here. Whatever happens, the sample does not
        stay with a worker that does nothing for it."""
        claim, write = self.claim, self.host.write
        try:
            await self._generate()
            done: list[StageClaim] = await write(samples.finish, claim, None, claim.finish_reason, self.keep_stages)
            return done
        except LetGo as reason:
            await self._give_back(str(reason))
        except asyncio.CancelledError:
            await self._give_back(self.told or "request cut off")
            raise
        except LeaseLost as error:
            log.warning("sample=%d %s", claim.sample_id, error)
        except SampleStoreError as error:
            await self._failed(error)
        except Exception as error:
            log.exception("sample=%d failed unexpectedly", claim.sample_id)
            await self._failed(error)
        return []

    def tell(self, reason: str) -> None:
        """Stop at the next chance and go back; the first reason counts."""
        self.told = self.told or reason

    async def abort(self, timeout_s: float) -> None:
        """Abort the running request at the engines; the partial comes back through the open call. Said again until it
        does: an abort that overtakes its request is not heard. In the end the call is cut: an engine that sees its
        client go stops too."""
        request, task, end = self.request, self.task, time.monotonic() + timeout_s
        while request is not None and task is not None and not task.done() and self.request is request:
            if time.monotonic() >= end:
                log.warning("rid=%s abort was not answered; closing its connection", request.rid)
                task.cancel()
                return
            await self.host.fleet.abort(request.rid)
            await asyncio.wait([task], timeout=max(0.01, min(1.0, end - time.monotonic())))

    async def _generate(self) -> None:
        """Requests, one after the other, until the sample is finished: it is resumed from its stored tokens whenever
        a request ends early. The budget is what is left of max_new_tokens, counted from stored tokens."""
        claim = self.claim
        if claim.n_tokens and claim.finish_reason not in (None, "abort", "length"):
            return  # it was complete, and its worker died before it could say so: another token would be one too many
        resumes, idle = claim.resumable, 0
        while True:
            self._check_told()
            budget = self._budget()
            if budget <= 0:
                return self._out_of_room()
            request = self.request = self._new_request()
            outcome = await self._ask(request, budget, resumes)
            self.request = None
            if outcome == Outcome.FINISHED and not self._slice_ended(budget, request):
                return None
            resumes = outcome != Outcome.FINISHED and claim.n_tokens > 0
            idle = 0 if request.stored else idle + 1
            self._check_told()
            if outcome == Outcome.CUT and idle >= MAX_CUTS:
                raise LetGo("engine unreachable")
            if outcome in (Outcome.CUT, Outcome.BUSY) or idle:
                # min: after an hour without engines 2**idle would be no float any more
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(5.0, BACKOFF_S * 2 ** min(idle, 8)))

    def _new_request(self) -> Request:
        host = self.host
        keyed = host.limits.versions_may_change and host.current_label is not None
        return Request(
            self.claim, host.client, host.write, host.limits, host.version_of, set(host.fleet.engines.values()),
            self._why_aborted, host.current_label[0] if keyed and host.current_label else None,
        )  # fmt: skip

    async def _ask(self, request: Request, budget: int, resumes: bool) -> str:
        fleet = self.host.fleet
        try:
            base = fleet.base_for(self.claim.group_id)
            outcome = await request.run(base, budget, resumes, None if fleet.router else base)
            if outcome == Outcome.CUT:
                fleet.suspect(base)
            return outcome
        except LeaseLost:
            # nobody wants these tokens any more, so the engine must not make them
            await asyncio.shield(fleet.abort(request.rid))
            raise

    def _budget(self) -> int:
        claim, room = self.claim, self.host.fleet.context_length
        budget = claim.budget(self.host.limits.max_new_tokens)
        if room is None:
            return budget
        return min(budget, room - int(claim.prompt_ids.size) - claim.n_tokens - CONTEXT_MARGIN)

    def _out_of_room(self) -> None:
        """The budget is used up: the sample is truncated, without another request."""
        if self.claim.n_tokens == 0:
            n, room = self.claim.prompt_ids.size, self.host.fleet.context_length
            raise EngineError("refused", f"a prompt of {n} tokens leaves no room in a context of {room}")
        self.claim.finish_reason = "length"

    def _slice_ended(self, budget: int, request: Request) -> bool:
        """Whether a slice ended, rather than the sample."""
        limits = self.host.limits
        return (
            limits.mode == "sliced"
            and self.claim.finish_reason == "length"
            and request.stored >= min(budget, limits.slice_tokens)
            and self._budget() > 0
        )

    def _why_aborted(self, label: str | None) -> str:
        if self.told is not None:
            return self.told
        current = self.host.current_label[0] if self.host.current_label else None
        return "weight update" if label != current else "engine"

    def _check_told(self) -> None:
        if self.told is not None:
            raise LetGo(self.told)

    async def _give_back(self, reason: str) -> None:
        try:
            await asyncio.shield(self.host.write(samples.release, self.claim, reason))
        except LeaseLost as error:
            log.warning("sample=%d %s", self.claim.sample_id, error)

    async def _failed(self, error: Exception) -> None:
        claim = self.claim
        log.error("sample=%d attempt=%d %s", claim.sample_id, claim.attempt, error)
        try:
            await self.host.write(samples.fail, claim, str(error) or type(error).__name__)
        except LeaseLost as lost:
            log.warning("sample=%d %s", claim.sample_id, lost)
