"""Continuous batching: requests join and leave between steps; pauses, aborts and weight updates act there too.

All state lives on the event loop. The model runs in one thread, one step at a time; while a step is out (`_busy`)
nothing here touches the rows, and whatever arrives meanwhile takes effect when the step is back.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from .checkpoint import load_model
from .pulse import Pulse
from .request import Request
from .runner import ModelRunner
from .sampler import Picked

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUED_ABORT = {"type": "abort", "message": "Abort in waiting queue"}
PAUSE_MODES = ("abort", "retract", "in_place")
_T = TypeVar("_T")


class QueueFull(RuntimeError):
    """The bound on waiting requests is reached; the client gets 503."""


class Scheduler:
    """Owns the requests of one engine. Every method but `run` returns quickly or waits without blocking the loop."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        version: str,
        model_path: str,
        dtype: str,
        threads: int = 1,
        max_queued: int | None = None,
        decode_interval_s: float = 0.0,
    ) -> None:
        self.runner = runner
        self.version = version
        self.model_path = model_path
        self.paused: str | None = None
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.by_rid: dict[str, Request] = {}
        self.generated_total = 0
        self.prompt_total = 0
        self.finished_total = 0
        self._dtype = dtype
        self._max_queued = max_queued
        self._interval = decode_interval_s
        self._next_decode = 0.0
        self._order = 0
        self._hold_from: int | None = None
        self._loading = False
        self._busy = False
        self._closing = False
        self._pulse = Pulse()
        self._update_lock = asyncio.Lock()
        # OpenMP counts threads per calling thread, so the limit is set again where the model runs.
        self._executor = ThreadPoolExecutor(1, "model", initializer=torch.set_num_threads, initargs=(threads,))
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")

    # What the HTTP side calls.

    @property
    def updating(self) -> bool:
        """True while a weight update waits or loads; new requests wait until it is over."""
        return self._loading or self._hold_from is not None

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `QueueFull`; the rid must not be in flight (the caller has checked)."""
        held = self.paused is not None or self.updating
        if self._max_queued is not None and not held and len(self.waiting) >= self._max_queued and not self._free():
            raise QueueFull("The request queue is full.")
        self._order += 1
        request.order = self._order
        self.by_rid[request.rid] = request
        self.waiting.append(request)
        self._pulse.wake()

    def abort(self, rid: str) -> None:
        """Abort the request with exactly this id; an unknown id is ignored."""
        request = self.by_rid.get(rid)
        if request is not None:
            self._abort_requests([request])

    def abort_all(self) -> None:
        """Abort every request in flight."""
        self._abort_requests(list(self.by_rid.values()))

    async def pause(self, mode: str) -> None:
        """Stop stepping: `abort` ends everything in flight, `retract` queues it again, `in_place` freezes it."""
        self.paused = mode
        self._pulse.changed()
        await self._pulse.until(lambda: not self._busy)
        if self.paused != mode:
            return
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for request in sorted(self.running, key=lambda item: item.order, reverse=True):
                self._retract(request)
        self._pulse.changed()

    def resume(self) -> None:
        """Go on after a pause; harmless when not paused."""
        self.paused = None
        self._pulse.wake()
        self._pulse.changed()

    async def update_weights(self, path: str, version: str | None, abort_all: bool) -> int:
        """Serve the checkpoint in `path`; returns how many paused requests live through it.

        Not paused: waits until the requests that came before have finished (`abort_all`: aborts them), while later
        ones wait. Paused: changes the weights at once; frozen requests get their keys and values computed again
        before they go on. Raises `CheckpointError` with the old weights still served.
        """
        async with self._update_lock:
            if abort_all:
                self.abort_all()
            self._hold_from = self._order
            try:
                await self._pulse.until(lambda: self.paused is not None or not self._older_in_flight())
                self._loading = True
                await self._pulse.until(lambda: not self._busy)
                load = functools.partial(load_model, path, self._dtype, self.runner.shapes)
                model = await asyncio.get_running_loop().run_in_executor(self._loader, load)
                self.runner.swap(model)
                self.model_path = path
                if version is not None:
                    self.version = version
                for request in self.running:
                    request.stale_rows = True
                return len(self.by_rid) if self.paused is not None else 0
            finally:
                self._hold_from = None
                self._loading = False
                self._pulse.wake()
                self._pulse.changed()

    async def relabel(self, version: str, abort_all: bool) -> None:
        """Change the version label only; `abort_all` aborts what is in flight first."""
        if abort_all:
            self.abort_all()
        # In the middle of a step too, whose tokens keep the label that it began with. To wait for its end is to wait
        # for the last one: without an interval the next step begins before anybody else gets a turn.
        self.version = version

    async def drained(self) -> None:
        """Wait until nothing is in flight; a paused engine can't drain, so what it holds is aborted."""
        if self.paused is not None:
            self.abort_all()
            self.resume()
        await self._pulse.until(lambda: not self.by_rid)

    def close(self) -> None:
        """Make `run` return after the current step."""
        self._closing = True
        self._pulse.wake()

    # The loop.

    async def run(self) -> None:
        """Step until `close`. A step that raises ends its requests with status 500; the engine goes on."""
        while not self._closing:
            self._abort_requests([item for item in self.running if item.abort_wanted])
            if self.paused is not None or self._loading:
                await self._pulse.sleep(None)
            elif stale := next((item for item in self.running if item.stale_rows), None):
                await self._refill(stale)
            elif (request := self._next_waiting()) is not None:
                await self._start(request)
            elif self.running:
                delay = self._next_decode - time.monotonic()
                if delay > 0:
                    await self._pulse.sleep(delay)
                else:
                    await self._decode()
            else:
                await self._pulse.sleep(None)
        self._executor.shutdown(wait=True)
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def _start(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        score = request.prompt_logprobs is None and request.return_logprob and request.logprob_start >= 0
        wanted = len(request.output) < request.limit
        fill = functools.partial(
            self.runner.prefill,
            len(self.running) - 1,
            request.prompt + request.output,
            request.choice() if wanted or request.top_logprobs else None,
            request.logprob_start if score else None,
        )
        version = self.version
        result = await self._step(fill, [request])
        if result is None:
            return
        picked, scores, top = result
        if not request.output:
            self.prompt_total += len(request.prompt)
        if score:
            request.prompt_logprobs, request.prompt_top = scores, top
        if picked is None or not wanted:
            request.close({"type": "length", "length": len(request.output)})
            self._settle([request])
        else:
            self._take([request], picked, version)

    async def _refill(self, request: Request) -> None:
        # The last token isn't in the row yet: the next decoding step feeds it.
        tokens = (request.prompt + request.output)[:-1]
        fill = functools.partial(self.runner.prefill, self.running.index(request), tokens, None)
        if await self._step(fill, [request]) is not None:
            request.stale_rows = False

    async def _decode(self) -> None:
        self._make_room()
        batch = list(self.running)
        if not batch:
            return
        self._next_decode = time.monotonic() + self._interval
        step = functools.partial(
            self.runner.decode,
            [request.output[-1] for request in batch],
            [request.length - 1 for request in batch],
            [request.choice() for request in batch],
        )
        version = self.version
        picked = await self._step(step, batch)
        if picked is not None:
            self._take(batch, picked, version)

    async def _step(self, work: Callable[[], _T], batch: list[Request]) -> _T | None:
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            message = f"the model failed: {type(error).__name__}: {error}"[:500]
            for request in batch:
                request.close({"type": "abort", "message": message, "status_code": 500, "err_type": "InternalError"})
            self._settle(batch)
            return None
        finally:
            self._busy = False
            self._pulse.changed()

    def _take(self, batch: list[Request], picked: Picked, version: str) -> None:
        for row, request in enumerate(batch):
            request.take(picked, row, version)
            request.changed.set()
        self.generated_total += len(batch)
        self._settle([request for request in batch if request.finish is not None])

    def _next_waiting(self) -> Request | None:
        held = self._hold_from
        for request in self.waiting:
            if held is not None and request.order > held:
                continue
            return request if self._free(request.length) else None
        return None

    def _free(self, length: int = 1) -> bool:
        rows = len(self.running) + 1
        longest = max([length, *(item.length for item in self.running)]) + 1
        return rows == 1 or (rows <= self.runner.max_running and rows * longest <= self.runner.max_total_tokens)

    def _make_room(self) -> None:
        """Retract the newest requests until one more token per row fits the key/value memory."""
        while len(self.running) > 1:
            longest = max(request.length for request in self.running)
            if len(self.running) * longest <= self.runner.max_total_tokens:
                return
            self._retract(max(self.running, key=lambda item: item.order))

    def _older_in_flight(self) -> bool:
        held = self._hold_from or 0
        return any(request.order <= held for request in self.by_rid.values())

    def _retract(self, request: Request) -> None:
        self._leave(request)
        request.retractions += 1
        request.stale_rows = False
        self.waiting.appendleft(request)

    def _abort_requests(self, requests: list[Request]) -> None:
        ended = []
        for request in requests:
            if request in self.waiting:
                request.queued_abort = True
                request.close(dict(QUEUED_ABORT))
                ended.append(request)
            elif self._busy:
                request.abort_wanted = True
            else:
                request.close(dict(ABORTED))
                ended.append(request)
        if requests:
            self._settle(ended)
            self._pulse.wake()

    def _settle(self, requests: list[Request]) -> None:
        for request in requests:
            if request in self.running:
                self._leave(request)
            elif request in self.waiting:
                self.waiting.remove(request)
            if self.by_rid.pop(request.rid, None) is not None:
                self.finished_total += 1
        if requests:
            self._pulse.changed()

    def _leave(self, request: Request) -> None:
        row, last = self.running.index(request), len(self.running) - 1
        if row != last:
            mover = self.running[last]
            self.runner.cache.move(last, row, mover.length)
            self.running[row] = mover
        self.running.pop()
