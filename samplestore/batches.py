"""A trainer's batch: wait, lease, read, settle."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from samplestore import codec
from samplestore import tensors as packing
from samplestore.advantages import METHODS
from samplestore.errors import (
    BatchTimeout,
    InvalidSetting,
    MissingLogprobs,
    SampleStoreError,
    StepHeld,
    WorkerDead,
    WorkerFailed,
)
from samplestore.heart import Heart
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
from samplestore.queries.why import why
from samplestore.statements import staleness
from samplestore.states import BatchState, SampleStatus, StalePolicy, WorkerKind, WorkerState
from samplestore.tensors import BatchSample
from samplestore.types import choice
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
        self.settled = row.state != BatchState.LEASED

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

    def tensors(self, device: Any = None, *, layout: str = "packed", advantages: str | None = None) -> dict[str, Any]:
        """The batch as torch tensors; see samplestore.tensors for names, shapes and dtypes."""
        method = advantages or str(self.policy.get("advantages", "grpo"))
        return packing.tensors(self.samples, device, layout, method)

    def arrays(self, *, layout: str = "packed", advantages: str | None = None) -> dict[str, npt.NDArray[Any]]:
        """The same as numpy arrays."""
        method = advantages or str(self.policy.get("advantages", "grpo"))
        return packing.arrays(self.samples, layout, method)


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
    staleness_mode: str = "oldest",
    stale: str | None = None,
    advantages: str = "grpo",
    need_logprobs: bool = True,
    timeout: float | None = None,
) -> Batch:
    """Wait until `groups` groups are ready inside the window, and lease them for `step`.

    groups, max_staleness, stale   the run's settings where left out
    staleness_mode                 "oldest", "newest" or "mean" (see statements/staleness.py)
    stale                          "skip" groups beyond the window, or "mask" their tokens beyond it
    timeout                        seconds; None waits for ever
    Raises BatchTimeout (with the reason), StepAlreadyCommitted, StepHeld, WorkerDead, WorkerFailed.
    """
    settings = run.settings
    wanted = settings.groups_per_step if groups is None else groups
    policy: dict[str, Any] = {
        "max_staleness": settings.max_staleness if max_staleness is None else max_staleness,
        "staleness": staleness_mode,
        "stale": choice("stale", stale or settings.stale, StalePolicy).value,
        "advantages": advantages,
        "need_logprobs": need_logprobs,
    }
    if advantages not in METHODS:
        raise InvalidSetting("advantages", advantages, " | ".join(METHODS))
    since, pause, tidy_at = time.monotonic(), 0.02, 0.0
    while True:
        waited = time.monotonic() - since
        owner = trainer_id(run)
        try:
            batch_id = run.transact(partial(verbs.lease, worker_id=owner, step=step, n_groups=wanted, policy=policy))
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
            return Batch(run, _row(run, batch_id), owner)
        if timeout is not None and waited >= timeout:
            raise BatchTimeout(waited, why(run.database, run.id, settings, wanted, policy["max_staleness"]))
        if time.monotonic() >= tidy_at:
            tidy_at = time.monotonic() + 1.0
            run.transact(prompts.admit)
            if run.database.hearts[run.id].may_reap:
                run.transact(partial(liveness.reap, reaper_id=owner))
            _raise_worker_failure(run)
        time.sleep(min(pause, 0.5) if timeout is None else min(pause, 0.5, max(0.0, timeout - waited)))
        pause *= 1.3


def _raise_worker_failure(run: Transactor) -> None:
    """A fatal worker error ends the wait when no other rollout worker is left to do the work."""
    of_run = sa.and_(worker.c.run_id == run.id, worker.c.kind == WorkerKind.ROLLOUT.value)
    with run.database.reading() as connection:
        live = sa.select(sa.func.count()).where(of_run, worker.c.state == WorkerState.LIVE.value)
        if connection.execute(live).scalar_one():
            return
        failed = connection.execute(sa.select(worker).where(of_run).order_by(worker.c.id.desc()).limit(1)).one_or_none()
    if failed is not None and failed.error is not None:
        raise WorkerFailed(failed.id, failed.name, failed.error)


def _row(run: Transactor, batch_id: int) -> Any:
    with run.database.reading() as connection:
        return connection.execute(sa.select(batch).where(batch.c.id == batch_id)).one()


def replay(run: Transactor, step: int) -> Batch:
    """The committed batch of `step` on the current lineage. Raises SampleStoreError if there is none."""
    with run.database.reading() as connection:
        row = connection.execute(
            sa.select(batch).where(
                batch.c.run_id == run.id, batch.c.step == step, batch.c.state == BatchState.COMMITTED.value
            )
        ).one_or_none()
    if row is None:
        raise SampleStoreError(f"run {run.name!r} has no committed batch of step {step}. See: samplestore status")
    return Batch(run, row, None)


def _read(run: Transactor, of: Batch) -> list[BatchGroupView]:
    """Everything of a batch in one snapshot: two queries, whatever its size."""
    columns = (
        sample.c.id, sample.c.index, sample.c.reward, sample.c.status, sample.c.finish_reason, sample.c.group_id,
        group.c.number, prompt.c.prompt_ids, prompt.c.label, prompt.c.metadata.label("meta"), batch_group.c.staleness,
    )  # fmt: skip
    in_batch = batch_group.join(sample, sample.c.group_id == batch_group.c.group_id)
    with run.database.reading() as connection:
        rows = connection.execute(
            sa.select(*columns)
            .select_from(
                in_batch.join(group, group.c.id == sample.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)
            )
            .where(batch_group.c.batch_id == of.id, sample.c.status != SampleStatus.FAILED.value)
            .order_by(batch_group.c.position, sample.c.index)
        ).fetchall()
        pieces = connection.execute(
            sa.select(
                segment.c.sample_id,
                segment.c.n_tokens,
                segment.c.loss,
                segment.c.kind,
                segment.c.version_min,
                segment.c.payload,
            )
            .select_from(
                in_batch.join(
                    segment, (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation)
                )
            )
            .where(batch_group.c.batch_id == of.id, sample.c.status != SampleStatus.FAILED.value)
            .order_by(segment.c.sample_id, segment.c.seq)
        ).fetchall()
        behind = _lags(connection, run.id, of)
    by_sample: dict[int, list[Any]] = defaultdict(list)
    for piece in pieces:
        by_sample[piece.sample_id].append(piece)
    views: dict[int, BatchGroupView] = {}
    for row in rows:
        view = views.setdefault(row.group_id, BatchGroupView(row.group_id, row.number, row.staleness, []))
        view.samples.append(_sample(row, by_sample[row.id], of, behind))
    return list(views.values())


def _lags(connection: sa.Connection, run_id: int, of: Batch) -> dict[int, int]:
    """Staleness of each version, as seen from the version that was current when the batch was leased."""
    if of.policy["stale"] != StalePolicy.MASK:
        return {}
    table = WeightVersionRow.__table__
    rows = connection.execute(
        sa.select(table.c.version, staleness.freshness(table).label("freshness"), table.c.depth).where(
            table.c.run_id == run_id
        )
    ).fetchall()
    depth = next(r.depth for r in rows if r.version == of.current_version)
    return {r.version: depth - r.freshness for r in rows}


def _sample(row: Any, pieces: list[Any], of: Batch, behind: dict[int, int]) -> BatchSample:
    ids, logprobs, mask, versions = [], [], [], []
    for piece in pieces:
        tokens, probs = codec.decode(piece.payload)
        n = tokens.size
        trained = bool(piece.loss) and not (
            # derived when read, never written: tokens beyond the window carry no gradient
            of.policy["stale"] == StalePolicy.MASK
            and behind.get(piece.version_min, of.policy["max_staleness"] + 1) > of.policy["max_staleness"]
        )
        if trained and probs is None and of.policy.get("need_logprobs", True):
            raise MissingLogprobs(row.id)
        ids.append(tokens)
        logprobs.append(np.zeros(n, np.float32) if probs is None else probs)
        mask.append(np.full(n, int(trained), np.uint8))
        versions.append(np.full(n, -1 if piece.version_min is None else piece.version_min, np.int32))
    return BatchSample(
        sample_id=row.id, group_id=row.group_id, group_number=row.number, index=row.index,
        prompt_ids=codec.ids_from(row.prompt_ids), response_ids=np.concatenate(ids), logprobs=np.concatenate(logprobs),
        loss_mask=np.concatenate(mask), versions=np.concatenate(versions), reward=row.reward, status=row.status,
        finish_reason=row.finish_reason, label=row.label, metadata=row.meta or {},
    )  # fmt: skip
