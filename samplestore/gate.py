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

    __slots__ = ("__weakref__", "_turns", "fd", "queued")

    def __init__(self, path: str) -> None:
        self.fd = -1
        self._turns: queue.SimpleQueue[_Turn | None] | None = None  # for its helper
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
        self.queued = False  # a helper thread waits in flock: closing now would give it somebody else's file

    def queue(self, turn: _Turn) -> None:
        """Have the helper wait for it. The helper stays for the next time: where processes write by turns, all of them
        wait, and to start a thread takes longer than to be woken."""
        self.queued = True
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
        self._there = self._given_up = False
        self._came.acquire()

    def take(self) -> None:
        """In the helper."""
        fcntl.flock(self._lock.fd, fcntl.LOCK_EX)
        with self._guard:
            self._lock.queued = False
            if self._given_up:
                self._lock.close()  # and with it the lock
            else:
                self._there = True
                self._came.release()

    def wait(self, timeout_s: float) -> None:
        self._came.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))

    def give_up(self) -> bool:
        """Leave the queue, and the lock to the helper; false if it came just now."""
        with self._guard:
            self._given_up = not self._there
            return self._given_up


def _take_turns(turns: queue.SimpleQueue[_Turn | None]) -> None:
    """Refers to no lock between two turns: it ends with the thread that it belongs to."""
    while (turn := turns.get()) is not None:
        turn.take()
        del turn


class Gate:
    """One gate per database and process. Each thread locks through a descriptor of its own, since flock belongs to
    the open file: two threads sharing one would both be inside."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._local = threading.local()
        self._locks: weakref.WeakSet[_Lock] = weakref.WeakSet()
        self._guard = threading.Lock()
        _gates.add(self)

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the gate. Nested holds of one thread are one. Raises StoreBusy."""
        depth = getattr(self._local, "depth", 0)
        if depth == 0:
            self._acquire(self.timeout_s if timeout_s is None else timeout_s)
        self._local.depth = depth + 1
        try:
            yield
        finally:
            self._local.depth = depth
            lock = getattr(self._local, "lock", None)
            if depth == 0 and lock is not None and lock.fd >= 0:  # a forked child has dropped it
                fcntl.flock(lock.fd, fcntl.LOCK_UN)

    def _acquire(self, timeout_s: float) -> None:
        lock: _Lock | None = getattr(self._local, "lock", None)
        if lock is None or lock.fd < 0:
            lock = self._local.lock = _Lock(self.path)
            with self._guard:
                self._locks.add(lock)
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait(lock, timeout_s)
        with contextlib.suppress(OSError):  # a full disk: only the name of who holds it is missing then
            os.pwrite(lock.fd, b"%-20d %-20f\n" % (os.getpid(), time.time()), 0)

    def _wait(self, lock: _Lock, timeout_s: float) -> None:
        turn = _Turn(lock)
        lock.queue(turn)
        try:
            turn.wait(timeout_s)
        except BaseException:  # Ctrl-C: a lock that nobody waits for would shut everybody out
            if self._gave_up(turn):
                raise
            fcntl.flock(lock.fd, fcntl.LOCK_UN)
            raise
        if self._gave_up(turn):
            raise StoreBusy(self.path, timeout_s, *self._holder())

    def _gave_up(self, turn: _Turn) -> bool:
        if over := turn.give_up():
            self._local.lock = None  # it belongs to the helper now
        return over

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
                if not lock.queued:
                    lock.close()

    def after_fork(self) -> None:
        """A child shares the parent's open files, and with them its lock: it must drop them. The threads that queue
        are not in the child."""
        self._guard, self._local = threading.Lock(), threading.local()
        for lock in list(self._locks):
            lock.close()


def _after_fork() -> None:
    for gate in list(_gates):
        gate.after_fork()


os.register_at_fork(after_in_child=_after_fork)
