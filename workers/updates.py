"""Bringing engines to the run's current weights. Each update is a claim: one process drives one engine."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from samplestore.errors import LeaseLost, SampleStoreError
from samplestore.states import WeightUpdateMode
from samplestore.verbs import weights
from samplestore.workers import control
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError
from samplestore.workers.routers import register, unregister

log = logging.getLogger("samplestore.fleet")


class Updates:
    """The updates that this worker drives.

    write      verb, first argument, more arguments -> result, after the commit
    router     where an engine that fails its update is taken out, and put back when it serves the right weights again
    """

    def __init__(
        self, client: EngineClient, write: Any, worker_id: int, mode: WeightUpdateMode, router: str | None,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.client, self.write, self.worker_id, self.mode = client, write, worker_id, mode
        self.router, self.timeout_s = router, timeout_s
        self.running: dict[str, asyncio.Task[None]] = {}
        self._claiming: set[str] = set()

    async def follow(self, url: str, served: dict[str, str | None], was_out: bool) -> None:
        """Bring an engine to the run's current version, unless another process does. What it then reports is put into
        `served`. was_out: it was taken out of the router's list, and is to be put back."""
        if url in self.running or url in self._claiming:
            return  # before the claim: one that is made and then dropped would hold the engine for ever
        self._claiming.add(url)
        try:
            held = await self.write(weights.claim_engine, self.worker_id, url)
        finally:
            self._claiming.discard(url)
        if held is None:
            return
        task = asyncio.create_task(self._update(held, served, was_out))
        self.running[url] = task
        task.add_done_callback(lambda _: self.running.pop(url, None))

    async def _update(self, held: dict[str, Any], served: dict[str, str | None], was_out: bool) -> None:
        url, label = held["url"], held["label"]
        log.info("engine=%s version=%s mode=%s updating", url, held["version"], self.mode)
        try:
            await control.change_weights(self.client, url, held["path"], label, self.mode, self.timeout_s)
            now, error = label, None
            if was_out:
                await self.put_back(url)
        except Exception as failure:  # whatever it is, the claim must end, and the reason be seen
            now, error = await control.served_label(self.client, url), str(failure) or type(failure).__name__
            log.error("engine=%s update failed, it gets no more requests: %s", url, failure)
            await self.unlist(url)
        served[url] = now
        try:
            await self.write(weights.engine_updated, held, now, error)
        except LeaseLost:
            log.warning("engine=%s another process took its update over", url)
        except SampleStoreError as failure:
            log.error("engine=%s update could not be recorded: %s", url, failure)

    # -- the router's list

    async def unlist(self, url: str) -> None:
        """Keep the router from sending samples to an engine that is not fit."""
        if self.router is None:
            return
        try:
            await unregister(self.client, self.router, url)
        except EngineError as error:
            log.warning("engine=%s could not be taken out of the router: %s", url, error)

    async def put_back(self, url: str) -> None:
        """Let an engine have requests again. Before that is recorded: the other way round, a worker that dies in
        between leaves it out for good. Raises EngineError."""
        if self.router is not None:
            await register(self.client, self.router, url)

    async def take_out(self, url: str, error: str, label: str | None) -> bool:
        """An engine turned out to be unfit while it served `label`: record it, and take it out. False: it serves other
        weights by now, which nobody has found unfit."""
        if await self.write(weights.engine_broken, self.worker_id, url, error, label):
            await self.unlist(url)
            return True
        return False

    async def close(self, timeout_s: float) -> None:
        """Wait for updates that this process drives: an engine must not be left half told. One that takes longer is
        left to whoever takes over: a stop must not wait minutes for an engine that hangs."""
        if not self.running:
            return
        _, late = await asyncio.wait(self.running.values(), timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
