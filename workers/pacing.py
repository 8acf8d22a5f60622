"""When a worker claims nothing although it has room, and what it does for a run that goes in steps."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from samplestore.run import Run
from samplestore.states import RolloutMode
from samplestore.types import Claim
from samplestore.verbs import prompts, steps
from samplestore.verbs.tx import Tx
from samplestore.workers.fleet import Fleet

log = logging.getLogger("samplestore.worker")


class Worker(Protocol):
    """What this needs of the worker."""

    run: Run
    worker_id: int
    fleet: Fleet
    labels: dict[str, int]  # versions by the labels that engines report
    current: Any  # the run's row, as last polled
    current_label: tuple[str, str | None] | None  # label and path of the current version

    async def write(self, verb: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any: ...

    async def read(self, question: Any) -> Any: ...


class Pacing:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.queueing = False

    async def tend(self) -> bool:
        """Mode partial: when enough groups are ready, what is still in flight goes back, here and at other workers.
        Whoever sees it first says so; the trainer that takes its batch does too. Before each claim: what was claimed
        in a step that is over would be aborted a moment later. Whether anything was said."""
        worker, run = self.worker, self.worker.run
        if run.settings.mode != RolloutMode.PARTIAL:
            return False
        if not await worker.read(lambda c: steps.due(c, run.id, run.settings)):
            return False
        await worker.write(lambda tx, by: steps.tend(tx, by=by), worker.worker_id)
        return True

    def holds_back(self) -> bool:
        """Whether nothing is to be claimed for now."""
        return self._between_steps() or self._engines_queue()

    def _between_steps(self) -> bool:
        """Modes sync and partial: some engine serves other weights than those of the step that begins. What it would
        generate now is old before it is done."""
        fleet, wanted = self.worker.fleet, self.worker.current_label
        if self.worker.run.settings.mode == RolloutMode.ASYNC or wanted is None or wanted[1] is None:
            return False
        return any(fleet.engines.get(url) != wanted[0] for url in fleet.fit)

    def _engines_serve(self, version: int) -> bool:
        """Whether all engines that get requests serve these weights, as far as is known. One that does not would make
        samples of an evaluation that count for nothing."""
        fleet = self.worker.fleet
        told = (fleet.engines.get(url) for url in fleet.fit)
        return all(label is not None and self.worker.labels.get(label) == version for label in told)

    def _engines_queue(self) -> bool:
        """Whether the engines have more waiting than the worker may add to. Told once each time."""
        fleet = self.worker.fleet
        if fleet.queueing != self.queueing:
            self.queueing = fleet.queueing
            what = "engines queue: nothing more is claimed" if self.queueing else "engines have room: claiming again"
            log.info("worker=%d %s (queued %s)", self.worker.worker_id, what, fleet.queued)
        return self.queueing

    async def claim(self, free: int) -> list[Claim]:
        """Up to `free` samples; groups are created for what is missing."""
        worker = self.worker
        at = worker.current.current_version
        serves = self._engines_serve(at)
        claims: list[Claim] = await worker.write(steps.claim, worker.worker_id, free, at, serves)
        if len(claims) < free and await worker.write(_admit, worker.worker_id):
            claims += await worker.write(steps.claim, worker.worker_id, free - len(claims), at, serves)
        return claims


def _admit(tx: Tx, worker_id: int) -> int:
    steps.tend(tx, by=worker_id)  # so that the events of its end name somebody
    return prompts.admit(tx)
