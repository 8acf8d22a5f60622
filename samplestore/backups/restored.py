"""What a restored database must be before it counts, whatever it lies in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from samplestore import migrations
from samplestore.backups import arrays
from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.errors import BackupError, DatabaseUnusable, RunInUse, SchemaMismatch
from samplestore.models import Worker
from samplestore.states import WorkerState
from samplestore.store import UNFINISHED, Store
from samplestore.verbs.recount import recount

ANOTHER = "Restore another one: samplestore restore BACKUP"

worker = Worker.__table__


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


def refuse_newer(name: str, revision: str) -> None:
    if not migrations.known(revision):
        raise SchemaMismatch(name, revision, migrations.REVISION, known=False)


def require_idle(database: Database) -> None:
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


def _skip_worker_ids(connection: sa.Connection) -> None:
    """The original may have given ids since, to processes that are suspended now and wake up beside this copy: nobody
    else may get one of those, since an id is what fences them off. The seconds of the clock are ahead of all ids that
    were handed out one by one, and of those that an earlier restore began with."""
    newest = connection.execute(sa.select(sa.func.coalesce(sa.func.max(worker.c.id), 0))).scalar_one()
    last = max(int(newest) + 1, int(connection.execute(sa.select(db_now())).scalar_one()))
    if connection.dialect.name == "sqlite":
        connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = 'worker'"))
        connection.execute(sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES ('worker', :last)"), {"last": last})
    else:
        connection.execute(sa.text("SELECT setval(pg_get_serial_sequence('worker', 'id'), :last)"), {"last": last})


def checked(store: Store, revision: str, backup: Path, put: arrays.Copies) -> list[str]:
    """Bring a restored copy to today's schema, free what its workers held, put array files back (told in `put`), check
    every run; the names of its runs."""
    if revision != migrations.REVISION:
        migrations.upgrade(store.database)
    former = arrays.own_folders(store)
    with store.database.writing() as connection:
        _skip_worker_ids(connection)
        # They work on the original, if at all; never on this copy.
        silent = db_now() - worker.c.ttl_s - 1.0
        connection.execute(
            sa.update(worker)
            .where(worker.c.state == WorkerState.LIVE.value, worker.c.heartbeat > silent)
            .values(heartbeat=silent)
        )
    # A merge or fork that was under way keeps its promises when its run gets its name, and goes on until then.
    runs = [store.existing_run(name) for name in store.run_names() if not name.startswith(UNFINISHED)]
    for run in runs:
        run.reap()
    arrays.copy_from(store, Path(f"{backup}{arrays.ARRAYS}"), former, put)
    for run in runs:
        run.transact(recount)
        if findings := run.check():
            told = "; ".join(f"{f.code}: {f.message} ({f.count} rows)" for f in findings)
            raise BackupError(f"run {run.name!r} of {backup} breaks a promise: {told}. {ANOTHER}")
    return store.run_names()
