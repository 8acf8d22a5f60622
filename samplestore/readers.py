"""Readers that stay. As long as a read transaction is open, SQLite can't use its WAL again and PostgreSQL can't vacuum
what it sees: writers go on, and the database grows. Read sessions therefore end after a while, and a WAL that grows
because of a reader is told of, with the process that reads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from samplestore.errors import ReadTooLong

log = logging.getLogger("samplestore.readers")

LIMIT_S = 300.0  # of a read transaction on SQLite
GRACE_S = 1.0
IDLE_LIMIT_S, STATEMENT_LIMIT_S = 60, 120  # on PostgreSQL, which ends them itself
ENDED_BY_SERVER = {"25P03": IDLE_LIMIT_S, "57014": STATEMENT_LIMIT_S}

# SQLite's read marks in the -shm file: WALINDEX_LOCK_OFFSET and SQLITE_SHM_NLOCK of its file format.
FIRST_MARK, LAST_MARK = 123, 127


@contextmanager
def limited(session: Session) -> Iterator[Session]:
    """`session`, whose transactions end after LIMIT_S seconds. Raises ReadTooLong, on the next use or when it is left:
    what was read last may be cut short."""
    ended, limit_s = threading.Event(), LIMIT_S

    def began(session: Session, transaction: Any, connection: Connection) -> None:
        if connection.dialect.name == "sqlite":
            _watch(connection, limit_s, ended)

    event.listen(session, "after_begin", began)
    try:
        yield session
    except DBAPIError as error:
        server = ENDED_BY_SERVER.get(getattr(error.orig, "sqlstate", None) or "")
        if ended.is_set() or server:
            raise ReadTooLong(server or limit_s) from error
        raise
    if ended.is_set():
        raise ReadTooLong(limit_s)


def _watch(connection: Connection, limit_s: float, ended: threading.Event) -> None:
    raw: Any = connection.connection.driver_connection
    closed, guard = threading.Event(), threading.Lock()

    def end() -> None:
        if closed.is_set():
            return
        log.warning("a read session was open for %g s and is ended: the WAL could not be used again", limit_s)
        ended.set()
        raw.interrupt()  # a statement that runs, or is fetched from, fails in its own thread
        closed.wait(GRACE_S)  # a rollback at the same moment would hide its error
        with guard:
            if not closed.is_set():
                raw.rollback()

    def refuse(*_: Any) -> None:
        # Without a transaction the statement would work, on another snapshot than the ones before.
        if ended.is_set():
            raise ReadTooLong(limit_s)

    def close(_: Any) -> None:
        with guard:  # once it is back in the pool the connection is somebody else's
            closed.set()
        timer.cancel()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    event.listen(connection, "before_cursor_execute", refuse)
    event.listen(connection, "rollback", close)
    event.listen(connection, "commit", close)
    timer.start()


def of(path: str) -> list[int]:
    """Process ids that read the SQLite file `path` at this moment (Linux; elsewhere none). Call it behind the gate, or
    it names writers too: they read before they write."""
    try:
        inode = os.stat(f"{path}-shm").st_ino
        with open("/proc/locks") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = set()
    for line in lines:  # 1: POSIX ADVISORY READ 4242 fd:01:131523 123 123
        fields = [field for field in line.split()[1:] if field != "->"]
        if len(fields) != 7 or fields[2] != "READ" or int(fields[4].rpartition(":")[2]) != inode:
            continue
        if int(fields[5]) <= LAST_MARK and (fields[6] == "EOF" or int(fields[6]) >= FIRST_MARK):
            found.add(int(fields[3]))
    return sorted(found)


def told(path: str) -> str:
    """Who reads, in words."""
    pids = of(path)
    if not pids:
        return "a reader that does not end its transaction"
    return "a read transaction of process " + ", ".join(
        f"{pid}{' (this one)' if pid == os.getpid() else ''}" for pid in pids
    )
