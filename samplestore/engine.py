"""Connections: drivers, pragmas, the two engines (writer, read-only reader), and the one retry loop."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError

from samplestore import driver, environment, faults, filesystem, pgcursor
from samplestore.errors import (
    DatabaseMissing,
    DatabaseUnusable,
    MissingExtra,
    SampleStoreError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
)
from samplestore.gate import Gate
from samplestore.kept import BEGUN, KeptConnections
from samplestore.urls import FIXED_SQLITE, parse_url, require_sqlite, sqlite_module
from samplestore.wal import LIMIT_PAGES, PAGES, Checkpointer

T = TypeVar("T")

RETRY_SQLSTATES = {"40001", "40P01"}  # serialization failure, deadlock
LOCK_TIMEOUT_SQLSTATE = "55P03"
MAX_CONFLICT_RETRIES = 20
# Statements that a SQLite connection keeps prepared. pysqlite3 throws out the least used one: in a connection that has
# seen more texts than it keeps (100, left to itself; making the schema alone takes more), new ones throw each other
# out from then on, and an append takes 170 us to prepare where it takes 10 to run.
STATEMENTS = 1000
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # an escaped NUL; not the text "\\u0000", whose backslash is escaped


class Database:
    """The writer engine, the read-only engine and the gate of one database.

    durability   "normal": what was acknowledged survives the death of any process; "full": power loss too
    busy_s       longest wait for the gate or for a lock
    reconnect_s  how long a write is repeated while the database server is away (every verb can be repeated)
    """

    def __init__(
        self, url: str | PathLike[str] | URL, *, durability: str = "normal", busy_s: float = 30.0,
        reconnect_s: float = 60.0,
    ) -> None:  # fmt: skip
        if durability not in ("normal", "full"):
            raise SampleStoreError(f"durability={durability!r} is not allowed; use 'normal' or 'full'")
        self.url = parse_url(url)
        self.durability, self.busy_s, self.reconnect_s = durability, busy_s, reconnect_s
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._wrote = False  # whether a writer connection was ever made: without, there is nothing to checkpoint
        self.hearts: dict[int, Any] = {}  # run id -> the heart of this process's trainer
        self.on_close: list[Callable[[], None]] = []
        self.closed = False
        self.reconnects = 0  # raised whenever something was repeated after a lost connection
        if self.is_sqlite:
            if not self.url.database or self.url.database == ":memory:":
                told = "an in-memory database would not outlive this process"
                raise SampleStoreError(f"{told}; name a file: --db rollouts.db")
            self.path = Path(self.url.database).absolute()
            filesystem.check(self.path)
            require_sqlite(self.shown_url)
            self.gate: Gate | None = Gate(f"{self.path}.gate", busy_s)
            self.writer, self.reader = self._sqlite_engine("rw"), self._sqlite_engine("ro")
            self._kept: KeptConnections | None = KeptConnections(self.writer)
            # An older SQLite may corrupt the WAL where a checkpoint meets a commit: there the writer does it itself.
            fixed = sqlite_module().sqlite_version_info >= FIXED_SQLITE
            self.checkpointer = Checkpointer(self._sqlite_writer, self.gate.hold) if fixed else None
            _databases.add(self)
        else:
            self.gate = self.checkpointer = self._kept = None
            self.writer, self.reader = self._postgres_engine(read_only=False), self._postgres_engine(read_only=True)

    @property
    def shown_url(self) -> str:
        """The URL with its password masked, as a person would type it."""
        if self.is_sqlite:
            return str(self.path)
        return self.url.set(drivername="postgresql").render_as_string(hide_password=True)

    def exists(self) -> bool:
        return not self.is_sqlite or self.path.exists()

    def _sqlite_writer(self) -> Any:
        return self._sqlite_connection("rw")

    def _require_open(self, *_: Any) -> None:
        """Whatever is done with a closed database has to connect first. Raises StoreClosed."""
        if self.closed:
            raise StoreClosed(self.shown_url)

    def _sqlite_connection(self, mode: str) -> Any:
        self._require_open()
        module = sqlite_module()
        if mode == "ro" and not self.path.exists():
            raise DatabaseMissing(self.shown_url)
        flag = "ro" if mode == "ro" else "rwc"
        self._wrote = self._wrote or mode == "rw"
        try:
            connection = module.connect(
                f"file:{quote(str(self.path))}?mode={flag}",
                uri=True,
                check_same_thread=False,
                isolation_level=None,  # the driver must begin nothing by itself: see _begin
                timeout=self.busy_s,
                cached_statements=STATEMENTS,
            )
        except module.OperationalError as error:
            raise DatabaseUnusable(self.shown_url, *environment.closed(self.path)) from error
        self._pragmas(connection, mode)
        return connection

    def _sqlite_engine(self, mode: str) -> Engine:
        engine = sa.create_engine(
            "sqlite://",
            creator=lambda: self._sqlite_connection(mode),
            module=sqlite_module(),
            paramstyle="named",  # as PostgreSQL's: statements that are sent as strings take a mapping on both
            poolclass=sa.QueuePool,
            pool_reset_on_return=None,  # every use ends with a commit or a rollback of its own
            pool_size=8,
            max_overflow=56,
            json_serializer=strict_json,
        )
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _pragmas(self, connection: Any, mode: str) -> None:
        run = connection.execute
        if mode == "ro":
            run("PRAGMA query_only=ON")
        else:
            with self.gate.hold() if self.gate else nullcontext():
                answer = run("PRAGMA journal_mode=WAL").fetchone()[0]
            if answer != "wal":
                raise SampleStoreError(f"{self.path}: this file system gives no WAL (got {answer}). Use a local disk.")
            run(f"PRAGMA synchronous={self.durability.upper()}")
            run(f"PRAGMA wal_autocheckpoint={LIMIT_PAGES if self.checkpointer else PAGES}")
            run("PRAGMA journal_size_limit=67108864")
        run("PRAGMA foreign_keys=ON")
        run("PRAGMA mmap_size=0")  # never with several writers
        run("PRAGMA cache_size=-16384")  # of each connection; the system caches the file itself

    def _postgres_engine(self, read_only: bool) -> Engine:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise MissingExtra("PostgreSQL", "postgres") from None
        settings = {
            # A process that was stopped inside a transaction must not hold its locks for ever.
            "idle_in_transaction_session_timeout": "60s",
            "lock_timeout": f"{int(self.busy_s * 1000)}ms",
        }
        if read_only:
            settings |= {"default_transaction_read_only": "on", "statement_timeout": "120s"}
        options = " ".join(f"-c {key}={value}" for key, value in settings.items())
        engine = sa.create_engine(
            self.url,
            pool_size=2 if read_only else 4,  # a worker's: two of its writer, one of its heart, one more
            max_overflow=6 if read_only else 4,
            # A write is repeated when its connection turns out to be dead; asking before each would cost a round trip.
            pool_pre_ping=read_only,
            # Every use ends with a commit or a rollback of its own.
            pool_reset_on_return=None,
            isolation_level="REPEATABLE READ" if read_only else "AUTOCOMMIT",  # see pgcursor
            connect_args={
                "options": options,
                **({} if read_only else {"cursor_factory": pgcursor.cursor_class()}),
            },
            json_serializer=strict_json,
        )  # fmt: skip
        event.listen(engine, "do_connect", self._require_open)
        event.listen(engine, "do_connect", _sign)
        if not read_only:
            event.listen(engine, "begin", _begin_postgres)
        return engine

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One snapshot, read-only. Fetch, leave, then render: a reader that stays stops WAL truncation and vacuum."""
        with self.explained(writing=False), self.reader.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def explained(self, *, writing: bool) -> Iterator[None]:
        """Errors of the environment become typed ones that name the cure. Raises StoreBusy, StoreUnavailable,
        DatabaseUnusable."""
        try:
            yield
        except (DBAPIError, sqlite_module().Error) as error:
            known = error if isinstance(error, DBAPIError) else DBAPIError(None, None, error)
            if _sqlstate(known) == LOCK_TIMEOUT_SQLSTATE:
                raise self._busy() from error
            told = environment.explain(self.shown_url, self.path if self.is_sqlite else None, known, writing=writing)
            if told is None:
                raise
            raise told from error

    def _busy(self) -> StoreBusy:
        sessions = None if self.is_sqlite else environment.lock_keeper(self.reader)
        return StoreBusy(self.shown_url, self.busy_s, None, None, sessions=sessions)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The first word with a server: that it is away is told at once, not waited for. Raises StoreUnavailable."""
        try:
            yield
        except DBAPIError as error:
            if not _is_disconnect(error):
                raise
            raise environment.server_away(self.shown_url, error) from error

    @contextmanager
    def writing(self, *, durable: bool = False) -> Iterator[Connection]:
        """One write transaction, behind the gate on SQLite, that SQLAlchemy knows of: for whoever hands the connection
        on, as migrations do. Verbs have `write`."""
        full = durable and self.durability != "full"
        with self._alone(), self._pooled(full) as connection:
            yield connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._require_open()  # before the gate is
        with self.explained(writing=True), self.gate.hold() if self.gate else nullcontext():
            yield
        if self.checkpointer:
            self.checkpointer.committed()
        faults.reached("committed")

    @contextmanager
    def _transaction(self, durable: bool, last: Callable[[], None] | None) -> Iterator[Connection]:
        full = durable and self.durability != "full"
        with self._alone(), self._keeping(full) as connection:
            yield connection
            with nullcontext() if self.is_sqlite else driver.committed(connection):
                if last:
                    last()

    def _keeping(self, full: bool) -> AbstractContextManager[Connection]:
        """Behind the gate, or two threads would both see the last room."""
        return self._kept.transaction() if self._kept and not full and self._kept.room() else self._pooled(full)

    @contextmanager
    def _pooled(self, full: bool) -> Iterator[Connection]:
        options = {"samplestore_write": True, "samplestore_full": full}
        with self.writer.connect().execution_options(**options) as connection:
            with connection.begin():
                yield connection
            _end_sqlite(connection)

    def write(
        self, work: Callable[[Connection], T], *, durable: bool = False, last: Callable[[], None] | None = None
    ) -> T:
        """Run `work` in one write transaction, and again if the database took it back. `work` can be repeated. `last`
        sends what comes before the commit and reads no answer: PostgreSQL gets both in one round trip."""

        def once() -> T:
            with self._transaction(durable, last) as connection:
                return work(connection)

        return self._repeated(once)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one snapshot, and again while the database server is away. `work` can be repeated."""

        def once() -> T:
            with self.reading() as connection:
                return work(connection)

        return self._repeated(once)

    def _repeated(self, once: Callable[[], T]) -> T:
        deadline, conflicts, since = None, 0, time.monotonic()
        while True:
            try:
                return once()
            except StoreUnavailable:
                deadline = deadline or time.monotonic() + self.reconnect_s
                if time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.05, 0.2))
            except DBAPIError as error:
                if _is_conflict(error):
                    conflicts += 1
                    # SQLite's "locked" has waited busy_s itself: twenty of those would be ten minutes
                    if conflicts > MAX_CONFLICT_RETRIES or time.monotonic() - since > self.busy_s:
                        raise self._busy() from error
                    time.sleep(random.uniform(0, 0.005 * 2 ** min(conflicts, 6)))
                elif _is_disconnect(error):
                    self.reconnects += 1
                    deadline = deadline or time.monotonic() + self.reconnect_s
                    if time.monotonic() > deadline:
                        raise environment.server_away(self.shown_url, error) from error
                    time.sleep(random.uniform(0.05, 0.2))
                else:
                    raise

    def close_connections(self) -> None:
        """Close what is open and idle; the next use connects anew. For whoever replaces the database underneath."""
        if self.checkpointer:
            self.checkpointer.close()
        self.reader.dispose()
        self._close_kept()
        self.writer.dispose()

    def _close_kept(self) -> None:
        if self._kept and self.gate:
            with self.gate.hold():
                self._kept.close()

    def close(self) -> None:
        """For good: what uses it afterwards gets StoreClosed."""
        while self.on_close:
            self.on_close.pop()()
        self.closed = True
        if self.checkpointer:
            self.checkpointer.close()
        self.reader.dispose()
        # Closing SQLite's last connection checkpoints: that belongs behind the gate too.
        with self.gate.hold() if self.gate and self._wrote else nullcontext():
            if self._kept and self._wrote:
                self._kept.close()
            self.writer.dispose()
        if self.gate:
            self.gate.close()

    def _after_fork(self) -> None:
        """In a child: a SQLite connection that crosses a fork corrupts what both write, and closing it may too. So they
        are left open, and out of reach; the thread that checkpoints stayed in the parent."""
        _inherited.append((self.writer.pool, self.reader.pool, self._kept))
        self.writer.dispose(close=False)
        self.reader.dispose(close=False)
        self._kept = KeptConnections(self.writer)
        if self.checkpointer and self.gate:
            self.checkpointer = Checkpointer(self._sqlite_writer, self.gate.hold)


_databases: weakref.WeakSet[Database] = weakref.WeakSet()  # on SQLite
_inherited: list[Any] = []


def _after_fork() -> None:
    for database in list(_databases):
        database._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def strict_json(value: Any) -> str:
    """JSON that both databases take: no NaN, and no NUL (PostgreSQL refuses it)."""
    return _NUL.sub(r"\1\\ufffd", json.dumps(value, allow_nan=False))


def _begin_sqlite(connection: Connection) -> None:
    """BEGIN IMMEDIATE for writers only: a global one would make every reader take the write lock, and a deferred
    transaction that reads before it writes fails at once with SQLITE_BUSY_SNAPSHOT, whatever the busy timeout."""
    options = connection.get_execution_options()
    if options.get(BEGUN):
        return
    if options.get("samplestore_full"):
        driver.run(connection, "PRAGMA synchronous=FULL")
    driver.run(connection, "BEGIN IMMEDIATE" if options.get("samplestore_write") else "BEGIN")


def _sign(dialect: Any, record: Any, args: Any, parameters: dict[str, Any]) -> None:
    """The server shows which process a session belongs to, of however many machines; 63 bytes of it."""
    parameters["application_name"] = f"samplestore {os.getpid()}@{socket.gethostname()}"


def _begin_postgres(connection: Connection) -> None:
    """Whoever did not ask for a transaction, VACUUM for one, has none."""
    raw: Any = connection.connection.driver_connection
    if connection.get_execution_options().get("samplestore_write"):
        pgcursor.owe_begin(raw)
    else:
        pgcursor.forget_begin(raw)


def _end_sqlite(connection: Connection) -> None:
    if connection.dialect.name == "sqlite" and connection.get_execution_options().get("samplestore_full"):
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.execute("PRAGMA synchronous=NORMAL")


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _is_conflict(error: DBAPIError) -> bool:
    if _sqlstate(error) in RETRY_SQLSTATES:
        return True
    text = str(error.orig)
    return isinstance(error, OperationalError) and ("database is locked" in text or "database table is locked" in text)


def _is_disconnect(error: DBAPIError) -> bool:
    state = _sqlstate(error)
    starting = state in {"57P01", "57P02", "57P03", "25P03"} or (state or "").startswith("08")
    refused = (
        state is None and type(error.orig).__module__.startswith("psycopg") and isinstance(error, OperationalError)
    )
    return error.connection_invalidated or starting or refused
