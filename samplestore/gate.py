"""The writer gate of a SQLite database: an flock on a file beside it.

SQLite's own busy handler starves: with hot-looping writers one process of four got one transaction in three seconds.
flock is handed on fairly, and the kernel releases it when its holder dies. It is held around write transactions and
checkpoints. PostgreSQL needs none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote

from samplestore.errors import DatabaseUnusable, StoreBusy, StoreUnavailable

_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class _Lock:
    """An open file that can be locked. Closed when nothing refers to it any more: when its thread has ended."""

    __slots__ = ("__weakref__", "_turns", "fd", "in_use")

    def __init__(self, path: str) -> None:
        self.fd = -1
        self._turns: queue.SimpleQueue[_Turn | None] | None = None  # for its helper
        self.in_use = False  # held or waited for: closing it now would let go of it, or wait in somebody else's file
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            folder = os.path.dirname(path) or "."
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreUnavailable(path, "its disk is full", f"Make room: df -h {quote(str(folder))}") from error
            if not os.path.isdir(folder):
                raise DatabaseUnusable(
                    path, "can't be made: there is no folder for it", f"Make it with: mkdir -p {quote(str(folder))}"
                ) from error
            told = f"can't be opened to write ({error.strerror})"
            raise DatabaseUnusable(path, told, f"Look at the rights: ls -ld {quote(str(folder))}") from error

    def queue(self, turn: _Turn) -> None:
        """Have the helper wait for it. The helper stays for the next time: where processes write by turns, all of them
        wait, and to start a thread takes longer than to be woken."""
        if self._turns is None:
            self._turns = queue.SimpleQueue()
            threading.Thread(target=_take_turns, args=(self._turns,), name="samplestore-gate", daemon=True).start()
        self._turns.put(turn)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if self._turns is not None:
            self._turns.put(None)

    def __del__(self) -> None:
        self.close()


class _Turn:
    """A wait for the lock in the kernel's queue: flock itself knows no time limit, and polling would lose our place.
    Whoever gives up leaves a helper that lets go at once when the turn comes."""

    def __init__(self, lock: _Lock) -> None:
        self._lock, self._guard, self._came = lock, threading.Lock(), threading.Lock()
        self._taken = self._given_up = False
        self._error: Exception | None = None
        self._came.acquire()

    def take(self) -> None:
        """In the helper."""
        try:
            fcntl.flock(self._lock.fd, fcntl.LOCK_EX)
        except Exception as error:  # for whoever waits
            self._error = error
        with self._guard:
            self._taken = True
            if self._given_up:
                self._lock.close()  # and with it the lock
        self._came.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether it came. Raises what flock raised."""
        came = self._came.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
        if self._error is not None:
            raise self._error
        return came

    def give_up(self) -> None:
        """Leave the queue: now if it came meanwhile, else the helper does."""
        with self._guard:
            self._given_up = True
            if self._taken:
                self._lock.close()


def _take_turns(turns: queue.SimpleQueue[_Turn | None]) -> None:
    """Refers to no lock between two turns: it ends with the thread that it belongs to."""
    while (turn := turns.get()) is not None:
        turn.take()
        del turn


class _Mine(threading.local):
    """Of a thread: its lock, unless a helper has it, and how many holds it is in."""

    lock: _Lock | None = None
    depth = 0


class Gate:
    """One gate per database and process. Each thread locks through a descriptor of its own, since flock belongs to
    the open file: two threads sharing one would both be inside."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._mine = _Mine()
        self._locks: weakref.WeakSet[_Lock] = weakref.WeakSet()
        self._guard = threading.Lock()
        _gates.add(self)

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the gate. Nested holds of one thread are one. Raises StoreBusy."""
        depth = self._mine.depth
        try:  # the taking too: a Ctrl-C just after it would leave the gate locked for everybody
            if depth == 0:
                self._acquire(self.timeout_s if timeout_s is None else timeout_s)
            self._mine.depth = depth + 1
            yield
        finally:
            self._mine.depth = depth
            lock = self._mine.lock
            if depth == 0 and lock is not None and lock.fd >= 0:  # a forked child has dropped it
                fcntl.flock(lock.fd, fcntl.LOCK_UN)
                lock.in_use = False

    def _acquire(self, timeout_s: float) -> None:
        lock = self._mine.lock
        if lock is None or lock.fd < 0:
            lock = _Lock(self.path)
            with self._guard:
                self._locks.add(lock)
            self._mine.lock = lock
        lock.in_use = True
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait(lock, timeout_s)
        with contextlib.suppress(OSError):  # a full disk: only the name of who holds it is missing then
            os.pwrite(lock.fd, b"%-20d %-20f\n" % (os.getpid(), time.time()), 0)

    def _wait(self, lock: _Lock, timeout_s: float) -> None:
        """Raises StoreBusy."""
        self._mine.lock = None  # it is the helper's until it comes
        turn = _Turn(lock)
        try:
            lock.queue(turn)
            if not turn.wait(timeout_s):
                raise StoreBusy(self.path, timeout_s, *self._holder())
            self._mine.lock = lock
        except BaseException:  # Ctrl-C too: a lock that nobody waits for would shut everybody out
            turn.give_up()
            raise

    def _holder(self) -> tuple[int | None, float | None]:
        try:
            with open(self.path, "rb") as file:
                pid, since = file.read(64).split()
                return int(pid), float(since)
        except (OSError, ValueError):
            return None, None

    def close(self) -> None:
        with self._guard:
            for lock in list(self._locks):
                if not lock.in_use:
                    lock.close()

    def after_fork(self) -> None:
        """A child shares the parent's open files, and with them its lock: it must drop them. The threads that queue
        are not in the child."""
        self._guard, self._mine = threading.Lock(), _Mine()
        for lock in list(self._locks):
            lock.close()


def _after_fork() -> None:
    for gate in list(_gates):
        gate.after_fork()


os.register_at_fork(after_in_child=_after_fork)
