"""Backup and restore. A backup is one file, one moment of the database; it is looked through before it counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from samplestore import migrations
from samplestore.backups import arrays, places, postgres, sqlite
from samplestore.backups.restored import Restored
from samplestore.engine import Database
from samplestore.errors import SQLITE, BackupError
from samplestore.store import Store

POSTGRES = b"PGDMP"  # how a file of pg_dump begins


@dataclass(frozen=True, slots=True)
class BackedUp:
    """size in bytes. arrays: side-car files that lie in TARGET.arrays."""

    target: str
    size: int
    revision: str
    arrays: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def backup(database: Database, target: Path, *, overwrite: bool = False) -> BackedUp:
    """A consistent copy of a database that is in use. Raises BackupError, also where `target` exists."""
    migrations.require_current(database)
    places.free([target], overwrite)
    places.refuse_in_use(database, target)
    store = Store(database)
    named = arrays.named_files(store)  # before and after: what is pruned meanwhile may still be in the copy
    with places.beside(target) as made:
        if database.is_sqlite:
            sqlite.copy(database, made)
            revision = sqlite.inspected(made, str(made))
        else:
            postgres.copy(database, made)
            revision = postgres.dumped_revision(made)
        if revision != migrations.REVISION:
            raise BackupError(f"the copy has schema revision {revision}; somebody migrated meanwhile. Run it again")
        size = made.stat().st_size
        files = arrays.copy_to(store, named | arrays.named_files(store), Path(f"{target}{arrays.ARRAYS}"))
        places.put(made, target, overwrite)
    return BackedUp(str(target), size, revision, files)


def restore(backup: Path, database: Database, *, overwrite: bool = False) -> Restored:
    """Make `database` of a backup: check the copy (its bytes, its revision, every promise of every run), migrate it if
    it is older, and declare dead whoever was at work when it was taken. Raises BackupError, SchemaMismatch, RunInUse,
    also where there is a database already."""
    kind = _kind(backup)
    if database.is_sqlite != (kind == SQLITE):
        what, place = ("SQLite file", "FILE") if kind == SQLITE else ("file of pg_dump", "postgresql://...")
        raise BackupError(
            f"{backup} is a {what}. Say where to: samplestore restore {quote(str(backup))} --db {quote(str(place))}"
        )
    return (sqlite.restore if database.is_sqlite else postgres.restore)(backup, database, overwrite)


def _kind(backup: Path) -> bytes:
    try:
        with backup.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise BackupError(
            f"cannot read {backup}: {error.strerror}. Look at it with: ls -l {quote(str(backup))}"
        ) from error
    for kind in (SQLITE, POSTGRES):
        if head.startswith(kind):
            return kind
    raise BackupError(
        f"{backup} is no backup: neither a SQLite file nor one of pg_dump. Look: ls -l {quote(str(backup))}"
    )
