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

    rows are the planner's estimate. Where it has none (ANALYZE never ran) they are, on SQLite, the highest row number,
    and `at_most` is true; on PostgreSQL, what its statistics have counted since they were last reset. None: not known,
    only on PostgreSQL. bytes of a table are those of its rows, indexes and large values, None on SQLite, which keeps no
    such sum.
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
    # Rows are numbered from 1 on, and the last one is found without counting: there are no more than that.
    names = sorted(Base.metadata.tables)
    last = [f'SELECT coalesce(max(rowid), 0) FROM "{name}"' for name in names]  # noqa: S608 - names of our own tables
    at_most = [int(n) for (n,) in c.exec_driver_sql(" UNION ALL ".join(last))]
    wal = database.path.with_name(database.path.name + "-wal")
    return {
        "bytes": page * pages,
        "free_bytes": page * free,
        "wal_bytes": wal.stat().st_size if wal.exists() else 0,
        "tables": [
            {"table": name, "rows": rows.get(name, most), "bytes": None, "at_most": name not in rows and most > 0}
            for name, most in zip(names, at_most, strict=True)
        ],
        "analyzed": bool(rows),
    }


def _postgres(c: sa.Connection) -> dict[str, Any]:
    found = {
        r.relname: r
        for r in c.execute(
            sa.text(
                "SELECT relname, reltuples, pg_total_relation_size(oid) AS bytes, pg_relation_size(oid) AS own_bytes, "
                "pg_stat_get_live_tuples(oid) AS counted FROM pg_class "
                "WHERE relkind = 'r' AND relnamespace = to_regnamespace(current_schema())"
            )
        )
    }
    tables = []
    for name in sorted(Base.metadata.tables):
        r = found.get(name)
        size = None if r is None else int(r.bytes)
        tables.append({"table": name, "rows": _about(r), "bytes": size, "at_most": False})
    return {
        "bytes": int(c.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one()),
        "free_bytes": None,
        "wal_bytes": None,
        "tables": tables,
        "analyzed": any(r.reltuples >= 0 for r in found.values()),
    }


def _about(r: Any) -> int | None:
    """Rows of a table of PostgreSQL: by its statistics, which a crash of the server empties, or by the last ANALYZE."""
    if r is None:
        return None
    if r.counted > 0 or r.own_bytes == 0:
        return int(r.counted)
    return int(r.reltuples) if r.reltuples >= 0 else None
