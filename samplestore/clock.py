"""One clock: the database's. Seconds since the epoch."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class db_now(FunctionElement[float]):
    """The database's time now, evaluated inside the statement."""

    type = Double()
    inherit_cache = True
    name = "db_now"


@compiles(db_now, "sqlite")
def _sqlite(element: Any, compiler: Any, **kw: Any) -> str:
    # unixepoch('subsec') needs SQLite 3.42; julianday is as exact (1 ms) and works everywhere.
    # Safe: one host, so its clock is the only one.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    # now() is the start of the transaction, which may have waited for locks; clock_timestamp() is now.
    return "extract(epoch from clock_timestamp())::double precision"
