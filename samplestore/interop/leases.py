"""The leases of a trainer that says only when a checkpoint is on the disk; see verbs.seen."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from samplestore.batches import Batch, renounce, take, trainer_id
from samplestore.errors import WorkerDead
from samplestore.run import Run
from samplestore.verbs import seen

log = logging.getLogger("samplestore.interop")

T = TypeVar("T")


def as_trainer(run: Run, work: Callable[..., T]) -> T:
    """work(tx, worker_id=...) in one transaction, as this process's trainer. Where this process was away for longer
    than its ttl, and so is dead for the others, it registers anew."""
    while True:
        owner = trainer_id(run)
        try:
            return run.transact(partial(work, worker_id=owner), durable=True)
        except WorkerDead:
            renounce(run, owner)


class Leases:
    """Batches by step, as many as are open at a time.

    options   of every batch: see samplestore.batches.take
    """

    def __init__(self, run: Run, **options: Any) -> None:
        self.run, self.options = run, options

    def take(self, step: int, groups: int | None = None) -> Batch:
        """Wait for the batch of `step` and lease it. Asked again, it is the same batch. Raises what run.batch raises;
        StepAlreadyCommitted where a checkpoint of this step was said to be there."""
        return take(self.run, step, groups, **self.options)

    def saved(self, step: int) -> list[int]:
        """The checkpoint of `step` is on the disk: all that was handed out up to it is consumed. Returns the steps that
        could not be settled, because their groups were dropped meanwhile."""
        return self._settled(partial(seen.settle, step=step))

    def loaded(self, step: int) -> list[int]:
        """Training begins with the checkpoint of `step`, or with none (-1): what it has seen is consumed, all else is
        ready again. Returns what `saved` does. Raises RewindTooFar, InvalidSetting: see verbs.seen.resume."""
        call = uuid.uuid4().hex
        return self._settled(partial(seen.resume, step=step, call=call))

    def _settled(self, work: Callable[..., list[int]]) -> list[int]:
        lost = as_trainer(self.run, work)
        if lost:
            log.warning(
                "run %s: the batches of the steps %s were trained on, and groups of theirs were dropped or handed out "
                "again meanwhile. See: samplestore tail", self.run.name, ", ".join(map(str, lost)),
            )  # fmt: skip
        return lost
