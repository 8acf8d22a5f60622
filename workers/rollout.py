"""The worker: claims samples, drives engines, stores segments, follows the run, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore import faults, filters
from samplestore.models import Run as RunRow
from samplestore.models import Sample, WeightVersionRow
from samplestore.queries import serving
from samplestore.run import Run
from samplestore.states import CLAIMABLE, RunState, WorkerKind
from samplestore.types import Claim, StageClaim
from samplestore.verbs import aborts, liveness, stages
from samplestore.workers.dispatch import EngineLimits
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.episode_runs import EpisodeTrajectory
from samplestore.workers.episodes import EpisodeOptions
from samplestore.workers.experts import ExpertShape
from samplestore.workers.filters import Filterer
from samplestore.workers.fleet import Fleet
from samplestore.workers.images import ImageData
from samplestore.workers.limits import EXPERT_FIELDS, Limits, is_greedy
from samplestore.workers.lives import Worker
from samplestore.workers.members import Needs
from samplestore.workers.pacing import Pacing
from samplestore.workers.replies import EngineError
from samplestore.workers.scoring import Scorer
from samplestore.workers.trajectory import Trajectory
from samplestore.writer import Call

log = logging.getLogger("samplestore.worker")

RUN_ROW = sa.select(RunRow.__table__).where(RunRow.__table__.c.id == sa.bindparam("b_run"))
MAX_FILTERING = 8  # groups that a worker holds for its filters; each has all its tokens in memory
REFRESH_S, BEHIND_S = 5.0, 1.0  # between two looks at the engines: all as they should be, some behind


class RolloutWorker(Worker):
    """One process's worker. `run_forever` returns the exit code."""

    kind, log = WorkerKind.ROLLOUT, log

    def __init__(
        self,
        run: Run,
        config: Any,
        scorer_of: Any = None,
        experts: ExpertShape | None = None,
        episodes: EpisodeOptions | None = None,
    ) -> None:
        super().__init__(run, config)
        self.experts, self.episodes = experts, episodes
        self.may_abort_all = run.settings.abort_all
        self.scorer_of = scorer_of  # (write) -> Scorer, or None: this worker scores nothing
        self.scorer: Scorer | None = None
        self.filterer_of: Callable[[Any], Filterer] | None = None  # as scorer_of, for the run's filters
        self.filterer: Filterer | None = None
        self.images = ImageData(self.read, run.id)
        self.inflight: dict[int, Trajectory] = {}  # by sample id
        self.scoring: dict[int, asyncio.Task[None]] = {}  # by stage id
        self.filtering: set[int] = set()  # those of them that are filters
        self.spawned: set[asyncio.Task[Any]] = set()
        self.draining = False  # stop claiming, finish what is held, leave
        self.abort_seq: int | None = None
        self.current: Any = None  # the run's row, as last polled
        self.pacing = Pacing(self)
        self.labels: dict[str, int] = {}
        self.current_label: tuple[str, str | None] | None = None  # label and path of the current version

    # -- life

    async def run_forever(self) -> int:
        self.begin()
        settings, config = self.run.settings, self.config
        self.limits = Limits(
            mode=config.mode, slice_tokens=config.slice_tokens, flush_tokens=config.flush_tokens,
            flush_seconds=config.flush_seconds, max_new_tokens=config.max_new_tokens or settings.max_new_tokens,
            sampling={**settings.sampling, **config.sampling}, sampling_seed=settings.sampling_seed,
            versions_may_change=settings.weight_update == "keep",
            routed_experts=self.experts, resumes=settings.resume, prepare_array=self.run.prepare_array,
        )  # fmt: skip
        if (less := self.limits.cut_in_two()) is not None:
            log.warning("%s", less)
        try:
            async with EngineClient(config.request_timeout_s) as self.client:
                self.scorer = None if self.scorer_of is None else self.scorer_of(self.write)
                self.filterer = None if self.filterer_of is None else self.filterer_of(self.write)
                async with contextlib.AsyncExitStack() as processes:
                    if self.scorer is not None:
                        await processes.enter_async_context(self.scorer)
                    if self.filterer is not None and self.filterer.process is not None:
                        await processes.enter_async_context(self.filterer.process)
                    await self.live()
            return 0
        finally:
            self.writer.close()

    def parts(self) -> list[Coroutine[Any, Any, Any]]:
        self.current = None  # a new fleet must be told what engines should serve
        self.fleet = Fleet(
            self.client, self.write, self.read, self.run.id, self.worker_id, self.run.settings.weight_update,
            self._needs(), router=self.config.router, urls=self.config.engines,
            direct=self.config.direct, drives=self.config.update_engines,
            update_timeout_s=self.config.update_timeout_s, max_queued=self.config.max_queued,
            limits=EngineLimits(self.run.settings.max_samples_per_engine, self.run.settings.max_groups_per_engine),
        )  # fmt: skip
        self.hopeless = self.loop.create_future()
        return [self._follow(), self._watch_engines(), self._work(), self._wait_hopeless()]

    async def let_go(self, was_dead: bool) -> None:
        await self._let_everything_go("worker declared dead" if was_dead else self.stop_reason or "worker left")
        await self.fleet.close(self.config.drain_timeout_s)

    def _needs(self) -> Needs:
        experts = self.limits.routed_experts is not None
        seeded = self.limits.sampling_seed is not None or "sampling_seed" in self.limits.sampling
        return Needs(
            streams=self.limits.mode == "stream",
            max_new_tokens=self.limits.max_new_tokens,
            sampling=frozenset(self.limits.sampling) | ({"sampling_seed"} if seeded else set()),
            fields=frozenset(EXPERT_FIELDS if experts else ()),
            routed_experts=experts,
            seeded=seeded and not is_greedy(self.limits.sampling),
        )

    async def _wait_hopeless(self) -> None:
        raise await self.hopeless

    def give_up(self, error: EngineError) -> None:
        """End this worker: engines or settings are such that no sample can be had."""
        if not self.hopeless.done():
            self.hopeless.set_result(error)

    def told(self) -> str:
        return "ready"

    def info(self) -> dict[str, Any]:
        c = self.config
        return {
            "concurrency": c.concurrency,
            "mode": c.mode,
            "router": c.router,
            "dispatch": "direct" if c.direct else "router",
            "engines": c.engines,
            "reward": c.reward,
            "stages": list(self.scorer.names) if self.scorer is not None else [],
            "episode": c.episode,
        }

    async def write_together(self, calls: Sequence[Call]) -> list[Any]:
        """Writes of one sample in one transaction: all of them, in order, or none. Returns their results."""
        results: list[Any] = await self.patiently(lambda: self.writer.submit_together(calls))
        if self.metrics is not None:
            for (verb, *args), result in zip(calls, results, strict=True):
                self.metrics.wrote(verb, args, result)
        return results

    def holds(self) -> dict[str, int]:
        return {"samples": sum(len(t.sample_ids) for t in self.inflight.values()), "stages": len(self.scoring)}

    # -- following the run

    async def _follow(self) -> None:
        """Poll the run's row: state, weights, aborts."""
        while True:
            await self._poll_run()
            await asyncio.sleep(self.config.poll_seconds)

    async def _poll_run(self) -> None:
        row = await self.read(lambda c: c.execute(RUN_ROW, {"b_run": self.run.id}).one())
        changed = self.current is None or row.current_version != self.current.current_version
        self.current = row
        self.draining = row.state == RunState.DRAINING
        if self.abort_seq is None:
            self.abort_seq = row.abort_seq
        if row.abort_seq != self.abort_seq:
            before, self.abort_seq = self.abort_seq, row.abort_seq
            for asked in await self.read(lambda c: aborts.asked_since(c, self.run.id, before, row.abort_seq)):
                self._abort(asked.reason, asked.samples)
        if changed:
            await self._learn_versions()
            self.spawn(self._update_engines())  # engines that don't answer must not keep aborts from being heard
        self.wake.set()

    async def _learn_versions(self) -> None:
        table = WeightVersionRow.__table__
        rows = await self.read(
            lambda c: c.execute(
                sa.select(table.c.version, table.c.label, table.c.path).where(table.c.run_id == self.run.id)
            ).fetchall()
        )
        self.labels = {row.label: row.version for row in rows}
        label, path = self.current_label = next(
            (r.label, r.path) for r in rows if r.version == self.current.current_version
        )
        self.fleet.wanted = label if path is not None else None

    async def version_of(self, label: str | None) -> int | None:
        """The version that an engine's label names. A label of nobody's stays unknown; it is never taken for 0."""
        if label is not None and label not in self.labels:
            await self._learn_versions()
        return None if label is None else self.labels.get(label)

    def _abort(self, reason: str, samples: frozenset[int] | None = None) -> None:
        """What is in flight (None: everything) stops at the engines, is stored as far as it came, and goes back."""
        told = [t for t in self.inflight.values() if samples is None or not samples.isdisjoint(t.sample_ids)]
        if told:
            log.info("worker=%d lets %d samples go: %s", self.worker_id, len(told), reason)
        for trajectory in told:
            trajectory.tell(reason)
            if trajectory.generating:
                self.spawn(trajectory.abort(self.config.abort_timeout_s))

    async def _watch_engines(self) -> None:
        said = ""
        while True:
            try:
                await self.fleet.refresh()
                await self._update_engines()
                said = ""
            except EngineError as error:
                if error.kind == "setup":
                    raise
                # once: a router that is away is asked several times a second
                log.log(logging.DEBUG if str(error) == said else logging.WARNING, "worker=%d %s", self.worker_id, error)
                said = str(error)
            self.wake.set()
            soon = self._behind() or self.fleet.unfit or self.config.max_queued is not None
            pause = BEHIND_S if soon else REFRESH_S
            await asyncio.sleep(pause if self.fleet.fit else self.config.poll_seconds)

    def _behind(self) -> list[str]:
        """Engines that serve other weights than they should, and that this worker may update; in one order, so that
        all workers begin with the same one."""
        if not self.config.update_engines or self.current_label is None or self.current_label[1] is None:
            return []
        return sorted(url for url, label in self.fleet.engines.items() if label != self.current_label[0])

    async def _update_engines(self) -> None:
        for url in self._behind():
            await self.fleet.follow(url)

    # -- work

    async def _work(self) -> None:
        """Keep the slots full until told to stop."""
        pause = self.config.poll_seconds
        while self.stop_reason is None:
            if await self.pacing.tend():
                await self._poll_run()  # what was asked is heard at once
            claimed = await self._claim()
            if claimed:
                pause = self.config.poll_seconds
                continue
            if not self.inflight and not self.scoring and await self._nothing_left():
                return
            if not await self.woken(pause):
                pause = min(pause * 1.5, 1.0)
        await self._let_everything_go(self.stop_reason)

    async def _nothing_left(self) -> bool:
        if self.draining:
            return True
        if not self.config.exit_when_done or self.current is None:
            return False
        row = self.current
        if not await self.read(lambda c: serving.exhausted(c, row, self.run.settings)):
            return False
        mine = [*(self.scorer.names if self.scorer else ()), *((filters.STAGE,) if self.filterer else ())]
        return not await self.read(lambda c: self._work_left(c, mine))

    def _work_left(self, connection: sa.Connection, mine: list[str]) -> bool:
        """Whether samples, or stages that this worker serves, are there or will be."""
        table = Sample.__table__
        claimable = (table.c.closed == 0) & table.c.status.in_([s.value for s in CLAIMABLE])
        if self.exists(connection, table, claimable) or (mine and self.has_pending(connection, mine)):
            return True
        # The stages of a group are made one after the other, when others have scored its samples: if the worker that
        # filters left before, the groups would wait for ever.
        late = bool({filters.STAGE, *self.run.settings.group_stages} & set(mine))
        return late and self.has_unfinished(connection)

    async def _claim(self) -> bool:
        """Fill free slots: stages that somebody left, then samples. Whether anything came."""
        if self.current is None or not self.fleet.looked or not self.fleet.fit:
            return False  # what an engine serves must be known before it is asked: mode keep starts from it
        before = self.run.database.reconnects
        got = await self._claim_stages()
        got = await self._claim_filters() or got
        free = self.config.concurrency - len(self.inflight)
        if self.current.state == RunState.RUNNING and free > 0 and not self.pacing.holds_back():
            got = await self._claim_samples(free) or got
        if self.run.database.reconnects != before:
            # A claim may have been committed and its answer lost: what it took is ours without our knowing.
            held = [id for t in self.inflight.values() for id in t.sample_ids]
            await self.write(liveness.disown, self.worker_id, held, list(self.scoring))
        return got

    async def _claim_samples(self, free: int) -> bool:
        claims = await self.pacing.claim(free)
        if claims:
            faults.reached("claimed")
        mine = self.scorer.names if self.scorer is not None else False
        for claim in claims:
            trajectory = self.inflight[claim.sample_id] = self._trajectory(claim, mine)
            trajectory.task = self.spawn(self._run(trajectory))
        return bool(claims)

    def _trajectory(self, claim: Claim, mine: Any) -> Trajectory:
        if self.episodes is None:
            return Trajectory(claim, self, mine)
        return EpisodeTrajectory(claim, self, mine, self.episodes)

    async def _claim_stages(self) -> bool:
        got = False
        for name, room in self.scorer.rooms() if self.scorer is not None else []:
            for claim in await self.write(stages.claim_stages, self.worker_id, room, (name,)):
                self._score(claim)
                got = True
        if got:
            await asyncio.sleep(0)  # the claims begin: their room is taken
        return got

    async def _claim_filters(self) -> bool:
        """Groups that are scored, for the run's filters."""
        if self.filterer is None or (room := MAX_FILTERING - len(self.filtering)) <= 0:
            return False
        claims = await self.write(stages.claim_stages, self.worker_id, room, (filters.STAGE,))
        for claim in claims:
            task = self.spawn(self.filterer.run(claim))
            self.scoring[claim.stage_id] = task
            self.filtering.add(claim.stage_id)
            task.add_done_callback(lambda _, id=claim.stage_id: self._stage_ended(id))  # type: ignore[misc]
        return bool(claims)

    def _stage_ended(self, stage_id: int) -> None:
        self.scoring.pop(stage_id, None)
        self.filtering.discard(stage_id)
        self.wake.set()

    def _score(self, claim: StageClaim) -> None:
        assert self.scorer is not None
        task = self.spawn(self.scorer.score(claim))
        self.scoring[claim.stage_id] = task
        task.add_done_callback(lambda _: self.scoring.pop(claim.stage_id, None))
        task.add_done_callback(lambda _: self.wake.set())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        task.add_done_callback(_log_failure)
        self.spawned.add(task)
        task.add_done_callback(self.spawned.discard)
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
        self._abort(reason)
        tasks = [*(t.task for t in self.inflight.values() if t.task), *self.scoring.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.config.drain_timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self.spawned:  # the last aborts: an engine must hear them before the connections close
            await asyncio.wait(self.spawned, timeout=self.config.abort_timeout_s)


def _log_failure(task: asyncio.Task[Any]) -> None:
    """A task's unexpected end must be seen: its sample would otherwise wait for the no-progress deadline."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed", task.get_coro(), exc_info=task.exception())
