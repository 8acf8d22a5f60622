"""How large a database is, and what may be pruned. Nothing here counts a table: what is not kept is said to be
about."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.models import Base, Run
from samplestore.queries import arrays

run = Run.__table__


def sizes(database: Database, run_id: int) -> dict[str, Any]:
    """{"bytes": of the database, "free_bytes": of it not used, "wal_bytes", "tables": [{"table", "rows", "at_most",
    "bytes"}],
    "analyzed": bool, "retention_step", "arrays": see queries/arrays.py, "run": {n_prompts, n_groups, ...}}.

    rows are the planner's estimate. Where it has none (ANALYZE never ran) they are, on SQLite, as many as were ever
    written, and `at_most` is true; None: not known. bytes of a table are those of its rows,
    indexes and large values, None on SQLite, which keeps no such sum.
    """
    with database.reading() as c:
        row = c.execute(
            sa.select(run.c.retention_step, run.c.n_prompts, run.c.n_groups, run.c.created_at).where(run.c.id == run_id)
        ).one()
        told = _sqlite(c, database) if database.is_sqlite else _postgres(c)
        named = arrays.sizes(c, run_id)
    return {**told, "retention_step": int(row.retention_step), "arrays": named, "run": dict(row._mapping)}


def _sqlite(c: sa.Connection, database: Database) -> dict[str, Any]:
    page, pages, free = (
        int(c.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in ("page_size", "page_count", "freelist_count")
    )
    rows: dict[str, int] = {}
    if c.exec_driver_sql("SELECT count(*) FROM sqlite_master WHERE name = 'sqlite_stat1'").scalar():
        for table, stat in c.exec_driver_sql("SELECT tbl, stat FROM sqlite_stat1 WHERE stat IS NOT NULL"):
            first = str(stat).split(" ")[0]
            if first.isdecimal():
                rows[table] = max(rows.get(table, 0), int(first))
    # Tables with ids that are never used twice: the last id is as many rows as were ever written, so no less than are.
    last = {str(name): int(seq) for name, seq in c.exec_driver_sql("SELECT name, seq FROM sqlite_sequence")}
    wal = database.path.with_name(database.path.name + "-wal")
    return {
        "bytes": page * pages,
        "free_bytes": page * free,
        "wal_bytes": wal.stat().st_size if wal.exists() else 0,
        "tables": [
            {
                "table": name,
                "rows": rows.get(name, last.get(name)),
                "bytes": None,
                "at_most": name not in rows and name in last,
            }
            for name in sorted(Base.metadata.tables)
        ],
        "analyzed": bool(rows),
    }


def _postgres(c: sa.Connection) -> dict[str, Any]:
    found = {
        r.relname: r
        for r in c.execute(
            sa.text(
                "SELECT relname, reltuples, pg_total_relation_size(oid) AS bytes FROM pg_class "
                "WHERE relkind = 'r' AND relnamespace = to_regnamespace(current_schema())"
            )
        )
    }
    tables = []
    for name in sorted(Base.metadata.tables):
        r = found.get(name)
        rows = None if r is None or r.reltuples < 0 else int(r.reltuples)
        size = None if r is None else int(r.bytes)
        tables.append({"table": name, "rows": rows, "bytes": size, "at_most": False})
    return {
        "bytes": int(c.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one()),
        "free_bytes": None,
        "wal_bytes": None,
        "tables": tables,
        "analyzed": any(t["rows"] is not None for t in tables),
    }
