"""A trainer's batch: wait, lease, read, settle."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from samplestore import codec, forks, hooks, masks, responses
from samplestore import tensors as packing
from samplestore.advantages import METHODS
from samplestore.errors import (
    ArrayNotStored,
    BatchTimeout,
    InvalidSetting,
    MissingLogprobs,
    SampleStoreError,
    StepHeld,
    TokensPruned,
    WorkerDead,
    WorkerFailed,
)
from samplestore.heart import Heart
from samplestore.media import Image
from samplestore.models import (
    BatchGroup,
    BatchRow,
    PromptRow,
    Run,
    Sample,
    SampleGroup,
    Segment,
    WeightVersionRow,
    Worker,
)
from samplestore.queries import arrays as named_arrays
from samplestore.queries import images, serving
from samplestore.queries.why import why
from samplestore.statements import staleness
from samplestore.statements.prepared import Prepared
from samplestore.states import (
    BatchState,
    SampleStatus,
    SegmentKind,
    StalenessMode,
    StalePolicy,
    WorkerKind,
    WorkerState,
)
from samplestore.tensors import BatchSample
from samplestore.types import Why, choice
from samplestore.verbs import batches as verbs
from samplestore.verbs import liveness, prompts
from samplestore.verbs.tx import Transactor

log = logging.getLogger("samplestore.batches")

batch, batch_group, group, sample, segment, prompt, worker, run_table = (
    t.__table__ for t in (BatchRow, BatchGroup, SampleGroup, Sample, Segment, PromptRow, Worker, Run)
)


@dataclass(frozen=True, slots=True)
class BatchGroupView:
    group_id: int
    number: int
    staleness: int | None
    samples: list[BatchSample]


class Batch:
    """Groups leased for one step. As a context manager it commits on a clean exit and is released on an error."""

    def __init__(self, run: Transactor, row: Any, worker_id: int | None) -> None:
        self._run, self._worker_id = run, worker_id
        self.id, self.step, self.timeline = int(row.id), int(row.step), int(row.timeline)
        self.current_version = int(row.current_version)
        self.policy: dict[str, Any] = dict(row.policy)
        self.n_groups, self.n_samples, self.n_tokens = int(row.n_groups), int(row.n_samples), int(row.n_tokens)
        self.settled = worker_id is None  # not by the row: a lease that was lost meanwhile must fail at its commit

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.settled:
            return
        if error is None:
            self.commit()
            return
        try:
            self.release(f"{type(error).__name__}: {error}")
        except Exception:  # the trainer's own error is the one to show
            log.exception("batch %d could not be released; its lease ends with this process", self.id)

    def commit(self) -> None:
        """Settle: the groups are consumed, exactly once. Save the checkpoint first, then commit. Repeatable."""
        if self._worker_id is None:
            raise SampleStoreError("a replayed batch is read-only")
        owner = self._worker_id
        self._run.transact(lambda tx: verbs.commit(tx, self.id, owner), durable=True)
        self.settled = True

    def release(self, reason: str) -> None:
        """Give the groups back. Repeatable."""
        if self._worker_id is None:
            raise SampleStoreError("a replayed batch is read-only")
        owner = self._worker_id
        self._run.transact(lambda tx: verbs.release(tx, self.id, owner, reason))
        self.settled = True

    @cached_property
    def groups(self) -> list[BatchGroupView]:
        """The groups in their order, read in one snapshot. Failed samples are left out."""
        return _read(self._run, self)

    @property
    def samples(self) -> list[BatchSample]:
        return [s for g in self.groups for s in g.samples]

    @cached_property
    def images(self) -> list[list[Image]]:
        """The images of each sample's prompt, in the order of `samples`; siblings share the objects. Read when asked
        for: they may be larger than all the rest."""
        wanted = {digest for s in self.samples for digest in s.images}
        found = self._run.database.read(lambda c: images.read(c, self._run.id, sorted(wanted)))
        return [[found[digest] for digest in s.images] for s in self.samples]

    def tensors(
        self, device: Any = None, *, layout: str = "packed", advantages: str | None = None, named: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The batch as torch tensors; see samplestore.tensors for names, shapes and dtypes.

        named   named arrays to give too, e.g. ["teacher_log_probs"]: [T, ...] or [B, L, ...], and NAME_present, 1 where
                a token has a row of it. Those of routed_experts stand at the token that went in, one before the one
                that came out
        Raises ArrayNotStored for one that no sample of the batch has, ArrayFileError.
        """
        return packing.as_torch(self.arrays(layout=layout, advantages=advantages, named=named), device)

    def arrays(
        self, *, layout: str = "packed", advantages: str | None = None, named: Sequence[str] = ()
    ) -> dict[str, npt.NDArray[Any]]:
        """The same as numpy arrays."""
        method = advantages or str(self.policy.get("advantages", "grpo"))
        made = packing.arrays(self.samples, layout, method)
        for name in named:
            parts = _named_parts(self._run, self.samples, name)
            made |= packing.named(self.samples, name, parts, layout)
        return made


def _named_parts(run: Transactor, samples: Sequence[BatchSample], name: str) -> dict[int, named_arrays.Whole]:
    """A named array of each sample that has it. Raises ArrayNotStored, ArrayFileError."""
    ids = [s.sample_id for s in samples]
    found = run.database.read(lambda c: named_arrays.of_samples(c, ids, [name]))
    if not found:
        raise ArrayNotStored(name, run.database.read(lambda c: named_arrays.names_of(c, ids)))
    lengths = run.database.read(lambda c: named_arrays.lengths(c, [id for id, _ in found]))
    return {id: named_arrays.together(name, parts, *lengths[id], run.array_files) for (id, _), parts in found.items()}


TELL_S = 30.0  # a wait that lasts longer is told to the log, and again whenever it has doubled
_trainers_lock = threading.Lock()


def trainer_id(run: Transactor) -> int:
    """This process's trainer row for the run, made at first use and kept alive by a heartbeat thread."""
    with _trainers_lock:
        hearts: dict[int, Heart] = run.database.hearts
        heart = hearts.get(run.id)
        if heart is None or heart.dead.is_set():
            worker_id = run.transact(lambda tx: liveness.register(tx, WorkerKind.TRAINER.value))
            heart = hearts[run.id] = Heart(run, worker_id)
            run.database.on_close.append(heart.leave)
        return heart.worker_id


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
    timeout: float | None = None,
) -> Batch:
    """Wait until `groups` groups are ready inside the window, and lease them for `step`.

    groups, max_staleness, staleness_mode, stale, mask_offpolicy, order
                                                   the run's settings where left out (types.RunSettings)
    timeout                                        seconds; None waits for ever, and tells the log why
    buffer_filter                                  slime's f(args, rollout_id, buffer, n), see hooks.choose
    all_samples                                    slime's f(args, groups, data_source), see hooks.show_all
    Raises BatchTimeout (with the reason), StepAlreadyCommitted, StepHeld, WorkerDead, WorkerFailed, InvalidSetting.
    """
    settings = run.settings
    wanted = settings.groups_per_step if groups is None else groups
    policy: dict[str, Any] = {
        "max_staleness": settings.max_staleness if max_staleness is None else max_staleness,
        "staleness": choice("staleness_mode", staleness_mode or settings.staleness_mode, StalenessMode).value,
        "stale": choice("stale", stale or settings.stale, StalePolicy).value,
        "advantages": advantages,
        "need_logprobs": need_logprobs,
        "mask_offpolicy": settings.mask_offpolicy if mask_offpolicy is None else mask_offpolicy,
        "order": settings.order if order is None else order,
    }
    if advantages not in METHODS:
        raise InvalidSetting("advantages", advantages, " | ".join(METHODS))
    serving.probe(run.database, policy["order"])
    since, pause, tidy_at = time.monotonic(), 0.02, 0.0
    tell_at = TELL_S
    only: list[int] | None = None

    def reasons() -> Why:
        told = why(
            run.database, run.id, settings, wanted, policy["max_staleness"], policy["staleness"], policy["stale"]
        )
        if only is None or len(only) >= wanted or told.ready_in_window < wanted:
            return told
        name = getattr(buffer_filter, "__name__", "") or repr(buffer_filter)
        short = f"the buffer filter {name} returned {len(only)} of the {wanted} groups that the batch needs"
        return replace(told, reasons=[("buffer_filter", short), *told.reasons])

    while True:
        waited = time.monotonic() - since
        owner = trainer_id(run)
        try:
            only = None if buffer_filter is None else hooks.choose(run, buffer_filter, step, wanted, policy)
            batch_id = run.transact(
                partial(verbs.lease, worker_id=owner, step=step, n_groups=wanted, policy=policy, only=only)
            )
        except StepHeld:
            # A trainer that was killed and started again meets its own lease, until its old row is reaped.
            if waited > 2 * settings.heartbeat_ttl_s:
                raise
            batch_id = None
        except WorkerDead:
            # This process was away for longer than its ttl. It holds nothing yet, so it registers anew.
            if (heart := run.database.hearts.pop(run.id, None)) is not None:
                heart.stop()
            continue
        if batch_id is not None:
            row = _row(run, batch_id)
            if row.state == BatchState.LEASED:
                made = Batch(run, row, owner)
                if all_samples is not None:
                    _show(run, all_samples, made)
                return made
            continue  # this process was away after its lease, and was reaped: it holds nothing, and registers anew
        if timeout is not None and waited >= timeout:
            raise BatchTimeout(waited, reasons())
        if waited >= tell_at:  # some waits have no end: nobody should have to guess
            tell_at = waited * 2
            log.warning("step %d has waited %.0f s for a batch. %s", step, waited, reasons())
        if time.monotonic() >= tidy_at:
            tidy_at = time.monotonic() + 1.0
            run.transact(prompts.admit)
            if run.database.hearts[run.id].may_reap:
                run.transact(partial(liveness.reap, reaper_id=owner))
            raise_worker_failure(run)
        time.sleep(min(pause, 0.5) if timeout is None else min(pause, 0.5, max(0.0, timeout - waited)))
        pause *= 1.3


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
    last = sa.select(worker).where(of_run).order_by(worker.c.ended_at.desc(), worker.c.id.desc()).limit(1)
    failed = run.database.read(lambda c: None if c.execute(live).scalar_one() else c.execute(last).one_or_none())
    if failed is not None and failed.error is not None:
        raise WorkerFailed(failed.id, failed.name, failed.error)


def _row(run: Transactor, batch_id: int) -> Any:
    return run.database.read(lambda c: c.execute(sa.select(batch).where(batch.c.id == batch_id)).one())


def replay(run: Transactor, step: int) -> Batch:
    """The committed batch of `step` on the current lineage. Raises SampleStoreError if there is none, TokensPruned."""
    wanted = verbs.live_of_step(run.id, step).where(batch.c.state == BatchState.COMMITTED.value)
    kept = sa.select(run_table.c.retention_step).where(run_table.c.id == run.id)
    row, limit = run.database.read(lambda c: (c.execute(wanted).one_or_none(), c.execute(kept).scalar_one()))
    if row is None:
        raise SampleStoreError(f"run {run.name!r} has no committed batch of step {step}. See: samplestore status")
    if step <= limit:
        raise TokensPruned(f"step {step}", limit)
    return Batch(run, row, None)


IN_BATCH = batch_group.join(sample, sample.c.group_id == batch_group.c.group_id)
OF_BATCH = (batch_group.c.batch_id == sa.bindparam("of_batch")) & (sample.c.status != SampleStatus.FAILED.value)
GROUPS = Prepared(
    sa.select(
        group.c.id, group.c.number, batch_group.c.staleness, prompt.c.label, prompt.c.metadata.label("meta"),
        prompt.c.prompt_ids, prompt.c.images,
    )
    .select_from(
        batch_group.join(group, group.c.id == batch_group.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)
    )
    .where(batch_group.c.batch_id == sa.bindparam("of_batch"))
    .order_by(batch_group.c.position)
)  # fmt: skip
SAMPLES = Prepared(
    sa.select(
        sample.c.id, sample.c.group_id, sample.c.index.label("place"), sample.c.reward, sample.c.status,
        sample.c.finish_reason, sample.c.removed, sample.c.parent_id, sample.c.parent_upto,
    )
    .select_from(IN_BATCH)
    .where(OF_BATCH)
    .order_by(batch_group.c.position, sample.c.index)
)  # fmt: skip
SEGMENTS = Prepared(
    sa.select(
        segment.c.sample_id, segment.c.loss, segment.c.kind, segment.c.version_min, segment.c.version_max,
        segment.c.attempt, segment.c.request_rid, segment.c.payload,
    )
    .select_from(
        IN_BATCH.join(segment, (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation))
    )
    .where(OF_BATCH)
    .order_by(segment.c.sample_id, segment.c.seq)
)  # fmt: skip


PARENTS = (
    sa.select(*segment.c)
    .select_from(
        segment.join(sample, (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation))
    )
    .where(sample.c.id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(segment.c.sample_id, segment.c.seq)
)


def _parents(connection: sa.Connection, samples: Sequence[Any]) -> Sequence[Any]:
    """Segments of samples that failed and are not delivered themselves, but whose forks begin with them."""
    missing = {row.parent_id for row in samples if row.parent_upto} - {row.id for row in samples}
    return connection.execute(PARENTS, {"ids": sorted(missing)}).fetchall() if missing else []


def _read(run: Transactor, of: Batch) -> list[BatchGroupView]:
    """Everything of a batch in one snapshot: three queries, whatever its size."""

    def snapshot(connection: sa.Connection) -> tuple[Any, ...]:
        asked = [question.rows(connection, {"of_batch": of.id}) for question in (GROUPS, SAMPLES, SEGMENTS)]
        return *asked, _parents(connection, asked[1]), _lags(connection, run.id, of)

    groups, samples, segments, shared, behind = run.database.read(snapshot)
    pieces: dict[int, list[Any]] = defaultdict(list)
    for piece in [*segments, *shared]:
        pieces[piece.sample_id].append(piece)
    views = {row.id: BatchGroupView(row.id, row.number, row.staleness, []) for row in groups}
    prompts = {row.id: row for row in groups}
    tokens = _Tokens(of, behind)
    order = [*(row.id for row in samples), *dict.fromkeys(piece.sample_id for piece in shared)]
    runs = {sample_id: tokens.runs(sample_id, pieces[sample_id]) for sample_id in order}
    # Episodes give rewards without a stage, too: where some have one, a sample without is not one of 0.
    rewarded = run.settings.gives_rewards or any(row.reward is not None for row in samples)
    for row in samples:
        about, response = prompts[row.group_id], runs[row.id]
        prompt_ids = codec.ids_from(about.prompt_ids)
        if row.parent_id is not None:
            if not pieces[row.id]:
                continue  # of an earlier life of its parent, and emptied (verbs/fanout.py)
            prompt_ids, response = forks.delivered(row, prompt_ids, runs, response[0].ids.size)
        unscored = row.reward is None and rewarded
        if row.removed is not None or unscored:
            response = tuple(run.untrained() for run in response)  # derived when read, as the staleness policy is
        views[row.group_id].samples.append(
            BatchSample(
                sample_id=row.id, group_id=row.group_id, group_number=about.number, index=row.place,
                prompt_ids=prompt_ids, runs=response, reward=row.reward, status=row.status,
                finish_reason=row.finish_reason, label=codec.own(about.label), metadata=codec.own(about.meta or {}),
                removed=row.removed, unscored=unscored,
                rollout_id=row.id if row.parent_id is None else row.parent_id,
                images=() if row.parent_id is not None and row.parent_upto is None else tuple(about.images or ()),
            )
        )  # fmt: skip
    return [view for view in views.values() if view.samples]


def _lags(connection: sa.Connection, run_id: int, of: Batch) -> dict[int, int]:
    """Staleness of each version, as seen from the version that was current when the batch was leased."""
    if of.policy["stale"] != StalePolicy.MASK:
        return {}
    table = WeightVersionRow.__table__
    rows = connection.execute(sa.select(table.c.version, table.c.parent, table.c.depth).where(table.c.run_id == run_id))
    return staleness.seen_from(of.current_version, rows.fetchall())


class _Tokens:
    """The response tokens of samples, and which of them are trained on."""

    def __init__(self, of: Batch, behind: dict[int, int]) -> None:
        self.policy, self.behind = of.policy, behind

    def runs(self, sample_id: int, pieces: Sequence[Any]) -> responses.Runs:
        """Those of a sample, a run for each segment. Raises MissingLogprobs."""
        since = masks.resumed_at(pieces) if self.policy.get("mask_offpolicy") else 0
        runs = []
        for place, piece in enumerate(pieces):
            tokens, probs = codec.decode(piece.payload)
            trained = self._trained(piece) and (place >= since or piece.kind != SegmentKind.GENERATED)
            if probs is None:
                if trained and self.policy.get("need_logprobs", True):
                    raise MissingLogprobs(sample_id)
                probs = np.zeros(tokens.size, np.float32)
            runs.append(responses.Run(tokens, probs, trained, -1 if piece.version_min is None else piece.version_min))
        return tuple(runs)

    def _trained(self, piece: Any) -> bool:
        """Derived when read, never written: tokens beyond the window carry no gradient. No weights made those of an
        environment, so they are behind none."""
        window = self.policy["max_staleness"]
        masks = self.policy["stale"] == StalePolicy.MASK and piece.kind == SegmentKind.GENERATED
        return bool(piece.loss) and not (masks and self.behind.get(piece.version_min, window + 1) > window)
