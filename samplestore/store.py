"""The store: one database, its runs, and read-only sessions on it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from samplestore import migrations, newruns, readers
from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.errors import DatabaseMissing, RunNotFound, RunSettingsConflict, SampleStoreError
from samplestore.models import Run as RunRow
from samplestore.models import Timeline, WeightVersionRow
from samplestore.queries import serving
from samplestore.run import Run
from samplestore.types import RunSettings
from samplestore.verbs.weights import FIRST_LABEL

log = logging.getLogger("samplestore.store")

table = RunRow.__table__


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
        if not name or len(name) > 200 or "\x00" in name:
            raise SampleStoreError(f"a run's name has 1 to 200 characters, not {len(name)}")
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
        """A run that must exist; without a name the only one, or the newest. Raises RunNotFound."""
        known = self.run_names()
        if name is None and known:
            name = known[-1]
        found = self._find(name) if name is not None else None
        if found is None:
            raise RunNotFound(name or "", known)
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
        if row is None and connection.dialect.name == "postgresql":
            # Two creators at once: the second would fail on the unique name. SQLite's are one after the other.
            connection.execute(sa.text("LOCK TABLE run IN SHARE ROW EXCLUSIVE MODE"))
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
        """A read-only ORM session in one snapshot. Writing through it fails in the database. Fetch and leave: one that
        stays open is ended, see samplestore.readers. Raises ReadTooLong."""
        with Session(self.database.reader, autoflush=False) as session, readers.limited(session):
            yield session

    def frame(self, table_name: str, run: str | None = None, limit: int = 100_000) -> Any:
        """A table as a pandas DataFrame, blobs left out. See samplestore.frames."""
        from samplestore.frames import frame

        return frame(self, table_name, run, limit)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open(url: str, *, create: bool = True, durability: str = "normal", busy_s: float = 30.0) -> Store:
    """Open a store. Bare paths and sqlite:/// URLs are SQLite files, postgresql:// a server.

    create: make and migrate a SQLite file that is not there. Raises DatabaseMissing, SchemaMismatch,
    UnsupportedFileSystem.
    """
    database = Database(url, durability=durability, busy_s=busy_s)
    try:
        if database.is_sqlite and (not database.exists() or database.path.stat().st_size == 0):
            if not create:
                raise DatabaseMissing(database.shown_url)
            migrations.upgrade(database)
        elif create and database.is_sqlite and migrations.is_blank(database):
            migrations.upgrade(database)  # somebody is creating it at this moment: wait for them at the gate
        migrations.require_current(database)
    except BaseException:  # Ctrl-C while it waits for the gate too: nobody else could close it
        database.close()
        raise
    return Store(database)
