"""samplestore prune, backup, restore, db downgrade, as an operator types them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

import samplestore
from samplestore import migrations
from samplestore.backups import backup as backups
from samplestore.backups import postgres, sqlite
from samplestore.engine import Database
from samplestore.errors import BackupError, LeaseLost, RunInUse, SchemaMismatch, UnknownWorker
from samplestore.run import Run
from samplestore.verbs import weights
from tests.cli.conftest import Cli
from tests.support import factory as f
from tests.support.postgres import Databases
from tests.support.processes import Processes


@pytest.fixture
def filled(db_url: str) -> str:
    """The URL of a database with a run of four committed steps, a leased batch, and samples in flight."""
    with samplestore.open(db_url) as store:
        run = f.make_run(store, prompts=20, max_staleness=8)
        worker, trainer = f.register(run), f.register(run, "trainer")
        for claim in run.claim(worker, 20):
            f.answer(run, claim, 700)
        for step in range(4):
            f.commit(run, f.lease(run, trainer, step) or 0, trainer)
        f.lease(run, trainer, 4, groups=1)
        [claim] = run.claim(worker, 1)
        f.add(run, claim, 5)
    return db_url


@pytest.fixture
def elsewhere(db_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of a place to restore to: no file yet, or an empty database."""
    if db_url.startswith("sqlite"):
        return f"sqlite:///{tmp_path}/restored.db"
    return str(request.getfixturevalue("postgres_empty_url"))


def stop_all(run: Run) -> None:
    for row in f.rows(run, "SELECT id FROM worker WHERE state = 'live'"):
        run.goodbye(row["id"])


# -- prune


def test_prune_tells_what_it_did(cli: Cli, filled: str) -> None:
    told = cli("prune", "--keep-steps", 1, "--db", filled, "--json").json
    assert (told["retention_step"], told["groups"], told["segments"]) == (2, 6, 12)
    assert told["freed_bytes"] == 12 * 5601 and told["slices"] >= 2
    again = cli("prune", "--keep-steps", 1, "--db", filled)
    assert again.code == 0 and "steps up to 2 are pruned; 0 groups" in again.out
    assert cli("check", "--db", filled).code == 0 and cli("ledger", "--exact", "--db", filled).code == 0
    far = cli("rewind", 1, "--db", filled, "--yes")
    assert far.code == 1 and "step 1" in far.err and "samplestore rewind 2" in far.err


def test_prune_must_be_told_what(cli: Cli, filled: str) -> None:
    for words in ((), ("--all", "--keep-steps", 1), ("--all",)):
        refused = cli("prune", *words, "--db", filled)
        assert refused.code == 2 and "samplestore prune" in refused.err
    asked = cli("prune", "--all", "--run", "r", "--db", filled)
    assert asked.code == 2 and "samplestore prune --all --run r --yes" in asked.err
    busy = cli("prune", "--all", "--run", "r", "--yes", "--db", filled)
    assert busy.code == 1 and "2 live workers" in busy.err and "samplestore reap" in busy.err
    assert cli("check", "--db", filled).code == 0, "and nothing was changed"


def test_prune_of_a_whole_run(cli: Cli, filled: str) -> None:
    with samplestore.open(filled) as store:
        stop_all(store.existing_run("r"))
    gone = cli("prune", "--all", "--run", "r", "--yes", "--full", "--db", filled)
    assert gone.code == 0 and "run r: it is gone" in gone.out, gone.err
    with samplestore.open(filled) as store:
        assert store.run_names() == []


# -- backup and restore


def test_a_backup_is_restored_whole(cli: Cli, filled: str, elsewhere: str, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    made = cli("backup", target, "--db", filled, "--json")
    assert made.code == 0, made.err
    assert made.json["size"] == target.stat().st_size and made.json["revision"] == migrations.REVISION
    assert sorted(p.name for p in tmp_path.glob("backup*")) == ["backup"], "nothing lies beside it"
    done = cli("restore", target, "--db", elsewhere)
    assert done.code == 0 and ": 1 run of " in done.out, done.err
    with samplestore.open(filled) as old, samplestore.open(elsewhere) as new:
        theirs, ours = (s.existing_run("r") for s in (old, new))
        f.sound(ours)
        before, after = f.snapshot(theirs), f.snapshot(ours)
        for table in ("prompt", "segment", "weight_version", "timeline"):
            assert before[table] == after[table], table
        # whoever was at work then is dead in the copy, and what they held is free
        assert {r["state"] for r in f.rows(ours, "SELECT state FROM worker")} == {"dead"}
        assert f.value(ours, "SELECT count(*) FROM sample WHERE owner IS NOT NULL") == 0
        assert {r["state"] for r in f.rows(ours, "SELECT state FROM batch")} == {"committed", "released"}
        assert {r["state"] for r in f.rows(theirs, "SELECT state FROM worker")} == {"live"}, "and not in the original"
        [claim] = ours.claim(f.register(ours), 1)
        assert len(f.tokens_of(claim)) == 5, "a sample in flight goes on from its stored tokens"


def test_a_backup_is_never_put_over_a_database_in_use(cli: Cli, tmp_path: Path, sqlite_url: str) -> None:
    """Whoever has it open would write on into a file without a name."""
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, "mine")
        f.finish_all(run, f.register(run))
        path = Path(sqlite_url.removeprefix("sqlite:///"))
        for target in (path, path.parent / "." / path.name):
            refused = cli("backup", target, "--db", sqlite_url, "--overwrite")
            assert refused.code == 1 and "is the database itself" in refused.err
        other = tmp_path / "other.db"
        other.write_bytes(path.read_bytes())
        Path(f"{other}-wal").write_bytes(b"commits of somebody")
        assert "in use" in cli("backup", other, "--db", sqlite_url, "--overwrite").err
        f.sound(run)


def test_nothing_is_overwritten_unasked(cli: Cli, filled: str, elsewhere: str, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    target.write_text("mine")
    assert "--overwrite" in cli("backup", target, "--db", filled).err
    assert target.read_text() == "mine"
    assert cli("backup", target, "--db", filled, "--overwrite").code == 0
    assert cli("restore", target, "--db", elsewhere).code == 0
    refused = cli("restore", target, "--db", elsewhere)
    assert refused.code == 1 and "--overwrite" in refused.err
    with samplestore.open(elsewhere) as store:
        later = f.make_run(store, "later")
        worker = f.register(later)
    busy = cli("restore", target, "--db", elsewhere, "--overwrite")
    assert busy.code == 1 and f"in use by 1 live worker or trainer ({worker}). Stop it, " in busy.err
    with samplestore.open(elsewhere) as store:
        store.existing_run("later").goodbye(worker)
    assert cli("restore", target, "--db", elsewhere, "--overwrite").code == 0
    with samplestore.open(elsewhere) as store:
        assert store.run_names() == ["r"]
        f.sound(store.existing_run("r"))


def test_a_backup_while_a_worker_writes(filled: str, elsewhere: str, tmp_path: Path) -> None:
    """One moment of it: the copy is sound, and holds what was acknowledged before it began."""
    with samplestore.open(filled) as store:
        run = store.existing_run("r")
        [claim] = run.claim(f.register(run), 1)
        stop, acknowledged, failed = threading.Event(), [0], list[Exception]()

        def append() -> None:
            try:
                while not stop.is_set():
                    f.add(run, claim, 3)
                    acknowledged[0] += 1
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=append)
        thread.start()
        try:
            for i in range(3):
                before = acknowledged[0]
                backups.backup(store.database, tmp_path / f"b{i}")
                after = acknowledged[0]
        finally:
            stop.set()
            thread.join()
        assert not failed and acknowledged[0] > 3
    copy = Database(elsewhere)
    try:
        assert backups.restore(tmp_path / "b2", copy).runs == ["r"]
    finally:
        copy.close()
    with samplestore.open(elsewhere) as store:
        held = f.sample(store.existing_run("r"), claim.sample_id)["n_segments"]
        assert before <= held <= after + 1


def test_damage_and_strangers_are_refused(cli: Cli, filled: str, elsewhere: str, tmp_path: Path) -> None:
    target, cut, text = tmp_path / "backup", tmp_path / "cut", tmp_path / "text"
    assert cli("backup", target, "--db", filled).code == 0
    cut.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    text.write_text("no backup at all, but long enough to be looked at")
    for bad, word in (
        (cut, "cut is damaged" if filled.startswith("sqlite") else "pg_restore failed"),
        (text, "is no backup"),
        (tmp_path / "missing", "cannot read"),
    ):
        refused = cli("restore", bad, "--db", elsewhere)
        assert refused.code == 1 and word in refused.err, refused.err
    if filled.startswith("sqlite"):
        assert not (tmp_path / "restored.db").exists()
        assert not list(tmp_path.glob("*partial*"))
    else:
        other = cli("restore", target, "--db", tmp_path / "file.db")
        assert "file of pg_dump" in other.err and "postgresql://" in other.err
        assert migrations.is_blank(Database(elsewhere))


def test_an_engine_keeps_no_weights_that_the_backup_did_not_know(db_url: str, tmp_path: Path) -> None:
    """Their number comes again after the restore, with other weights."""
    database = Database(db_url)
    with samplestore.Store(database) as store:
        run = f.make_run(store)
        backups.backup(database, tmp_path / "backup")
        lost = run.publish_weights(step=1)
        rewound = run.rewind(0)
        backups.restore(tmp_path / "backup", database, overwrite=True)
        restored = store.existing_run("r")
        again = restored.publish_weights(step=1)
        assert again.version == lost.version
        assert len({lost.label, rewound.label, again.label, restored.rewind(0).label}) == 4
        for left in (lost, rewound):
            seen = restored.transact(lambda tx, left=left: weights.see_engine(tx, "http://engine", left.label))
            assert (seen["label"], seen["version"]) == (left.label, None)


def test_no_process_gets_the_id_of_one_that_the_backup_did_not_know(db_url: str, tmp_path: Path) -> None:
    """A worker that was suspended before a restore writes into the restored database when it wakes up."""
    database = Database(db_url)
    with samplestore.Store(database) as store:
        run = f.make_run(store)
        backups.backup(database, tmp_path / "backup")
        suspended = f.register(run)
        (claim, *_) = run.claim(suspended, 8)
        f.kill(run, suspended)
        backups.restore(tmp_path / "backup", database, overwrite=True)
        restored = store.existing_run("r")
        (its_own, *_) = restored.claim(f.register(restored), 8)
        assert (its_own.sample_id, its_own.attempt) == (claim.sample_id, claim.attempt)
        with pytest.raises(LeaseLost):
            f.add(restored, claim)
        with pytest.raises(UnknownWorker):
            restored.heartbeat(suspended)
        f.add(restored, its_own)
        f.sound(restored)


def test_a_backup_that_breaks_a_promise_is_refused(filled: str, elsewhere: str, tmp_path: Path) -> None:
    with samplestore.open(filled) as store:
        f.execute(store, "UPDATE sample SET n_tokens = n_tokens + 1 WHERE id = 1")
        backups.backup(store.database, tmp_path / "backup")
    copy = Database(elsewhere)
    with pytest.raises(BackupError, match="breaks a promise: sample_summary"):
        backups.restore(tmp_path / "backup", copy)
    copy.close()
    assert not (tmp_path / "restored.db").exists()


def test_an_older_backup_is_migrated_and_a_newer_refused(
    db_url: str, elsewhere: str, tmp_path: Path, filled: str
) -> None:
    assert migrations.downgrade(filled, "0001") == "0001"
    target = tmp_path / "old"
    old = Database(filled)
    if old.is_sqlite:
        sqlite.copy(old, target)
    else:
        postgres.copy(old, target)
    f.execute(samplestore.store.Store(old), "UPDATE alembic_version SET version_num = '9999'")
    newer = tmp_path / "new"
    if old.is_sqlite:
        sqlite.copy(old, newer)
    else:
        postgres.copy(old, newer)
    old.close()
    copy = Database(elsewhere)
    with pytest.raises(SchemaMismatch, match="pip install -U"):
        backups.restore(newer, copy)
    done = backups.restore(target, copy)
    assert (done.revision, done.runs) == ("0001", ["r"])
    assert migrations.current(copy) == migrations.REVISION
    copy.close()


# -- of one kind


def test_files_of_a_former_database_do_not_come_back(cli: Cli, sqlite_url: str, tmp_path: Path) -> None:
    """SQLite plays a WAL into whatever database lies under its name."""
    with samplestore.open(sqlite_url) as store:
        f.make_run(store)
    assert cli("backup", tmp_path / "b.db", "--db", sqlite_url).code == 0
    (tmp_path / "new.db-wal").write_bytes(b"\x37\x7f\x06\x82" + bytes(500))
    refused = cli("restore", tmp_path / "b.db", "--db", tmp_path / "new.db")
    assert refused.code == 1 and "new.db-wal exists" in refused.err
    assert cli("restore", tmp_path / "b.db", "--db", tmp_path / "new.db", "--overwrite").code == 0
    assert cli("check", "--db", tmp_path / "new.db").code == 0


def test_a_database_in_use_is_no_backup(sqlite_url: str, tmp_path: Path) -> None:
    with samplestore.open(sqlite_url) as store:
        f.make_run(store)
        with pytest.raises(BackupError, match=r"holds a part of it.*samplestore backup"):
            backups.restore(tmp_path / "rollouts.db", Database(tmp_path.joinpath("new.db").as_posix()))


def test_a_database_in_use_is_not_replaced(sqlite_url: str, tmp_path: Path) -> None:
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store)
        backups.backup(store.database, tmp_path / "b.db")
        f.register(run)
        with pytest.raises(RunInUse):
            backups.restore(tmp_path / "b.db", store.database, overwrite=True)
        f.sound(run)


def test_a_disk_that_is_full_leaves_no_half_backup(sqlite_url: str, tmp_path: Path, processes: Processes) -> None:
    """A limit on the size of files stands for the disk."""
    with samplestore.open(sqlite_url) as store:
        f.finish_all(f.make_run(store, prompts=20), f.register(store.existing_run("r")), n=20_000)
    code = (
        "import resource, signal, sys; from samplestore.cli.app import run;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000));"
        "sys.exit(run(sys.argv[1:]))"
    )
    process = processes.start([sys.executable, "-c", code, "backup", str(tmp_path / "b.db"), "--db", sqlite_url])
    assert process.wait(60) == 1
    assert "cannot write" in process.log() and "df -h" in process.log()
    assert not list(tmp_path.glob("b.db*"))


def test_pg_dump_that_is_missing_is_named(
    cli: Cli, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = cli("backup", tmp_path / "b", "--db", postgres_url)
    assert said.code == 1 and "apt-get install postgresql-client" in said.err


def test_the_password_is_no_argument(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_server: Databases
) -> None:
    """Arguments are seen by every user of a machine."""
    fake = tmp_path / "pg_dump"
    fake.write_text('#!/bin/sh\necho "error: $* / $PGPASSWORD" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    secret = make_url(postgres_url).set(password="s3cr3t")  # trusted here: the server asks for none
    database = Database(secret)
    with pytest.raises(BackupError) as caught:
        backups.backup(database, tmp_path / "b")
    database.close()
    arguments, _, given = str(caught.value).partition(" / ")
    assert "s3cr3t" not in arguments and given.startswith("s3cr3t")


def test_a_copied_backup_opens_with_any_sqlite(sqlite_url: str, tmp_path: Path) -> None:
    """The backup is one plain file: no WAL belongs to it."""
    with samplestore.open(sqlite_url) as store:
        f.make_run(store)
        backups.backup(store.database, tmp_path / "b.db")
    shutil.copyfile(tmp_path / "b.db", tmp_path / "c.db")
    found = sqlite3.connect(f"file:{tmp_path}/c.db?mode=ro", uri=True)
    assert found.execute("SELECT name FROM run").fetchall() == [("r",)]
    assert found.execute("PRAGMA journal_mode").fetchone()[0] != "wal"
    found.close()


# -- db downgrade


def test_db_downgrade(cli: Cli, filled: str) -> None:
    done = cli("db", "downgrade", "0002", "--db", filled)
    assert done.code == 0 and f"revision 0002 (it was {migrations.REVISION})" in done.out
    assert cli("check", "--db", filled).code == 3
    assert cli("db", "upgrade", "--db", filled).code == 0
    assert cli("check", "--db", filled).code == 0
    unknown = cli("db", "downgrade", "base", "--db", filled)
    assert unknown.code == 2 and "samplestore db current" in unknown.err
    assert cli("prune", "--keep-steps", 1, "--db", filled).code == 0
    refused = cli("db", "downgrade", "0002", "--db", filled)
    assert refused.code == 1 and "were pruned" in refused.err and "samplestore restore" in refused.err


def test_show_of_a_pruned_sample(cli: Cli, filled: str) -> None:
    assert cli("prune", "--keep-steps", 0, "--db", filled).code == 0
    told = cli("show", "0/0", "--db", filled, "--json")
    assert told.code == 0 and told.json["sample"]["n_tokens"] == 700, told.err
