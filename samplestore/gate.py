"""The writer gate of a SQLite database: an flock on a file beside it.

SQLite's own busy handler starves: with hot-looping writers one process of four got one transaction in three seconds.
flock is handed on fairly, and the kernel releases it when its holder dies. It is held around write transactions and
checkpoints. PostgreSQL needs none.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from samplestore.errors import StoreBusy

_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


class Gate:
    """One gate per database and process. Each thread locks through a descriptor of its own, since flock belongs to
    the open file: two threads sharing one would both be inside."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._local = threading.local()
        self._fds: set[int] = set()
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
            if depth == 0:
                fcntl.flock(self._local.fd, fcntl.LOCK_UN)

    def _acquire(self, timeout_s: float) -> None:
        fd = getattr(self._local, "fd", None)
        if fd is None or fd not in self._fds:
            fd = self._open()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fd = self._wait(timeout_s)
        self._local.fd = fd
        os.pwrite(fd, b"%-20d %-20f\n" % (os.getpid(), time.time()), 0)

    def _open(self) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._fds.add(fd)
        return fd

    def _wait(self, timeout_s: float) -> int:
        """Queue for the lock in a helper thread: flock itself knows no time limit, and polling would lose our place
        in the kernel's queue. Whoever gives up leaves a thread that unlocks at once when its turn comes."""
        fd = self._local.fd = self._open() if getattr(self._local, "fd", None) not in self._fds else self._local.fd
        done, guard, given_up = threading.Event(), threading.Lock(), False

        def queue() -> None:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with guard:
                if given_up:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                    self._forget(fd)
                else:
                    done.set()

        threading.Thread(target=queue, name="samplestore-gate", daemon=True).start()
        got = False
        try:
            got = done.wait(timeout_s)
        finally:  # also when Ctrl-C ends the wait: a lock that nobody waits for would shut everybody out
            with guard:
                if not got and not (got := done.is_set()):
                    given_up = True
                    self._local.fd = None  # the descriptor belongs to the waiting thread now
        if got:
            return fd
        raise StoreBusy(self.path, timeout_s, *self._holder())

    def _holder(self) -> tuple[int | None, float | None]:
        try:
            with open(self.path, "rb") as file:
                pid, since = file.read(64).split()
                return int(pid), float(since)
        except (OSError, ValueError):
            return None, None

    def _forget(self, fd: int) -> None:
        self._fds.discard(fd)
        os.close(fd)

    def close(self) -> None:
        for fd in list(self._fds):
            self._forget(fd)

    def after_fork(self) -> None:
        """A child shares the parent's open files, and with them its lock: it must drop them."""
        self.close()
        self._local = threading.local()


def _after_fork() -> None:
    for gate in list(_gates):
        gate.after_fork()


os.register_at_fork(after_in_child=_after_fork)
