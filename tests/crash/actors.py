"""Processes with a name that die again and again, each life by its fate."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash import children
from tests.crash.children import Job
from tests.crash.proof import Broken
from tests.crash.schedule import IMMORTAL, Fate
from tests.support.processes import Process
from tests.support.router import Router

if TYPE_CHECKING:
    from tests.crash.world import World

OVERDUE_S = 20.0  # a life that has not come to its named point by then ends at random
RECOVERY_S = 5.0  # of a database server


class Actor:
    """A process with a name that dies again and again. `job(life)` says what its next life does."""

    def __init__(self, world: World, kind: str, name: str, job: Callable[[Fate], Job]) -> None:
        self.world, self.kind, self.name, self.job = world, kind, name, job
        self.lives = 0
        self.fate: Fate = IMMORTAL
        self.process: Any = None
        self.woken = self.stopped = False
        self.killed_by_us = self.meant_to_end = False

    def start(self) -> None:
        world = self.world
        self.fate = world.next_fate(self.kind, self.name, self.lives)
        self.lives += 1
        self.woken = self.stopped = self.killed_by_us = False
        self.log_from = len(world.log(self.name))
        self.launch()
        self.since = self.born = time.monotonic()

    def launch(self) -> None:
        self.process = self.world.context.Process(target=children.main, args=(self.job(self.fate),), daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def look(self) -> str | None:
        """Move its fate on. Returns the point that it died at ("random" too), or None while it lives."""
        now, fate = time.monotonic(), self.fate
        if not self.process.is_alive():
            return self.died()
        if self.stopped:
            if now - self.since >= (fate.stop_s or 0.0):
                self.wake()
            return None
        if fate.stop_s is not None and not self.woken:
            if fate.point is None and now - self.since >= fate.after_s:
                send(self.pid, signal.SIGSTOP)
            if is_stopped(self.pid):
                self.stopped, self.since = True, now
                self.world.tally.stops[f"{self.kind} {fate.point or 'random'}"] += 1
                return None
        by_hand = self.woken or fate.point is None
        if now - self.since >= (fate.after_s if by_hand else OVERDUE_S):
            self.killed_by_us = True
            self.process.kill()
        return None

    def wake(self) -> None:
        self.stopped, self.woken, self.since = False, True, time.monotonic()
        send(self.pid, signal.SIGCONT)

    def died(self) -> str:
        self.process.join()
        if self.process.exitcode != -signal.SIGKILL:
            if self.meant_to_end and self.process.exitcode == 0:
                return "end"
            if self._met_no_server():
                return "left"
            raise Broken(f"{self.name} ended by itself with {self.process.exitcode}\n{self.world.tail(self.name)}")
        return "random" if self.killed_by_us or self.fate.point is None else self.fate.point

    def _met_no_server(self) -> bool:
        """Opening a database that is away is an error, and whoever supervises starts the process again. One that has
        begun its work waits until the server is back."""
        lately = self.world.server_died_at > self.born - RECOVERY_S
        log = self.world.log(self.name)[self.log_from :]
        return lately and self.process.exitcode in (1, 3) and not re.search(r"\bready\b", log)  # pg_isready is no word


class RouterActor(Actor):
    """A real sglang-router, which forgets its engines when it dies: whoever starts it tells it again."""

    def __init__(self, world: World, port: int, engines: list[str]) -> None:
        super().__init__(world, "router", "router", lambda fate: world.job("router", "router"))
        self.port, self.engines = port, engines

    def start(self) -> None:
        super().start()
        router = Router.start(self.world.processes, port=self.port)
        for url in self.engines:
            router.add_worker(url, wait=False)
        self.process = _Subprocess(router.process)
        self.since = time.monotonic()

    def launch(self) -> None:
        """It is no Python: nothing to fork."""


class _Subprocess:
    """What an actor needs of a process, of one that was started with exec."""

    def __init__(self, process: Process) -> None:
        self._process, self.pid, self.kill = process, process.pid, process.kill_tree

    def is_alive(self) -> bool:
        return self._process.alive()

    @property
    def exitcode(self) -> int | None:
        return self._process.returncode

    def join(self, timeout_s: float | None = None) -> None:
        self._process.popen.wait(timeout_s)


def send(pid: int, number: int) -> None:
    """A signal to a process that may have ended by itself: then its end is seen at the next look."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
