"""Backups of a SQLite file: VACUUM INTO, and the file in its place again."""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from samplestore.backups import arrays, places
from samplestore.backups.restored import ANOTHER, Restored, checked, refuse_newer, require_idle
from samplestore.engine import Database
from samplestore.errors import BackupError
from samplestore.store import Store
from samplestore.urls import sqlite_module


def _open(path: Path, flags: str) -> Any:
    return sqlite_module().connect(f"file:{quote(str(path.absolute()))}?{flags}", uri=True, isolation_level=None)


def copy(database: Database, made: Path) -> None:
    """One read transaction: writers go on, and the WAL can't be used again until it ends. Raises BackupError."""
    module = sqlite_module()
    connection = _open(database.path, "mode=ro")
    try:
        connection.execute("VACUUM INTO ?", (str(made),))
    except module.Error as error:
        raise BackupError(f"cannot write {made}: {error}. Look at: df -h {shlex.quote(str(made.parent))}") from error
    finally:
        connection.close()


def inspected(path: Path, name: str) -> str:
    """The revision of a SQLite file that nobody has open, once its bytes were looked through. Raises BackupError."""
    module = sqlite_module()
    connection = _open(path, "mode=ro")
    try:
        said = connection.execute("PRAGMA integrity_check(5)").fetchall()
        if said != [("ok",)]:
            raise BackupError(f"{name} is damaged: {'; '.join(str(row[0]) for row in said)}. {ANOTHER}")
        found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except module.Error as error:
        raise BackupError(f"{name} is damaged, or not of samplestore: {error}. {ANOTHER}") from error
    finally:
        connection.close()
    return str(found[0]) if found else "none"


def restore(backup: Path, database: Database, overwrite: bool) -> Restored:
    """See backup.restore."""
    target, gate = database.path, database.gate
    assert gate is not None
    beside = [Path(f"{target}{end}") for end in places.BESIDE]
    places.free([target, *(p for p in beside if p.suffix[-3:] != "shm" and p.exists() and p.stat().st_size)], overwrite)
    wal = Path(f"{backup}-wal")
    if wal.exists() and wal.stat().st_size:
        raise BackupError(
            f"{backup} is in use, and {wal} holds a part of it. Take a copy: samplestore backup COPY --db "
            f"{shlex.quote(str(backup))}"
        )
    with places.beside(target) as made, arrays.copies() as put:
        shutil.copyfile(backup, made)
        revision = inspected(made, str(backup))
        refuse_newer(str(backup), revision)
        copy = Database(f"sqlite:///{made}")
        try:
            runs = checked(Store(copy), revision, backup, put)
        finally:
            copy.close()
        places.synced(made)
        with gate.hold():  # nobody writes in the file that goes, nor makes one
            if target.exists():
                require_idle(database)
            database.close_connections()
            if target.exists():
                _whole_without_wal(target)
            for path in beside:
                path.unlink(missing_ok=True)  # SQLite would play a WAL of the old database into the new one
            places.put(made, target, overwrite)
    return Restored(database.shown_url, revision, runs, len(put))


def _whole_without_wal(target: Path) -> None:
    """Bring a WAL's commits into the file that is about to be replaced: killed between the end of the one and of the
    other, this would leave the old database without its last commits."""
    with suppress(sqlite_module().DatabaseError):  # damaged ones may be why somebody restores
        connection = _open(target, "mode=rw")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.close()
