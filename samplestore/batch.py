"""A trainer's batch: what it holds, and how it is settled."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from samplestore import arrayfiles, arrays, delivery, mismatch, planning, responses
from samplestore import tensors as packing
from samplestore.arrays import Prepared
from samplestore.delivery import BatchGroupView, Delivery
from samplestore.errors import ArrayNotStored, BatchReleased, InvalidSegment, OnlyRankZero, SampleStoreError
from samplestore.media import Image
from samplestore.mismatch import Mismatch
from samplestore.models import BatchRow
from samplestore.queries import arrays as named_arrays
from samplestore.queries import images, plans
from samplestore.states import BatchState
from samplestore.tensors import BatchSample
from samplestore.types import Floats
from samplestore.verbs import batches as verbs
from samplestore.verbs.tx import Transactor
from samplestore.words import amount

log = logging.getLogger("samplestore.batches")

batch = BatchRow.__table__


class Batch:
    """Groups leased for one step, or a rank's part of them. As a context manager it commits on a clean exit and is
    released on an error.

    The same block works on every rank, and only rank 0 settles: on the others a clean exit asks whether the lease still
    stands (require_held), and an error gives nothing back. Let all ranks meet (a barrier of the trainer's) at the end
    of the block, so that rank 0 commits when all are done. n_groups, n_samples and n_tokens are those of the whole
    batch on every rank; `groups`, `samples` and what is made of them are its part.
    """

    def __init__(
        self, run: Transactor, row: Any, worker_id: int | None, rank: int = 0, plan: dict[str, Any] | None = None
    ) -> None:
        self._run, self._worker_id = run, worker_id
        self.id, self.step, self.timeline = int(row.id), int(row.step), int(row.timeline)
        self.current_version = int(row.current_version)
        self.policy: dict[str, Any] = dict(row.policy)
        self.n_groups, self.n_samples, self.n_tokens = int(row.n_groups), int(row.n_samples), int(row.n_tokens)
        self.rank, self.world = rank, 1 if plan is None else int(plan["world"])
        self.plan: list[list[int]] | None = None if plan is None else plan["samples"]  # ids, of each rank
        # A replay has nothing to settle. Not by the row: a lease that was lost meanwhile must fail at its commit.
        self.settled = worker_id is None and row.state == BatchState.COMMITTED

    def __repr__(self) -> str:
        of = f", rank {self.rank} of {self.world}" if self.world > 1 else ""
        size = f"{amount(self.n_groups, 'group')}, {amount(self.n_samples, 'sample')}, {amount(self.n_tokens, 'token')}"
        state = "settled" if self.settled else "leased"
        return f"<Batch {self.id}: step {self.step}, timeline {self.timeline}, {size}{of}, {state}>"

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.settled:
            return
        if self.rank > 0:
            if error is None:
                self.require_held()
        elif error is None:
            self.commit()
        else:
            self.abandon(f"{type(error).__name__}: {error}")

    def abandon(self, reason: str) -> None:
        """Release it, unless it is settled or another rank's, on the way out: what goes wrong is told to the log."""
        if self.settled or self.rank > 0:
            return
        try:
            self.release(reason)
        except Exception:  # the trainer's own error is the one to show
            log.exception("batch %d could not be released; its lease ends with this process", self.id)

    def commit(self) -> None:
        """Settle: the groups are consumed, exactly once. Save the checkpoint first, then commit. Repeatable. Raises
        LeaseLost, OnlyRankZero."""
        owner = self._owner("commit")
        self._run.transact(lambda tx: verbs.commit(tx, self.id, owner), durable=True)
        self.settled = True

    def release(self, reason: str) -> None:
        """Give the groups back. Repeatable. Raises LeaseLost, OnlyRankZero."""
        owner = self._owner("release")
        self._run.transact(lambda tx: verbs.release(tx, self.id, owner, reason))
        self.settled = True

    def _owner(self, verb: str) -> int:
        if self.rank > 0:
            raise OnlyRankZero(verb, self.step, self.rank)
        if self._worker_id is None:
            raise SampleStoreError("a replayed batch is read-only")
        return self._worker_id

    def require_held(self) -> None:
        """Nothing where the lease still stands, or is committed. Raises BatchReleased where it ended otherwise: rank 0
        failed or died, and what was computed on this batch must not be kept. For ranks, before their barrier."""
        row = row_of(self._run, self.id)
        if row.state not in (BatchState.LEASED, BatchState.COMMITTED):
            raise BatchReleased(self.step, self.id, row.reason)

    @cached_property
    def _delivery(self) -> Delivery:
        only = None if self.plan is None else self.plan[self.rank]
        return delivery.read(self._run, self.id, self.policy, self.current_version, only)

    @property
    def groups(self) -> list[BatchGroupView]:
        """The groups in their order, read in one snapshot at first use. Failed samples are left out; so are, of a rank,
        the samples that other ranks read."""
        return self._delivery.groups

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
        self, device: Any = None, *, layout: str = "packed", advantages: str | None = None, named: Sequence[str] = (),
        samples: Sequence[BatchSample] | None = None, pin_memory: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The batch as torch tensors; see samplestore.tensors for names, shapes and dtypes.

        named       named arrays to give too, e.g. ["teacher_log_probs"]: [T, ...] or [B, L, ...], and NAME_present, 1
                    where a token has a row of it. Those of routed_experts stand at the token that went in, one before
                    the one that came out
        samples     only these, e.g. a micro-batch. Their advantages are still those of the whole batch
        pin_memory  None: where `device` is a GPU; see samplestore.tensors.as_torch
        Raises InvalidSetting for another layout or method, ArrayNotStored for an array that no sample of the batch has,
        ArrayFileError, MissingExtra.
        """
        made = self.arrays(layout=layout, advantages=advantages, named=named, samples=samples)
        return packing.as_torch(made, device, pin_memory)

    def arrays(
        self, *, layout: str = "packed", advantages: str | None = None, named: Sequence[str] = (),
        samples: Sequence[BatchSample] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:  # fmt: skip
        """The same as numpy arrays."""
        method = advantages or str(self.policy.get("advantages", "grpo"))
        chosen = self.samples if samples is None else samples
        made = packing.arrays(chosen, self._delivery.whole, layout, method)
        for name in named:
            parts = _named_parts(self._run, chosen, name)
            made |= packing.named(chosen, name, parts, layout, self._like(name))
        return made

    def _like(self, name: str) -> npt.NDArray[Any]:
        """No rows of a named array, so that a part of the batch that has none gets what the others get. Raises
        ArrayNotStored where nobody has it."""
        ids = self._delivery.whole.sample_ids.tolist()
        found = self._run.database.read(lambda c: named_arrays.empty(c, ids, name))
        if found is None:
            raise ArrayNotStored(name, self._run.database.read(lambda c: named_arrays.names_of(c, ids)))
        return found

    def micro_batches(self, max_tokens: int) -> list[list[BatchSample]]:
        """`samples` in micro-batches of at most `max_tokens` tokens, prompts too, each for one forward pass: give them
        to `tensors(samples=...)`. All ranks get as many (some may be empty): each knows the lengths of the others, and
        a rank that ran once less would leave them waiting in their collectives. Raises InvalidSetting where a sample of
        any rank is longer."""
        samples = self.samples
        lengths = [s.prompt.size + responses.length(s.runs) for s in samples]
        of_ranks = self._lengths_of_ranks() if self.plan else [lengths]
        most = max(len(planning.micro_batches(of_rank, max_tokens)) for of_rank in of_ranks)
        return [[samples[i] for i in places] for places in planning.micro_batches(lengths, max_tokens, most)]

    def _lengths_of_ranks(self) -> list[list[int]]:
        tokens = self._run.database.read(lambda c: plans.lengths(c, self.id))
        return [[tokens[id] for id in of_rank] for of_rank in self.plan or ()]

    def record_logprobs(self, log_probs: Any, samples: Sequence[BatchSample] | None = None) -> Mismatch:
        """Store what the trainer computed for the tokens that it trains, under "trainer_log_probs", before the commit,
        and tell how far it is from what their engines computed. Each rank records its own samples.

        log_probs   nats, numpy or torch: packed [T] or padded [B, L] as `tensors` lays the samples out, the entry of a
                    token at its own place (where rollout_log_probs has it), prompts and padding are passed over; or a
                    list of [response tokens] for each sample
        samples     those that it is of, e.g. a micro-batch; all of this rank where left out
        One transaction. Repeatable: the last call counts. A warning goes to the log when the numbers fit better one or
        two places beside their tokens (Mismatch.best_lag).
        Raises InvalidSegment for another shape, or for what is not finite where the loss mask is 1; BatchReleased;
        SampleStoreError for a batch that is committed. Then nothing is stored.
        """
        chosen = self.samples if samples is None else list(samples)
        rows = packing.per_sample(chosen, log_probs, arrays.TRAINER)
        made = {s.sample_id: self._kept(arrays.prepare(arrays.TRAINER, row)) for s, row in _own(chosen, rows)}
        self._run.transact(lambda tx: verbs.record(tx, self.id, made))
        told = mismatch.compare(self.step, chosen, rows, self._behind)
        if told.shifted:
            log.warning("step %d: %s", self.step, told.warning)
        return told

    def _kept(self, made: Prepared) -> Prepared:
        return arrayfiles.keep(self._run.settings, self._run.array_files, made)

    def mismatch(self) -> Mismatch:
        """How far the recorded log-probs of these samples are from those of their engines. Raises ArrayNotStored."""
        self._like(arrays.TRAINER)
        parts = _named_parts(self._run, self.samples, arrays.TRAINER)
        there = [s for s in self.samples if s.sample_id in parts]
        rows = [mismatch.on_response(s, *parts[s.sample_id]) for s in there]
        return mismatch.compare(self.step, there, rows, self._behind)

    @cached_property
    def _behind(self) -> dict[int, int]:
        return self._run.database.read(lambda c: delivery.lags(c, self._run.id, self.current_version))


def _own(samples: Sequence[BatchSample], rows: Sequence[Floats]) -> Iterator[tuple[BatchSample, Floats]]:
    """What is stored of each sample: of a fork the tokens that are its own. Raises InvalidSegment."""
    for sample, row in zip(samples, rows, strict=True):
        bad = ~np.isfinite(row)
        if (wrong := np.flatnonzero(bad & (sample.loss_mask > 0))).size:
            place = int(wrong[0])
            raise InvalidSegment(
                f"{arrays.TRAINER} is {row[place]} at response token {place} of sample {sample.sample_id}, which is "
                "trained", field=arrays.TRAINER, position=place,
            )  # fmt: skip
        if row.size > sample.shared:
            yield sample, np.where(bad, np.float32("nan"), row)[sample.shared :]


def _named_parts(run: Transactor, samples: Sequence[BatchSample], name: str) -> dict[int, named_arrays.Whole]:
    """A named array of each sample that has it. Raises ArrayFileError."""
    ids = [s.sample_id for s in samples]
    found = run.database.read(lambda c: named_arrays.of_samples(c, ids, [name]))
    lengths = run.database.read(lambda c: named_arrays.lengths(c, [id for id, _ in found]))
    return {id: named_arrays.together(name, parts, *lengths[id], run.array_files) for (id, _), parts in found.items()}


def row_of(run: Transactor, batch_id: int) -> Any:
    """The row of a batch."""
    return run.database.read(lambda c: c.execute(sa.select(batch).where(batch.c.id == batch_id)).one())
