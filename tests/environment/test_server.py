"""PostgreSQL that is restarted, full of connections, or not ours to use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa

import samplestore
from samplestore import migrations
from samplestore.cli import exits
from samplestore.engine import Database
from samplestore.errors import DatabaseUnusable, StoreBusy, StoreUnavailable
from samplestore.run import Run
from tests.support import factory as f
from tests.support.postgres import Databases, PostgresServer
from tests.support.processes import wait_until


class Appending:
    """A thread that appends until it is told to stop. acknowledged: appends that returned."""

    def __init__(self, run: Run) -> None:
        self.run, self.acknowledged, self.failed = run, 0, list[Exception]()
        [self.claim] = run.claim(f.register(run), 1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                f.add(self.run, self.claim, 2)
                self.acknowledged += 1
        except Exception as error:
            self.failed.append(error)

    def more(self, n: int = 5) -> None:
        aim = self.acknowledged + n
        wait_until(lambda: self.failed or self.acknowledged >= aim, what=f"{n} more appends", timeout=60)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive() and not self.failed, self.failed
        assert f.sample(self.run, self.claim.sample_id)["n_segments"] == self.acknowledged
        f.sound(self.run)


def test_appends_go_on_over_restarts_of_the_server(postgres_crash_server: PostgresServer) -> None:
    """kill -9 and an orderly restart: every acknowledged append is there, and no caller hears of it."""
    url = postgres_crash_server.url(postgres_crash_server.create())
    migrations.upgrade(url)
    with samplestore.open(url) as store:
        appending = Appending(f.make_run(store))
        try:
            appending.more()
            postgres_crash_server.kill_and_restart()
            appending.more()
            postgres_crash_server.stop()
            postgres_crash_server.start()
            appending.more()
        finally:
            appending.end()
        assert store.database.reconnects > 0


def test_a_server_that_stays_away_is_told(postgres_crash_server: PostgresServer) -> None:
    url = postgres_crash_server.url(postgres_crash_server.create())
    migrations.upgrade(url)
    with samplestore.open(url) as store:
        run = f.make_run(store)
        [claim] = run.claim(f.register(run), 1)
        store.database.reconnect_s = 0.2
        postgres_crash_server.kill()
        with pytest.raises(StoreUnavailable, match=r"does not answer.*Nothing was changed.*pg_isready") as caught:
            f.add(run, claim)
        assert exits.exit_code(caught.value) == exits.DATABASE
        postgres_crash_server.start()
        f.add(run, claim)
        f.sound(run)


def test_a_lock_that_somebody_keeps_is_told_with_who_keeps_it(postgres_url: str) -> None:
    """Of a verb, and of what is no verb: a migration waits for the locks of all others."""
    with samplestore.open(postgres_url, busy_s=0.3) as store, samplestore.open(postgres_url) as other:
        run = f.make_run(store)
        with other.database.writing() as connection:
            keeps = connection.execute(sa.text("SELECT pg_backend_pid() FROM run FOR UPDATE")).scalar_one()
            who = rf"session {keeps} \(samplestore {os.getpid()}@\S+, idle in transaction\)"
            told = rf"waited 0\.3 s for a lock .*{who}.*psql -c 'TABLE pg_stat_activity'"
            with pytest.raises(StoreBusy, match=told):
                run.publish_weights(path="/w/1", step=0)
            with pytest.raises(StoreBusy, match=told), store.database.writing() as waiting:
                waiting.execute(sa.text("LOCK TABLE run IN ACCESS EXCLUSIVE MODE"))
        run.publish_weights(path="/w/1", step=0)
        f.sound(run)


@pytest.fixture
def narrow_server() -> Iterator[PostgresServer]:
    """A server with six connections."""
    server = PostgresServer.launch(settings={"max_connections": "6", "superuser_reserved_connections": "0",
                                             "max_wal_senders": "0"})  # fmt: skip
    yield server
    server.close()


def test_out_of_connections_is_waited_for_and_told(narrow_server: PostgresServer) -> None:
    url = narrow_server.url(narrow_server.create())
    migrations.upgrade(url)
    with samplestore.open(url) as store:
        run = f.make_run(store)
        [claim] = run.claim(f.register(run), 1)
        store.database.close_connections()
        taken: list[psycopg.Connection] = []
        with pytest.raises(psycopg.OperationalError, match=r"too many clients|slots are reserved"):
            while True:
                taken.append(narrow_server.connect())
        store.database.reconnect_s = 0.0
        with pytest.raises(StoreUnavailable, match=r"no connection left.*Nothing was changed.*max_connections"):
            f.add(run, claim)
        store.database.reconnect_s = 60.0
        done = threading.Event()
        waiting = threading.Thread(target=lambda: (f.add(run, claim), done.set()))
        waiting.start()
        assert not done.wait(0.3), "there is still no connection"
        for connection in taken:
            connection.close()
        waiting.join(60)
        assert done.is_set()
        f.sound(run)


@pytest.mark.parametrize(
    ("database", "user", "told"),
    [
        ("nowhere", None, r"is not there, though its server is\. .*createdb"),
        (None, "stranger", r"lets nobody in by these names .*stranger.*psql"),
    ],
)
def test_what_waiting_does_not_help_is_told_at_once(
    postgres_server: Databases, postgres_url: str, database: str | None, user: str | None, told: str
) -> None:
    """Not after the minute that a server may be away."""
    from sqlalchemy.engine import make_url

    url = make_url(postgres_url)
    url = url.set(database=database or url.database, username=user or url.username)
    with pytest.raises(DatabaseUnusable, match=told) as caught:
        samplestore.open(url.render_as_string(hide_password=False))
    assert exits.exit_code(caught.value) == exits.DATABASE


def test_a_role_without_rights_is_told(postgres_server: Databases, postgres_url: str) -> None:
    from sqlalchemy.engine import make_url

    with postgres_server.connect() as admin:
        admin.execute("DROP ROLE IF EXISTS samplestore_reader")
        admin.execute("CREATE ROLE samplestore_reader LOGIN")
    reader = Database(make_url(postgres_url).set(username="samplestore_reader"))
    try:
        with pytest.raises(DatabaseUnusable, match=r"does not let this user do that .*permission denied.*rights"):
            migrations.current(reader)
    finally:
        reader.close()
        with postgres_server.connect() as admin:
            admin.execute("DROP ROLE samplestore_reader")
