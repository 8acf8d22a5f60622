"""Backup and restore. A backup is one file that one moment of the database went into; it is checked before it counts.

SQLite: VACUUM INTO, one read transaction: writers go on, and the WAL can't be reused until it ends. PostgreSQL:
pg_dump and pg_restore, which take a snapshot too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import sqlalchemy as sa

from samplestore import migrations
from samplestore.arrayfiles import ArrayFiles, LocalFiles, open_files
from samplestore.clock import db_now
from samplestore.engine import Database, sqlite_module
from samplestore.errors import ArrayFileError, BackupError, DatabaseUnusable, RunInUse, SchemaMismatch
from samplestore.models import Run, Sample, SegmentArray, Worker
from samplestore.states import WorkerState
from samplestore.store import Store
from samplestore.types import RunSettings

SQLITE, POSTGRES = b"SQLite format 3\x00", b"PGDMP"
ARRAYS = ".arrays"  # the folder of a backup's side-car files, beside it
ANOTHER = "Restore another one: samplestore restore BACKUP"
BESIDE = ("-wal", "-shm", "-journal")  # files that SQLite takes for a database's own, whoever left them there

Copies = list[tuple[ArrayFiles, str]]

worker = Worker.__table__


@dataclass(frozen=True, slots=True)
class BackedUp:
    """size in bytes. arrays: side-car files that lie in TARGET.arrays."""

    target: str
    size: int
    revision: str
    arrays: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Restored:
    """revision: of the backup, before it was migrated to this samplestore's. arrays: side-car files that were put
    where its runs look for them, a folder of their own."""

    database: str
    revision: str
    runs: list[str]
    arrays: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def backup(database: Database, target: Path, *, overwrite: bool = False) -> BackedUp:
    """A consistent copy of a database that is in use. Raises BackupError, also where `target` exists."""
    migrations.require_current(database)
    _free_place([target], overwrite)
    _refuse_in_use(database, target)
    store = Store(database)
    named = _named_files(store)  # before and after: what is pruned meanwhile may still be in the copy
    with _beside(target) as made:
        if database.is_sqlite:
            _copy_sqlite(database, made)
            revision = _inspected(made, str(made))
        else:
            _run(["pg_dump", "--format=custom", f"--file={made}", *_server(database)], database)
            revision = _dumped_revision(made)
        if revision != migrations.REVISION:
            raise BackupError(f"the copy has schema revision {revision}; somebody migrated meanwhile. Run it again")
        size = made.stat().st_size
        files = _copy_arrays_to(store, named | _named_files(store), Path(f"{target}{ARRAYS}"))
        _put(made, target, overwrite)
    return BackedUp(str(target), size, revision, files)


def restore(backup: Path, database: Database, *, overwrite: bool = False) -> Restored:
    """Make `database` of a backup: check the copy (its bytes, its revision, every promise of every run), migrate it if
    it is older, and declare dead whoever was at work when it was taken. Raises BackupError, SchemaMismatch, RunInUse,
    also where there is a database already."""
    kind = _kind(backup)
    if database.is_sqlite != (kind == SQLITE):
        what, place = ("SQLite file", "FILE") if kind == SQLITE else ("file of pg_dump", "postgresql://...")
        raise BackupError(f"{backup} is a {what}. Say where to: samplestore restore {backup} --db {place}")
    return (_restore_sqlite if database.is_sqlite else _restore_postgres)(backup, database, overwrite)


def _kind(backup: Path) -> bytes:
    try:
        with backup.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise BackupError(f"cannot read {backup}: {error.strerror}. Look at it with: ls -l {backup}") from error
    for kind in (SQLITE, POSTGRES):
        if head.startswith(kind):
            return kind
    raise BackupError(f"{backup} is no backup: neither a SQLite file nor one of pg_dump. Look: ls -l {backup}")


# -- files


def _free_place(paths: Sequence[Path], overwrite: bool) -> None:
    there = [path for path in paths if os.path.lexists(path)]
    if there and not overwrite:
        raise BackupError(f"{there[0]} exists. Name another file, or replace it with: --overwrite")
    if not paths[0].parent.is_dir():
        raise BackupError(f"there is no folder {paths[0].parent}. Make it with: mkdir -p {paths[0].parent}")


def _refuse_in_use(database: Database, target: Path) -> None:
    """Whoever has a SQLite file open would go on writing into the old one, beside the new one's name."""
    if database.is_sqlite and target.exists() and os.path.samefile(target, database.path):
        raise BackupError(f"{target} is the database itself. Name another file")
    wal = Path(f"{target}-wal")
    if wal.exists() and wal.stat().st_size:
        raise BackupError(f"{target} is a database in use: {wal} holds a part of it. Name another file")


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A new file beside `target`, gone at the end unless it was put there. Whatever is killed in between leaves it
    under its own name, and the target as it was."""
    made = target.with_name(f"{target.name}.{os.getpid()}.partial")
    made.unlink(missing_ok=True)
    try:
        yield made
    except OSError as error:
        raise BackupError(f"cannot write {made}: {error.strerror or error}. Look at: df -h {target.parent}") from error
    finally:
        for end in ("", ".gate", *BESIDE):
            Path(f"{made}{end}").unlink(missing_ok=True)


def _synced(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _put(made: Path, target: Path, overwrite: bool) -> None:
    """Under its name, whole or not at all, also after a power failure."""
    _synced(made)
    if overwrite:
        os.replace(made, target)
    else:
        try:
            os.link(made, target)  # unlike a rename it never replaces what came meanwhile
        except FileExistsError:
            _free_place([target], overwrite)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# -- SQLite


def _open_sqlite(path: Path, flags: str) -> Any:
    return sqlite_module().connect(f"file:{quote(str(path.absolute()))}?{flags}", uri=True, isolation_level=None)


def _copy_sqlite(database: Database, made: Path) -> None:
    module = sqlite_module()
    connection = _open_sqlite(database.path, "mode=ro")
    try:
        connection.execute("VACUUM INTO ?", (str(made),))
    except module.Error as error:
        raise BackupError(f"cannot write {made}: {error}. Look at: df -h {made.parent}") from error
    finally:
        connection.close()


def _inspected(path: Path, name: str) -> str:
    """The revision of a SQLite file that nobody has open, once its bytes were looked through. Raises BackupError."""
    module = sqlite_module()
    connection = _open_sqlite(path, "mode=ro")
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


def _restore_sqlite(backup: Path, database: Database, overwrite: bool) -> Restored:
    target, gate = database.path, database.gate
    assert gate is not None
    beside = [Path(f"{target}{end}") for end in BESIDE]
    _free_place([target, *(p for p in beside if p.suffix[-3:] != "shm" and p.exists() and p.stat().st_size)], overwrite)
    wal = Path(f"{backup}-wal")
    if wal.exists() and wal.stat().st_size:
        raise BackupError(
            f"{backup} is in use, and {wal} holds a part of it. Take a copy: samplestore backup COPY --db {backup}"
        )
    with _beside(target) as made, _copies() as put:
        shutil.copyfile(backup, made)
        revision = _inspected(made, str(backup))
        _refuse_newer(str(backup), revision)
        copy = Database(f"sqlite:///{made}")
        try:
            runs = _checked(Store(copy), revision, backup, put)
        finally:
            copy.close()
        _synced(made)
        with gate.hold():  # nobody writes in the file that goes, nor makes one
            if target.exists():
                _require_idle(database)
            database.close_connections()
            if target.exists():
                _whole_without_wal(target)
            for path in beside:
                path.unlink(missing_ok=True)  # SQLite would play a WAL of the old database into the new one
            _put(made, target, overwrite)
    return Restored(database.shown_url, revision, runs, len(put))


def _whole_without_wal(target: Path) -> None:
    """Bring a WAL's commits into the file that is about to be replaced: killed between the end of the one and of the
    other, this would leave the old database without its last commits."""
    with suppress(sqlite_module().DatabaseError):  # damaged ones may be why somebody restores
        connection = _open_sqlite(target, "mode=rw")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.close()


# -- PostgreSQL


def _server(database: Database) -> list[str]:
    """How to reach it, without the password: other users see arguments."""
    url = database.url.set(drivername="postgresql")._replace(password=None)  # set() takes None for "leave it"
    return ["--no-password", f"--dbname={url.render_as_string(hide_password=False)}"]


def _run(command: list[str], database: Database | None) -> str:
    tool = shutil.which(command[0])
    if tool is None:
        raise BackupError(
            f"{command[0]}, which does this for PostgreSQL, is not installed. Debian: apt-get install postgresql-client"
        )
    password = None if database is None else database.url.password
    env = {**os.environ, **({"PGPASSWORD": str(password)} if password else {})}
    done = subprocess.run([tool, *command[1:]], env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        _failed(command[0], done.stderr)
    return done.stdout


def _failed(tool: str, said: str) -> NoReturn:
    lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
    raise BackupError(
        f"{tool} failed: {(lines or ['it said nothing'])[0].strip()}. Look further with: samplestore doctor"
    )


def _dumped_revision(dump: Path) -> str:
    """The schema revision in a pg_dump file, which is read to its table of contents. Raises BackupError."""
    said = _run(["pg_restore", "--data-only", "--table=alembic_version", "--file=-", str(dump)], None)
    found = re.search(r"^COPY [^\n]*alembic_version[^\n]*\n([^\n]*)\n\\\.", said, re.MULTILINE)
    if found is None:
        raise BackupError(f"{dump} holds no database of samplestore. {ANOTHER}")
    return found[1].strip()


def _restore_postgres(backup: Path, database: Database, overwrite: bool) -> Restored:
    revision = _dumped_revision(backup)
    _refuse_newer(str(backup), revision)
    if not migrations.is_blank(database):
        if not overwrite:
            raise BackupError(
                f"{database.shown_url} has tables. Make an empty database with createdb, or replace them: --overwrite"
            )
        _require_idle(database)
    database.close_connections()
    options = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"]
    clean = ["--clean", "--if-exists"] if overwrite else []
    _run(["pg_restore", *options, *clean, *_server(database), str(backup)], database)
    put: Copies = []  # a database that breaks a promise stays, and its files with it
    runs = _checked(Store(database), revision, backup, put)
    return Restored(database.shown_url, revision, runs, len(put))


# -- side-car files of arrays


def _copy_arrays_to(store: Store, named: set[tuple[str, str]], folder: Path) -> int:
    """Copy files that rows name (run, file) into a backup's folder, RUN_UUID/ab/abcdef...; how many. Raises
    BackupError."""
    for name, key in sorted(named):
        run = store.existing_run(name)
        target = LocalFiles(folder / run.uuid)
        try:
            if not target.whole(key):  # of an earlier backup: a disk may have lost or changed it
                target.put(run.array_files().get(key))
        except ArrayFileError as error:
            raise BackupError(f"{error}. Was it pruned meanwhile? Then run this again") from error
    return len(named)


def _own_folders(store: Store) -> dict[str, RunSettings]:
    """Give each run that has array files a folder of its own for them; its former settings, by name. The database that
    the backup was taken of may still be in use: a prune of either must not remove files that rows of the other name."""
    table, former = Run.__table__, {}
    for name in store.run_names():
        run = store.existing_run(name)
        if run.settings.array_url is None:
            continue
        former[name] = run.settings
        settings = replace(run.settings, array_folder=uuid.uuid4().hex[:16]).as_json()
        with store.database.writing() as connection:
            connection.execute(sa.update(table).where(table.c.id == run.id).values(settings=settings))
    return former


def _copy_arrays_from(store: Store, folder: Path, former: dict[str, RunSettings], put: Copies) -> None:
    """Put the files that rows name where the runs look for them: from the backup's folder, or else from where they lay.
    Raises BackupError."""
    for name, key in sorted(_named_files(store)):
        run = store.existing_run(name)
        kept: ArrayFiles = LocalFiles(folder / run.uuid)
        try:
            if kept.size(key) is None and name in former:
                kept = open_files(former[name], run.uuid)
            files = run.array_files()
            files.put(kept.get(key))
        except ArrayFileError as error:
            raise BackupError(f"{error}. A backup's files lie in {folder}") from error
        put.append((files, key))


@contextmanager
def _copies() -> Iterator[Copies]:
    """Array files that were put into folders of their own, removed if the restore fails: nobody would find them."""
    put: Copies = []
    try:
        yield put
    except BaseException:  # Ctrl-C too: what was put is removed whatever ended the restore
        for files, key in put:
            with suppress(OSError):  # one that can't be removed must not keep the others
                files.remove(key, 0.0)
        raise


def _named_files(store: Store) -> set[tuple[str, str]]:
    """(run, file) of all side-car files that rows name."""
    table, samples, runs = SegmentArray.__table__, Sample.__table__, Run.__table__
    query = (
        sa.select(runs.c.name, table.c.sidecar)
        .select_from(table.join(samples, samples.c.id == table.c.sample_id).join(runs, runs.c.id == samples.c.run_id))
        .where(table.c.sidecar.is_not(None))
        .distinct()
    )
    return store.database.read(lambda c: {(name, key) for name, key in c.execute(query)})


# -- what both need


def _refuse_newer(name: str, revision: str) -> None:
    if not migrations.known(revision):
        raise SchemaMismatch(name, revision, migrations.REVISION, known=False)


def _require_idle(database: Database) -> None:
    """What is replaced must not be at work. A database that can't be read, or is another program's, says nothing."""
    live: Callable[[sa.Connection], list[int]] = lambda c: list(  # noqa: E731
        c.execute(sa.select(worker.c.id).where(worker.c.state == WorkerState.LIVE.value)).scalars()
    )
    try:
        found = database.read(live)
    except (sa.exc.DBAPIError, DatabaseUnusable):
        return
    if found:
        raise RunInUse(database.shown_url, found)


def _checked(store: Store, revision: str, backup: Path, put: Copies) -> list[str]:
    """Bring a restored copy to today's schema, free what its workers held, put array files back (told in `put`), check
    every run; the names of its runs."""
    if revision != migrations.REVISION:
        migrations.upgrade(store.database)
    former = _own_folders(store)
    with store.database.writing() as connection:  # they work on the original, if at all; never on this copy
        silent = db_now() - worker.c.ttl_s - 1.0
        connection.execute(
            sa.update(worker)
            .where(worker.c.state == WorkerState.LIVE.value, worker.c.heartbeat > silent)
            .values(heartbeat=silent)
        )
    runs = [store.existing_run(name) for name in store.run_names()]
    for run in runs:
        run.reap()
    _copy_arrays_from(store, Path(f"{backup}{ARRAYS}"), former, put)
    for run in runs:
        if findings := run.check():
            told = "; ".join(f"{f.code}: {f.message} ({f.count} rows)" for f in findings)
            raise BackupError(f"run {run.name!r} of {backup} breaks a promise: {told}. {ANOTHER}")
    return store.run_names()
