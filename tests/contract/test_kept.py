"""The writing connection that a thread keeps: it is given back when the thread or the store ends, survives refused
writes and a database that is replaced underneath, and is not used by a child."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine.default import DefaultDialect

import samplestore
from samplestore import driver
from samplestore.errors import LeaseLost, SampleStoreError, StoreUnavailable
from samplestore.urls import sqlite_module

from ..support import factory as f


@pytest.fixture
def sqlite_path(sqlite_url: str, tmp_path: Path) -> Path:
    return tmp_path / "rollouts.db"


@pytest.fixture
def kept(sqlite_path: Path) -> Iterator[samplestore.Store]:
    with samplestore.open(str(sqlite_path)) as store:
        yield store


def open_files(path: Path) -> int:
    """How many descriptors of this process are this file."""
    links = Path("/proc/self/fd")
    return sum(os.path.realpath(link) == str(path) for link in links.iterdir())


def test_a_refused_write_leaves_nothing_behind(kept: samplestore.Store) -> None:
    """On the same connection the next write begins afresh, whether the driver or SQLAlchemy had begun."""
    run = f.make_run(kept, prompts=2, samples_per_prompt=1)
    (claim, other) = run.claim(f.register(run), 2)
    run.drop([claim.group_id], "unwanted")
    before = kept.database.writer.pool.checkedout()
    for refused in (lambda: f.add(run, claim, 3), lambda: run.release(claim, "x"), lambda: run.fail(claim, "x")):
        with pytest.raises(LeaseLost):
            refused()
    with pytest.raises(sa.exc.IntegrityError), kept.database.writing() as connection:
        connection.execute(sa.text("INSERT INTO prompt SELECT * FROM prompt"))
    assert f.add(run, other, 3) == 3
    assert kept.database.writer.pool.checkedout() == before == 1
    f.sound(run)


def test_threads_that_end_give_theirs_back(kept: samplestore.Store) -> None:
    run = f.make_run(kept, prompts=2)
    for _ in range(20):
        thread = threading.Thread(target=run.admit)
        thread.start()
        thread.join()
    assert kept.database.writer.pool.checkedout() == 1


def test_a_closed_store_holds_no_file(sqlite_path: Path) -> None:
    """Also of threads that live on; and the WAL is gone with the last connection."""
    store = samplestore.open(str(sqlite_path))
    run = f.make_run(store)
    wrote, may_end = threading.Event(), threading.Event()

    def work() -> None:
        run.admit()
        wrote.set()
        may_end.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert wrote.wait(30)
    store.close()
    assert open_files(sqlite_path) == 0
    assert not sqlite_path.with_name(sqlite_path.name + "-wal").exists()
    may_end.set()
    thread.join()


def test_a_file_that_was_replaced_is_opened_anew(kept: samplestore.Store, sqlite_path: Path, tmp_path: Path) -> None:
    run = f.make_run(kept)
    kept.database.close_connections()
    shutil.copyfile(sqlite_path, tmp_path / "copy.db")
    os.replace(tmp_path / "copy.db", sqlite_path)
    (claim,) = run.claim(f.register(run), 1)
    assert f.add(run, claim, 3) == 3
    with samplestore.open(str(sqlite_path)) as another:
        assert f.value(another, "SELECT sum(n_tokens) FROM segment") == 3


def test_a_child_opens_its_own(kept: samplestore.Store) -> None:
    """A SQLite connection that crosses a fork corrupts what both write."""
    run = f.make_run(kept, prompts=4, samples_per_prompt=1)
    me = f.register(run)
    run.claim(me, 1)
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if len(run.claim(me, 1)) == 1 else 1)
        except SampleStoreError:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(run.claim(me, 1)) == 1
    f.sound(run)


def test_a_commit_that_failed_once_is_forgotten(kept: samplestore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at COMMIT: the error is typed, and once there is room the same thread writes on. SQLAlchemy keeps a
    transaction that failed so, and refuses everything after it."""
    run = f.make_run(kept)
    kept.database.reconnect_s = 0.0
    full = [True]
    commit = DefaultDialect.do_commit

    def refuse(self: Any, connection: Any) -> None:
        if full[0]:
            raise sqlite_module().OperationalError("database or disk is full")
        commit(self, connection)

    monkeypatch.setattr(DefaultDialect, "do_commit", refuse)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="disk is full"):
            run.register(info={"note": "a statement through SQLAlchemy, so that it commits"})
    full[0] = False
    (claim,) = run.claim(run.register(), 1)
    assert f.add(run, claim, 3) == 3
    f.sound(run)


@pytest.mark.parametrize("place", ["BEGIN IMMEDIATE", "COMMIT"])
def test_an_interrupt_leaves_no_transaction(
    kept: samplestore.Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ctrl-C just after BEGIN or before COMMIT: the next write begins afresh, and other processes are not shut out."""
    run = f.make_run(kept)
    sent = driver.run

    def interrupted(connection: Any, sql: str, *args: Any, **kwargs: Any) -> Any:
        if sql == place == "COMMIT":
            raise KeyboardInterrupt
        answer = sent(connection, sql, *args, **kwargs)
        if sql == place:
            raise KeyboardInterrupt
        return answer

    (claim,) = run.claim(f.register(run), 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(driver, "run", interrupted)
        f.add(run, claim, 3)
    with samplestore.open(kept.database.shown_url, busy_s=1.0) as other:
        other.existing_run("r").pause()
    assert f.add(run, claim, 3) == 3
    f.sound(run)


def test_more_threads_than_connections(kept: samplestore.Store) -> None:
    """Threads that live on after a write must not hold all the connections there are."""
    n = 80
    run = f.make_run(kept, prompts=n, groups_per_step=n // 2, samples_per_prompt=1)
    claims = run.claim(f.register(run), n)
    wrote, end = threading.Barrier(n + 1), threading.Event()

    def work(claim: Any) -> None:
        f.add(run, claim, 1)
        wrote.wait(60)
        end.wait(60)

    threads = [threading.Thread(target=work, args=(claim,)) for claim in claims]
    for thread in threads:
        thread.start()
    try:
        wrote.wait(60)
        run.publish_weights(step=1)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    f.sound(run)


def test_a_child_never_meets_its_parents_connection(kept: samplestore.Store) -> None:
    """Not by the pool either, nor in another thread, nor in a durable write."""
    run = f.make_run(kept, prompts=4, samples_per_prompt=1)
    run.claim(f.register(run), 1)
    inherited = {id(one.connection.connection.driver_connection) for one in kept.database._kept._all}
    if (child := os.fork()) == 0:
        run.publish_weights(step=1)
        mine = {id(one.connection.connection.driver_connection) for one in kept.database._kept._all}
        with kept.database.writer.connect() as connection:
            mine.add(id(connection.connection.driver_connection))
        os._exit(len(mine & inherited))
    assert os.waitpid(child, 0)[1] == 0
    assert run.current_version == 1
