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
from samplestore.runsettings import RunSettings
from samplestore.statements import totals
from samplestore.types import Finding

EXAMPLES = 5
TOTALS = ("request_total", "event_total")  # what `recount` makes anew from what is sound
ANEW = "Make them anew with: samplestore check --recount"
CHECKS = (
    tokens.segments, tokens.samples, states.groups, states.owners, states.batches, tokens.requests, tokens.retention,
)  # fmt: skip


def check(database: Database, run_id: int, settings: RunSettings) -> list[Finding]:
    with database.reading() as connection:
        found = [_run_check(connection, *item) for checks in CHECKS for item in checks(run_id)]
        stored = arrays.findings(connection, run_id, settings)
        totals_hold = (*_ledger(connection, run_id), *_requests(connection, run_id), *_events(connection, run_id))
        return [*(f for f in found if f is not None), *stored, *totals_hold, *_foreign_keys(connection)]


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


def _requests(connection: sa.Connection, run_id: int) -> Iterator[Finding]:
    kept, counted = ledger.kept_requests(connection, run_id), ledger.counted_requests(connection, run_id)
    yield from _differ(
        TOTALS[0], f"the totals of requests differ from their rows. {ANEW}",
        ledger.by_amount(kept), ledger.by_amount(counted),
    )  # fmt: skip


def _events(connection: sa.Connection, run_id: int) -> Iterator[Finding]:
    queries = (totals.kept_events(run_id), totals.counted_events(totals.event.c.run_id == run_id))
    kept, counted = (
        {(r.kind, r.reason, name): int(getattr(r, name)) for r in connection.execute(query) for name in ("n", "tokens")}
        for query in queries
    )
    yield from _differ(TOTALS[1], f"the totals of events differ from their rows. {ANEW}", kept, counted)


def _differ(code: str, message: str, kept: dict[Any, int], counted: dict[Any, int]) -> Iterator[Finding]:
    kept, counted = totals.told_alike(kept, counted)
    wrong = sorted(key for key in {*kept, *counted} if kept.get(key, 0) != counted.get(key, 0))
    if wrong:
        shown = [
            {"of": ": ".join(key), "kept": kept.get(key, 0), "counted": counted.get(key, 0)} for key in wrong[:EXAMPLES]
        ]
        yield Finding(code, message, len(wrong), shown)


def _foreign_keys(connection: sa.Connection) -> Iterator[Finding]:
    if connection.dialect.name != "sqlite":
        return  # PostgreSQL never lets a foreign key be off
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        yield Finding(
            "foreign_key", "rows refer to rows that do not exist", len(broken), [list(r) for r in broken[:EXAMPLES]]
        )
