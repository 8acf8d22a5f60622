"""A transaction of the store: a connection, the ledger entries and the events that its changes make.

Verbs are functions `verb(tx, ...)`. They lock in one order - worker, run, group, sample, stage, each by id - and
leave totals and events to `flush`, which writes them last and sorted, so that two transactions never wait for each
other in a circle. A verb may run again (lost connection, deadlock), so it touches nothing but the database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from samplestore import codec
from samplestore.arguments import id_of_worker
from samplestore.arrayfiles import ArrayFiles
from samplestore.clock import db_now
from samplestore.driver import Answer
from samplestore.engine import Database
from samplestore.errors import NotInRun, UnknownWorker, WorkerDead
from samplestore.models import Event, Run, SampleGroup, Worker
from samplestore.runsettings import RunSettings
from samplestore.statements import ledger, totals
from samplestore.statements.lists import among
from samplestore.statements.prepared import Prepared
from samplestore.statements.totals import Amounts
from samplestore.states import Fate, WorkerState
from samplestore.types import Claim, StageClaim, expect

run, group, worker, event = (t.__table__ for t in (Run, SampleGroup, Worker, Event))

T = TypeVar("T")
Key = tuple[str, str, int]  # fate, reason, version
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a verb is called with, after the transaction
SHARED = 0  # ledger rows that belong to no live worker
LOCK_GROUPS = (
    sa.select(group)
    .where(group.c.id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(group.c.id)
    .with_for_update(key_share=True)
)
WORKER_STATE = Prepared(
    sa.select(worker.c.state)
    .where(worker.c.id == sa.bindparam("of_worker"), worker.c.run_id == sa.bindparam("b_run"))
    .with_for_update(read=True)
)
HOLD_SAMPLES = Prepared(
    sa.select(ledger.sample.c.id)
    .where(among(ledger.sample.c.id, "ids"))
    .order_by(ledger.sample.c.id)
    .with_for_update(key_share=True)
)
EVENT = ("run_id", "kind", "reason", "worker_id", "group_id", "sample_id", "step", "version", "tokens", "details")
INSERT_EVENT = Prepared(sa.insert(event).values(at=db_now()), EVENT)
PART = 500  # ids a statement: SQLite takes 32,766 bound values, PostgreSQL 65,535
REMEMBERED = 100  # events of a kind among which a repetition is looked for; a retry comes within a minute


def in_parts(ids: Iterable[int]) -> Iterator[list[int]]:
    """The ids in the order of locks, as many at a time as a statement takes."""
    waiting = iter(sorted(set(ids)))
    while part := list(islice(waiting, PART)):
        yield part


class Contested(Exception):
    """One of several writes was refused, and which one can't be told: take the transaction back, do each alone."""


class Tx:
    def __init__(self, connection: Connection, run_id: int, settings: RunSettings) -> None:
        self.connection, self.run_id, self.settings = connection, run_id, settings
        self.worker_id = SHARED
        self._deltas: Counter[tuple[int, Key]] = Counter()
        self._events: list[dict[str, Any]] = []
        self._requests: dict[tuple[int, str], tuple[Amounts, float]] = {}  # by worker and reason: and the last end
        self._happened: dict[tuple[int, str, str], tuple[int, int]] = {}  # by worker, kind and reason: how many, tokens
        self._held: set[int] = set()  # groups

    @overload
    def execute(self, statement: Prepared, parameters: Any = None) -> Answer: ...

    @overload
    def execute(self, statement: sa.Executable, parameters: Any = None) -> sa.CursorResult[Any]: ...

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        if isinstance(statement, Prepared):
            return statement.execute(self.connection, parameters)
        return self.connection.execute(statement, parameters)

    def rows(self, statement: Any, parameters: Any = None) -> Sequence[Any]:
        if isinstance(statement, Prepared):
            return statement.rows(self.connection, parameters)
        found: Sequence[Any] = self.execute(statement, parameters).fetchall()
        return found

    def as_worker(self, worker_id: int) -> None:
        """Ledger entries from here on go to this worker's rows: no two processes fight for one."""
        self.worker_id = worker_id

    def as_owner_of(self, claim: Any, kind: type[Claim] | type[StageClaim] = Claim) -> None:
        """Write for the owner of a claim. Raises InvalidSetting for what is none, NotInRun for a claim of another run:
        its settings and ledger are not this one's."""
        expect(claim, kind)
        if claim.run_id != self.run_id:
            raise NotInRun("claim", [claim.sample_id])
        self.as_worker(claim.owner)

    def require_live(self, worker_id: int) -> None:
        """Lock the worker's row against a reap and check it. Without, a claim that commits during a reap would be
        owned by a worker that no longer exists. Raises WorkerDead, UnknownWorker."""
        self.as_worker(worker_id)
        if self.state_of(worker_id) != WorkerState.LIVE:
            raise WorkerDead(worker_id)

    def state_of(self, worker_id: int) -> str:
        """Of a worker, whose row is locked against a reap. Raises UnknownWorker where the run has no such worker."""
        state = self.execute(WORKER_STATE, {"of_worker": id_of_worker(worker_id), "b_run": self.run_id}).scalar()
        if state is None:
            raise UnknownWorker(worker_id)
        return str(state)

    def lock_run(self) -> sa.Row[Any]:
        """The run's row, locked. FOR NO KEY UPDATE: inserts that refer to the run must not wait for us."""
        return self.execute(sa.select(run).where(run.c.id == self.run_id).with_for_update(key_share=True)).one()

    def lock_groups(self, ids: Sequence[int]) -> dict[int, sa.Row[Any]]:
        found = self.rows(LOCK_GROUPS, {"ids": sorted(set(ids))})
        return {row.id: row for row in found}

    def hold_groups(self, ids: Iterable[int]) -> None:
        """Lock groups whose rows the caller has no use for, unless this transaction holds them. On SQLite it holds the
        whole database."""
        wanted = sorted(set(ids) - self._held)
        if wanted and self.connection.dialect.name != "sqlite":
            self.lock_groups(wanted)
        self._held.update(wanted)

    def hold_samples(self, ids: Iterable[int]) -> None:
        """Lock samples in their order, for a transaction that will write them in another. See hold_groups."""
        wanted = sorted(set(ids))
        if len(wanted) > 1 and self.connection.dialect.name != "sqlite":
            self.rows(HOLD_SAMPLES, {"ids": wanted})

    def lock_samples_of(self, group_ids: Sequence[int]) -> None:
        """Lock all samples of (locked) groups before counting what they hold. Appends and claims lock no group: one
        that committed between the count and the change would leave its tokens twice in the ledger, and a claim of
        that moment would own a sample of a closed group."""
        self.rows(
            sa.select(ledger.sample.c.id)
            .where(ledger.sample.c.group_id.in_(group_ids))
            .order_by(ledger.sample.c.id)
            .with_for_update(key_share=True)
        )

    # -- ledger

    def add(self, fate: Fate, version: int | None, amount: int, reason: str = "") -> None:
        self._deltas[(self.worker_id, (fate.value, reason, -1 if version is None else version))] += amount

    @contextmanager
    def moving(self, *, samples: Sequence[int] = (), groups: Sequence[int] = ()) -> Iterator[None]:
        """Whatever the block does to these samples or groups, their tokens move in the ledger accordingly."""
        before = self._tokens(samples, groups)
        yield
        for key, amount in self._tokens(samples, groups).items():
            self._deltas[(self.worker_id, key)] += amount
        for key, amount in before.items():
            self._deltas[(self.worker_id, key)] -= amount

    def move(self, groups: Sequence[int], old: Fate, new: Fate) -> None:
        """The tokens of these groups that have one fate get another: half of the reading of `moving`, for a change that
        moves nothing else. Call it before the change."""
        for (fate, _, version), amount in self._tokens([], groups).items():
            if fate == old:
                self.add(old, version, -amount)
                self.add(new, version, amount)

    def _tokens(self, samples: Sequence[int], groups: Sequence[int]) -> Counter[Key]:
        counted: Counter[Key] = Counter()
        for statement, ids in ((ledger.OF_SAMPLES, samples), (ledger.OF_GROUPS, groups)):
            if ids:
                for fate, reason, version, amount in self.rows(statement, {"ids": list(ids)}):
                    counted[(fate, reason, version)] += int(amount)
        return counted

    def fold(self, worker_ids: Sequence[int]) -> None:
        """Move the totals of workers that are gone to the shared rows, so that the tables stay small."""
        self.as_worker(SHARED)
        for row in self._taken(ledger.total, worker_ids):
            self._deltas[(SHARED, (row.fate, row.reason, row.version))] += row.amount
        taken = self._taken(totals.of_requests, worker_ids)
        for reason, amounts in totals.by_reason(taken).items():
            self.requests(reason, amounts, max(row.at for row in taken))
        for row in self._taken(totals.of_events, worker_ids):
            self.happened(row.kind, row.reason, row.n, row.tokens)

    def _taken(self, table: sa.Table, worker_ids: Sequence[int]) -> Sequence[Any]:
        theirs = (table.c.run_id == self.run_id) & table.c.worker_id.in_(worker_ids)
        return self.rows(sa.delete(table).where(theirs).returning(*table.c))

    # -- totals of requests and events

    def requests(self, reason: str, amounts: Amounts, at: float = 0.0) -> None:
        """Add to what the run's requests come to. reason: why tokens of them were lost; at: when the last one ended."""
        if not any(amounts):
            return
        key = (self.worker_id, reason)
        before, last = self._requests.get(key, (Amounts(), 0.0))
        self._requests[key] = before.plus(amounts), max(last, at)

    def happened(self, kind: str, reason: str | None, n: int, tokens: int) -> None:
        """Add to how many events of a kind there are."""
        key = (self.worker_id, kind, totals.reason_of(kind, reason))
        before = self._happened.get(key, (0, 0))
        self._happened[key] = (before[0] + n, before[1] + tokens)

    def recount(
        self, *, requests: sa.ColumnElement[bool] | None = None, events: Any = None, times: int = 1, anew: bool = False
    ) -> None:
        """Add rows that came in another way than by their verbs; times=-1: take off those that are about to go; anew:
        nothing is kept yet of what these rows tell."""
        if requests is not None:
            counted = self.rows(totals.counted_requests(requests))
            last = max((row.at for row in counted if row.at is not None), default=0.0) if times > 0 else 0.0
            told = totals.by_reason(counted)
            names = totals.names({("", reason): amounts.lost for reason, amounts in told.items()}, anew)
            for reason, amounts in told.items():
                self.requests(names["", reason], Amounts().plus(amounts, times), last)
        if events is not None:
            rows = self.rows(totals.counted_events(events))
            names = totals.names({(row.kind, row.reason): int(row.n) for row in rows}, anew)
            for row in rows:
                self.happened(row.kind, names[row.kind, row.reason], times * int(row.n), times * int(row.tokens))

    # -- events

    def event(self, kind: str, reason: str | None = None, **fields: Any) -> None:
        blank = dict.fromkeys(EVENT)
        said = None if reason is None else codec.clean_text(reason)
        self._events.append({**blank, **fields, "run_id": self.run_id, "kind": kind, "reason": said})
        self.happened(kind, said, 1, fields.get("tokens") or 0)

    def done_before(self, kind: str, call: str | None) -> dict[str, Any] | None:
        """The event that this very call left when it ran before and its acknowledgement was lost; None: it did not.
        For verbs that change something else each time; `call` is made once by whoever repeats the closure."""
        if call is None:
            return None
        recent = self.rows(
            sa.select(event.c.version, event.c.details)
            .where(event.c.run_id == self.run_id, event.c.kind == kind)
            .order_by(event.c.at.desc(), event.c.id.desc())
            .limit(REMEMBERED)
        )
        found = (row for row in recent if (row.details or {}).get("call") == call)
        return next((dict(row._mapping) for row in found), None)

    def flush(self) -> None:
        """Write the ledger, the totals and the events. Reads no answer."""
        rows = [
            {"run_id": self.run_id, "worker_id": w, "fate": f, "reason": r, "version": v, "amount": amount}
            for (w, (f, r, v)), amount in sorted(self._deltas.items())
            if amount
        ]
        if rows:
            self.execute(ledger.ADD[self.connection.dialect.name], rows)
        if self._requests:
            of_requests = [
                {"run_id": self.run_id, "worker_id": w, "reason": reason, **amounts._asdict(), "at": at}
                for (w, reason), (amounts, at) in sorted(self._requests.items())
            ]
            totals.add(self.connection, totals.of_requests, of_requests)
        if self._happened:
            of_events = [
                {"run_id": self.run_id, "worker_id": w, "kind": kind, "reason": reason, "n": n, "tokens": tokens}
                for (w, kind, reason), (n, tokens) in sorted(self._happened.items())
            ]
            totals.add(self.connection, totals.of_events, of_events)
        if self._events:
            self.execute(INSERT_EVENT, self._events)
        for written in (self._deltas, self._requests, self._happened, self._events):
            written.clear()


class Transactor(Protocol):
    """What lower layers need of a run: its identity, and transactions."""

    database: Database
    id: int
    uuid: str
    name: str
    settings: RunSettings
    tokenizer: Any

    def array_files(self) -> ArrayFiles: ...

    def transact(self, work: Callable[[Tx], T], *, durable: bool = False) -> T: ...
