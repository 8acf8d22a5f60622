"""Files that a backup writes or replaces: whole under their name, or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from samplestore import rooms
from samplestore.engine import Database
from samplestore.errors import BackupError

BESIDE = ("-wal", "-shm", "-journal")  # files that SQLite takes for a database's own, whoever left them there


def free(paths: Sequence[Path], overwrite: bool) -> None:
    """That nothing is in these places, or may be replaced. Raises BackupError."""
    there = [path for path in paths if os.path.lexists(path)]
    if there and not overwrite:
        raise BackupError(f"{there[0]} exists. Name another file, or replace it with: --overwrite")
    if not paths[0].parent.is_dir():
        raise BackupError(f"there is no folder {paths[0].parent}. Make it with: mkdir -p {quote(str(paths[0].parent))}")


def refuse_in_use(database: Database, target: Path) -> None:
    """Whoever has a SQLite file open would go on writing into the old one, beside the new one's name."""
    if database.is_sqlite and target.exists() and os.path.samefile(target, database.path):
        raise BackupError(f"{target} is the database itself. Name another file")
    wal = Path(f"{target}-wal")
    if wal.exists() and wal.stat().st_size:
        raise BackupError(f"{target} is a database in use: {wal} holds a part of it. Name another file")


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A new file beside `target`, gone at the end unless it was put there. Whatever is killed in between leaves the
    target as it was, and the next that comes removes the rest."""
    try:
        with rooms.beside(target) as room:
            yield room / target.name
    except OSError as error:
        raise BackupError(
            f"cannot write {target}: {error.strerror or error}. Look at: df -h {target.parent}"
        ) from error


def synced(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def put(made: Path, target: Path, overwrite: bool) -> None:
    """Under its name, whole or not at all, also after a power failure."""
    synced(made)
    if overwrite:
        os.replace(made, target)
    else:
        try:
            os.link(made, target)  # unlike a rename it never replaces what came meanwhile
        except FileExistsError:
            free([target], overwrite)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
