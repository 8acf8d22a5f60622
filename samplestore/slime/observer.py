"""A passive observer: stock slime generates and trains, and what it generated is recorded as finished samples.

Nothing of a sample is changed, and nothing raises into slime (unless samplestore_strict): what can't be recorded is
told once to the log. `observe` sees samples before their reward is there, so it keeps them until the next rollout
begins, slime shows all of them (`observe_all`), or the process ends; each time they are one transaction.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from samplestore.errors import StepAlreadyCommitted
from samplestore.interop.leases import as_trainer
from samplestore.models import SampleGroup
from samplestore.portable import imports
from samplestore.promptfiles import InvalidRow
from samplestore.run import Run
from samplestore.slime import readable
from samplestore.slime.settings import Settings, observed_run, settings_of
from samplestore.states import GroupState, StalenessMode, StalePolicy
from samplestore.types import Added
from samplestore.verbs import batches
from samplestore.verbs import imports as import_verbs
from samplestore.verbs.tx import PART, Tx, in_parts

log = logging.getLogger("samplestore.slime")
group = SampleGroup.__table__

POLICY = {
    "max_staleness": 2**31 - 1, "staleness": StalenessMode.OLDEST.value, "stale": StalePolicy.SKIP.value,
    "need_logprobs": False,
}  # fmt: skip


def observe(args, sample, *, rollout_id, evaluation):  # type: ignore[no-untyped-def]
    """For `--rollout-sample-hook-path samplestore.slime.observe`: keeps the sample, and gives nothing back. Samples of
    evaluations are not recorded."""
    if not evaluation:
        _guarded(args, lambda settings: _observer.keep(settings, args, sample, rollout_id))


def observe_all(args, all_groups, data_source):  # type: ignore[no-untyped-def]
    """For `--rollout-all-samples-process-path samplestore.slime.observe_all`: records all groups of a rollout, filtered
    ones too, in one transaction. With `observe` beside it the rollout is known: then they are step rollout_id."""
    args.processed_group_count = len(all_groups)  # what slime's contract test of this hook looks for
    source = getattr(data_source, "__self__", data_source)  # some versions give its get_samples
    if callable(ended := getattr(source, "ended", None)):
        ended(all_groups)  # the store has served them: this is no mere observation, and may raise
        return
    _guarded(args, lambda settings: _observer.groups(settings, args, all_groups))


def flush() -> None:
    """Record what `observe` has kept. Called when the process ends."""
    _observer.flush()


class Observer:
    """What was seen and is not recorded yet. slime calls its hooks from an event loop and from other threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.rollout: int | None = None  # the last that `observe` was told: a repetition of its groups is of it too
        self.kept: dict[int, Any] = {}  # by the identity of the sample, which slime fills further
        self.of: tuple[Settings, Any, int | None] | None = None  # settings, args and rollout of what is kept
        self.told: set[str] = set()

    def keep(self, settings: Settings, args: Any, sample: Any, rollout_id: int | None) -> None:
        with self.lock:
            if self.of is not None and self.of[2] != rollout_id:
                self.flush()
            self.of, self.rollout = (settings, args, rollout_id), rollout_id
            self.kept[id(sample)] = sample

    def groups(self, settings: Settings, args: Any, all_groups: Sequence[Any]) -> None:
        with self.lock:
            for sample in flat(all_groups):
                self.kept.setdefault(id(sample), sample)
            self.of = (settings, args, self.rollout)
            self.flush()

    def flush(self) -> None:
        with self.lock:
            if self.of is None:
                return
            (settings, args, rollout_id), kept = self.of, list(self.kept.values())
            self.of, self.kept = None, {}  # first: what fails once would fail again
            record(observed_run(settings, args), args, kept, rollout_id)

    def tell(self, error: Exception) -> None:
        """Once for each kind of error: a hook that fails for one sample fails for thousands."""
        kind = type(error).__name__
        if kind not in self.told:
            self.told.add(kind)
            log.error("samples were not recorded, slime goes on; this is told once: %s: %s", kind, error)


_observer = Observer()


def _guarded(args: Any, work: Any) -> None:
    strict = bool(getattr(args, "samplestore_strict", False))
    try:
        work(settings_of(args))
    except Exception as error:  # whatever it is: an observer must not end the training that it looks at
        if strict:
            raise
        _observer.tell(error)


@atexit.register
def _at_exit() -> None:
    try:
        _observer.flush()
    except Exception as error:  # the process ends: there is nobody to raise to
        _observer.tell(error)


def flat(value: Any) -> Iterator[Any]:
    """The samples in slime's lists of groups, whose members may be lists themselves (fan-out)."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    else:
        yield value


def record(run: Run, args: Any, samples: Iterable[Any], rollout_id: int | None = None) -> Added:
    """Store finished samples of slime, all of them in one transaction; those whose group is there already are left
    alone. rollout_id: they are the batch of this step, consumed, unless it has one already. Unfinished samples
    (pending, aborted, failed) and those that break a promise of the store are left out, which is told to the log."""
    found, refused = _readable(args, samples, rollout_id)
    if not found:
        return Added(0, 0, refused)

    def store(tx: Tx, worker_id: int | None = None) -> Added:
        made, ids = _import(tx, run, found)
        if worker_id is None or rollout_id is None:
            return made
        # what slime trains on at once is no work for anybody else
        batch = lease_ready(tx, worker_id, ids, rollout_id)
        if batch is not None:
            batches.commit(tx, batch, worker_id)
        return made

    added = run.transact(store, durable=True) if rollout_id is None else as_trainer(run, store)
    return Added(added.added, added.existing, refused)


def record_group(run: Run, args: Any, samples: Iterable[Any]) -> list[int]:
    """Store the finished samples of one group; the ids of what it became, ready for a batch."""
    found, _ = _readable(args, samples, None)
    return run.transact(lambda tx: _import(tx, run, found)[1], durable=True) if found else []


def _readable(args: Any, samples: Iterable[Any], rollout_id: int | None) -> tuple[list[imports.Imported], int]:
    """(groups that can be stored, how many samples and groups can't)."""
    given, found, refused = list(samples), [], 0
    read = readable.Portables(args, given)
    for item in imports.read_portable(read, dataset=readable.DATASET):
        if isinstance(item, InvalidRow):
            refused += 1
            log.warning("not recorded, of rollout %s: %s", rollout_id, item)
        else:
            found.append(item)
    stored = sum(len(one.samples) for one in found)
    if stored < len(given):
        level = logging.WARNING if refused else logging.INFO
        left = ", ".join(f"{n} {why}" for why, n in sorted(read.left_out.items())) or "none"
        log.log(level, "rollout %s: %d of %d samples are not recorded; unfinished ones of them: %s",
                rollout_id, len(given) - stored, len(given), left)  # fmt: skip
    return _apart(found, read.places, rollout_id), refused


def _apart(found: Iterable[imports.Imported], places: dict[int, Any], rollout_id: int | None) -> list[imports.Imported]:
    """With keys that tell groups apart which say the same, by rollout and group_index; without group_index, by how
    many such there were in the rollout before. A repetition of a rollout has the same keys."""
    made, met = [], Counter[str]()
    for one in found:
        place = places[one.samples[0].group]
        if place is None:
            place = f"no {met[one.key]}"
            met[one.key] += 1
        key = hashlib.sha256(f"{one.key}|{rollout_id}|{place}".encode()).hexdigest()
        made.append(replace(one, key=key))
    return made


def _import(tx: Tx, run: Run, found: Sequence[imports.Imported]) -> tuple[Added, list[int]]:
    pieces = [p for one in found for s in one.samples for p in s.pieces]
    versions = {v for p in pieces for v in (p.version_min, p.version_max) if v is not None}
    made = import_verbs.import_groups(tx, iter(found), run._kept, None, versions, recorded=True)
    ids: list[int] = []
    for start in range(0, len(found), PART):
        keys = [one.import_key for one in found[start : start + PART]]
        of_part = sa.select(group.c.id).where(group.c.run_id == tx.run_id, group.c.import_key.in_(keys))
        ids += tx.execute(of_part.order_by(group.c.id)).scalars()
    return made, ids


def lease_ready(tx: Tx, owner: int, ids: Iterable[int], step: int) -> int | None:
    """Lease those of these groups that are ready, as the batch of `step`; None where there are none, or the step has a
    batch already."""
    ready: list[int] = []
    for part in in_parts(sorted(ids)):
        of_part = sa.select(group.c.id).where(group.c.id.in_(part), group.c.state == GroupState.READY.value)
        ready += tx.execute(of_part).scalars()
    if not ready:
        return None
    try:
        return batches.lease(tx, owner, step, len(ready), POLICY, only=sorted(ready))
    except StepAlreadyCommitted:
        return None
