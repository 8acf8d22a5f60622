"""Runs that a merge or a fork is still writing: their names, who writes one, and the removal of those nobody does.

The first worker row of such a run is its owner's. Each transaction of the copy beats it under a token of this one copy,
so whoever was taken for dead and replaced writes nothing any more. The row goes when the run gets its name.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from samplestore import retention
from samplestore.clock import db_now
from samplestore.errors import RunInUse, SampleStoreError, StoreBusy
from samplestore.models import Run as RunRow
from samplestore.models import Worker
from samplestore.run import Run
from samplestore.runsettings import RunSettings
from samplestore.states import WorkerKind, WorkerState
from samplestore.store import Store
from samplestore.verbs.tx import Tx

table, worker = RunRow.__table__, Worker.__table__
T = TypeVar("T")
TTL_S = 60.0  # without a transaction of it; one takes some groups or prompts
_HIDDEN = re.compile(r"\(copying ([0-9a-f-]{36}) of ([0-9a-f-]{36}) at (-?\d+|end)\) (.*)", re.DOTALL)


class CopyBusy(SampleStoreError):
    """Somebody else is writing this copy. Nothing was changed."""

    def __init__(self, name: str, host: str, pid: int) -> None:
        self.name, self.host, self.pid = name, host, pid
        super().__init__(
            f"run {name!r} is being copied by process {pid} on {host}. Let it end; if it was killed, repeat this "
            f"command after {TTL_S:.0f} s. Look at it with: ps -fp {pid}"
        )


class CopyLost(SampleStoreError):
    """This copy was silent for so long that another took it over, or removed it."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the copy of run {name!r} was taken over, since nothing was heard of this one for {TTL_S:.0f} s. See what "
            "is there with: samplestore runs; then repeat the command"
        )


@dataclass(frozen=True, slots=True)
class Hidden:
    """The name of a run that is not whole yet: which copy it is of what."""

    uuid: str
    origin: str
    at: str
    name: str

    @classmethod
    def parse(cls, name: str) -> Hidden | None:
        found = _HIDDEN.fullmatch(name)
        return None if found is None else cls(*found.groups())

    def __str__(self) -> str:
        return f"(copying {self.uuid} of {self.origin} at {self.at}) {self.name}"


def run_of(store: Store, row: Any) -> Run:
    return Run(store.database, row.id, row.uuid, row.name, RunSettings.parse(row.settings))


def require_free(connection: sa.Connection, run_id: int, name: str, token: str = "") -> Any:
    """The owner's row, locked; None where there is none. Raises CopyBusy while another owner than `token` is alive."""
    fresh = (worker.c.heartbeat >= db_now() - worker.c.ttl_s).label("fresh")
    first = sa.select(sa.func.min(worker.c.id)).where(worker.c.run_id == run_id).scalar_subquery()
    query = sa.select(worker, fresh).where(worker.c.id == first)
    row = None
    for each in (query, query.with_for_update()):  # first without the lock, which whoever lives may hold
        row = connection.execute(each).one_or_none()
        live = row is not None and row.state == WorkerState.LIVE and row.fresh and not _ended(row.host, row.pid)
        if row is not None and live and row.name != token:
            raise CopyBusy(name, row.host, row.pid)
    return row


def _ended(host: str, pid: int) -> bool:
    """A process of this machine that is no more need not be waited for. Where it is in another pid namespace and
    lives, it loses its copy: each of its transactions finds out."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class Owner:
    """One copy that writes a hidden run, until it lets go or falls silent."""

    def __init__(self, run: Run, worker_id: int, token: str) -> None:
        self.run, self.worker_id, self.token = run, worker_id, token

    @classmethod
    def begin(cls, connection: sa.Connection, run: Run, token: str, stood_at: list[int]) -> Owner:
        """Own a run that was made in this transaction and has no other worker. stood_at: see `stood_at` below."""
        values = {"run_id": run.id, "kind": WorkerKind.TOOL.value, "info": {"stood_at": stood_at}, **_owned(token)}
        id = connection.execute(sa.insert(worker).values(**values).returning(worker.c.id)).scalar_one()
        return cls(run, int(id), token)

    @classmethod
    def take_over(cls, connection: sa.Connection, run: Run, token: str, row: Any) -> Owner:
        """Own a run whose owner is gone; row: what `require_free` gave."""
        connection.execute(sa.update(worker).where(worker.c.id == row.id).values(**_owned(token)))
        return cls(run, row.id, token)

    def transact(self, work: Callable[[Tx], T], *, durable: bool = False) -> T:
        """A transaction of the run, as long as it is this copy's. Raises CopyLost."""

        def owned(tx: Tx) -> T:
            self.beat(tx)
            return work(tx)

        return self.run.transact(owned, durable=durable)

    def beat(self, tx: Tx) -> None:
        """Say that this copy lives, and lock its row until the transaction ends. Raises CopyLost."""
        if tx.execute(self._update(heartbeat=db_now())).rowcount != 1:
            hidden = Hidden.parse(self.run.name)
            raise CopyLost(self.run.name if hidden is None else hidden.name)

    def _update(self, **values: Any) -> sa.Update:
        mine = (worker.c.id == self.worker_id) & (worker.c.name == self.token)
        return sa.update(worker).where(mine, worker.c.state == WorkerState.LIVE.value).values(**values)

    def let_go(self) -> None:
        """After an error: whoever repeats the command need not wait."""
        gone = self._update(state=WorkerState.GONE.value, ended_at=db_now())
        with suppress(StoreBusy):  # the error is told, not this
            self.run.database.write(lambda c: c.execute(gone))

    def end(self, tx: Tx) -> None:
        """In the transaction that gives the run its name."""
        tx.execute(sa.delete(worker).where(worker.c.id == self.worker_id))


def _owned(token: str) -> dict[str, Any]:
    return {
        "name": token, "host": socket.gethostname(), "pid": os.getpid(), "ttl_s": TTL_S, "ended_at": None,
        "state": WorkerState.LIVE.value, "started_at": db_now(), "heartbeat": db_now(),
    }  # fmt: skip


def stood_at(row: Any) -> list[int] | None:
    """Where the source stood when the copy began, by its owner's row; None: it can't be gone on with."""
    return None if row is None else (row.info or {}).get("stood_at")


def give_up(connection: sa.Connection, row: Any) -> None:
    """Nobody goes on with this copy: it may lack what `drop` has removed already. row: what `require_free` gave."""
    if row is not None:
        dead = {"state": WorkerState.DEAD.value, "ended_at": db_now(), "info": {}}
        connection.execute(sa.update(worker).where(worker.c.id == row.id).values(**dead))


def drop(run: Run) -> None:
    """Remove a copy that was given up, in slices; killed in between, the next one goes on. Raises RunInUse."""
    with suppress(sa.exc.NoResultFound):  # somebody else has removed it
        retention.remove(run)


def drop_unfinished(store: Store) -> int:
    """Remove copies that nobody writes, whatever they were of; how many."""
    dropped = 0
    for name in store.run_names():
        if Hidden.parse(name) is None:
            continue
        given_up = store.database.write(lambda c, n=name: _give_up_if_free(store, c, n))  # type: ignore[misc]
        try:
            if given_up is not None:
                drop(given_up)
                dropped += 1
        except RunInUse:  # a worker has registered itself there: it keeps it until it leaves
            continue
    return dropped


def _give_up_if_free(store: Store, connection: sa.Connection, name: str) -> Run | None:
    found = connection.execute(sa.select(table).where(table.c.name == name)).one_or_none()
    if found is None:
        return None  # it has got its name
    try:
        give_up(connection, require_free(connection, found.id, name))
    except CopyBusy:
        return None
    return run_of(store, found)


def removal(name: str, shown: str) -> str:
    """The command that removes a copy that is not finished."""
    return shlex.join(["samplestore", "prune", "--all", "--run", name, "--db", shown])
