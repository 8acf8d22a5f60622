"""How much a call reads, whatever the machine: instructions of SQLite's virtual machine, rows that PostgreSQL's scans
touch. And the plans of what it sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database

STEP = 100  # instructions between two ticks
LARGE = ("sample", "sample_group", "segment", "stage", "request", "event", "batch", "batch_group")


@dataclass
class Reading:
    """work   SQLite: instructions; PostgreSQL: rows, those that were read and then filtered out included
    plans    (statement, plan as text) of everything that was sent
    """

    work: int = 0
    sent: list[tuple[str, Any]] = field(default_factory=list)
    plans: list[tuple[str, str]] = field(default_factory=list)

    def whole_tables(self) -> list[str]:
        """Large tables, or indexes of them, that are read from end to end."""
        wrong = []
        for statement, plan in self.plans:
            for line in plan.splitlines():
                words = line.replace("(", " ").split()
                for table in LARGE:
                    scan = (
                        "SCAN" in words and words[words.index("SCAN") + 1] == table
                    ) or f"Seq Scan on {table} " in line
                    if scan:
                        wrong.append(f"{line.strip()}\n    {' '.join(statement.split())[:300]}")
        return wrong


@contextmanager
def measured(database: Database) -> Iterator[Reading]:
    """What the calls inside the block cost on the reader's connections; plans are there afterwards."""
    reading = Reading()

    def tick() -> int:
        reading.work += STEP
        return 0

    def listen(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        reading.sent.append((statement, parameters[0] if many and parameters else parameters))
        if database.is_sqlite:
            conn.connection.driver_connection.set_progress_handler(tick, STEP)

    sa.event.listen(database.reader, "before_cursor_execute", listen)
    try:
        yield reading
    finally:
        sa.event.remove(database.reader, "before_cursor_execute", listen)
        database.reader.dispose()  # and with its connections the handlers
    with database.reading() as connection:
        for statement, parameters in reading.sent:
            if not statement.lstrip().upper().startswith(("SELECT", "WITH")):
                continue
            if database.is_sqlite:
                rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
                reading.plans.append((statement, "\n".join(str(row[-1]) for row in rows)))
            else:
                reading.plans.append((statement, _explain(connection, statement, parameters, _adder(reading))))


def _adder(reading: Reading) -> Callable[[int], None]:
    def add(rows: int) -> None:
        reading.work += rows

    return add


def _explain(connection: Any, statement: str, parameters: Any, add: Callable[[int], None]) -> str:
    """The plan as PostgreSQL ran it; `add` gets the rows of each scan."""
    told = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}", parameters).scalar()
    lines: list[str] = []

    def walk(node: dict[str, Any], depth: int) -> None:
        of = node.get("Relation Name") or node.get("Index Name") or ""
        removed = sum(node.get(f"Rows Removed by {why}", 0) for why in ("Filter", "Index Recheck", "Join Filter"))
        rows = (node["Actual Rows"] + removed) * node["Actual Loops"]
        if "Scan" in node["Node Type"] and node["Node Type"] != "CTE Scan":
            add(int(rows))
        lines.append(f"{'  ' * depth}{node['Node Type']} on {of} (rows={rows:.0f})")
        for child in node.get("Plans", []):
            walk(child, depth + 1)

    for plan in told if isinstance(told, list) else json.loads(told):
        walk(plan["Plan"], 0)
    return "\n".join(lines)
