"""How a trainer gets a batch: wait and lease, join what rank 0 has leased, or read one again."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import sqlalchemy as sa

from samplestore import arrays, hooks, ranks
from samplestore.advantages import METHODS
from samplestore.arguments import choice, one_of, seconds, whole
from samplestore.batch import Batch as Batch
from samplestore.batch import row_of
from samplestore.errors import (
    BatchTimeout,
    SampleStoreError,
    StepHeld,
    TokensPruned,
    WaitStopped,
    WorkerDead,
    WorkerFailed,
)
from samplestore.heart import Heart
from samplestore.mismatch import Mismatch
from samplestore.models import BatchRow, Run, Worker
from samplestore.queries import plans, serving
from samplestore.queries.why import why
from samplestore.states import BatchState, StalenessMode, StalePolicy, WorkerKind, WorkerState
from samplestore.types import Why
from samplestore.verbs import batches as verbs
from samplestore.verbs import liveness, prompts
from samplestore.verbs.tx import Transactor
from samplestore.words import amount, did_you_mean

log = logging.getLogger("samplestore.batches")

batch, worker, run_table = (t.__table__ for t in (BatchRow, Worker, Run))


TELL_S = 30.0  # a wait that lasts longer is told to the log, and again whenever it has doubled
_trainers_lock = threading.Lock()


def trainer_id(run: Transactor) -> int:
    """This process's trainer row for the run, made at first use and kept alive by a heartbeat thread."""
    with _trainers_lock:
        hearts: dict[int, Heart] = run.database.hearts
        heart = hearts.get(run.id)
        if heart is None or not heart.beats_here:
            worker_id = run.transact(lambda tx: liveness.register(tx, WorkerKind.TRAINER.value))
            heart = hearts[run.id] = Heart(run, worker_id)
            run.database.on_close.append(heart.leave)
        return heart.worker_id


def renounce(run: Transactor, owner: int) -> None:
    """This process was away for longer than its ttl, and its trainer row is dead: trainer_id registers anew. Another
    thread may have done so already; then the new heart beats on."""
    with _trainers_lock:
        heart = run.database.hearts.get(run.id)
        if heart is None or heart.worker_id != owner:
            return
        del run.database.hearts[run.id]
    heart.stop()


def take(
    run: Transactor,
    step: int,
    groups: int | None = None,
    *,
    max_staleness: int | None = None,
    staleness_mode: str | None = None,
    stale: str | None = None,
    advantages: str = "grpo",
    need_logprobs: bool = True,
    mask_offpolicy: bool | None = None,
    order: str | None = None,
    buffer_filter: hooks.BufferFilter | None = None,
    all_samples: hooks.AllSamples | None = None,
    rank: int = 0,
    world: int = 1,
    timeout: float | None = None,
    stop: threading.Event | None = None,
) -> Batch:
    """Wait until `groups` groups are ready inside the window, and lease them for `step`. Get-or-create: the same step
    gives the same groups, also to a trainer that died and was started again, as long as they are ready.

    groups, max_staleness, staleness_mode, stale, mask_offpolicy, order
                                                   the run's settings where left out (runsettings.RunSettings)
    rank, world                                    of a data-parallel trainer: rank 0 leases, and shares the samples out
                                                   by tokens (samplestore.planning.plan); the others wait for it and
                                                   read their part. What the batch is, the options of rank 0 say
    timeout                                        seconds; None waits for ever, and tells the log why
    buffer_filter                                  slime's f(args, rollout_id, buffer, n), see hooks.choose
    all_samples                                    slime's f(args, groups, data_source), see hooks.show_all
    stop                                           set it from another thread to end the wait
    Raises BatchTimeout (with the reason), StepAlreadyCommitted, StepHeld, WorkerDead, WorkerFailed, InvalidSetting; on
    ranks above 0 BatchReleased, WorldMismatch; WaitStopped when `stop` was set.
    """
    rank, world = ranks.check(rank, world)
    settings, step = run.settings, whole("step", step)
    wanted = settings.groups_per_step if groups is None else whole("groups", groups, 1)
    policy: dict[str, Any] = {
        "max_staleness": settings.max_staleness if max_staleness is None else whole("max_staleness", max_staleness),
        "staleness": choice("staleness_mode", staleness_mode or settings.staleness_mode, StalenessMode).value,
        "stale": choice("stale", stale or settings.stale, StalePolicy).value,
        "advantages": advantages,
        "need_logprobs": need_logprobs,
        "mask_offpolicy": settings.mask_offpolicy if mask_offpolicy is None else mask_offpolicy,
        "order": settings.order if order is None else order,
    }
    one_of("advantages", advantages, METHODS)
    serving.probe(run.database, policy["order"])
    only: list[int] | None = None

    def reasons() -> Why:
        told = why(
            run.database, run.id, settings, wanted, policy["max_staleness"], policy["staleness"], policy["stale"]
        )
        if only is None or len(only) >= wanted or told.ready_in_window < wanted:
            return told
        name = getattr(buffer_filter, "__name__", "") or repr(buffer_filter)
        short = f"the buffer filter {name} returned {len(only)} of the {amount(wanted, 'group')} that the batch needs"
        return replace(told, reasons=[("buffer_filter", short), *told.reasons])

    wait = Wait(step, timeout, stop, reasons)
    if rank > 0:
        row = ranks.join(run, step, world, wait.on)
        return Batch(run, row, None, rank, row.plan)
    tidy_at = 0.0
    while True:
        owner = trainer_id(run)
        try:
            only = None if buffer_filter is None else hooks.choose(run, buffer_filter, step, wanted, policy)
            batch_id = run.transact(
                partial(verbs.lease, worker_id=owner, step=step, n_groups=wanted, policy=policy, only=only, world=world)
            )
        except StepHeld:
            # A trainer that was killed and started again meets its own lease, until its old row is reaped.
            if wait.waited > 2 * settings.heartbeat_ttl_s:
                raise
            batch_id = None
        except WorkerDead:
            renounce(run, owner)  # it holds nothing yet
            continue
        if batch_id is not None:
            row = row_of(run, batch_id)
            if row.state == BatchState.LEASED:
                made = Batch(run, row, owner, 0, row.plan)
                if all_samples is not None:
                    _show(run, all_samples, made)
                return made
            continue  # this process was away after its lease, and was reaped: it holds nothing, and registers anew
        wait.check()
        if time.monotonic() >= tidy_at:
            tidy_at = time.monotonic() + 1.0
            run.transact(prompts.admit)
            heart = run.database.hearts.get(run.id)
            if heart is not None and heart.may_reap:
                run.transact(partial(liveness.reap, reaper_id=owner))
            raise_worker_failure(run)
        wait.sleep()


OPTIONS = tuple(p.name for p in inspect.signature(take).parameters.values() if p.kind is p.KEYWORD_ONLY)


def require_options(called: str, options: Iterable[str], without: Collection[str] = ()) -> None:
    """That these are options of `take`: who calls it by another name is told of that one. Raises TypeError."""
    known = [name for name in OPTIONS if name not in without]
    for name in options:
        if name not in known:
            raise TypeError(f"{called} has no option {name!r}.{did_you_mean(name, known)} It has: {', '.join(known)}")


class Wait:
    """The pace of a wait for a step's batch: looks come ever less often, and it ends, or is told to the log."""

    def __init__(
        self, step: int, timeout: float | None, stop: threading.Event | None, reasons: Callable[[], Why]
    ) -> None:  # fmt: skip
        self._step, self._timeout, self._reasons = step, seconds("timeout", timeout), reasons
        self._stop = threading.Event() if stop is None else stop
        self._since, self._pause, self._tell_at = time.monotonic(), 0.02, TELL_S

    @property
    def waited(self) -> float:
        return time.monotonic() - self._since

    def on(self, for_what: str) -> float:
        """Wait until the next look; the seconds so far."""
        self.check(for_what)
        self.sleep()
        return self.waited

    def check(self, for_what: str | None = None) -> None:
        """Raises BatchTimeout, WaitStopped."""
        waited = self.waited
        if self._stop.is_set():
            raise WaitStopped(f"the wait for step {self._step}")
        if self._timeout is not None and waited >= self._timeout:
            raise BatchTimeout(waited, self._told(for_what))
        if waited >= self._tell_at:  # some waits have no end: nobody should have to guess
            self._tell_at = waited * 2
            log.warning("step %d has waited %.0f s for a batch. %s", self._step, waited, self._told(for_what))

    def _told(self, for_what: str | None) -> Why:
        why = self._reasons()
        return why if for_what is None else replace(why, reasons=[("rank_0", for_what), *why.reasons])

    def sleep(self) -> None:
        left = 0.5 if self._timeout is None else max(0.0, self._timeout - self.waited)
        self._stop.wait(min(self._pause, 0.5, left))
        self._pause *= 1.3


def _show(run: Transactor, hook: hooks.AllSamples, of: Batch) -> None:
    try:
        hooks.show_all(run, hook, of.id)
    except BaseException as error:
        of.release(f"all-samples hook: {type(error).__name__}: {error}")
        raise


def raise_worker_failure(run: Transactor) -> None:
    """A fatal worker error ends the wait when no other rollout worker is left to do the work."""
    of_run = sa.and_(worker.c.run_id == run.id, worker.c.kind == WorkerKind.ROLLOUT.value)
    live = sa.select(sa.func.count()).where(of_run, worker.c.state == WorkerState.LIVE.value)
    # the last to go, whoever came last: if that one failed, nobody is left who did not
    # one that was killed ended with its last heartbeat, not when somebody reaped it
    went = sa.case((worker.c.state == WorkerState.DEAD.value, worker.c.heartbeat), else_=worker.c.ended_at)
    last = sa.select(worker).where(of_run).order_by(went.desc(), worker.c.id.desc()).limit(1)
    failed = run.database.read(lambda c: None if c.execute(live).scalar_one() else c.execute(last).one_or_none())
    if failed is not None and failed.error is not None:
        raise WorkerFailed(failed.id, failed.name, failed.error)


def replay(run: Transactor, step: int, rank: int = 0, world: int = 1) -> Batch:
    """The committed batch of `step` on the current lineage, or the part of a rank; shared out anew where `world` is
    another than it was. Raises SampleStoreError if there is none, TokensPruned."""
    rank, world = ranks.check(rank, world)
    committed = verbs.live_of_step(run.id, step).where(batch.c.state == BatchState.COMMITTED.value)
    row = _kept(run, lambda c: c.execute(committed).one_or_none())
    if row is None:
        raise SampleStoreError(f"run {run.name!r} has no committed batch of step {step}. See: samplestore status")
    same = ranks.world_of(row) == world
    plan = row.plan if same else run.database.read(lambda c: plans.of_batch(c, row.id, world))
    return Batch(run, row, None, rank, plan)


def mismatch(run: Transactor, step: int | None = None) -> Mismatch:
    """How far the trainer's log-probs of a step are from those of the engines; of the newest of the last steps that has
    them where `step` is left out. Leased batches too. Raises SampleStoreError if there is none, TokensPruned."""
    if step is None:
        row = _kept(run, lambda c: plans.newest_with(c, run.id, arrays.TRAINER))
    else:
        row = _kept(run, lambda c: c.execute(verbs.live_of_step(run.id, step)).one_or_none())
    if row is None:
        what = "with recorded log-probs" if step is None else f"of step {step}"
        raise SampleStoreError(f"run {run.name!r} has no batch {what}. Store them: batch.record_logprobs(...)")
    return Batch(run, row, None).mismatch()


def _kept(run: Transactor, find: Callable[[sa.Connection], Any | None]) -> Any | None:
    """The row of a batch, if its tokens are still there. Raises TokensPruned."""
    kept = sa.select(run_table.c.retention_step).where(run_table.c.id == run.id)
    row, limit = run.database.read(lambda c: (find(c), c.execute(kept).scalar_one()))
    if row is not None and row.step <= limit:
        raise TokensPruned(f"step {row.step}", limit)
    return row
