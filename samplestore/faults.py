"""Named places in the code at which a test kills or suspends the process: what dies between a commit and its answer
can't be aimed at from outside.

SAMPLESTORE_FAULTS="committed=kill@3 claimed=stop@1" arms them: at the third arrival at `committed` the process kills
itself, at the first at `claimed` it stops. Without the variable, which is how every real process runs, a place costs
one call of an empty function, and nothing here can happen.

    kill   SIGKILL, as the out-of-memory killer sends it
    stop   SIGSTOP: a suspended machine, until somebody sends SIGCONT
    hang   this thread waits for ever; the others, the heartbeat's too, live on
    lose   what was done stays done, and the caller hears that its connection broke

`%n` in place of `@n` means every n-th arrival.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from samplestore.errors import InvalidSetting

VARIABLE = "SAMPLESTORE_FAULTS"
POINTS = {
    "claimed": "a worker's claim is acknowledged, and nothing was done for its samples yet",
    "appended": "a segment is written and not committed",
    "committed": "a transaction is committed, and its caller does not know",
    "rewarded": "a reward is computed and not stored",
    "filed": "an array's file is on disk, and no row names it yet",
    "importing": "some groups of an import are written and not committed",
    "exporting": "an export is whole on disk, and has not got its name",
    "replacing": "the folder that an export replaces has made way, and its successor has not got its name",
    "copying": "a transaction of a merge or fork is committed, the next not begun",
    "saved": "a trainer's checkpoint is on disk and its batch not committed; for trainers to call",
    "migrating": "a revision is applied and not committed",
    "pruning": "one slice of a prune is committed, the next not begun",
}
ACTIONS = ("kill", "stop", "hang", "lose")


@dataclass
class _Fault:
    action: str
    number: int
    every: bool
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arrive(self) -> None:
        with self.lock:
            self.seen += 1
            due = self.seen % self.number == 0 if self.every else self.seen == self.number
        if not due:
            return
        if self.action == "lose":
            from sqlalchemy.exc import OperationalError  # here: the package imports without SQLAlchemy

            broke = ConnectionError("the connection broke before the answer came (a fault that was asked for)")
            raise OperationalError("COMMIT", None, broke, connection_invalidated=True)
        if self.action == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def _nothing(point: str) -> None:
    pass


reached: Callable[[str], None] = _nothing  # call it as faults.reached("committed")


def arm(spec: str) -> None:
    """Arm what `spec` says, for this process; "" disarms. Raises InvalidSetting."""
    global reached
    armed = dict(_parsed(part) for part in spec.split())

    def arrive(point: str) -> None:
        if (fault := armed.get(point)) is not None:
            fault.arrive()

    reached = arrive if armed else _nothing


def _parsed(part: str) -> tuple[str, _Fault]:
    point, _, rest = part.partition("=")
    every = "%" in rest
    action, _, number = rest.partition("%" if every else "@")
    if point not in POINTS or action not in ACTIONS or not (number or "1").isdecimal() or int(number or 1) < 1:
        allowed = f"POINT=ACTION@NUMBER with POINT of {', '.join(POINTS)} and ACTION of {', '.join(ACTIONS)}"
        raise InvalidSetting(VARIABLE, part, allowed)
    return point, _Fault(action, int(number or 1), every)


if os.environ.get(VARIABLE):
    arm(os.environ[VARIABLE])
