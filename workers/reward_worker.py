"""`samplestore reward`: a worker that serves stages and drives no engine. Rewards that come late hold up nobody:
rollout workers leave these stages alone, and an abort or a weight update never waits for a judge."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from samplestore import faults
from samplestore.errors import StoreBusy, WorkerDead
from samplestore.heart import Heart
from samplestore.models import Run as RunRow
from samplestore.models import SampleGroup, Stage
from samplestore.run import Run
from samplestore.states import UNFINISHED_GROUP, RunState, StageStatus
from samplestore.types import StageClaim
from samplestore.verbs import liveness, stages
from samplestore.workers.scoring import Scorer, Write
from samplestore.writer import Writer

log = logging.getLogger("samplestore.reward")

run_table, group, stage = RunRow.__table__, SampleGroup.__table__, Stage.__table__
MAX_PAUSE_S = 2.0


class RewardWorker:
    """One process's worker. `run_forever` returns the exit code."""

    def __init__(self, run: Run, config: Any, scorer_of: Callable[[Write], Scorer]) -> None:
        self.run, self.config, self.scorer_of = run, config, scorer_of
        self.held: dict[int, asyncio.Task[None]] = {}  # by stage id
        self.stop_reason: str | None = None
        self.wake = asyncio.Event()
        self.tick = 0.0

    async def run_forever(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.writer = Writer(self.run, loop=self.loop)
        ticker = asyncio.create_task(self._ticker())
        try:
            async with self.scorer_of(self.write) as self.scorer:
                while await self._one_life():
                    log.warning("worker=%d was declared dead; registering anew", self.worker_id)
            return 0
        finally:
            ticker.cancel()
            self.writer.close()

    def stop(self, reason: str) -> None:
        """Let what is being done come to its end, within drain_timeout_s, give the rest back, leave."""
        self.stop_reason = self.stop_reason or reason
        self.wake.set()

    async def _ticker(self) -> None:
        """Shows the heart that the event loop turns. A loop that is stuck must look dead."""
        while True:
            self.tick = time.monotonic()
            await asyncio.sleep(0.1)

    async def write(self, verb: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One write through the group commit, acknowledged. While somebody holds the database it waits."""
        while True:
            try:
                return await self.writer.submit(verb, first, *args, **kwargs)
            except StoreBusy as busy:
                log.warning("%s", busy)

    async def _one_life(self) -> bool:
        """Register, serve, leave. True where this process was declared dead while it was away."""
        info = {"stages": list(self.scorer.names), "reward": self.config.reward, "teacher": self.config.teacher}
        self.worker_id = await self.write(liveness.register, "reward", self.config.name, info)
        log.info("worker=%d run=%s serves %s", self.worker_id, self.run.name, ", ".join(self.scorer.names))
        dead = asyncio.Event()
        heart = Heart(
            self.run, self.worker_id, ticked=lambda: self.tick,
            on_dead=lambda: self.loop.call_soon_threadsafe(dead.set),
        )  # fmt: skip
        parts = [asyncio.create_task(self._serve()), asyncio.create_task(dead.wait())]
        error: BaseException | None = None
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            error = next((t.exception() for t in done if t.exception()), None)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        was_dead = dead.is_set() or isinstance(error, WorkerDead)
        await self._let_go(0.0 if was_dead else self.config.drain_timeout_s)
        await asyncio.to_thread(heart.stop)
        if was_dead:
            return self.stop_reason is None
        said = None if error is None else f"{type(error).__name__}: {error}"
        await self.write(liveness.goodbye, self.worker_id, said)
        if error is not None:
            raise error
        return False

    async def _serve(self) -> None:
        pause = self.config.poll_seconds
        while self.stop_reason is None:
            if await self._claim():
                pause = self.config.poll_seconds
                continue
            if not self.held and await asyncio.to_thread(self.run.database.read, self._nothing_left):
                return
            self.wake.clear()
            try:
                async with asyncio.timeout(pause * random.uniform(0.8, 1.2)):
                    await self.wake.wait()
            except TimeoutError:
                pause = min(pause * 1.5, MAX_PAUSE_S)

    async def _claim(self) -> bool:
        before, got = self.run.database.reconnects, False
        for name, room in self.scorer.rooms():
            for claim in await self.write(stages.claim_stages, self.worker_id, room, (name,)):
                self._do(claim)
                got = True
        if self.run.database.reconnects != before:
            # A claim may have been committed and its answer lost: what it took is ours without our knowing.
            await self.write(liveness.disown, self.worker_id, [], list(self.held))
        if got:
            faults.reached("claimed")
            await asyncio.sleep(0)  # the claims begin: their room is taken
        return got

    def _do(self, claim: StageClaim) -> None:
        task = self.held[claim.stage_id] = asyncio.create_task(self.scorer.score(claim))

        def ended(_: asyncio.Task[None]) -> None:
            self.held.pop(claim.stage_id, None)
            self.wake.set()

        task.add_done_callback(ended)

    def _nothing_left(self, connection: sa.Connection) -> bool:
        """A run that drains: its stages here are done. With exit_when_done: no group is on its way to one either."""
        pending = sa.select(sa.func.count()).where(
            stage.c.run_id == self.run.id, stage.c.status == StageStatus.PENDING.value,
            stage.c.name.in_(self.scorer.names),
        )  # fmt: skip
        if connection.execute(pending).scalar_one():
            return False
        unfinished = sa.select(sa.func.count()).where(
            group.c.run_id == self.run.id, group.c.state.in_([s.value for s in UNFINISHED_GROUP])
        )
        state = connection.execute(sa.select(run_table.c.state).where(run_table.c.id == self.run.id)).scalar_one()
        waits = bool(connection.execute(unfinished).scalar_one())
        return not waits and (self.config.exit_when_done or state == RunState.DRAINING)

    async def _let_go(self, timeout_s: float) -> None:
        tasks = list(self.held.values())
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()  # goodbye frees what it held, undone
        await asyncio.gather(*late, return_exceptions=True)
