"""Checkpoints beside the writers: the WAL stays short, nothing is lost, and a reader only delays it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore import wal
from samplestore.run import Run
from samplestore.types import Claim

from ..support import factory as f

TOKENS = 8192  # a segment is 16 pages and a little


@pytest.fixture
def run(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run on SQLite whose WAL is long at 64 pages. Its thread never looks by itself: the test does."""
    monkeypatch.setattr(wal, "PAGES", 64)
    monkeypatch.setattr(wal, "REST_PAGES", 16)
    monkeypatch.setattr(wal.Checkpointer, "_loop", lambda self: None)
    with samplestore.open(sqlite_url) as store:
        yield f.make_run(store, prompts=1)


def fill(run: Run, claim: Claim, segments: int) -> None:
    for _ in range(segments):
        run.append(claim, np.arange(TOKENS), np.full(TOKENS, -0.5, np.float32), 0)


def pages(run: Run) -> tuple[int, int]:
    """(in the WAL, of them copied)"""
    connection = run.database._sqlite_writer()
    try:
        return wal._checkpoint(connection, "NOOP")
    finally:
        connection.close()


descriptors = wal._descriptors


def look(run: Run) -> None:
    connection = run.database._sqlite_writer()
    try:
        run.database.checkpointer.look(connection)
    finally:
        connection.close()


def test_a_long_wal_is_copied_and_used_again(run: Run) -> None:
    claim = run.claim(f.register(run), 1)[0]
    fill(run, claim, 8)
    length, copied = pages(run)
    assert length > 64 and copied < length
    look(run)
    assert pages(run)[1] == pages(run)[0]
    size = Path(f"{run.database.path}-wal").stat().st_size
    fill(run, claim, 1)
    assert pages(run)[0] < 64, "the commit after it starts the WAL afresh"
    assert Path(f"{run.database.path}-wal").stat().st_size == size
    f.sound(run)


def test_the_disk_has_it_before_writers_wait(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite flushes the file when all of it is copied, which is behind the gate."""
    claim = run.claim(f.register(run), 1)[0]
    fill(run, claim, 8)
    order: list[str] = []
    flush, hold = os.fsync, run.database.checkpointer._gate

    def flushed(fd: int) -> None:
        flush(fd)
        order.append(os.readlink(f"/proc/self/fd/{fd}"))

    def held() -> Any:
        order.append("gate")
        return hold()

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(run.database.checkpointer, "_gate", held)
    look(run)
    assert order == [str(run.database.path), "gate"]
    fill(run, claim, 8)
    # One that was closed just now, and one whose number somebody else has now.
    read, write = os.pipe()
    monkeypatch.setattr(wal, "_descriptors", lambda path: [10_000, write, *descriptors(path)])
    look(run)
    os.close(read)
    os.close(write)
    assert order == [str(run.database.path), "gate"] * 2
    f.sound(run)


def test_a_disk_that_refuses_is_not_passed_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(run, run.claim(f.register(run), 1)[0], 8)

    def refuses(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuses)
    with pytest.raises(OSError, match="Input/output error"):
        look(run)
    monkeypatch.undo()
    f.sound(run)


def test_a_short_wal_is_left_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = run.claim(f.register(run), 1)[0]
    look(run)  # whatever making the run has left
    fill(run, claim, 1)
    before = pages(run)
    monkeypatch.setattr(wal, "PAGES", 10_000)
    look(run)
    assert pages(run) == before and before[1] < before[0]


def test_a_reader_delays_it_and_no_writer(run: Run) -> None:
    claim = run.claim(f.register(run), 1)[0]
    with run.database.reading() as connection:
        connection.exec_driver_sql("SELECT count(*) FROM segment").scalar()
        fill(run, claim, 16)
        look(run)
        length, copied = pages(run)
        assert copied < length
        fill(run, claim, 1)
    look(run)
    fill(run, claim, 1)
    assert pages(run)[0] < 64
    assert claim.n_tokens == 18 * TOKENS
    f.sound(run)


def test_the_thread_ends_and_begins_again(sqlite_url: str) -> None:
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=1)
        keeper = store.database.checkpointer
        assert keeper is not None and keeper._thread is not None and keeper._thread.is_alive()
        thread = keeper._thread
        store.database.close_connections()
        assert not thread.is_alive()
        f.register(run)
        assert keeper._thread is not None and keeper._thread.is_alive()
    assert keeper._thread is None
