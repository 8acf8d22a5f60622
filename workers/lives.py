"""What every worker process does, whatever it works on: it registers, keeps its heart beating, writes through the group
commit, and registers anew where it was declared dead while it was away."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, ClassVar

import sqlalchemy as sa

from samplestore.errors import StoreBusy, WorkerDead
from samplestore.heart import Heart
from samplestore.migrations import REVISION
from samplestore.models import SampleGroup, Stage
from samplestore.run import Run
from samplestore.states import UNFINISHED_GROUP, StageStatus, WorkerKind
from samplestore.types import Heartbeat
from samplestore.verbs import liveness
from samplestore.workers.metrics import Timed, WorkerMetrics
from samplestore.writer import Writer

group, stage = SampleGroup.__table__, Stage.__table__


class Worker(ABC):
    """One process's worker.

    stop_reason   set once: take nothing more, let go of what is held, leave
    tick          rises while the event loop turns. A loop that is stuck must look dead
    metrics       counts what is written, where a port is asked for (workers/metrics.py)
    """

    kind: ClassVar[WorkerKind]
    log: ClassVar[logging.Logger]

    def __init__(self, run: Run, config: Any) -> None:
        self.run, self.config = run, config
        self.stop_reason: str | None = None
        self.wake = asyncio.Event()
        self.tick = 0.0
        self.metrics: WorkerMetrics | None = None

    def stop(self, reason: str) -> None:
        """Let go of what is held, and leave. Called by the first SIGTERM or SIGINT."""
        self.stop_reason = self.stop_reason or reason
        self.wake.set()

    # -- lives

    def begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.writer = Writer(self.run if self.metrics is None else Timed(self.run, self.metrics), loop=self.loop)

    async def live(self) -> None:
        """Register, work, leave; and again if this process was declared dead while it was away."""
        ticker = asyncio.create_task(self._ticker())
        try:
            while await self._one_life():
                self.log.warning("worker=%d was declared dead; registering anew", self.worker_id)
        finally:
            ticker.cancel()

    async def _one_life(self) -> bool:
        self.worker_id: int = await self.write(liveness.register, self.kind.value, self.config.name, self.info())
        self.log.info("worker=%d run=%s %s", self.worker_id, self.run.name, self.told())
        dead = asyncio.Event()
        heart = Heart(
            self.run, self.worker_id, ticked=lambda: self.tick,
            on_beat=self._heard, on_dead=lambda: self.loop.call_soon_threadsafe(dead.set),
        )  # fmt: skip
        parts = [asyncio.create_task(part) for part in (*self.parts(), dead.wait())]
        error: BaseException | None = None
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            error = next((t.exception() for t in done if t.exception()), None)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        was_dead = dead.is_set() or isinstance(error, WorkerDead)
        await self.let_go(was_dead)
        await asyncio.to_thread(heart.stop)
        if was_dead:
            return self.stop_reason is None
        said = None if error is None else f"{type(error).__name__}: {error}"
        await self.write(liveness.goodbye, self.worker_id, said)
        if error is not None:
            raise error
        return False

    def _heard(self, learnt: Heartbeat) -> None:
        """From the heart's thread. Statements of another schema would miss what it keeps, or not run at all."""
        if learnt.revision != REVISION and self.stop_reason is None:
            self.log.warning(
                "worker=%d the database has schema revision %s by now, and this process writes %s: it lets go of what "
                "it holds and leaves. Start it again with the samplestore that migrated the database",
                self.worker_id, learnt.revision, REVISION,
            )  # fmt: skip
            self.loop.call_soon_threadsafe(self.stop, "the schema was migrated")

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What its row says of it."""

    @abstractmethod
    def told(self) -> str:
        """What the log says when it is registered."""

    @abstractmethod
    def holds(self) -> dict[str, int]:
        """How much it holds now, by what."""

    @abstractmethod
    def parts(self) -> Iterable[Coroutine[Any, Any, Any]]:
        """What it does in a life, at once; the first that ends, ends it."""

    @abstractmethod
    async def let_go(self, was_dead: bool) -> None:
        """Give back what is held, at the end of a life. was_dead: it belongs to others already."""

    async def _ticker(self) -> None:
        while True:
            self.tick = time.monotonic()
            await asyncio.sleep(0.1)

    async def woken(self, pause_s: float) -> bool:
        """Wait until something has happened, for about so long. Whether it has."""
        self.wake.clear()
        try:
            # not wait_for: on Python 3.11 a cancellation that comes together with the event is swallowed
            async with asyncio.timeout(pause_s * random.uniform(0.8, 1.2)):
                await self.wake.wait()
        except TimeoutError:
            return False
        return True

    # -- the store

    async def write(self, verb: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One write through the group commit, acknowledged. Survives this coroutine's cancellation. While somebody
        holds the database it waits: a worker that left would only lose what it has."""
        result = await self.patiently(lambda: self.writer.submit(verb, first, *args, **kwargs))
        if self.metrics is not None:
            self.metrics.wrote(verb, (first, *args), result)
        return result

    async def read(self, question: Any) -> Any:
        """One question, asked again while the database is away: as with a write, leaving would help nobody."""
        return await self.patiently(lambda: asyncio.to_thread(self.run.database.read, question))

    async def patiently(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await ask()
            except StoreBusy as busy:
                self.log.warning("%s", busy)

    def has_pending(self, connection: sa.Connection, stages: Iterable[str]) -> bool:
        """Whether stages of these names wait; one that waits for its next attempt is work too."""
        return self.exists(connection, stage, stage.c.status == StageStatus.PENDING.value, stage.c.name.in_(stages))

    def has_unfinished(self, connection: sa.Connection) -> bool:
        """Whether a group is on its way: to be generated, or through its stages."""
        return self.exists(connection, group, group.c.state.in_([s.value for s in UNFINISHED_GROUP]))

    def exists(self, connection: sa.Connection, table: Any, *where: Any) -> bool:
        return bool(connection.execute(sa.select(sa.exists().where(table.c.run_id == self.run.id, *where))).scalar())
