"""Disks that are full, and files and folders that can't be used: a clear error, nothing lost, and no person needed
where it passes by itself."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

import samplestore
from samplestore import Store, environment, urls
from samplestore.cli import exits
from samplestore.errors import DatabaseMissing, DatabaseUnusable, StoreUnavailable
from tests.support import factory as f
from tests.support.processes import Processes

REFUSE = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'could not extend file: No space left on device';
END $$
"""


@contextmanager
def full_disk(store: Store) -> Iterator[threading.Event]:
    """Inside, the database refuses to grow as it does on a full disk; the event is set when it has refused something.

    SQLite: a limit on its pages, which ends in the same SQLITE_FULL. PostgreSQL: an insert fails with the server's own
    SQLSTATE; filling its disk would stop every other test.
    """
    refused, explain = threading.Event(), environment.explain

    def seen(*args: Any, **kwargs: Any) -> Any:
        told = explain(*args, **kwargs)
        if isinstance(told, StoreUnavailable):
            refused.set()
        return told

    environment.explain = seen
    try:
        yield from _refusing(store, refused)
    finally:
        environment.explain = explain


def _refusing(store: Store, refused: threading.Event) -> Iterator[threading.Event]:
    database = store.database
    if database.is_sqlite:
        pages = [1]

        def limit(connection: Any, record: Any, proxy: Any) -> None:
            connection.execute(f"PRAGMA max_page_count={pages[0]}")

        event.listen(database.writer, "checkout", limit)
        database.close_connections()  # those that threads keep are checked out anew
        try:
            yield refused
        finally:
            pages[0] = 2**30
            database.close_connections()
    else:
        f.execute(store, REFUSE)
        f.execute(store, "CREATE TRIGGER refuse BEFORE INSERT ON segment FOR EACH ROW EXECUTE FUNCTION full_disk()")
        try:
            yield refused
        finally:
            f.execute(store, "DROP TRIGGER refuse ON segment")


BIG = 5000  # tokens: more than the pages that are still free


def test_a_full_disk_refuses_and_loses_nothing(store: Store) -> None:
    run = f.make_run(store)
    claim, other = run.claim(f.register(run), 2)
    f.add(run, claim, BIG)
    before = f.snapshot(run, leave_out=())
    run.database.reconnect_s = 0.0
    with full_disk(store):
        with pytest.raises(StoreUnavailable, match=r"disk.* full.*Nothing was changed.*df -h") as caught:
            f.add(run, claim, BIG)
        assert exits.exit_code(caught.value) == exits.DATABASE
        assert f.snapshot(run, leave_out=()) == before, "what was acknowledged is there, what was refused is not"
        assert run.check() == [], "reading goes on"
    f.add(run, claim, BIG)
    f.add(run, other, BIG)
    assert f.sample(run, claim.sample_id)["n_tokens"] == 2 * BIG
    f.sound(run)


def test_a_write_waits_for_room_and_goes_on(store: Store) -> None:
    run = f.make_run(store)
    [claim] = run.claim(f.register(run), 1)
    f.add(run, claim, BIG)
    failed: list[Exception] = []

    def append() -> None:
        try:
            f.add(run, claim, BIG)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=append)
    with full_disk(store) as refused:
        thread.start()
        assert refused.wait(60)
    thread.join(60)
    assert not thread.is_alive() and not failed
    assert f.sample(run, claim.sample_id)["n_tokens"] == 2 * BIG
    f.sound(run)


def test_no_database_is_told_from_a_damaged_one(tmp_path: Path, sqlite_url: str) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("These are notes, and no database of anything. " * 10)
    with pytest.raises(DatabaseUnusable, match=r"notes.txt is not a database of SQLite\. .*ls -l .*notes.txt"):
        samplestore.open(str(text))
    assert text.read_text().startswith("These are notes"), "it is left as it was"
    path = tmp_path / "rollouts.db"
    with samplestore.open(sqlite_url) as store:
        f.finish_all(f.make_run(store, prompts=50), f.register(store.existing_run("r")), n=500)
    data = bytearray(path.read_bytes())
    data[8192 : len(data) - 4096] = os.urandom(len(data) - 4096 - 8192)
    path.write_bytes(data)
    with (
        pytest.raises(DatabaseUnusable, match=r"is damaged\. .*samplestore restore"),
        samplestore.open(sqlite_url) as store,
    ):
        store.existing_run("r").check()


def test_a_folder_and_a_path_into_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusable, match=rf"is a folder\. .*--db {tmp_path}/rollouts\.db"):
        samplestore.open(str(tmp_path))
    with pytest.raises(DatabaseUnusable, match=r"there is no folder for it\. .*mkdir -p .*deep/er"):
        samplestore.open(str(tmp_path / "deep" / "er" / "a.db"))
    assert not (tmp_path / "deep").exists()


def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    """As `mktemp` and an interrupted creation leave it."""
    (tmp_path / "a.db").touch()
    with pytest.raises(DatabaseMissing, match="samplestore db upgrade"):
        samplestore.open(str(tmp_path / "a.db"), create=False)
    with samplestore.open(str(tmp_path / "a.db")) as store:
        assert store.run_names() == []


def test_a_sqlite_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        sqlite_version_info, sqlite_version = (3, 34, 1), "3.34.1"

    monkeypatch.setattr(urls, "sqlite_module", lambda: Old)
    with pytest.raises(
        DatabaseUnusable, match=r"needs SQLite 3\.38\.0 or newer.* 3\.34\.1\. Run: pip install pysqlite3"
    ):
        samplestore.open(str(tmp_path / "a.db"))
    assert list(tmp_path.iterdir()) == []


# As root every permission holds, so the child lets go of it. What it may need is imported before: nobody else may be
# able to read this installation.
AS_NOBODY = """
import os, sys
import samplestore
from samplestore import retention
from samplestore.backups import backup
from samplestore.cli.app import run
from tests.support import factory as f
warm = sys.argv[2]
with samplestore.open(warm) as store:
    f.sound(f.make_run(store, "warm"))
for words in (["check"], ["status"]):
    assert run([*words, "--db", warm]) == 0
run(["status", "--db", warm + ".missing"])
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
print("NOBODY", flush=True)
how, path = sys.argv[3:]
if how == "write":
    try:
        with samplestore.open(path) as store:
            store.run("new")
        print("written")
    except samplestore.errors.SampleStoreError as error:
        print(type(error).__name__, error)
else:
    print("exit", run(["check", "--db", path]))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose parents everybody may enter; pytest's are closed to others."""
    path = Path(tempfile.mkdtemp(prefix="samplestore-env-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    for folder in (path, *path.iterdir()):
        folder.chmod(0o755)
    shutil.rmtree(path)


def as_nobody(processes: Processes, tmp_path: Path, how: str, path: Path) -> str:
    process = processes.start(
        [sys.executable, "-c", AS_NOBODY, "", str(tmp_path / "warm.db"), how, str(path)], cwd=Path(__file__).parents[2]
    )
    process.wait(120)
    told = process.log().partition("NOBODY\n")
    assert told[1], process.log()
    return told[2]


@pytest.mark.parametrize("closed", ["folder", "file", "gate"])
def test_what_may_not_be_written_is_told(
    closed: str, place: Path, tmp_path: Path, processes: Processes, sqlite_template: Path
) -> None:
    path = place / "a.db"
    shutil.copyfile(sqlite_template, path)
    for open_ in (place, path):
        open_.chmod(0o777)
    if closed == "folder":
        place.chmod(0o555)
    elif closed == "file":
        path.chmod(0o444)
    else:
        (place / "a.db.gate").touch()
        (place / "a.db.gate").chmod(0o400)
    said = as_nobody(processes, tmp_path, "write", path)
    assert said.startswith("DatabaseUnusable"), said
    assert "ls -l" in said
    assert path.read_bytes() == sqlite_template.read_bytes(), "it is left as it was"


def test_what_may_not_be_read_is_told(place: Path, tmp_path: Path, processes: Processes, sqlite_template: Path) -> None:
    path = place / "a.db"
    shutil.copyfile(sqlite_template, path)
    path.chmod(0o600)
    place.chmod(0o777)
    said = as_nobody(processes, tmp_path, "read", path)
    assert "may not be read by this user" in said and "ls -l" in said and "exit 3" in said


def test_a_folder_that_can_only_be_read(
    place: Path, tmp_path: Path, processes: Processes, sqlite_template: Path
) -> None:
    path = place / "a.db"
    shutil.copyfile(sqlite_template, path)
    path.chmod(0o666)
    place.chmod(0o555)
    said = as_nobody(processes, tmp_path, "read", path)
    assert "Copy it to a folder of yours" in said and "exit 3" in said


def test_a_mistake_in_a_read_only_session_stays_one(store: Store) -> None:
    """It is no fault of the environment, so no cure is told."""
    with pytest.raises(sa.exc.DBAPIError), store.database.reading() as connection:
        connection.execute(sa.text("UPDATE run SET name = 'x'"))
