"""slime's data source: what is served, and what is consumed, stands in the store and not in a cursor."""

from __future__ import annotations

import logging
from typing import Any

import sqlalchemy as sa

from samplestore.arguments import whole
from samplestore.batches import Batch
from samplestore.errors import InvalidSetting
from samplestore.interop.leases import Leases, as_trainer
from samplestore.models import DatasetRow
from samplestore.run import Run
from samplestore.slime import objects, observer
from samplestore.slime.served import Served
from samplestore.slime.settings import run_of, settings_of
from samplestore.states import FINISHED, Purpose
from samplestore.verbs.tx import Tx

log = logging.getLogger("samplestore.slime")
dataset = DatasetRow.__table__


class StoreDataSource:
    """For `--data-source-path samplestore.slime.StoreDataSource`.

    A rollout's groups are leased when they are handed out, and consumed when slime says that the checkpoint is saved:
    save(rollout_id) settles that rollout and those before it, and none after it, also where slime has asked for the
    next one already. load(rollout_id) settles what the checkpoint has seen, and everything else is ready again.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.settings = settings_of(args)
        self.run: Run = run_of(self.settings)
        self.leases = Leases(self.run, timeout=self.settings.timeout_s, need_logprobs=self.settings.need_logprobs)
        self.rollout = 0  # the next one, where slime generates
        self._served: Served | None = None
        if args is not None and not getattr(args, "rollout_global_dataset", True):
            log.warning("slime saves and loads its data source only with a global dataset: nothing will be consumed. "
                        "Leave out --disable-rollout-global-dataset")  # fmt: skip

    def batch(self, rollout_id: int, groups: int | None = None) -> Batch:
        """Wait for the groups of a rollout, and lease them: step rollout_id of the run."""
        return self.leases.take(whole("rollout_id", rollout_id), groups)

    def finished(self, rollout_id: int, groups: int | None = None) -> tuple[list[list[Any]], Batch]:
        """(the groups of a rollout as slime's samples, their batch)."""
        batch = self.batch(rollout_id, groups)
        made = objects.groups_of(self.run, batch, self.args)
        return made, batch

    # -- where slime's own rollout function generates

    @property
    def served(self) -> Served:
        """What slime has of this store, in this process. Raises InvalidSetting where the run has other stages."""
        if self._served is None:
            self._served = Served(self.run, self.args)
        return self._served

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Up to so many groups of prompts to generate, at least one; what was aborted comes first, with its tokens.
        They are claimed by this process until they come back, by `add_samples` or `observe_all`.
        Raises BatchTimeout (samplestore_timeout_s) while the run has none, InvalidSetting."""
        return self.served.take(whole("num_samples", num_samples, 1), self.settings.timeout_s, self.rollout)

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Groups come back: what is aborted is resumable from its tokens, what is finished waits for a batch. Finished
        groups that this store has not served are recorded as generated elsewhere. Raises InvalidSetting for unfinished
        ones that it has not served."""
        listed = list(observer.flat(samples))
        _, others = self.served.store(listed, self.rollout)
        self.served.forget(listed)
        if unfinished := sum(objects.status_of(s) not in FINISHED for s in others):
            raise InvalidSetting("samples", f"{unfinished} unfinished", "samples that get_samples gave")
        if others:
            observer.record(self.run, self.args, others)

    def ended(self, all_groups: list[Any]) -> None:
        """A rollout of slime's own function is over (observe_all says so, once a rollout): its samples are recorded,
        and its finished groups leased as that rollout, to be consumed when it is saved. Finished groups that this store
        has not served are recorded as generated elsewhere, and are among them."""
        step, listed = self.rollout, list(observer.flat(all_groups))
        groups, others = self.served.store(listed, step)
        groups.update(observer.record_group(self.run, self.args, others) if others else ())

        def lease(tx: Tx, worker_id: int) -> None:
            if observer.lease_ready(tx, worker_id, groups, step) is not None:
                self.served.note_removed(tx, listed)

        as_trainer(self.run, lease)
        self.served.forget(listed)
        self.rollout = step + 1  # last: where something failed, slime may say it again

    # -- checkpoints

    def save(self, rollout_id: int) -> None:
        """The checkpoint of this rollout is on the disk."""
        self.leases.saved(whole("rollout_id", rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        """Training begins with the checkpoint of this rollout; -1 is none. None: nobody says where, nothing is done.
        Raises RewindTooFar, InvalidSetting for a checkpoint of a timeline that was left."""
        if rollout_id is not None:
            self.leases.loaded(whole("rollout_id", rollout_id, -1))
            self.rollout = rollout_id + 1

    def state_dict(self) -> dict[str, Any]:
        """Only names: the state is the store's."""
        return {"samplestore_run": self.run.uuid}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do: load(rollout_id) says where training stands."""

    def __len__(self) -> int:
        """Prompts that are served for training: slime makes steps of epochs with it."""
        wanted = sa.select(sa.func.coalesce(sa.func.sum(dataset.c.n_prompts), 0)).where(
            dataset.c.run_id == self.run.id, dataset.c.purpose == Purpose.TRAIN.value
        )
        if self.run.settings.datasets:
            wanted = wanted.where(dataset.c.name.in_(sorted(self.run.settings.datasets)))
        return int(self.run.database.read(lambda c: c.execute(wanted).scalar_one()))
