"""The writing connection that each thread keeps, for SQLite.

To take one from the pool, begin and commit through SQLAlchemy and give it back costs 50 us a transaction: as much as
the two statements of an append. PostgreSQL's round trips cost ten times that, so there the pool does it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.engine import Connection, Engine

from samplestore import driver

BEGUN = "samplestore_begun"  # the option of a connection whose BEGIN is sent here, not by SQLAlchemy


MOST = 32  # threads that keep one; more take theirs from the pool, which must not run out


class _Kept:
    __slots__ = ("__weakref__", "connection")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def usable(self) -> bool:
        return not self.connection.closed and not self.connection.invalidated


class KeptConnections:
    """One for each thread that writes, up to MOST; a thread's goes back to the pool when the thread ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(**{BEGUN: True})
        self._local = threading.local()
        self._all: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._guard = threading.Lock()

    def room(self) -> bool:
        """Whether this thread has one or may have one."""
        return getattr(self._local, "kept", None) is not None or len(self._all) < MOST

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """BEGIN IMMEDIATE, then COMMIT, or ROLLBACK after an error. For whoever holds the gate, and does not commit
        himself."""
        connection = self._mine()
        try:  # BEGIN too: a Ctrl-C just after it would leave the database locked for everybody
            driver.run(connection, "BEGIN IMMEDIATE")
            yield connection
            # A statement that went through SQLAlchemy has opened its transaction, which knows nothing of ours.
            if connection.in_transaction():
                connection.commit()
            else:
                driver.run(connection, "COMMIT")
        except BaseException:
            self._take_back(connection)
            raise

    def _mine(self) -> Connection:
        kept: _Kept | None = getattr(self._local, "kept", None)
        if kept is None or not kept.usable():
            kept = self._local.kept = _Kept(self._engine.connect())
            with self._guard:
                self._all.add(kept)
        return kept.connection

    def _take_back(self, connection: Connection) -> None:
        """Roll back; a connection that can't is of no use any more. A commit that failed leaves SQLAlchemy with a
        transaction that is over and yet there: in_transaction() denies it, and the next statement would be refused."""
        try:
            if connection.get_transaction() is not None:
                connection.rollback()
            raw = None if connection.invalidated else connection.connection.driver_connection
            if raw is not None and raw.in_transaction:
                driver.run(connection, "ROLLBACK")
        except Exception:  # whichever layer it comes from: what led here is the error to show, this connection is gone
            self._local.kept = None
            with contextlib.suppress(Exception):
                connection.invalidate()
                connection.close()

    def close(self) -> None:
        """Give all back. For whoever holds the gate: nobody is within a transaction then."""
        with self._guard:
            kept = [one for one in self._all if one.usable()]
            self._all.clear()
        for one in kept:
            one.connection.close()
