"""The events of a run, as they come: for `samplestore tail`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
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


class Follower:
    """Reads each event of a run once, however its commit was late. `kinds`: only these; all if left out."""

    def __init__(self, database: Database, run_id: int, kinds: Collection[str] = ()) -> None:
        self.database = database
        self._mine = event.c.run_id == run_id
        if kinds:
            self._mine &= event.c.kind.in_(sorted(kinds))
        self._late_s = 0.0 if database.is_sqlite else LATE_S
        self._low = 0  # everything up to here was seen
        self._seen: set[int] = set()  # above it
        self._marks: deque[tuple[float, int]] = deque()  # (when, highest id that was there then)

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """The newest `limit` events, oldest first; `more` goes on after them."""
        query = sa.select(*_COLUMNS).where(self._mine).order_by(event.c.id.desc()).limit(min(limit, MAX_ROWS))
        rows, top, now = self._read(query)
        self._low = rows[-1]["id"] - 1 if rows else top
        return self._fresh(rows[::-1], top, now)

    def more(self) -> list[dict[str, Any]]:
        """What has come since, oldest first, MAX_ROWS at most."""
        most = MAX_ROWS + len(self._seen)
        rows, top, now = self._read(
            sa.select(*_COLUMNS).where(self._mine, event.c.id > self._low).order_by(event.c.id).limit(most)
        )
        return self._fresh(rows, rows[-1]["id"] if len(rows) == most else top, now)

    def _read(self, query: sa.Select[Any]) -> tuple[list[dict[str, Any]], int, float]:
        """(rows, the highest id of all events, the time), in one snapshot."""

        def all_of(connection: sa.Connection) -> tuple[Sequence[Any], int, float]:
            top = connection.execute(sa.select(sa.func.max(event.c.id))).scalar()
            now = connection.execute(sa.select(db_now())).scalar_one()
            return connection.execute(query).all(), int(top or 0), float(now)

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
