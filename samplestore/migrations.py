"""Alembic, called from the library. One history for both databases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from samplestore.engine import Database
from samplestore.errors import DatabaseMissing, SampleStoreError, SchemaMismatch
from samplestore.words import amount

if TYPE_CHECKING:
    from alembic.config import Config

REVISION = "0007"  # the head of alembic/versions; a test compares. Kept here so that opening needs no Alembic.
ADVISORY_LOCK = 7_236_001


def script_folder() -> Path:
    """The migrations: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).parent
    for folder in (here / "_alembic", here.parent / "alembic"):
        if (folder / "env.py").exists():
            return folder
    raise SampleStoreError(
        "the migrations are missing from this installation. Run: pip install --force-reinstall samplestore"
    )


def alembic_config(connection: Connection | None = None) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(script_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def revision_of(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def current(database: Database) -> str | None:
    with database.reading() as connection:
        return revision_of(connection)


def is_blank(database: Database) -> bool:
    """A database without any table: new, and perhaps about to be migrated by another process."""
    with database.reading() as connection:
        return not sa.inspect(connection).get_table_names()


def _has_tables(database: Database) -> bool:
    with database.reading() as connection:
        return sa.inspect(connection).has_table("sample_group")


def require_current(database: Database) -> None:
    """Raise SchemaMismatch, with the command to type, unless the schema is the one this code needs."""
    if not database.exists():
        raise DatabaseMissing(database.shown_url)
    found = current(database)
    if found is None and _has_tables(database):
        raise SampleStoreError(
            f"{database.shown_url} has samplestore's tables but no alembic_version: its revision is not known. "
            f"Restore a backup. If the schema surely is {REVISION}, run: alembic stamp {REVISION}"
        )
    if found != REVISION:
        known = found is None or (found.isdigit() and int(found) < int(REVISION))
        raise SchemaMismatch(database.shown_url, found, REVISION, known)


def upgrade(target: str | Database, revision: str = "head") -> str | None:
    """Migrate to `revision`; returns the revision reached. Safe to run from several processes at once. Raises
    SchemaMismatch where a newer samplestore made the schema; then nothing was changed."""
    return _migrate(target, revision, "upgrade")


def downgrade(target: str | Database, revision: str) -> str | None:
    """Migrate back to an older `revision`, as far as nothing that is stored is lost; returns the revision reached.
    Raises DowngradeRefused, SchemaMismatch where this samplestore does not know the way; then nothing was changed."""
    database = target if isinstance(target, Database) else Database(target)
    try:
        found = current(database)
        if found is None or not known(found) or not known(revision):
            raise SchemaMismatch(database.shown_url, found, revision, known=found is None)
        return _migrate(database, revision, "downgrade") if int(revision) < int(found) else found
    finally:
        if database is not target:
            database.close()


def known(revision: str) -> bool:
    """Whether this samplestore has the migrations of a revision."""
    return re.fullmatch(r"[0-9]{4}", revision) is not None and 0 < int(revision) <= int(REVISION)


def _migrate(target: str | Database, revision: str, direction: str) -> str | None:
    """One transaction on both databases: killed in the middle, the old schema and all rows are there."""
    database = target if isinstance(target, Database) else Database(target)
    try:
        if database.is_sqlite:
            _migrate_sqlite(database, revision, direction)
        else:
            with database.writing(durable=True) as connection:
                # two migrations at once would both find the old schema
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(ADVISORY_LOCK)))
                _run(database, connection, revision, direction)
        return current(database)
    finally:
        if database is not target:
            database.close()


def _migrate_sqlite(database: Database, revision: str, direction: str) -> None:
    """Foreign keys are off while tables are recreated: on, dropping a parent deletes every child row, silently."""
    assert database.gate is not None
    writer = database.writer
    with (
        database.explained(writing=True),
        database.gate.hold(),
        writer.connect().execution_options(samplestore_write=True) as connection,
    ):
        raw = connection.connection.driver_connection
        assert raw is not None
        if not raw.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            # Before the first table, or never without a VACUUM. It lets a prune shrink the file in slices.
            raw.execute("PRAGMA auto_vacuum=INCREMENTAL")
            raw.execute("VACUUM")
        raw.execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                _run(database, connection, revision, direction)
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
                if broken:
                    raise SampleStoreError(
                        f"migration refused: {amount(len(broken), 'row')} would lose a parent, e.g. {broken[0]}"
                    )
        finally:
            raw.execute("PRAGMA foreign_keys=ON")


def _run(database: Database, connection: Connection, revision: str, direction: str) -> None:
    from alembic import command

    found = revision_of(connection)
    if found is not None and not known(found):
        raise SchemaMismatch(database.shown_url, found, REVISION, known=False)
    getattr(command, direction)(alembic_config(connection), revision)


@contextmanager
def views_aside(connection: Connection) -> Iterator[None]:
    """For a migration that changes tables which views read: without the views, which are made again afterwards from the
    text that the database itself has. Both databases refuse such changes otherwise: PostgreSQL to drop a column or to
    change its type, SQLite to make a table anew, since the views would name one that is not there for a moment."""
    found = sa.inspect(connection)
    texts = {name: found.get_view_definition(name) for name in found.get_view_names()}
    for name in texts:
        connection.exec_driver_sql(f'DROP VIEW "{name}"')
    yield
    for name, text in texts.items():
        assert text is not None
        # SQLite keeps the statement, PostgreSQL the query; and its driver takes a bare % for a parameter.
        sqlite = connection.dialect.name == "sqlite"
        connection.exec_driver_sql(text if sqlite else f'CREATE VIEW "{name}" AS {text}'.replace("%", "%%"))


def differences(database: Database) -> list[Any]:
    """What Alembic's autogenerate would still change: empty when models and database agree."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from samplestore.models import Base

    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))
