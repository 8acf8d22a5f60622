"""Prune: many short transactions, so that workers go on meanwhile, and then the space is given back.

Killed at any moment it leaves a sound database; run again, it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import sqlalchemy as sa

from samplestore import faults
from samplestore.arguments import whole
from samplestore.arrayfiles import GRACE_S
from samplestore.engine import Database
from samplestore.errors import RunInUse
from samplestore.models import Base, BatchRow, Event, PromptRow, Sample, SampleGroup, Segment, SegmentArray, Worker
from samplestore.states import BatchState, WorkerState
from samplestore.verbs import liveness
from samplestore.verbs import prune as verbs
from samplestore.verbs.prune import Freed
from samplestore.verbs.tx import Transactor, Tx

SLICE_S = {True: 0.02, False: 0.2}  # a transaction's share on SQLite, where all writers wait, and on PostgreSQL
SLICE_MOST = 1000  # rows named in one statement
LIST_MOST = 10_000  # ids looked up at once
VACUUM_PAGES = 256  # 1 MB of a SQLite file

batch, group, sample, segment, worker, array = (
    t.__table__ for t in (BatchRow, SampleGroup, Sample, Segment, Worker, SegmentArray)
)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune did.

    retention_step   steps up to here were pruned; None: the run is gone
    freed_bytes      of tokens, log-probs and arrays that were removed
    files            side-car files of arrays that were removed; their bytes are among freed_bytes
    before, after    bytes of the database on disk
    slices, slowest_s   write transactions, and the time that the slowest one needed
    """

    retention_step: int | None
    groups: int
    segments: int
    freed_bytes: int
    before: int
    after: int
    slices: int
    slowest_s: float
    files: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Slices:
    """Work in transactions of about SLICE_S, whatever its rows weigh."""

    def __init__(self, run: Transactor) -> None:
        self.sqlite = run.database.is_sqlite
        self.run, self.size, self.freed, self.count, self.slowest_s = run, 1, Freed(), 0, 0.0

    def each(self, ids: Sequence[int], verb: Callable[..., Freed]) -> None:
        """`verb(tx, ids=...)` for all ids, slice by slice."""
        rest = list(ids)
        while rest:
            head, rest = rest[: self.size], rest[self.size :]
            took = self.one(partial(verb, ids=head))
            if self.sqlite:
                _make_way(took)
            share = SLICE_S[self.sqlite] / max(took, 1e-4)
            self.size = max(1, min(SLICE_MOST, int(self.size * min(2.0, max(0.25, share)))))

    def one(self, verb: Callable[[Tx], Freed]) -> float:
        began = 0.0

        def timed(tx: Tx) -> Freed:
            nonlocal began
            began = time.monotonic()  # not before: waiting for others is not work
            return verb(tx)

        self.freed = self.freed.plus(self.run.transact(timed))
        took = time.monotonic() - began
        self.count, self.slowest_s = self.count + 1, max(self.slowest_s, took)
        faults.reached("pruning")
        return took


def _make_way(took: float) -> None:
    """Half of the time belongs to the others. The gate alone would let each of them in once between two slices."""
    time.sleep(min(took, 1.0))


def prune(run: Transactor, keep_steps: int) -> Pruned:
    """Remove the tokens of groups that were consumed more than `keep_steps` steps before the newest committed one, and
    of what was dropped, superseded or went stale before that. Summary columns stay. A rewind to the last `keep_steps`
    steps finds all it needs; one further back raises RewindTooFar from now on. Raises InvalidSetting."""
    keep_steps = whole("keep_steps", keep_steps)
    before = disk_bytes(run.database)
    may = run.transact(lambda tx: verbs.retain(tx, keep_steps), durable=True)
    slices = _Slices(run)
    for ids in _groups(run, may):
        slices.each(ids, partial(verbs.prune_groups, may=may))
    for ids in _former_lives(run, may):
        slices.each(ids, partial(verbs.prune_lives, may=may))
    slices.freed = slices.freed.plus(sweep_files(run))
    return _told(run.database, slices, before, may.step)


def _groups(run: Transactor, may: verbs.Retention) -> Iterator[list[int]]:
    """Groups to prune, looked up on snapshots: the writer gate is free meanwhile."""
    wanted = sa.select(group.c.id).where(verbs.prunable(run.id, may)).order_by(group.c.id).limit(LIST_MOST)
    yield from _pages(run.database, wanted, group.c.id)


def _former_lives(run: Transactor, may: verbs.Retention) -> Iterator[list[int]]:
    wanted = (
        sa.select(sample.c.id)
        .where(sample.c.incarnation > 0)
        .where(sa.exists().where(segment.c.sample_id == sample.c.id, verbs.former_lives(run.id, may)))
        .order_by(sample.c.id)
        .limit(LIST_MOST)
    )
    yield from _pages(run.database, wanted, sample.c.id)


def _pages(database: Database, wanted: sa.Select[Any], key: sa.ColumnElement[int]) -> Iterator[list[int]]:
    last = 0
    while True:
        page = wanted.where(key > last)
        ids = database.read(lambda c, page=page: list(c.execute(page).scalars()))  # type: ignore[misc]
        if not ids:
            return
        yield ids
        last = ids[-1]


def remove(run: Transactor) -> Pruned:
    """Remove a whole run, tokens and rows. What is left at any moment is sound: batches that gave their groups back
    first, then committed ones with their groups, then the other groups, prompts and events, the run last. Raises
    RunInUse while workers or trainers are alive on it."""
    database, before = run.database, disk_bytes(run.database)
    slices, name = _Slices(run), run.name
    run.transact(lambda tx: liveness.reap(tx))
    run.transact(verbs.close_run, durable=True)
    ended, held = (BatchState.RELEASED, BatchState.REWOUND), (BatchState.LEASED, BatchState.COMMITTED)
    for states in (ended, held):
        wanted = sa.select(batch.c.id).where(batch.c.run_id == run.id, batch.c.state.in_([s.value for s in states]))
        for ids in _pages(database, wanted.order_by(batch.c.id).limit(LIST_MOST), batch.c.id):
            slices.each(ids, partial(verbs.remove_batches, name=name))
    for table, verb in (
        (group, verbs.remove_groups),
        (PromptRow.__table__, partial(verbs.remove_rows, table=PromptRow.__table__)),
        (Event.__table__, partial(verbs.remove_rows, table=Event.__table__)),
    ):
        wanted = sa.select(table.c.id).where(table.c.run_id == run.id).order_by(table.c.id).limit(LIST_MOST)
        for ids in _pages(database, wanted, table.c.id):
            slices.each(ids, partial(verb, name=name))
    slices.freed = slices.freed.plus(sweep_files(run, grace_s=0.0))  # nobody is at work: no row will come any more
    slices.one(partial(verbs.remove_run, name=name))
    return _told(database, slices, before, None)


def _told(database: Database, slices: _Slices, before: int, step: int | None) -> Pruned:
    give_back(database)
    freed = slices.freed
    return Pruned(
        step, freed.groups, freed.segments, freed.size, before, disk_bytes(database), slices.count, slices.slowest_s,
        freed.files,
    )  # fmt: skip


def sweep_files(run: Transactor, grace_s: float = GRACE_S) -> Freed:
    """Remove the side-car files that no row names any more, after the rows have gone: killed in between, this leaves
    files that the next prune finds. Young ones stay: their row may be about to be committed."""
    if run.settings.array_url is None:
        return Freed()
    files, freed = run.array_files(), Freed()
    found = files.old(grace_s)
    while part := list(islice(found, SLICE_MOST)):
        keys = [key for key, _ in part]
        named = set(run.database.read(lambda c, keys=keys: list(c.execute(_naming(run.id, keys)).scalars())))  # type: ignore[misc]
        for key, size in part:
            if key not in named and files.remove(key, grace_s):
                freed = freed.plus(Freed(size=size, files=1))
    return freed


def _naming(run_id: int, keys: Sequence[str]) -> sa.Select[Any]:
    return (
        sa.select(array.c.sidecar)
        .select_from(array.join(sample, sample.c.id == array.c.sample_id))
        .where(array.c.sidecar.in_(keys), sample.c.run_id == run_id)
    )


# -- space


def disk_bytes(database: Database) -> int:
    """Bytes of the database on disk: a SQLite file with its WAL, or the PostgreSQL database's tables and indexes."""
    if database.is_sqlite:
        files = (database.path, database.path.with_name(database.path.name + "-wal"))
        return sum(path.stat().st_size for path in files if path.exists())
    return int(database.read(lambda c: c.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one()))


def give_back(database: Database) -> None:
    """Give freed pages back, while others work: a SQLite file shrinks in slices behind the gate. PostgreSQL cuts free
    pages off the end of its files and uses the others again."""
    if not database.is_sqlite:
        _vacuum_postgres(database, "ANALYZE")
        return
    assert database.gate is not None
    free = _free_pages(database)
    while free:
        before, began = free, time.monotonic()
        with database.explained(writing=True), database.gate.hold(), database.writer.connect() as connection:
            raw: Any = connection.connection.driver_connection
            # a script, since the driver steps a single statement only once, which frees one page
            raw.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
            free = raw.execute("PRAGMA freelist_count").fetchone()[0]
        faults.reached("pruning")
        _make_way(time.monotonic() - began)
        if free >= before:
            break  # somebody else frees as fast as this does
    with database.explained(writing=True), database.gate.hold(), database.writer.connect() as connection:
        _copy_wal(connection.connection.driver_connection, database.busy_s)


def _free_pages(database: Database) -> int:
    """Pages of a SQLite file that can be cut off: none of a file from before this was switched on, see rewrite()."""
    with database.reading() as connection:
        if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() != 2:
            return 0
        return int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())


def _copy_wal(raw: Any, busy_s: float) -> None:
    """The file itself is cut when the WAL is copied into it. Readers are waited for a moment only: the gate is held,
    and what they keep back is copied later, as ever."""
    raw.execute("PRAGMA busy_timeout=500")
    try:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        raw.execute(f"PRAGMA busy_timeout={int(1000 * busy_s)}")


def rewrite(database: Database) -> None:
    """Write the tables anew without gaps. Nobody else can work meanwhile, so nobody may: raises RunInUse. It needs as
    much free disk as the database holds. A SQLite file can shrink in slices from then on."""
    live = database.read(
        lambda c: list(c.execute(sa.select(worker.c.id).where(worker.c.state == WorkerState.LIVE.value)).scalars())
    )
    if live:
        raise RunInUse(database.shown_url, live)
    if not database.is_sqlite:
        _vacuum_postgres(database, "FULL, ANALYZE")
        return
    assert database.gate is not None
    with database.explained(writing=True), database.gate.hold(), database.writer.connect() as connection:
        raw: Any = connection.connection.driver_connection
        raw.execute("PRAGMA auto_vacuum=INCREMENTAL")
        raw.execute("VACUUM")
        _copy_wal(raw, database.busy_s)


def _vacuum_postgres(database: Database, options: str) -> None:
    """Of all tables: a removed run leaves gaps in each. With ANALYZE, since the planner's numbers are of before."""
    autocommit = database.writer.execution_options(isolation_level="AUTOCOMMIT")
    with database.explained(writing=True), autocommit.connect() as connection:
        for table in Base.metadata.sorted_tables:
            connection.exec_driver_sql(f"VACUUM ({options}) {table.name}")
