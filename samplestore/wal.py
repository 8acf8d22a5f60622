"""Checkpoints of a SQLite database, beside its writers.

A checkpoint copies the WAL into the database file: half of what writing costs, and done by the writer itself (SQLite's
default) a pause of a tenth of a second for 32 MiB on a busy disk. Here a thread does it. SQLite starts the WAL
afresh only when a commit finds all of it copied, which under unbroken writing never happens by itself: so the thread
copies most of it while writers go on, and the little that came meanwhile behind the gate.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from samplestore import readers

log = logging.getLogger("samplestore.wal")

PAGES = 8192  # 32 MiB of WAL: then it is copied
REST_PAGES = 512  # 2 MiB: what may be left for the part that writers wait for
ROUNDS = 4
POLL_S = 0.02  # between two looks while there are commits; a commit after a quiet time waits for none
WARN_PAGES = 8 * PAGES  # 256 MiB
LIMIT_PAGES = 8 * PAGES  # where the thread can't keep up, or died: a writer does it itself


class Checkpointer:
    """One thread, with a connection of its own, for a process that writes.

    connect   a new connection that writes; called in the thread
    gate      hold the writer gate: with it no process writes
    """

    def __init__(self, connect: Callable[[], Any], gate: Callable[[], AbstractContextManager[None]]) -> None:
        self._connect, self._gate = connect, gate
        self._wrote, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._warn_at, self._held_since = WARN_PAGES, None  # type: int, float | None

    def committed(self) -> None:
        """A writer has committed something. Starts the thread."""
        if not self._wrote.is_set():
            self._wrote.set()
        if self._thread is None:
            with self._guard:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name="samplestore-wal", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread and its connection. A later commit starts them anew."""
        with self._guard:
            self._stopped.set()
            self._wrote.set()
            if self._thread is not None:
                self._thread.join()
            self._thread = None
            self._stopped.clear()
            self._wrote.clear()

    def _loop(self) -> None:
        connection = None
        try:
            while True:
                self._wrote.wait()
                if self._stopped.is_set():
                    return
                self._wrote.clear()
                try:
                    connection = connection or self._connect()
                    self.look(connection)
                except Exception:  # a full disk, a busy gate: writers hear of it, at LIMIT_PAGES at the latest
                    log.debug("no checkpoint", exc_info=True)
                self._stopped.wait(POLL_S)
        finally:
            if connection is not None:
                connection.close()

    def look(self, connection: Any) -> None:
        """Copy the WAL if it is long."""
        length, copied = _checkpoint(connection, "NOOP")
        if length < PAGES:
            return
        for _ in range(ROUNDS):
            length, copied = _checkpoint(connection, "PASSIVE")
            if length - copied > REST_PAGES:
                return self._held_back(connection, length)  # a reader needs it: the gate would not help
            _flush(connection)
            behind, _ = _checkpoint(connection, "NOOP")
            if behind - copied <= REST_PAGES:
                break
        with self._gate():
            _checkpoint(connection, "PASSIVE")
        self._warn_at, self._held_since = WARN_PAGES, None

    def _held_back(self, connection: Any, pages: int) -> None:
        """A reader keeps the WAL from being used again: said once it is long, and then at each doubling."""
        self._held_since = self._held_since or time.monotonic()
        if pages < self._warn_at:
            return
        self._warn_at = 2 * pages
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        page = connection.execute("PRAGMA page_size").fetchone()[0]
        with self._gate():  # writers hold read marks too, for as long as they write
            who = readers.told(path)
        log.warning(
            "the WAL of %s has %d MiB and can't be used again for %.0f s now: %s keeps it. It grows until that ends",
            path, pages * page >> 20, time.monotonic() - self._held_since, who,
        )  # fmt: skip


def _flush(connection: Any) -> None:
    """Have the disk take what was copied so far. SQLite does so only once all is copied, which is behind the gate:
    writers waited 20 to 40 ms there for 32 MiB that had been copied before. Raises OSError if the disk refuses.

    The descriptor is one of SQLite's own: to close another of that file would drop the locks of this whole process.
    """
    path = os.path.realpath(connection.execute("PRAGMA database_list").fetchone()[2])
    for fd in _descriptors(path):
        try:
            return os.fsync(fd)
        except OSError as error:
            # Its connection was closed just now; and a pipe or a socket has the number already.
            if error.errno not in (errno.EBADF, errno.EINVAL):
                raise


def _descriptors(path: str) -> list[int]:
    """Of this process, of that file; none where there is no /proc: the flush behind the gate takes longer then."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, as the listing's own is
                if os.readlink(f"/proc/self/fd/{fd}") == path:
                    found.append(int(fd))
    return found


def _checkpoint(connection: Any, mode: str) -> tuple[int, int]:
    """(pages in the WAL, of them copied)"""
    _, length, copied = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    return int(length), int(copied)
