"""Whole runs into another database (merge), and a run that branches off another (fork): copying.py."""

from __future__ import annotations

import uuid as uuids
from functools import partial
from pathlib import Path
from shlex import quote

import sqlalchemy as sa

from samplestore.arguments import plain_text
from samplestore.clock import db_now
from samplestore.copies.copying import Copied, Copy, Progress
from samplestore.copies.hidden import Hidden, drop_unfinished, removal, run_of
from samplestore.copies.source import stands_at
from samplestore.errors import InvalidSetting, RunInUse, SampleStoreError
from samplestore.logs import mask
from samplestore.models import Event, Worker
from samplestore.models import Run as RunRow
from samplestore.queries.check import TOTALS
from samplestore.run import Run
from samplestore.states import WorkerState
from samplestore.store import Store
from samplestore.store import open as open_store
from samplestore.verbs import copies as verbs
from samplestore.verbs import rewind
from samplestore.verbs.tx import Tx

worker, run_table, event = (t.__table__ for t in (Worker, RunRow, Event))
OWNER_GONE = ("sample_owner_gone", "stage_owner_gone")  # what a copy frees


class MergeRefused(SampleStoreError):
    """Runs of a source can't be merged. Nothing of it was written."""

    def __init__(self, source: str, why: str, cure: str) -> None:
        self.source, self.why = source, why
        super().__init__(f"{source}: {why}. Nothing of it was merged. {cure}")


def merge(target: Store, source: str | Path, progress: Progress | None = None) -> list[Copied]:
    """All runs of another database into this one, known by their uuids: what is there already is left alone. All are
    looked through before the first is copied. A name that another run has gets the beginning of the uuid behind it. An
    unfinished merge goes on, or begins anew where the source went on since then. Raises DatabaseMissing,
    SchemaMismatch, RunInUse for a source whose workers are alive, MergeRefused for one that is damaged, went on
    after it was merged or is the target itself, SourceMoved for one that goes on meanwhile, CopyBusy while somebody
    else merges it, CopyLost where somebody else has taken it over."""
    with open_store(str(source), create=False) as other:
        shown = mask(str(source))
        if _same_file(target, other):
            raise MergeRefused(shown, "is the target itself", "Name other files: samplestore merge TARGET SOURCE...")
        runs = [other.existing_run(name) for name in other.run_names()]
        if hidden := [found for run in runs if (found := Hidden.parse(run.name))]:
            cure = f"Finish it there by repeating its command, or remove it with: {removal(str(hidden[0]), shown)}"
            raise MergeRefused(shown, f"has a copy that is not finished, of run {hidden[0].name!r}", cure)
        for run in runs:
            _sound(run, shown)
            if (there := _whole(target, run)) is not None:
                _there_already(there, run, shown)
        return [_merge_run(target, run, shown, progress) for run in runs]


def _same_file(one: Store, other: Store) -> bool:
    both = one.database.is_sqlite and other.database.is_sqlite
    return both and one.database.path.samefile(other.database.path)


def _sound(run: Run, shown: str) -> None:
    beats = worker.c.heartbeat >= db_now() - worker.c.ttl_s
    at_work = (worker.c.run_id == run.id) & (worker.c.state == WorkerState.LIVE.value) & beats
    if live := run.database.read(lambda c: list(c.execute(sa.select(worker.c.id).where(at_work)).scalars())):
        raise RunInUse(f"run {run.name!r} of {shown}", live)
    findings = [f for f in run.check() if f.code not in (*OWNER_GONE, *TOTALS)]
    if findings:
        cure = f"Look at it with: samplestore check --db {quote(shown)} --run {quote(run.name)}"
        raise MergeRefused(shown, f"run {run.name!r} breaks a promise: {findings[0].message}", cure)


def _merge_run(target: Store, source: Run, shown: str, progress: Progress | None) -> Copied:
    while (found := _whole(target, source)) is None:
        copy = Copy(source, target, source.uuid, source.name, progress=progress, whole=True)
        if (done := copy.run({"merged_from": Path(shown).name})) is not None:
            return done
    return _there_already(found, source, shown)


def _whole(target: Store, source: Run) -> Run | None:
    """The run itself in the target, unless it is not there, or not finished."""
    query = sa.select(run_table).where(run_table.c.uuid == source.uuid)
    row = target.database.read(lambda c: c.execute(query).one_or_none())
    return None if row is None or Hidden.parse(row.name) else run_of(target, row)


def _there_already(found: Run, source: Run, shown: str) -> Copied:
    """A repetition. What happened in the source after it was merged would not be known here. It may have come by way of
    other databases: each of them left an event."""
    query = sa.select(event.c.details).where(event.c.run_id == found.id, event.c.kind == verbs.COPIED)
    told = found.database.read(lambda c: [row.details or {} for row in c.execute(query)])
    stood_at = [details["stood_at"] for details in told if "stood_at" in details]
    if not stood_at:
        why = f"run {source.name!r} is in the target already, and came there by no merge: both are one, or copies"
        raise MergeRefused(shown, why, "Name other databases: samplestore merge TARGET SOURCE...")
    now = source.database.read(lambda c: stands_at(c, source.id))
    if now not in stood_at:
        of = f"--run {quote(source.name)} --db {quote(shown)}"
        cure = f"Bring its samples with: samplestore export {of} --to DIR, and samplestore import DIR"
        raise MergeRefused(shown, f"run {source.name!r} went on after it was merged", cure)
    return Copied(found.name, found.uuid, 0, now[0], 0, 0)


def fork(store: Store, run: str, step: int, name: str, progress: Progress | None = None) -> Copied:
    """A new run `name` that stands where `run`'s checkpoint of `step` stood, as after a rewind to it: groups that the
    checkpoint has not seen are there to be trained on or to be finished, the prompts and their order go on, and the
    restored weights are its current version. `run` itself is not changed, and may be at work. Requests, engines and
    events are not copied. An unfinished fork goes on, or begins anew where `run` went on since then; copies that nobody
    writes any more are removed. Raises RunNotFound, InvalidSetting, RewindTooFar, SourceMoved where `run` is rewound
    meanwhile, CopyBusy while somebody else makes a run of this name, CopyLost where somebody else has taken it over."""
    plain_text("name", name, 200)
    source = store.existing_run(run)
    source.database.read(partial(_require_reachable, source, step))
    copy = Copy(source, store, str(uuids.uuid4()), name, progress=progress, whole=False, step=step)
    done = copy.run({"forked_from": source.uuid, "forked_run": source.name, "step": step})
    if done is None:
        raise InvalidSetting("name", name, "the name of a run that is not there yet. See: samplestore runs")
    drop_unfinished(store)
    return done


def _require_reachable(source: Run, step: int, connection: sa.Connection) -> None:
    row = connection.execute(sa.select(run_table).where(run_table.c.id == source.id)).one()
    rewind.require_reachable(Tx(connection, source.id, source.settings), row, step)
