"""A reader that never ends its transaction: writers go on, what grows because of it is told, and ours are ended."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Sample, Store, readers, wal
from samplestore.errors import ReadTooLong
from tests.support import factory as f
from tests.support.processes import Processes, wait_until

STAYS = """
import signal, sys
from samplestore.urls import sqlite_module
connection = sqlite_module().connect(sys.argv[1])
connection.execute("BEGIN")
print("reading", connection.execute("SELECT count(*) FROM sample").fetchone(), flush=True)
signal.pause()
"""
COUNT = sa.select(sa.func.count()).select_from(Sample)


def test_a_session_that_stays_stops_no_writer_and_sees_its_snapshot(store: Store) -> None:
    run = f.make_run(store, prompts=4, admit=False)
    with store.session() as session:
        assert session.execute(COUNT).scalar_one() == 0
        run.admit()
        f.finish_all(run, f.register(run))
        assert session.execute(COUNT).scalar_one() == 0
    with store.session() as session:
        assert session.execute(COUNT).scalar_one() == 8


def test_a_session_that_stays_too_long_is_ended(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readers, "LIMIT_S", 0.05)
    with samplestore.open(sqlite_url) as store:
        f.make_run(store)
        with pytest.raises(ReadTooLong, match=r"ended after 0\.05 s"), store.session() as session:
            session.execute(COUNT)
            wait_until(lambda: "is ended" in caplog.text, what="the end of the session")
            wait_until(lambda: readers.of(str(store.database.path)) == [], what="its read mark is gone")
            session.execute(COUNT)
        with store.session() as session:
            assert session.execute(COUNT).scalar_one() == 8, "the next is a new one"


def test_a_statement_that_runs_too_long_is_ended(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LIMIT_S", 0.05)
    endless = sa.text("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n")
    with samplestore.open(sqlite_url) as store:
        with pytest.raises(ReadTooLong), store.session() as session:
            session.execute(endless)


def test_rows_that_were_cut_short_are_not_taken_for_all(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readers, "LIMIT_S", 0.05)
    many = sa.text("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000) SELECT i FROM n")
    with samplestore.open(sqlite_url) as store:
        with pytest.raises(ReadTooLong), store.session() as session:
            rows = iter(session.execute(many.execution_options(yield_per=10)))
            next(rows)
            wait_until(lambda: "is ended" in caplog.text, what="the end of the session")
            list(rows)
        assert store.run_names() == []


def test_a_short_session_is_left_alone(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    f.make_run(store)
    with store.session() as session:
        session.execute(COUNT)
        session.rollback()
        assert session.execute(COUNT).scalar_one() == 8
    assert "is ended" not in caplog.text


def test_the_server_ends_a_session_that_stays(postgres_url: str) -> None:
    with samplestore.open(postgres_url) as store, samplestore.open(postgres_url) as other:
        run = f.make_run(other)
        with pytest.raises(ReadTooLong, match="ended after 60 s"), store.session() as session:
            limit = session.execute(sa.text("SHOW idle_in_transaction_session_timeout")).scalar_one()
            assert limit == f"{readers.IDLE_LIMIT_S // 60}min"
            session.execute(sa.text("SET idle_in_transaction_session_timeout = '50ms'"))
            pid = session.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
            there = "SELECT count(*) FROM pg_stat_activity WHERE pid = :p"
            wait_until(lambda: f.value(run, there, p=pid) == 0, what="the server has ended the session")
            session.execute(COUNT)


def test_a_wal_that_grows_because_of_a_reader_is_told_with_its_process(
    sqlite_url: str,
    tmp_path: Path,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wal, "PAGES", 64)
    monkeypatch.setattr(wal, "REST_PAGES", 8)
    monkeypatch.setattr(wal, "WARN_PAGES", 256)
    caplog.set_level(logging.WARNING)
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=4)
        (claim, *_) = run.claim(f.register(run), 8)
        assert readers.of(str(tmp_path / "rollouts.db")) == []
        reader = processes.start([sys.executable, "-c", STAYS, str(tmp_path / "rollouts.db")], name="reader")
        reader.wait_for_log("reading")
        assert readers.of(str(tmp_path / "rollouts.db")) == [reader.pid]

        def write() -> str:
            f.add(run, claim, 2000)
            return "can't be used again" if "can't be used again" in caplog.text else ""

        wait_until(write, what="a warning of the WAL", interval=0)
        assert f"process {reader.pid} keeps it" in caplog.text
        log = tmp_path / "rollouts.db-wal"
        assert log.stat().st_size >= 256 * 4096
        before = salt(log)
        reader.kill()
        assert readers.of(str(tmp_path / "rollouts.db")) == []
        wait_until(lambda: f.add(run, claim, 2000) and salt(log) != before, what="the WAL is used again", interval=0)


def salt(log: Path) -> bytes:
    """Of a WAL's header: another one each time that it is begun anew."""
    with log.open("rb") as file:
        return file.read(24)[16:]
