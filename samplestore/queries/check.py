"""`check`: every promise that a query can verify, in one snapshot. An empty list is good.

Each check is one SELECT of the rows that break a promise; the first column names the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.queries import check_arrays as arrays
from samplestore.queries import check_states as states
from samplestore.queries import check_tokens as tokens
from samplestore.queries import ledger
from samplestore.types import Finding, RunSettings

EXAMPLES = 5
CHECKS = (
    tokens.segments, tokens.samples, states.groups, states.owners, states.batches, tokens.requests, tokens.retention,
)  # fmt: skip


def check(database: Database, run_id: int, settings: RunSettings) -> list[Finding]:
    with database.reading() as connection:
        found = [_run_check(connection, *item) for checks in CHECKS for item in checks(run_id)]
        stored = arrays.findings(connection, run_id, settings)
        ledger_closes, keys_hold = _ledger(connection, run_id), _foreign_keys(connection)
        return [*(f for f in found if f is not None), *stored, *ledger_closes, *keys_hold]


def _run_check(connection: sa.Connection, code: str, message: str, query: sa.Select[Any]) -> Finding | None:
    rows = connection.execute(query.limit(1000)).fetchall()
    if not rows:
        return None
    shown = [{name: _plain(value) for name, value in row._mapping.items()} for row in rows[:EXAMPLES]]
    return Finding(code, message, len(rows), shown)


def _plain(value: Any) -> Any:
    """PostgreSQL gives sums as Decimal, which JSON does not know."""
    return int(value) if isinstance(value, Decimal) else value


def _ledger(connection: sa.Connection, run_id: int) -> Iterator[Finding]:
    kept, counted = ledger.kept_totals(connection, run_id), ledger.recounted(connection, run_id)
    wrong = sorted(key for key in {*kept, *counted} if kept.get(key, 0) != counted.get(key, 0))
    if wrong:
        shown = [
            {
                "fate": f,
                "reason": r,
                "version": v,
                "kept": kept.get((f, r, v), 0),
                "recounted": counted.get((f, r, v), 0),
            }
            for f, r, v in wrong
        ]
        yield Finding("ledger", "the token ledger does not close", len(wrong), shown[:EXAMPLES])


def _foreign_keys(connection: sa.Connection) -> Iterator[Finding]:
    if connection.dialect.name != "sqlite":
        return  # PostgreSQL never lets a foreign key be off
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        yield Finding(
            "foreign_key", "rows refer to rows that do not exist", len(broken), [list(r) for r in broken[:EXAMPLES]]
        )
