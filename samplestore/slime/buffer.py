"""Miles: its buffer of finished groups, kept in a store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from samplestore import slimehooks
from samplestore.interop.leases import as_trainer
from samplestore.models import BatchRow
from samplestore.portable import exports, slime_samples
from samplestore.run import Run
from samplestore.slime import objects, observer
from samplestore.slime.rollout import load
from samplestore.slime.settings import observed_run, settings_of
from samplestore.states import SampleStatus, StalenessMode
from samplestore.verbs import batches
from samplestore.verbs.tx import Tx

batch = BatchRow.__table__

PREFIX = "rollout/fully_async/"
SOURCES = ("source", "prompt_group")  # how versions of Miles call what a group was made from
PENDING = {
    "tokens": [], "response": "", "response_length": 0, "reward": None, "loss_mask": None, "rollout_log_probs": None,
    "weight_versions": [], "status": SampleStatus.PENDING.value,
}  # fmt: skip


@dataclass(slots=True)
class _Entry:
    given: Any  # Miles' DataBufferInput
    ids: list[int]  # of its groups in the store
    consuming: asyncio.Task[None] | None = None  # what a get has begun, also where that get was cancelled


class StoreDataBuffer:
    """For `--custom-async-data-buffer-path samplestore.slime.StoreDataBuffer`: first in, first out, and every finished
    group is in the database before it counts as put.

    A group is consumed when it is handed out (a batch of its own; steps count what was handed out). Finished groups
    that were not handed out when Miles died are handed out first by the next process.
    """

    def __init__(self, input: Any) -> None:
        self.args = input.args
        self.run: Run = observed_run(settings_of(self.args), self.args)
        unused = getattr(input, "unused_handler_fn", None) or getattr(input, "on_evict", None)
        self._unused: Callable[[Any], None] = unused or (lambda source: None)
        self._discard: Callable[[Any], None] = getattr(input, "discard_handler_fn", None) or (lambda source: None)
        path = getattr(self.args, "dynamic_sampling_filter_path", None)
        self._filter = None if path is None else load(path)
        factor = getattr(self.args, "async_data_buffer_capacity_factor", None)
        self._capacity = None if factor is None else max(1, int(factor * self.args.rollout_batch_size))
        self._entries: deque[_Entry] = deque()
        self._changed = asyncio.Condition()
        self._restored = False
        self._counts: dict[str, int] = {}
        self._staleness: list[int] = []

    async def put(self, input: Any) -> None:
        """Take a finished group: filtered, recorded, and then there to be got; waits while the buffer is full."""
        if any(objects.status_of(s) == SampleStatus.ABORTED for s in observer.flat(input.group)):
            self._count("aborted_groups_filtered")
            self._unused(_source(input))
            return
        reason = None if self._filter is None else slimehooks.verdict(self._filter(self.args, input.group))
        if reason is not None:
            self._count(f"dynamic_filter/{reason}")
            self._discard(_source(input))
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._capacity is None or len(self._entries) < self._capacity)
            samples = list(observer.flat(input.group))
            ids = await asyncio.to_thread(observer.record_group, self.run, self.args, samples)
            self._entries.append(_Entry(input, ids))
            self._changed.notify_all()

    async def get(self, current_version: int | None = None, **context: Any) -> Any:
        """The oldest group, as it was put; waits until there is one. Groups beyond args.max_weight_staleness are given
        back to Miles."""
        async with self._changed:
            if not self._restored:
                self._entries.extendleft(reversed(await asyncio.to_thread(self._left)))
                self._restored = True
            while True:
                await self._changed.wait_for(lambda: self._entries)
                entry = self._entries[0]
                await self._consumed(entry)
                self._entries.popleft()
                self._changed.notify_all()
                if self._fits(entry.given, current_version):
                    return entry.given
                self._count("stale_groups_filtered")
                self._unused(_source(entry.given))

    def get_metrics(self) -> dict[str, float]:
        """Since the call before this one."""
        made: dict[str, float] = {f"{PREFIX}queue_size": float(len(self._entries))}
        made |= {f"{PREFIX}{name}": float(n) for name, n in self._counts.items()}
        if self._staleness:
            made[f"{PREFIX}avg_staleness"] = sum(self._staleness) / len(self._staleness)
            made[f"{PREFIX}max_staleness"] = float(max(self._staleness))
        self._counts, self._staleness = {}, []
        return made

    def validate_final_admission(
        self, entries: Sequence[Any], *, current_weight_update_epoch: int, current_version: int | None
    ) -> Any:
        """Miles' verdict on a batch just before it is trained on: what has become too old meanwhile."""
        old = tuple(i for i, entry in enumerate(entries) if not self._fits(entry, current_version))
        kind = objects.of_framework("rollout.fully_async_data_buffer", "DataBufferAdmissionVerdict")
        return old if kind is None else kind(rejected_indexes=old)

    async def discard_all(self, on_discard: Callable[[Any], None]) -> BaseException | None:
        """Give all that is in the buffer back to Miles; it stays recorded, and ready. The first error, if any."""
        async with self._changed:
            kept, first = deque[_Entry](), None
            for entry in self._entries:
                try:
                    on_discard(_source(entry.given))
                except Exception as error:  # Miles' own handler: it asks for the error, and for the rest to go on
                    first = first or error
                    kept.append(entry)
            self._entries = kept
            self._changed.notify_all()
        return first

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    def _fits(self, given: Any, current: int | None) -> bool:
        limit = getattr(self.args, "max_weight_staleness", None)
        oldest = min(_versions(given.group), default=None)
        if oldest is None or current is None:
            return True
        self._staleness.append(current - oldest)
        return limit is None or current - oldest <= limit

    async def _consumed(self, entry: _Entry) -> None:
        """Its groups are consumed. What fails leaves it in the buffer. A get that is cancelled does not stop the
        transaction that it began: the next get waits for that one, and returns the group."""
        task = entry.consuming
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = entry.consuming = asyncio.create_task(asyncio.to_thread(self._consume, entry.ids))
        await asyncio.shield(task)

    def _consume(self, ids: list[int]) -> None:
        def take(tx: Tx, worker_id: int) -> None:
            tx.require_live(worker_id)
            tx.lock_run()
            last = tx.execute(sa.select(sa.func.max(batch.c.step)).where(batch.c.run_id == tx.run_id)).scalar()
            held = observer.lease_ready(tx, worker_id, ids, 0 if last is None else last + 1)
            if held is not None:
                batches.commit(tx, held, worker_id)

        as_trainer(self.run, take)

    def _left(self) -> list[_Entry]:
        """Finished groups of a process that died, as Miles' inputs. None where Miles is not there to say what those
        are."""
        kind = objects.of_framework("rollout.fully_async_data_buffer", "DataBufferInput")
        if kind is None:
            return []
        mine = {id for entry in self._entries for id in entry.ids}
        query = batches.ready(self.run.id, 100_000, StalenessMode.OLDEST, None, self.run.settings.order, lock=False)
        found = self.run.database.read(lambda c: [row.id for row in c.execute(query)])
        return [_Entry(self._input(kind, id), [id]) for id in found if id not in mine]

    def _input(self, kind: Any, group_id: int) -> Any:
        part = exports.Part(None, [group_id], {})
        tokenizer = objects.tokenizer_of(self.args)
        told = [
            slime_samples.to_slime(one)
            for one in exports.samples(self.run, self.run.uuid, part, exports.Selection(), tokenizer)
        ]
        source = [objects.sample_of(self.args, {**values, **PENDING}) for values in told]
        name = next(f.name for f in fields(kind) if f.name in SOURCES)
        return kind(**{name: source}, group=[objects.sample_of(self.args, values) for values in told])


def _source(given: Any) -> Any:
    return next(getattr(given, name) for name in SOURCES if hasattr(given, name))


def _versions(group: Any) -> Iterator[int]:
    for sample in observer.flat(group):
        yield from (int(v) for v in sample.weight_versions or () if str(v).isdigit())
