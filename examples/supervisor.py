"""Processes of the demo: started, watched, started again when they die, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_RESTARTS = 5


class ProcessDied(Exception):
    """A process of the demo could not be kept alive; the message shows the end of its log."""


@dataclass
class Child:
    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes]
    restarts: int = 0
    finished: bool = False  # it is meant to end (a trainer that is done), or has been told to


@dataclass
class Supervisor:
    """Runs named commands with their output in `folder`/NAME.log. A command that ends without being told to is started
    again: that is what a process manager does for a real run, and what lets anyone kill anything during the demo."""

    folder: Path
    environment: dict[str, str]
    children: dict[str, Child] = field(default_factory=dict)
    on_restart: Callable[[str, int], None] = lambda name, code: None

    def start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> Child:
        """`environment` is added to what all processes have."""
        log, variables = self.folder / f"{name}.log", {**self.environment, **(environment or {})}
        child = Child(name, command, log, variables, self._spawn(command, log, variables))
        self.children[name] = child
        return child

    def _spawn(self, command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip

    def watch(self) -> None:
        """Start again what has died. Raises ProcessDied for what dies again and again."""
        for child in self.children.values():
            code = child.process.poll()
            if code is None or child.finished:
                continue
            if child.name == "trainer" and code == 0:
                child.finished = True
                continue
            child.restarts += 1
            if child.restarts > MAX_RESTARTS:
                raise ProcessDied(f"{child.name} died {child.restarts} times, last with {code}:\n{tail(child.log)}")
            self.on_restart(child.name, code)
            child.process = self._spawn(child.command, child.log, child.environment)

    def kill(self, name: str) -> None:
        os.kill(self.children[name].process.pid, signal.SIGKILL)

    def terminate(self, name: str, timeout_s: float) -> int:
        """Ask a process to end, and return its exit code; -9 if it had to be killed."""
        child = self.children[name]
        child.finished = True
        child.process.terminate()
        try:
            return child.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
            return child.process.wait()

    def close(self) -> None:
        """Kill whatever is still there, with the processes that it started."""
        for child in self.children.values():
            child.finished = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()


def _die_with_parent() -> None:
    """If the demo itself is killed, its processes must not go on (Linux; elsewhere `close` does it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def wait_until(what: str, ready: Callable[[], Any], supervisor: Supervisor, timeout_s: float) -> Any:
    """Poll `ready` until it gives something true; its value. Connection errors count as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        supervisor.watch()
        try:
            if value := ready():
                return value
        except (urllib.error.URLError, OSError, ValueError):
            pass  # not up yet
        if time.monotonic() > deadline:
            raise ProcessDied(f"{what} was not ready after {timeout_s:.0f} s; logs are in {supervisor.folder}")
        time.sleep(0.1)


def http_get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - our own http:// URLs
        return bytes(response.read())
