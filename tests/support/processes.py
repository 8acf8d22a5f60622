"""Real processes for tests: start them, wait for what they do with a deadline, and never leave one behind.

Every process gets a session of its own (so that signals can reach its whole group) and a unique tag in its
environment, which its descendants inherit. Teardown kills the group, then whatever still carries the tag: a child that
called setsid() would otherwise survive the test and hold a port or a database lock in the next one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

HOST = "127.0.0.1"
TAG = "SAMPLESTORE_TEST_TAG"
POLL_S = 0.02
LOG_TAIL = 4000  # characters of a log shown in a failure


def in_ci() -> bool:
    """True where a missing real component must fail a test instead of skipping it."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago. Another process may take it: callers report bind failures."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until(predicate: Callable[[], T], *, what: str, timeout: float = 30.0, interval: float = POLL_S) -> T:
    """The first true result of `predicate`. Raises TimeoutError that names `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        if result := predicate():
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s (last answer: {result!r})")
        time.sleep(interval)


async def wait_until_async(
    predicate: Callable[[], T | Awaitable[T]],
    *,
    what: str,
    timeout: float = 30.0,  # noqa: ASYNC109 - asyncio.timeout could not say what was waited for
    interval: float = POLL_S,
) -> T:
    """wait_until for coroutines: the event loop runs on between two looks; `predicate` may be async."""
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        result: T = await answer if isinstance(answer, Awaitable) else answer
        if result:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout:g} s (last answer: {result!r})")
        await asyncio.sleep(interval)


class Process:
    """A started process; stdout and stderr go to one log file. Made by Processes.start."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log_path: Path, tag: str) -> None:
        self.name, self.popen, self.log_path, self.tag = name, popen, log_path, tag

    @property
    def pid(self) -> int:
        return self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.popen.poll()

    def log(self) -> str:
        """Everything it has written so far."""
        return self.log_path.read_text(errors="replace")

    def wait_for(self, predicate: Callable[[], T], *, what: str, timeout: float = 30.0) -> T:
        """wait_until, but a process that exits meanwhile fails at once, with the end of its log."""

        def look() -> T | bool:
            # The order matters: an answer that came just before the exit still counts.
            ended = not self.alive()
            result = predicate()
            if not result and ended:
                raise AssertionError(f"{self.name} exited with {self.returncode} before {what}\n{self._tail()}")
            return result

        try:
            return wait_until(look, what=f"{self.name}: {what}", timeout=timeout)  # type: ignore[return-value]
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self._tail()}") from None

    def wait_for_log(self, text: str, *, timeout: float = 30.0) -> str:
        """The log, once it contains `text`."""
        self.wait_for(lambda: text in self.log(), what=f"{text!r} in its log", timeout=timeout)
        return self.log()

    def wait(self, timeout: float = 30.0) -> int:
        """Its exit status. Raises TimeoutError with the end of its log."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {timeout:g} s\n{self._tail()}") from None

    def signal(self, number: int) -> None:
        """Send a signal to the process alone (SIGSTOP and SIGCONT suspend and wake it)."""
        self.popen.send_signal(number)

    def terminate(self, timeout: float = 30.0) -> int:
        """SIGTERM, then its exit status: for tests of an orderly end."""
        self.popen.terminate()
        return self.wait(timeout)

    def kill(self) -> None:
        """SIGKILL the process alone, as the out-of-memory killer does, and wait until it is gone."""
        self.popen.kill()
        self.popen.wait(10)

    def kill_tree(self) -> None:
        """SIGKILL the process, its group and every descendant, whatever session that moved to."""
        if self.alive():  # not reaped yet, so the group id cannot belong to anyone else
            with contextlib.suppress(ProcessLookupError):  # it ended between the two lines
                os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(10)
        wait_until(lambda: not kill_tagged(self.tag), what=f"{self.name}: descendants gone", timeout=10)

    def _tail(self) -> str:
        return f"--- end of the log of {self.name} ---\n{self.log()[-LOG_TAIL:]}"


class Processes:
    """Starts processes and kills all that are left in close(). The fixture `processes` gives one per test."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.started: list[Process] = []
        _open.add(self)

    def start(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
    ) -> Process:
        """Start `args` without a shell. `env` is added to this process's environment; `user` needs root."""
        name = name or Path(args[0]).name
        tag = uuid.uuid4().hex
        log_path = self.log_dir / f"{len(self.started):03d}-{name}.log"
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                [os.fspath(arg) for arg in args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {}), TAG: tag},
                cwd=cwd,
                user=user,
                group=_group_of(user),
                extra_groups=[] if user else None,
                start_new_session=True,
            )
        process = Process(name, popen, log_path, tag)
        self.started.append(process)
        return process

    def close(self) -> None:
        """Kill everything that still runs, children included."""
        for process in reversed(self.started):
            process.kill_tree()
        self.started.clear()
        _open.discard(self)


_open: weakref.WeakSet[Processes] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """For a run that ends without its teardowns, such as an error inside pytest itself."""
    for processes in list(_open):
        processes.close()


def _group_of(user: str | None) -> int | None:
    if user is None:
        return None
    import pwd

    return pwd.getpwnam(user).pw_gid


def kill_tagged(tag: str) -> list[int]:
    """SIGKILL every living process with `tag` in its environment; returns the pids it found (Linux; else none)."""
    wanted = f"{TAG}={tag}".encode()
    found = [pid for pid in pids() if wanted in _read(f"/proc/{pid}/environ").split(b"\0")]
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself
    return found


def pids() -> list[int]:
    """All process ids of this machine; empty where there is no /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it ended, or belongs to another user
        return b""
