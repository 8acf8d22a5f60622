"""The worker: claims samples, drives engines, stores segments, follows the run, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from typing import Any

import sqlalchemy as sa

from samplestore.errors import StoreBusy, WorkerDead
from samplestore.heart import Heart
from samplestore.models import Run as RunRow
from samplestore.models import Sample, Stage, WeightVersionRow
from samplestore.order import Cursor
from samplestore.run import Run
from samplestore.states import CLAIMABLE, RunState, StageStatus
from samplestore.types import StageClaim
from samplestore.verbs import liveness, prompts, samples, stages
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.fleet import Fleet
from samplestore.workers.generation import Limits
from samplestore.workers.replies import EngineError
from samplestore.workers.scoring import STAGE, Scorer
from samplestore.workers.trajectory import Trajectory
from samplestore.writer import Writer

log = logging.getLogger("samplestore.worker")

REFRESH_S, BEHIND_S = 5.0, 1.0  # between two looks at the engines: all as they should be, some behind


class RolloutWorker:
    """One process's worker. `run_forever` returns the exit code."""

    def __init__(self, run: Run, config: Any, scorer_of: Any = None) -> None:
        self.run, self.config = run, config
        self.scorer_of = scorer_of  # (write) -> Scorer, or None: this worker scores nothing
        self.scorer: Scorer | None = None
        self.inflight: dict[int, Trajectory] = {}  # by sample id
        self.scoring: dict[int, asyncio.Task[None]] = {}  # by stage id
        self.stop_reason: str | None = None  # set once: stop claiming, let go of everything, leave
        self.draining = False  # stop claiming, finish what is held, leave
        self.abort_seq: int | None = None
        self.tick = 0.0
        self.current: Any = None  # the run's row, as last polled
        self.labels: dict[str, int] = {}
        self.current_label: tuple[str, str | None] | None = None  # label and path of the current version
        self.wake = asyncio.Event()

    # -- life

    async def run_forever(self) -> int:
        self.loop = asyncio.get_running_loop()
        self.writer = Writer(self.run)
        settings, config = self.run.settings, self.config
        self.limits = Limits(
            mode=config.mode, slice_tokens=config.slice_tokens, flush_tokens=config.flush_tokens,
            flush_seconds=config.flush_seconds, max_new_tokens=config.max_new_tokens or settings.max_new_tokens,
            sampling={**settings.sampling, **config.sampling}, versions_may_change=settings.weight_update == "keep",
        )  # fmt: skip
        try:
            async with EngineClient(config.request_timeout_s) as self.client:
                self.scorer = None if self.scorer_of is None else self.scorer_of(self.write)
                if self.scorer is None:
                    await self._live()
                else:
                    async with self.scorer.pool:
                        await self._live()
            return 0
        finally:
            self.writer.close()

    async def _live(self) -> None:
        """Register, work, leave; and again if this process was declared dead while it was away."""
        ticker = asyncio.create_task(self._ticker())
        try:
            while True:
                self.worker_id = await self.write(liveness.register, "rollout", self.config.name, self._info())
                log.info("worker=%d run=%s ready", self.worker_id, self.run.name)
                again = await self._one_life()
                if not again:
                    return
                log.warning("worker=%d was declared dead; registering anew", self.worker_id)
        finally:
            ticker.cancel()

    async def _one_life(self) -> bool:
        dead = asyncio.Event()
        heart = Heart(
            self.run, self.worker_id, ticked=lambda: self.tick,
            on_dead=lambda: self.loop.call_soon_threadsafe(dead.set),
        )  # fmt: skip
        self.fleet = Fleet(
            self.client, self.write, self.worker_id, self.run.settings.weight_update, router=self.config.router,
            urls=self.config.engines, update_timeout_s=self.config.update_timeout_s,
        )  # fmt: skip
        parts = [asyncio.create_task(c) for c in (self._follow(), self._watch_engines(), self._work(), dead.wait())]
        error: BaseException | None = None
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            error = next((t.exception() for t in done if t.exception()), None)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        was_dead = dead.is_set() or isinstance(error, WorkerDead)
        await self._let_everything_go("worker declared dead" if was_dead else self.stop_reason or "worker left")
        await self.fleet.close(self.config.drain_timeout_s)
        await asyncio.to_thread(heart.stop)
        if was_dead:
            return self.stop_reason is None
        await self.write(
            liveness.goodbye, self.worker_id, None if error is None else f"{type(error).__name__}: {error}"
        )
        if error is not None:
            raise error
        return False

    def _info(self) -> dict[str, Any]:
        c = self.config
        return {
            "concurrency": c.concurrency,
            "mode": c.mode,
            "router": c.router,
            "engines": c.engines,
            "reward": c.reward,
        }

    async def _ticker(self) -> None:
        """Shows the heart that the event loop turns. A loop that is stuck must look dead."""
        while True:
            self.tick = time.monotonic()
            await asyncio.sleep(0.1)

    async def write(self, verb: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One write through the group commit, acknowledged. Survives this coroutine's cancellation. While somebody
        holds the database it waits: a worker that left would only lose what it has."""
        while True:
            try:
                return await asyncio.wrap_future(self.writer.submit(verb, first, *args, **kwargs))
            except StoreBusy as busy:
                log.warning("%s", busy)

    async def read(self, question: Any) -> Any:
        return await asyncio.to_thread(self.run.database.read, question)

    def stop(self, reason: str) -> None:
        """Checkpoint what is in flight, release it, leave. Called by the first SIGTERM or SIGINT."""
        self.stop_reason = self.stop_reason or reason
        self.wake.set()

    # -- following the run

    async def _follow(self) -> None:
        """Poll the run's row: state, weights, aborts."""
        while True:
            await self._poll_run()
            await asyncio.sleep(self.config.poll_seconds)

    async def _poll_run(self) -> None:
        row = await self.read(lambda c: c.execute(sa.select(RunRow.__table__).where(RunRow.id == self.run.id)).one())
        changed = self.current is None or row.current_version != self.current.current_version
        self.current = row
        self.draining = row.state == RunState.DRAINING
        if self.abort_seq is None:
            self.abort_seq = row.abort_seq
        if row.abort_seq != self.abort_seq:
            self.abort_seq = row.abort_seq
            self._abort_all(row.abort_reason or "asked to")
        if changed:
            await self._learn_versions()
            await self._update_engines()
        self.wake.set()

    async def _learn_versions(self) -> None:
        table = WeightVersionRow.__table__
        rows = await self.read(
            lambda c: c.execute(
                sa.select(table.c.version, table.c.label, table.c.path).where(table.c.run_id == self.run.id)
            ).fetchall()
        )
        self.labels = {row.label: row.version for row in rows}
        self.current_label = next((r.label, r.path) for r in rows if r.version == self.current.current_version)

    async def version_of(self, label: str | None) -> int | None:
        """The version that an engine's label names. A label of nobody's stays unknown; it is never taken for 0."""
        if label is not None and label not in self.labels:
            await self._learn_versions()
        return None if label is None else self.labels.get(label)

    def _abort_all(self, reason: str) -> None:
        """Everything in flight stops at the engines, is stored as far as it came, and goes back."""
        if self.inflight:
            log.info("worker=%d lets %d samples go: %s", self.worker_id, len(self.inflight), reason)
        for trajectory in self.inflight.values():
            trajectory.tell(reason)
            if trajectory.request is not None:
                self._spawn(trajectory.abort(self.config.abort_timeout_s))

    async def _watch_engines(self) -> None:
        while True:
            try:
                await self.fleet.refresh()
                await self._update_engines()
            except EngineError as error:
                log.warning("worker=%d %s", self.worker_id, error)
            self.wake.set()
            pause = BEHIND_S if self._behind() else REFRESH_S
            await asyncio.sleep(pause if self.fleet.engines else self.config.poll_seconds)

    def _behind(self) -> list[str]:
        """Engines that serve other weights than they should, and that this worker may update."""
        if not self.config.update_engines or self.current_label is None or self.current_label[1] is None:
            return []
        return [url for url, label in self.fleet.engines.items() if label != self.current_label[0]]

    async def _update_engines(self) -> None:
        for url in self._behind():
            await self.fleet.follow(url)

    # -- work

    async def _work(self) -> None:
        """Keep the slots full until told to stop."""
        pause = self.config.poll_seconds
        while self.stop_reason is None:
            claimed = await self._claim()
            if claimed:
                pause = self.config.poll_seconds
                continue
            if not self.inflight and not self.scoring and await self._nothing_left():
                return
            self.wake.clear()
            try:
                await asyncio.wait_for(self.wake.wait(), timeout=pause * random.uniform(0.8, 1.2))
            except TimeoutError:
                pause = min(pause * 1.5, 1.0)
        await self._let_everything_go(self.stop_reason)

    async def _nothing_left(self) -> bool:
        if self.draining:
            return True
        if not self.config.exit_when_done or self.current is None:
            return False
        row = self.current
        cursor = Cursor(row.epoch, row.chunk_start, row.chunk_stop, row.chunk_next)
        if not cursor.exhausted(row.n_prompts, self.run.settings.epochs):
            return False
        table = Sample.__table__
        query = sa.select(sa.func.count()).where(
            table.c.run_id == self.run.id, table.c.closed == 0, table.c.status.in_([s.value for s in CLAIMABLE])
        )
        pending = sa.select(sa.func.count()).where(
            Stage.__table__.c.run_id == self.run.id, Stage.__table__.c.status == StageStatus.PENDING.value
        )
        if await self.read(lambda c: c.execute(query).scalar_one()):
            return False
        # a stage that waits for its next attempt is work too
        return self.scorer is None or not await self.read(lambda c: c.execute(pending).scalar_one())

    async def _claim(self) -> bool:
        """Fill free slots: stages that somebody left, then samples. Whether anything came."""
        if self.current is None or not self.fleet.looked or not self.fleet.engines:
            return False  # what an engine serves must be known before it is asked: mode keep starts from it
        before = self.run.database.reconnects
        got = await self._claim_stages()
        free = self.config.concurrency - len(self.inflight)
        if self.current.state == RunState.RUNNING and free > 0:
            got = await self._claim_samples(free) or got
        if self.run.database.reconnects != before:
            # A claim may have been committed and its answer lost: what it took is ours without our knowing.
            await self.write(liveness.disown, self.worker_id, list(self.inflight), list(self.scoring))
        return got

    async def _claim_samples(self, free: int) -> bool:
        claims = await self.write(samples.claim, self.worker_id, free)
        if len(claims) < free and await self.write(lambda tx, _: prompts.admit(tx)):
            claims += await self.write(samples.claim, self.worker_id, free - len(claims))
        mine = self.scorer is not None and STAGE in self.run.settings.stages
        for claim in claims:
            trajectory = self.inflight[claim.sample_id] = Trajectory(claim, self, mine)
            trajectory.task = self._spawn(self._run(trajectory))
        return bool(claims)

    async def _claim_stages(self) -> bool:
        room = 2 * self.config.reward_processes - len(self.scoring)
        if self.scorer is None or STAGE not in self.run.settings.stages or room <= 0:
            return False
        claims = await self.write(stages.claim_stages, self.worker_id, room)
        for claim in claims:
            self._score(claim)
        return bool(claims)

    def _score(self, claim: StageClaim) -> None:
        assert self.scorer is not None
        task = self._spawn(self.scorer.score(claim))
        self.scoring[claim.stage_id] = task
        task.add_done_callback(lambda _: self.scoring.pop(claim.stage_id, None))
        task.add_done_callback(lambda _: self.wake.set())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        task.add_done_callback(_log_failure)
        return task

    async def _run(self, trajectory: Trajectory) -> None:
        id = trajectory.claim.sample_id
        try:
            for stage in await trajectory.run():
                self._score(stage)
        finally:
            if self.inflight.get(id) is trajectory:
                del self.inflight[id]
            self.wake.set()

    # -- leaving

    async def _let_everything_go(self, reason: str) -> None:
        """Abort what is in flight at the engines, store the partials, release the samples, end the rewards."""
        self._abort_all(reason)
        tasks = [*(t.task for t in self.inflight.values() if t.task), *self.scoring.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.config.drain_timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def _log_failure(task: asyncio.Task[Any]) -> None:
    """A task's unexpected end must be seen: its sample would otherwise wait for the no-progress deadline."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed", task.get_coro(), exc_info=task.exception())
