"""The events of a run, as they come: for `samplestore tail`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import Event

event = Event.__table__

MAX_ROWS = 1000
# An event's id is drawn before its transaction commits, so on PostgreSQL one may be seen after a higher one. Those of
# the last seconds are read again. On SQLite there is one writer at a time: ids and commits have one order.
LATE_S = 10.0
TEXT = 1000  # characters of a reason

_COLUMNS = (
    event.c.id, event.c.at, event.c.kind, sa.func.substr(event.c.reason, 1, TEXT).label("reason"), event.c.worker_id,
    event.c.group_id, event.c.sample_id, event.c.step, event.c.version, event.c.tokens, event.c.details,
)  # fmt: skip
_first = (
    sa.select(sa.func.min(event.c.kind).label("kind")).where(event.c.run_id == sa.bindparam("run")).cte(recursive=True)
)
_next = sa.select(sa.func.min(event.c.kind)).where(event.c.run_id == sa.bindparam("run"), event.c.kind > _first.c.kind)
_each = _first.union_all(sa.select(_next.correlate(_first).scalar_subquery()).where(_first.c.kind.is_not(None)))
_KINDS = sa.select(_each.c.kind).where(_each.c.kind.is_not(None))  # those that a run has, each found by an index


class Follower:
    """Reads each event of a run once, however its commit was late. `kinds`: only these; all if left out."""

    def __init__(self, database: Database, run_id: int, kinds: Collection[str] = ()) -> None:
        self.database = database
        self._run_id, self._kinds = run_id, sorted(kinds)
        self._mine = event.c.run_id == run_id
        if kinds:
            self._mine &= event.c.kind.in_(self._kinds)
        self._late_s = 0.0 if database.is_sqlite else LATE_S
        self._low = 0  # everything up to here was seen
        self._seen: set[int] = set()  # above it
        self._marks: deque[tuple[float, int]] = deque()  # (when, highest id that was there then)

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """The newest `limit` events, oldest first; `more` goes on after them."""
        size = min(limit, MAX_ROWS)
        rows, top, now = self._read(lambda c: self._newest(c, size))
        self._low = rows[-1]["id"] - 1 if rows else top
        return self._fresh(rows[::-1], top, now)

    def _newest(self, c: sa.Connection, size: int) -> sa.Select[Any]:
        """Kind by kind, of which an index has the newest: the run may have been silent while others had millions."""

        def of_kind(kind: str) -> sa.Select[Any]:
            query = sa.select(event.c.id).where(event.c.run_id == self._run_id, event.c.kind == kind)
            inner = query.order_by(event.c.at.desc(), event.c.id.desc()).limit(size).subquery()
            return sa.select(inner.c.id)

        kinds = self._kinds or c.execute(_KINDS, {"run": self._run_id}).scalars().all()
        chosen = sa.union_all(*map(of_kind, kinds)) if kinds else sa.select(event.c.id).where(sa.false())
        return sa.select(*_COLUMNS).where(event.c.id.in_(chosen)).order_by(event.c.id.desc()).limit(size)

    def more(self) -> list[dict[str, Any]]:
        """What has come since, oldest first, MAX_ROWS at most."""
        most = MAX_ROWS + len(self._seen)
        query = sa.select(*_COLUMNS).where(self._mine, event.c.id > self._low).order_by(event.c.id).limit(most)
        rows, top, now = self._read(lambda _: query)
        return self._fresh(rows, rows[-1]["id"] if len(rows) == most else top, now)

    def _read(self, query: Callable[[sa.Connection], sa.Select[Any]]) -> tuple[list[dict[str, Any]], int, float]:
        """(rows, the highest id of all events, the time), in one snapshot."""

        def all_of(connection: sa.Connection) -> tuple[Sequence[Any], int, float]:
            top = connection.execute(sa.select(sa.func.max(event.c.id))).scalar()
            now = connection.execute(sa.select(db_now())).scalar_one()
            return connection.execute(query(connection)).all(), int(top or 0), float(now)

        rows, top, now = self.database.read(all_of)
        return [dict(row._mapping) for row in rows], top, now

    def _fresh(self, rows: list[dict[str, Any]], top: int, now: float) -> list[dict[str, Any]]:
        """Those of the rows that were not seen. What was seen long enough ago is not read again."""
        found = [row for row in rows if row["id"] not in self._seen]
        self._marks.append((now, top))
        while self._marks and now - self._marks[0][0] >= self._late_s:
            self._low = max(self._low, self._marks.popleft()[1])
        self._seen = {id for id in (*self._seen, *(row["id"] for row in found)) if id > self._low}
        return found
