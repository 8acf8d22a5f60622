"""The engines of a run: found through the router or given, watched, aborted, and left out when they are not fit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from samplestore.states import WeightUpdateMode
from samplestore.verbs import weights
from samplestore.workers import control, engine_state, routers
from samplestore.workers.dispatch import NO_LIMITS, Dispatcher, EngineLimits, Target
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.members import Members, Needs
from samplestore.workers.replies import EngineError, ReplyReader
from samplestore.workers.updates import Updates

log = logging.getLogger("samplestore.fleet")

Write = Callable[..., Awaitable[Any]]  # verb, first argument, more arguments -> result, after the commit
Read = Callable[[Callable[[sa.Connection], Any]], Awaitable[Any]]

PROBE_S, PROBE_EVERY_S = 30.0, 10.0  # for a probe's answer; between two probes of a failed engine
PROBE_PROMPT = [0]
LAST_COUNT_S = 3.0  # that a worker which leaves waits for its engines' counters, and for probes that still run
GRACE_S = 10.0  # for weights that are announced after engines serve them: who drives updates himself may do so
COUNTERS_S = 15.0  # between two readings of an engine's load and token counter


class Fleet:
    """What a worker knows of its engines. The database says which version each should serve, which are not fit, and
    which process may drive an update; this class asks, tells and reports."""

    def __init__(
        self, client: EngineClient, write: Write, read: Read, run_id: int, worker_id: int, mode: str, needs: Needs, *,
        router: str | None, urls: list[str], direct: bool, drives: bool, update_timeout_s: float,
        max_queued: int | None = None, limits: EngineLimits = NO_LIMITS,
    ) -> None:  # fmt: skip
        self.drives = drives  # this worker may bring engines to other weights, and ends the pauses that belong to it
        self.client, self.write, self.read = client, write, read
        self.run_id, self.needs, self.mode = run_id, needs, WeightUpdateMode(mode)
        self.router = router.rstrip("/") if router else None
        self.given = [u.rstrip("/") for u in urls]
        self.direct = direct or self.router is None
        self.engines: dict[str, str | None] = dict.fromkeys(self.given)  # url -> label that it last reported
        self.members = Members(needs)  # what they are
        self.looked = False  # whether the engines have been asked once
        self.unfit: set[str] = set()  # the database says that they failed
        self.updates = Updates(client, write, read, run_id, worker_id, self.mode, self.router, update_timeout_s)
        self.max_queued = max_queued
        self.queued: dict[str, int] = {}  # url -> requests that waited there when last asked; with max_queued only
        self._dispatcher = Dispatcher(limits)
        self._through: routers.Router | None = None
        self._router_away = False  # no connection to it; until it lists its engines again
        self._strangers: dict[
            str, tuple[str, float]
        ] = {}  # url -> why its tokens could never be trained on, since when
        self._down: set[str] = set()  # did not answer when last asked
        self.wanted: str | None = None  # the label that engines should serve, where we can bring them to it
        self._probed: dict[str, float] = {}  # url -> when it was last probed
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._counted: dict[str, float] = {}  # url -> when its counters were last read
        self._proving = asyncio.Lock()
        self._found_unfit = 0.0  # when this worker last found an engine unfit

    # -- where requests go

    @property
    def flushes(self) -> bool:
        """Whether engines empty their prefix cache when they change weights; else requests carry a key for it."""
        return self.mode == WeightUpdateMode.ABORT

    @property
    def fit(self) -> list[str]:
        """Engines that answer, are not known to be broken, and serve weights that the run knows."""
        if self._router_away:
            return []
        return sorted(self.engines.keys() - self._down - self.unfit - self._strangers.keys())

    @property
    def queueing(self) -> bool:
        """Whether every fit engine had more requests waiting than max_queued when last asked."""
        return bool(self.fit) and not self._with_room()

    def _with_room(self) -> list[str]:
        most = self.max_queued
        return [url for url in self.fit if most is None or self.queued.get(url, 0) <= most]

    async def _ask_queue(self, url: str) -> None:
        if self.max_queued is None:
            return
        try:
            self.queued[url] = (await engine_state.load(self.client, url)).queued or 0
        except EngineError as error:
            self.queued.pop(url, None)  # a limit must not stop the run because a release can't tell
            log.debug("engine=%s tells no queue: %s", url, error)

    @contextmanager
    def place(self, group_id: int) -> Iterator[Target]:
        """Where a request of a group goes. There must be a fit engine."""
        if self.direct:
            with self._dispatcher.place(group_id, self._with_room() or self.fit) as engine:
                yield Target(engine, engine)
        else:
            assert self.router is not None
            yield Target(self.router, None)

    def suspect(self, target: Target, error: EngineError | None) -> None:
        """A call was cut off: where no router sees to it, others are asked until that engine answers again. A router
        that cannot be reached is not asked by every sample, but by the next look."""
        if target.engine is not None:
            self._down.add(target.engine)
        elif error is not None and error.unconnected:
            self._router_away = True

    async def unfit_after(self, engine: str | None, prompt: Any, since: float, error: Exception) -> bool:
        """Whether an engine, not the sample, is to blame for log-probs that are no numbers, or may be; one that is
        gets recorded and left out. `engine`: who answered, None if a router did not tell; `since`: when the request
        began."""
        async with self._proving:  # a hundred samples find it at once; one probe is enough
            if engine in self.unfit or (engine is None and self._found_unfit >= since):
                return True
            # Those known to be unfit, too: a router may send them requests for a while after they were taken out.
            asked = [engine] if engine else sorted(self.engines.keys() - self._down)
            answers = {url: await self._gives_no_numbers(url, prompt.tolist()) for url in asked}
            for url in (url for url, broken in answers.items() if broken):
                log.error("engine=%s is left out: %s", url, error)
                await self._leave_out(url, str(error))
            return any(broken is not False for broken in answers.values())  # no answer proves nothing

    async def _leave_out(self, url: str, error: str) -> None:
        label = self.engines.get(url)
        if not await self.updates.take_out(url, error, label):
            if url not in await self.read(lambda c: weights.failed_engines(c, self.run_id)):
                return  # it was brought to other weights meanwhile
            await self.updates.unlist(url)  # somebody else has found it; the router may not have heard
        self.unfit.add(url)
        self._found_unfit = time.monotonic()

    async def _gives_no_numbers(self, url: str, prompt: list[int]) -> bool | None:
        """Generate one token, and see whether its log-prob is one. None: there was no answer to judge by."""
        reader = ReplyReader()
        body = {
            "rid": secrets.token_hex(16), "input_ids": prompt, "return_logprob": True, "stream": False,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }  # fmt: skip
        try:
            async with asyncio.timeout(PROBE_S), contextlib.aclosing(self.client.generate(url, body, "probe")) as reply:
                for chunk in await reply.read():
                    reader.feed(chunk)
        except (EngineError, TimeoutError) as error:
            log.warning("engine=%s could not be probed: %s", url, error)
            return None
        return reader.unsound if reader.totals.completion_tokens else None

    def _due_for_probe(self, url: str, label: str | None) -> bool:
        """Engines that failed come back with their next weights. Where none are due (it serves the current ones after
        all, or loading is not our business) a probe tells whether somebody has repaired it."""
        due = time.monotonic() - self._probed.get(url, -PROBE_EVERY_S) >= PROBE_EVERY_S
        running = url in self._probes and not self._probes[url].done()
        if not due or running or url in self._strangers or (self.wanted is not None and label != self.wanted):
            return False
        self._probed[url] = time.monotonic()
        return True

    async def _recover(self, url: str, label: str | None) -> None:
        try:
            if self.drives:  # its update may have ended between the weights and the continue
                await control.proceed(self.client, url)
            if await self._gives_no_numbers(url, PROBE_PROMPT) is not False:
                return
            await self.updates.put_back(url)
            if await self.write(weights.engine_recovered, url, label):
                log.info("engine=%s is fit again", url)
                self.unfit.discard(url)
            elif url in await self.read(lambda c: weights.failed_engines(c, self.run_id)):
                await self.updates.unlist(url)  # it has other weights by now, and failed with those
        except EngineError as error:
            log.warning("engine=%s could not be put back: %s", url, error)

    # -- who is there

    async def discover(self) -> list[str]:
        """Engine URLs: those that the router lists, and those given."""
        if self.router is None:
            return list(self.given)
        if self._through is None and not self.direct:
            self._through = await routers.identify(self.client, self.router)
            routers.require_passes(self._through, self.needs.fields, self.needs.sampling)
        return sorted({*self.given, *await routers.listed(self.client, self.router)})

    async def refresh(self) -> None:
        """See which engines there are and what they serve, and record it. Raises EngineError; "setup" is final."""
        found = await self._discovered()
        known = set(self.unfit)
        failed = await self.read(lambda c: weights.failed_engines(c, self.run_id))
        self.unfit = set(failed) | (self.unfit - known)  # some may have been found while that was read
        # those that failed are looked at too: they were taken out of the router's list, and may come back
        urls = sorted({*found, *failed})
        self._router_away = False
        for gone in self.engines.keys() - set(urls):
            del self.engines[gone]
            self._strangers.pop(gone, None)
        self.members.keep(urls)
        # At once: one engine that hangs must not keep the others from being seen and updated.
        await _all(self._meet(url) for url in urls)
        self._judge_models()
        await _all(self._look(url) for url in urls)
        await self._part()
        self.looked = True

    def _judge_models(self) -> None:
        """Tokens of another model would be taken for this one's: a fresh engine of any model says "default". Where that
        shows at the start, nobody can tell who is right. Raises EngineError("setup")."""
        odd = self.members.judge(self.unfit)
        new = sorted(odd.keys() - self.unfit)  # the others were taken out before
        if new and not self.looked:
            raise EngineError(
                "setup", f"{new[0]}: {odd[new[0]]}. All engines of a run serve one model. {self._cure(new[0])}"
            )

    async def _part(self) -> None:
        """Strangers beside engines that belong: a router would send them requests, so one ends the worker at its start,
        and is taken out of the router's list later. It comes back as a failed one does. Where all are strangers nothing
        is claimed, and nobody's router is touched: it may be that of another database. Raises EngineError("setup")."""
        odd = sorted(self._strangers.keys() - self.unfit)
        if not odd or not self.fit:
            return
        for url in odd:
            why, since = self._strangers[url]
            if not self.looked and not self.direct:
                raise EngineError("setup", f"{url}: {why}. Or: {self._cure(url)}")
            late = not self.direct and time.monotonic() - since >= GRACE_S
            if late or self.members.why_other(url) is not None:
                await self._leave_out(url, why)

    def _cure(self, url: str) -> str:
        if url in self.given or self.router is None:
            return f"Start the worker without --engine {url}"
        return f"Take it out with: samplestore engines unlist {url} --router {self.router}"

    async def _discovered(self) -> list[str]:
        try:
            return await self.discover()
        except EngineError as error:
            if error.kind == "setup" or not self.direct or not self.engines:
                raise
            log.warning("router=%s lists no engines, going on with those known: %s", self.router, error)
            return list(self.engines)

    async def _meet(self, url: str) -> None:
        """See whether an engine answers and what it serves; of one that is new, or was started again, also how."""
        before = self.engines.get(url)
        try:
            if before is None and url in self.given and await routers.is_router(self.client, url):
                raise EngineError("setup", f"{url} is a router, not an engine. Say --router {url}")
            label = (await engine_state.info(self.client, url)).label
            fresh = before is None or url in self._down
            if fresh or before != label:  # it may have been started otherwise
                self.members.learn(url, await engine_state.server(self.client, url), fresh)
        except EngineError as error:
            if error.kind == "setup" and not self.looked:
                raise  # one that joins later is left out: the others do well without it
            self.engines.setdefault(url, None)
            log.log(logging.DEBUG if url in self._down else logging.WARNING, "engine=%s is left out: %s", url, error)
            self._down.add(url)
            return
        if url in self._down:
            log.info("engine=%s answers now", url)
        self._down.discard(url)
        if url not in self.updates.running:
            self.engines[url] = label

    async def _look(self, url: str) -> None:
        """Record what an engine serves, and judge it."""
        if url in self._down or url in self.updates.running:
            return
        label = self.engines[url]
        await self._ask_queue(url)
        if self.drives and not await self._settled(url, label):
            return
        row = await self._record(url, label)
        self._judge(url, row)
        if url in self.unfit and row["owner"] is None and self._due_for_probe(url, label):
            # by itself: an engine that hangs would keep all from being looked at
            self._probes[url] = asyncio.create_task(self._recover(url, label))

    def _judge(self, url: str, row: Any) -> None:
        """An engine of another model, or of weights that the run does not know and that no update brings to others,
        gets no requests: its tokens could never be trained on."""
        why = self.members.why_other(url)
        if why is not None:
            why = f"{why}. {self._cure(url)}"
        elif row["version"] is None and row["label"] is not None and not (self.drives and self.wanted):
            why = (
                f"it serves {row['label']!r}, which this run has not published. Bring it to the run's weights with: "
                f"samplestore engines update --engine {url} --path MODEL --label default"
            )
        if why is None:
            self._strangers.pop(url, None)
        elif url not in self._strangers:
            self._strangers[url] = why, time.monotonic()
            log.error("engine=%s gets no requests: %s", url, why)

    async def _record(self, url: str, label: str | None) -> Any:
        """Write what an engine serves; now and then also its load and its count of generated tokens."""
        now = time.monotonic()
        if now - self._counted.get(url, -COUNTERS_S) < COUNTERS_S:
            return await self.write(weights.see_engine, url, label)
        self._counted[url] = now
        base = await self.read(lambda c: weights.counter_base(c, url))
        try:
            facts = await engine_state.facts(self.client, url)
            label = (await engine_state.info(self.client, url)).label  # that took a while: an update may have ended
        except EngineError as error:
            log.info("engine=%s tells no counters: %s", url, error)
            return await self.write(weights.see_engine, url, label)
        self.engines[url] = label
        return await self.write(weights.see_engine, url, label, facts=facts, counter_seen_at=base)

    async def _settled(self, url: str, label: str | None) -> bool:
        """Whether an engine's weights are those that the database has seen, or may be recorded. Where somebody else
        changed them and nobody drives an update, the driver died between the update and its continue_generation: the
        engine would stay frozen for ever. Where the driver lives on after all, another continue is harmless. An engine
        that is paused with the weights that it had is none of our business: its memory may be released."""
        known, owner = await self.read(lambda c: weights.known_engine(c, url))
        if known is None or known == label:
            return True
        if owner is not None:
            return False  # it will say, or be reaped
        try:
            await control.proceed(self.client, url)
        except EngineError as error:
            log.warning("engine=%s could not be told to go on: %s", url, error)
            return False
        return True

    async def follow(self, url: str) -> None:
        """Bring an engine to the run's current version, unless another process does, or it serves another model."""
        if self.members.why_other(url) is not None:
            return
        await self.updates.follow(url, self.engines, url in self.unfit)

    # -- aborts

    async def abort(self, rid: str, engine: str | None) -> None:
        """Abort one request at `engine`, or wherever it runs: control calls do not pass the router. An unknown rid is
        harmless."""
        await self._at(engine, lambda url: control.abort(self.client, url, rid), f"abort of {rid}")

    async def abort_all(self, engine: str | None) -> None:
        """Abort everything that runs at `engine`, or at all of them."""
        await self._at(engine, lambda url: control.abort_all(self.client, url), "abort of all")

    async def _at(self, engine: str | None, call: Callable[[str], Awaitable[None]], what: str) -> None:
        async def one(url: str) -> None:
            try:
                await call(url)
            except EngineError as error:
                log.warning("engine=%s %s failed: %s", url, what, error)

        await asyncio.gather(*(one(url) for url in ([engine] if engine else list(self.engines))))

    async def close(self, timeout_s: float) -> None:
        """Wait for the updates that this worker drives, and read the engines' counters once more: only then can the
        ledger hold them against all requests. A probe that has woken an engine says so: samples may end before it."""
        self._counted.clear()
        last = [asyncio.create_task(self._record(url, self.engines[url])) for url in self.fit if self.engines[url]]
        last += self._probes.values()
        if last:
            _, late = await asyncio.wait(last, timeout=LAST_COUNT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*last, return_exceptions=True)
        await self.updates.close(timeout_s)


async def _all(looks: Iterable[Awaitable[None]]) -> None:
    """Wait for all of them; then raise what the first that failed raised."""
    for failure in await asyncio.gather(*looks, return_exceptions=True):
        if failure is not None:
            raise failure
