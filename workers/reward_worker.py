"""`samplestore reward`: a worker that serves stages and drives no engine. Rewards that come late hold up nobody:
rollout workers leave these stages alone, and an abort or a weight update never waits for a judge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import sqlalchemy as sa

from samplestore import faults
from samplestore.models import Run as RunRow
from samplestore.run import Run
from samplestore.states import RunState, WorkerKind
from samplestore.types import StageClaim
from samplestore.verbs import liveness, stages
from samplestore.workers.lives import Worker
from samplestore.workers.scoring import Scorer, Write

run_table = RunRow.__table__
MAX_PAUSE_S = 2.0


class RewardWorker(Worker):
    """One process's worker. `run_forever` returns the exit code."""

    kind, log = WorkerKind.REWARD, logging.getLogger("samplestore.reward")

    def __init__(self, run: Run, config: Any, scorer_of: Callable[[Write], Scorer]) -> None:
        super().__init__(run, config)
        self.scorer_of = scorer_of
        self.held: dict[int, asyncio.Task[None]] = {}  # by stage id

    async def run_forever(self) -> int:
        self.begin()
        try:
            async with self.scorer_of(self.write) as self.scorer:
                await self.live()
            return 0
        finally:
            self.writer.close()

    def info(self) -> dict[str, Any]:
        return {"stages": list(self.scorer.names), "reward": self.config.reward, "teacher": self.config.teacher}

    def told(self) -> str:
        return f"serves {', '.join(self.scorer.names)}"

    def holds(self) -> dict[str, int]:
        return {"stages": len(self.held)}

    def parts(self) -> list[Coroutine[Any, Any, Any]]:
        return [self._serve()]

    async def _serve(self) -> None:
        pause = self.config.poll_seconds
        while self.stop_reason is None:
            if await self._claim():
                pause = self.config.poll_seconds
                continue
            if not self.held and await self.read(self._nothing_left):
                return
            if not await self.woken(pause):
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
        if self.has_pending(connection, self.scorer.names) or self.has_unfinished(connection):
            return False
        state = connection.execute(sa.select(run_table.c.state).where(run_table.c.id == self.run.id)).scalar_one()
        return bool(self.config.exit_when_done or state == RunState.DRAINING)

    async def let_go(self, was_dead: bool) -> None:
        """What is being done comes to its end, within drain_timeout_s; the rest is given back."""
        tasks = list(self.held.values())
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=0.0 if was_dead else self.config.drain_timeout_s)
        for task in late:
            task.cancel()  # goodbye frees what it held, undone
        await asyncio.gather(*late, return_exceptions=True)
