"""The store: one database, its runs, and read-only sessions on it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from samplestore import arguments, migrations, newruns, readers
from samplestore.arguments import plain_text
from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.errors import DatabaseMissing, RunNotFound, RunSettingsConflict
from samplestore.models import Run as RunRow
from samplestore.models import Timeline, WeightVersionRow
from samplestore.queries import serving
from samplestore.run import Run
from samplestore.runsettings import RunSettings
from samplestore.verbs.weights import FIRST_LABEL

log = logging.getLogger("samplestore.store")

table = RunRow.__table__
MAX_NAME = 200  # characters of a run's name
UNFINISHED = "(copying "  # how the name of a run begins that a merge or fork still writes: samplestore/copies/hidden.py


class Store:
    """A sample store. Thread-safe; one per process and database is enough.

    Every public verb of a run is one transaction. A verb that returned is durable: it survives the death of any
    process (`durability="normal"`) or of the machine ("full"; batch commits and publishes are always full).
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def run(self, name: str, **settings: Any) -> Run:
        """Get or create a run. Settings left out are the stored ones (defaults for a new run, see RunSettings).

        Raises RunSettingsConflict if the run exists with other settings, InvalidSetting.
        """
        given = {key: value for key, value in settings.items() if value is not None}
        wanted = RunSettings.parse(given)
        plain_text("run", name, MAX_NAME)
        found = self._find(name)
        if found is None:
            newruns.check(wanted)
            for doubt in newruns.doubts(wanted):
                log.warning("run %s: %s", name, doubt)
            serving.probe(self.database, wanted.order, wanted.curriculum)
            found = self.database.write(lambda c: self._create(c, name, wanted), durable=True)
        stored = {key: list(v) if isinstance(v, tuple) else v for key, v in found.settings.as_json().items()}
        asked = wanted.as_json()
        different = {key: asked[key] for key in given if stored[key] != asked[key]}
        if different:
            raise RunSettingsConflict(name, stored, different)
        return found

    def existing_run(self, name: str | None = None) -> Run:
        """A run that must exist; without a name the only one, or the newest. Raises RunNotFound, and InvalidSetting for
        what can be no name."""
        if name:
            plain_text("run", name, MAX_NAME)
        if name is None:
            name = next((n for n in reversed(self.run_names()) if not n.startswith(UNFINISHED)), None)
        found = self._find(name) if name is not None else None
        if found is None:
            raise RunNotFound(name or "", self.run_names())
        return found

    def run_names(self) -> list[str]:
        """All runs, oldest first."""
        with self.database.reading() as connection:
            return list(connection.execute(sa.select(table.c.name).order_by(table.c.id)).scalars())

    def _find(self, name: str) -> Run | None:
        with self.database.reading() as connection:
            row = connection.execute(sa.select(table).where(table.c.name == name)).one_or_none()
        return None if row is None else Run(self.database, row.id, row.uuid, row.name, RunSettings.parse(row.settings))

    def _create(self, connection: sa.Connection, name: str, settings: RunSettings) -> Run:
        row = connection.execute(sa.select(table).where(table.c.name == name)).one_or_none()
        if row is None:
            lock_names(connection)  # two creators at once: the second would fail on the unique name
            row = connection.execute(sa.select(table).where(table.c.name == name)).one_or_none()
        if row is None:
            row = connection.execute(
                sa.insert(table)
                .values(uuid=str(uuid.uuid4()), name=name, created_at=db_now(), settings=settings.as_json())
                .returning(table)
            ).one()
            connection.execute(sa.insert(Timeline.__table__).values(run_id=row.id, number=0, created_at=db_now()))
            connection.execute(
                sa.insert(WeightVersionRow.__table__).values(
                    run_id=row.id,
                    version=0,
                    timeline=0,
                    depth=0,
                    common_depth=0,
                    label=FIRST_LABEL,
                    created_at=db_now(),
                )
            )
        return Run(self.database, row.id, row.uuid, row.name, RunSettings.parse(row.settings))

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A read-only SQLAlchemy session in one snapshot: `select(samplestore.Sample).where(...)`. Relationships load
        when they are first asked for, inside the session. Writing through it fails in the database. Fetch and leave:
        one that stays open is ended after 5 minutes (PostgreSQL: a minute without a statement). Raises ReadTooLong."""
        with Session(self.database.reader, autoflush=False) as session, readers.limited(session):
            yield session

    def frame(
        self,
        table_name: str,
        run: str | None = None,
        limit: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        step: int | None = None,
        status: str | None = None,
        sample_ids: Iterable[int] | None = None,
        group_ids: Iterable[int] | None = None,
        versions: Iterable[int] | None = None,
    ) -> Any:
        """A pandas DataFrame of one snapshot, newest first, blobs left out. Whole numbers that may be missing are
        Int64, times are UTC datetimes, JSON is Python objects.

        table_name   runs, prompts, datasets, groups, samples, segments, tokens, stages, requests, batches,
                     batch_groups, versions, timelines, workers, engines, evaluations, events, ledger, or a view
        run          name of a run; all of them if left out
        limit        most rows, by default 100,000, of tokens 1,000,000. If there are more, the rest is cut off: a
                     warning says so, and frame.attrs["cut_off"] is True
        columns      these alone, in this order
        step         rows of this trainer step, or of the groups that its batch took
        status       status or state
        sample_ids, group_ids, versions   rows of these samples, groups, weight versions

        "tokens" has a row for each response token of the samples' present lives, in their order: run_id, group (its
        number), index, sample_id, seq (of its segment), position (in the response, int32), token (int32), logprob
        (float32, NaN: none), loss (int8), kind, version (Int64), staleness now (Int64). Segments whose tokens were
        pruned are left out and counted in frame.attrs["pruned_segments"].
        Raises InvalidSetting for what a table has not, RunNotFound, MissingExtra.
        """
        from samplestore.frames import frame

        return frame(
            self, table_name, run, limit, columns=columns, step=step, status=status, sample_ids=sample_ids,
            group_ids=group_ids, versions=versions,
        )  # fmt: skip

    def close(self) -> None:
        """Give back what this process's trainer holds, and close all connections, for good: the store, its runs and
        its batches raise StoreClosed from then on. Repeatable."""
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def lock_names(connection: sa.Connection) -> None:
    """Nobody else makes or renames a run until this transaction ends: what is looked up from here on stays true.
    SQLite's writers come one after the other anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("LOCK TABLE run IN SHARE ROW EXCLUSIVE MODE"))


def open(url: str | PathLike[str], *, create: bool = True, durability: str = "normal", busy_s: float = 30.0) -> Store:
    """Open a store. Bare paths and sqlite:/// URLs are SQLite files, postgresql:// a server.

    create: make and migrate a SQLite file that is not there. busy_s: seconds that a write waits for others, then
    StoreBusy. Raises InvalidSetting, DatabaseMissing, SchemaMismatch, UnsupportedFileSystem, StoreUnavailable where the
    server does not answer, DatabaseUnusable.
    """
    if isinstance(url, str | PathLike):
        arguments.path("url", url)
    database = Database(url, durability=durability, busy_s=arguments.duration("busy_s", busy_s))
    try:
        if database.is_sqlite and (not database.exists() or database.path.stat().st_size == 0):
            if not create:
                raise DatabaseMissing(database.shown_url)
            migrations.upgrade(database)
        elif create and database.is_sqlite and migrations.is_blank(database):
            migrations.upgrade(database)  # somebody is creating it at this moment: wait for them at the gate
        with database.answering():
            migrations.require_current(database)
    except BaseException:  # Ctrl-C while it waits for the gate too: nobody else could close it
        database.close()
        raise
    return Store(database)
