"""The engines of a run: found through the router or given, watched, aborted, and brought to the current weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from samplestore.errors import LeaseLost, SampleStoreError
from samplestore.states import WeightUpdateMode
from samplestore.verbs import weights
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError

log = logging.getLogger("samplestore.fleet")

Write = Callable[..., Awaitable[Any]]  # verb, first argument, more arguments -> result, after the commit


class Fleet:
    """What a worker knows of its engines. The database says which version each should serve, and which process may
    drive its update; this class asks, tells and reports."""

    def __init__(
        self, client: EngineClient, write: Write, worker_id: int, mode: str, *,
        router: str | None, urls: list[str], update_timeout_s: float,
    ) -> None:  # fmt: skip
        self.client, self.write, self.worker_id = client, write, worker_id
        self.mode = WeightUpdateMode(mode)
        self.router, self.given = router.rstrip("/") if router else None, [u.rstrip("/") for u in urls]
        self.update_timeout_s = update_timeout_s
        self.engines: dict[str, str | None] = dict.fromkeys(self.given)  # url -> label that it last reported
        self.context_length: int | None = None
        self.looked = False  # whether the engines have been asked once
        self._list_path: str | None = None
        self._updating: dict[str, asyncio.Task[None]] = {}
        self._claiming: set[str] = set()
        self._down: set[str] = set()  # did not answer when last asked
        self._unsettled: set[str] = set()  # mode keep: engines whose last change of weights somebody else drove

    def base_for(self, group_id: int) -> str:
        """Where a group's generate calls go: the router, or one of the engines that were given, always the same while
        it answers."""
        if self.router is not None:
            return self.router
        urls = sorted(self.engines.keys() - self._down) or sorted(self.engines)
        return urls[group_id % len(urls)]

    def suspect(self, base: str) -> None:
        """A call to `base` was cut off: where there is no router to see to it, others are asked until it answers."""
        if base != self.router:
            self._down.add(base)

    async def discover(self) -> list[str]:
        """Engine URLs from the router (GET /workers, older ones GET /list_workers), and those given."""
        if self.router is None:
            return list(self.given)
        found = set(self.given)
        for path in [self._list_path] if self._list_path else ["/workers", "/list_workers"]:
            try:
                answer = await self.client.get(f"{self.router}{path}")
            except EngineError as error:
                if error.status in (404, 405) and not self._list_path:
                    continue
                raise
            self._list_path = path
            found |= _urls(answer)
            break
        else:
            raise EngineError("refused", f"{self.router} lists its engines neither at /workers nor at /list_workers")
        return sorted(found)

    async def refresh(self) -> None:
        """See which engines there are and what they serve, and record it."""
        urls = await self.discover()
        for gone in self.engines.keys() - set(urls):
            del self.engines[gone]
        # At once: one engine that hangs must not keep the others from being seen and updated.
        failures = await asyncio.gather(*(self._look(url) for url in urls), return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure
        self.looked = True

    async def _look(self, url: str) -> None:
        try:
            info = await self._info(url)
        except EngineError as error:
            self.engines.setdefault(url, None)
            self._down.add(url)
            log.warning("engine=%s does not answer: %s", url, error)
            return
        self._down.discard(url)
        if url in self._updating:
            return
        before, label = self.engines.get(url), info.get("weight_version")
        self.engines[url] = label if isinstance(label, str) else None
        row = await self.write(weights.see_engine, url, self.engines[url])
        if self.mode == WeightUpdateMode.KEEP:
            if before != self.engines[url]:
                self._unsettled.add(url)
            if url in self._unsettled and row["owner"] is None:
                await self._wake(url)

    async def _wake(self, url: str) -> None:
        """Let an engine go on whose weights were changed by somebody else. A driver that died between the update and
        its continue_generation would leave it frozen for ever; where it lives on, another continue is harmless."""
        try:
            await self.client.post(f"{url}/continue_generation", {})
        except EngineError as error:
            log.warning("engine=%s could not be told to go on: %s", url, error)
            return
        self._unsettled.discard(url)

    async def _info(self, url: str) -> dict[str, Any]:
        try:
            info = await self.client.get(f"{url}/model_info")
        except EngineError as error:
            if error.status != 404:
                raise
            info = await self.client.get(f"{url}/get_model_info")
        if not isinstance(info, dict):
            raise EngineError("broken", f"{url}/model_info answered {str(info)[:100]!r}")
        await self._learn_context(url)
        return info

    async def _learn_context(self, url: str) -> None:
        """The shortest context length of the fleet: a longer request would be refused."""
        if self.engines.get(url) is not None:
            return
        try:
            server = await self.client.get(f"{url}/server_info")
        except EngineError:
            return  # older releases have no such page; the engine then refuses what is too long, with a message
        length = server.get("context_length") if isinstance(server, dict) else None
        if isinstance(length, int) and length > 0:
            self.context_length = min(length, self.context_length or length)

    # -- weights

    async def follow(self, url: str) -> None:
        """Bring an engine to the run's current version, unless another process does."""
        if url in self._updating or url in self._claiming:
            return  # before the claim: one that is made and then dropped would hold the engine for ever
        self._claiming.add(url)
        try:
            held = await self.write(weights.claim_engine, self.worker_id, url)
        finally:
            self._claiming.discard(url)
        if held is None:
            return
        task = asyncio.create_task(self._update(held))
        self._updating[url] = task
        task.add_done_callback(lambda _: self._updating.pop(url, None))

    async def _update(self, held: dict[str, Any]) -> None:
        url, label = held["url"], held["label"]
        log.info("engine=%s version=%s mode=%s updating", url, held["version"], self.mode)
        try:
            await self._load(url, held["path"], label)
            info = await self._info(url)
            served = info.get("weight_version")
            if served != label:
                raise EngineError("broken", f"was told to serve {label}, says {served!r}")
            error = None
        except EngineError as failure:
            served, error = await self._served(url), str(failure)
            log.error("engine=%s update failed: %s", url, failure)
        self.engines[url] = served if isinstance(served, str) else None
        try:
            await self.write(weights.engine_updated, held, self.engines[url], error)
        except LeaseLost:
            log.warning("engine=%s another process took its update over", url)
        except SampleStoreError as failure:
            log.error("engine=%s update could not be recorded: %s", url, failure)

    async def _served(self, url: str) -> str | None:
        try:
            label = (await self._info(url)).get("weight_version")
        except EngineError:
            return None
        return label if isinstance(label, str) else None

    async def _load(self, url: str, path: str, label: str) -> None:
        """abort: what runs is handed back, labelled with the old version, before the weights change. keep: frozen in
        place, and goes on. drain: the engine waits until it is idle. abort_all_requests is always said: one release's
        default kills everything in flight."""
        body = {
            "model_path": path,
            "weight_version": label,
            "abort_all_requests": self.mode == WeightUpdateMode.ABORT,
            # kept requests need their cache; elsewhere old KV must not serve new weights
            "flush_cache": self.mode != WeightUpdateMode.KEEP,
        }
        keep = self.mode == WeightUpdateMode.KEEP
        if keep:
            await self.client.post(f"{url}/pause_generation", {"mode": "in_place"})
        try:
            answer = await self.client.post(f"{url}/update_weights_from_disk", body, self.update_timeout_s)
        finally:
            if keep:
                await self.client.post(f"{url}/continue_generation", {})
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError("refused", str(answer.get("message", answer)))

    # -- aborts

    async def abort(self, rid: str) -> None:
        """Abort one request, wherever it runs: control calls do not pass the router. An unknown rid is harmless."""
        await asyncio.gather(*(self._abort_at(url, rid) for url in list(self.engines)))

    async def _abort_at(self, url: str, rid: str) -> None:
        try:
            await self.client.post(f"{url}/abort_request", {"rid": rid}, 5.0)
        except EngineError as error:
            log.warning("engine=%s rid=%s abort failed: %s", url, rid, error)

    async def close(self, timeout_s: float) -> None:
        """Wait for updates that this process drives: an engine must not be left half told. One that takes longer is
        left to whoever takes over: a stop must not wait minutes for an engine that hangs."""
        if not self._updating:
            return
        _, late = await asyncio.wait(self._updating.values(), timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


def _urls(answer: Any) -> set[str]:
    """Engine URLs in the shapes that routers list them in."""
    listed = answer.get("workers", answer.get("urls", [])) if isinstance(answer, dict) else answer
    found = set()
    for item in listed if isinstance(listed, list) else []:
        url = item.get("url") if isinstance(item, dict) else item
        if isinstance(url, str) and url.startswith(("http://", "https://")):
            found.add(url.rstrip("/"))
    return found
