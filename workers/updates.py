"""Bringing engines to the run's current weights. Each update is a claim: one process drives one engine.

Where a worker can't see whether a checkpoint fits, one engine is told first: a tensor of another shape kills whoever
loads it. That holds across workers, since what decides is in the engines' rows.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.errors import LeaseLost, SampleStoreError
from samplestore.states import WeightUpdateMode
from samplestore.verbs import weights
from samplestore.workers import control, engine_state
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError
from samplestore.workers.routers import register, unregister

log = logging.getLogger("samplestore.fleet")

ANOTHER_S, MAX_DEATHS = 60.0, 2  # one engine may have died by chance; when it stays away another is asked, once
BACK_S = 2.0  # for the answer of one that died of its weights: no answer, and it is asked again at the next look

_e, _v, _r = weights.engine.c, weights.version.c, weights.run.c
CURRENT = (
    sa.select(_v.label, _v.path)
    .select_from(weights.version.join(weights.run, (_r.id == _v.run_id) & (_r.current_version == _v.version)))
    .where(_r.id == sa.bindparam("b_run"))
)
# Where the weights lay that the run's engines serve, but for those that they were started with.
TAKEN = sa.select(_v.path).select_from(
    weights.version.join(weights.engine, (_e.run_id == _v.run_id) & (_e.label == _v.label))
).where(_v.run_id == sa.bindparam("b_run"), weights.KNOWN, _v.parent.is_not(None), _v.path.is_not(None))  # fmt: skip
ENGINES = sa.select(
    _e.url, _e.label, _e.owner, _e.state, _e.failures, _e.error, (db_now() - _e.updated_at).label("age")
).where(_e.run_id == sa.bindparam("b_run"), weights.KNOWN)  # fmt: skip


class Updates:
    """The updates that this worker drives.

    write      verb, first argument, more arguments -> result, after the commit
    read       question about the database -> its answer
    router     where an engine that fails its update is taken out, and put back when it serves the right weights again
    """

    def __init__(
        self, client: EngineClient, write: Any, read: Callable[..., Awaitable[Any]], run_id: int, worker_id: int,
        mode: WeightUpdateMode, router: str | None, timeout_s: float,
    ) -> None:  # fmt: skip
        self.client, self.write, self.read, self.mode = client, write, read, mode
        self.run_id, self.worker_id = run_id, worker_id
        self.router, self.timeout_s = router, timeout_s
        self.running: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # who claims next must see who is told
        self._waits: dict[str, tuple[str, str]] = {}  # url -> the label that it waits for, and why

    async def follow(self, url: str, served: dict[str, str | None], was_out: bool) -> None:
        """Bring an engine to the run's current version, unless another process does. What it then reports is put into
        `served`. was_out: it was taken out of the router's list, and is to be put back."""
        async with self._turn:
            if url in self.running:
                return  # before the claim: one that is made and then dropped would hold the engine for ever
            held = await self.write(weights.claim_engine, self.worker_id, url) if await self._may_tell(url) else None
            if held is None:
                return
            task = asyncio.create_task(self._update(held, served, was_out))
            self.running[url] = task
            task.add_done_callback(lambda _: self.running.pop(url, None))

    async def _may_tell(self, url: str) -> bool:
        """Whether an engine's turn has come: not while another one finds out whether the weights can be loaded, nor
        where some have died of them. Weights from where an engine has got its own are told to all at once: a trainer
        writes tensors of the same shapes step after step, and waiting would take twice the time at each."""

        def ask(connection: sa.Connection) -> tuple[Any, Sequence[Any], Sequence[str]]:
            of_run = {"b_run": self.run_id}
            current = connection.execute(CURRENT, of_run).one()
            engines = connection.execute(ENGINES, of_run).fetchall()
            return current, engines, connection.execute(TAKEN, of_run).scalars().all()

        (label, path), engines, taken = await self.read(ask)
        if path is None:
            return True
        others = [row for row in engines if row.url != url]
        died = died_of_it([row for row in engines if row.url == url], path)
        if died and await engine_state.served_label(self.client, url, BACK_S) is None:
            return False  # not back: all that came of it is an error in the place of the one that the others go by
        if (why := why_not_yet(others, label, path)) is None:
            return True
        if os.path.dirname(path) in map(os.path.dirname, taken) and not died_of_it(others, path):
            return True
        known, said = self._waits.get(url, (None, None))
        if known != label and not await control.may_not_fit(self.client, url, path):
            return True  # looked at once: it reads the headers of all files
        if (known, said) != (label, why):
            self._waits[url] = label, why
            log.warning("engine=%s is not told to load %s: %s", url, label, why)
        return False

    async def _update(self, held: dict[str, Any], served: dict[str, str | None], was_out: bool) -> None:
        url, label = held["url"], held["label"]
        log.info("engine=%s version=%s mode=%s updating", url, held["version"], self.mode)
        try:
            await control.change_weights(self.client, url, held["path"], label, self.mode, self.timeout_s)
            now, error = label, None
            if was_out:
                await self.put_back(url)
        except Exception as failure:  # whatever it is, the claim must end, and the reason be seen
            now, error = await engine_state.served_label(self.client, url), str(failure) or type(failure).__name__
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


def why_not_yet(others: Sequence[Any], label: str, path: str) -> str | None:
    """Why an engine that may not bear weights is not told of them, by the rows of the run's other engines; None: it
    may be told, since one has taken them, or nobody is trying."""
    if any(row.label == label for row in others):
        return None
    # One that did not answer the last time finds nothing out: many that are gone would hold the others up in turn.
    tried = (row.url for row in others if row.owner is not None and not (row.state == "failed" and row.label is None))
    if (trying := next(tried, None)) is not None:
        return f"{trying} is told first, since it can't be seen from this machine whether they fit"
    died = died_of_it(others, path)
    if not died or (len(died) < MAX_DEATHS and all(row.age > ANOTHER_S for row in died)):
        return None
    return (
        f"{died[0].url} {control.died_of(path)}. The others go on with the weights that they have. Publish others: "
        "run.publish_weights(PATH)"
    )


def died_of_it(others: Sequence[Any], path: str) -> list[Any]:
    """The engines that a checkpoint has killed. A publish sets failures to 0: what was before it says nothing about
    these weights."""
    return [row for row in others if row.failures and f"{control.died_of(path)} " in (row.error or "")]
