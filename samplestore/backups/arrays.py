"""Side-car files of arrays: beside a backup, and in folders of the restored runs' own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from samplestore.arrayfiles import ArrayFiles, LocalFiles, open_files
from samplestore.errors import ArrayFileError, BackupError
from samplestore.models import Run, Sample, SegmentArray
from samplestore.runsettings import RunSettings
from samplestore.store import Store

ARRAYS = ".arrays"  # the folder of a backup's side-car files, beside it

Copies = list[tuple[ArrayFiles, str]]


def copy_to(store: Store, named: set[tuple[str, str]], folder: Path) -> int:
    """Copy files that rows name (uuid of a run, file) into a backup's folder, RUN_UUID/ab/abcdef...; how many. Raises
    BackupError."""
    runs = {run.uuid: run for run in map(store.existing_run, store.run_names())}
    for of, key in sorted(named):
        target = LocalFiles(folder / of)
        try:
            if not target.whole(key):  # of an earlier backup: a disk may have lost or changed it
                target.put(runs[of].array_files().get(key))
        except (ArrayFileError, KeyError) as error:
            why = f"run {of} is gone" if isinstance(error, KeyError) else error
            raise BackupError(f"{why}. Was it pruned meanwhile? Then run this again") from error
    return len(named)


def own_folders(store: Store) -> dict[str, RunSettings]:
    """Give each run that has array files a folder of its own for them; its former settings, by uuid. The database that
    the backup was taken of may still be in use: a prune of either must not remove files that rows of the other name."""
    table, former = Run.__table__, {}
    for name in store.run_names():
        run = store.existing_run(name)
        if run.settings.array_url is None:
            continue
        former[run.uuid] = run.settings
        settings = replace(run.settings, array_folder=uuid.uuid4().hex[:16]).as_json()
        with store.database.writing() as connection:
            connection.execute(sa.update(table).where(table.c.id == run.id).values(settings=settings))
    return former


def copy_from(store: Store, folder: Path, former: dict[str, RunSettings], put: Copies) -> None:
    """Put the files that rows name where the runs look for them: from the backup's folder, or else from where they lay.
    Raises BackupError."""
    runs = {run.uuid: run for run in map(store.existing_run, store.run_names())}
    for of, key in sorted(named_files(store)):
        kept: ArrayFiles = LocalFiles(folder / of)
        try:
            if kept.size(key) is None and of in former:
                kept = open_files(former[of], of)
            files = runs[of].array_files()
            files.put(kept.get(key))
        except ArrayFileError as error:
            raise BackupError(f"{error}. A backup's files lie in {folder}") from error
        put.append((files, key))


@contextmanager
def copies() -> Iterator[Copies]:
    """Array files that were put into folders of their own, removed if the restore fails: nobody would find them."""
    put: Copies = []
    try:
        yield put
    except BaseException:  # Ctrl-C too: what was put is removed whatever ended the restore
        for files, key in put:
            with suppress(OSError):  # one that can't be removed must not keep the others
                files.remove(key, 0.0)
        raise


def named_files(store: Store) -> set[tuple[str, str]]:
    """(uuid of the run, file) of all side-car files that rows name."""
    table, samples, runs = SegmentArray.__table__, Sample.__table__, Run.__table__
    query = (
        sa.select(runs.c.uuid, table.c.sidecar)
        .select_from(table.join(samples, samples.c.id == table.c.sample_id).join(runs, runs.c.id == samples.c.run_id))
        .where(table.c.sidecar.is_not(None))
        .distinct()
    )
    return store.database.read(lambda c: {(of, key) for of, key in c.execute(query)})
