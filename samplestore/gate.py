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

    __slots__ = ("__weakref__", "fd", "queued")

    def __init__(self, path: str) -> None:
        self.fd = -1
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

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


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
        """Queue for the lock in a helper thread: flock itself knows no time limit, and polling would lose our place
        in the kernel's queue. Whoever gives up leaves a thread that unlocks at once when its turn comes."""
        done, guard, given_up = threading.Event(), threading.Lock(), False

        def queue() -> None:
            fcntl.flock(lock.fd, fcntl.LOCK_EX)
            with guard:
                lock.queued = False
                if given_up:
                    lock.close()  # and with it the lock
                else:
                    done.set()

        def give_up() -> bool:
            """Leave the queue; false if the lock came just now."""
            nonlocal given_up
            with guard:
                if not done.is_set():
                    given_up = True
                    self._local.lock = None  # it belongs to the waiting thread now
                return given_up

        lock.queued = True
        threading.Thread(target=queue, name="samplestore-gate", daemon=True).start()
        try:
            done.wait(timeout_s)
        except BaseException:  # Ctrl-C: a lock that nobody waits for would shut everybody out
            if not give_up():
                fcntl.flock(lock.fd, fcntl.LOCK_UN)
            raise
        if give_up():
            raise StoreBusy(self.path, timeout_s, *self._holder())

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
