"""Whether the SQL of a run's settings runs on this database, and whether anything is left to serve."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore import serving
from samplestore.engine import Database
from samplestore.errors import InvalidSetting
from samplestore.models import DatasetRow, SampleGroup
from samplestore.order import Cursor
from samplestore.runsettings import RunSettings

dataset, group = DatasetRow.__table__, SampleGroup.__table__


def probe(database: Database, order: str = serving.FIFO, curriculum: str | None = None) -> None:
    """Run what a setting says once, read-only, on no rows. Raises InvalidSetting with the database's words."""
    serving.check(order, {}, curriculum)
    if order.startswith(serving.SQL):
        first: sa.ColumnElement[Any] = sa.literal_column(f"({order.removeprefix(serving.SQL)})")
        rows = sa.select(group.c.id).where(group.c.run_id == 0).order_by(first).limit(1)
        _try(database, "order", order, rows, {})
        if not database.is_sqlite:
            # A lease locks the rows that it reads, and PostgreSQL refuses window functions and the like where rows are
            # locked. SQLite has no such lock. No row is of run 0, so nothing is held.
            _try(database, "order", order, rows.with_for_update(of=group, key_share=True, skip_locked=True), {}, True)
    if curriculum is not None:
        _try(database, "curriculum", curriculum, *query(curriculum, 0, 1, 0, 0))


def query(curriculum: str, run_id: int, n: int, served: int, seed: int) -> tuple[sa.TextClause, dict[str, int]]:
    """The statement of a curriculum and its parameters. What it gives more than n of is not read."""
    known = {"run": run_id, "n": n, "served": served, "seed": seed}
    statement = sa.text(curriculum)
    used = statement._bindparams.keys()
    if unknown := sorted(used - known.keys()):
        raise InvalidSetting("curriculum", curriculum, f"parameters :{', :'.join(known)}, not :{unknown[0]}")
    return statement, {name: value for name, value in known.items() if name in used}


def exhausted(connection: sa.Connection, row: Any, settings: RunSettings) -> bool:
    """Whether admission has nothing more to serve. row: the run's. Raises InvalidSetting where a curriculum does not
    run."""
    if row.n_prompts == 0:
        return True
    if settings.curriculum is not None:
        total = sa.select(sa.func.coalesce(sa.func.sum(dataset.c.n_served), 0)).where(dataset.c.run_id == row.id)
        served = int(connection.execute(total).scalar_one())
        return chosen(connection, settings.curriculum, row.id, 1, served, settings.seed) == []
    if not settings.datasets:
        return Cursor(row.epoch, row.chunk_start, row.chunk_stop, row.chunk_next).exhausted(
            row.n_prompts, settings.epochs
        )
    rules = serving.shares(settings.datasets)
    named = connection.execute(sa.select(dataset).where(dataset.c.run_id == row.id, dataset.c.name.in_(rules)))
    return all(
        Cursor(d.epoch, d.chunk_start, d.chunk_stop, d.chunk_next).exhausted(
            d.n_prompts, rules[d.name].epochs or settings.epochs
        )
        for d in named
    )


def chosen(connection: sa.Connection, curriculum: str, run_id: int, n: int, served: int, seed: int) -> list[Any]:
    """The first column of what a curriculum gives, at most n values. Raises InvalidSetting where it does not run: a
    SELECT that ran when the run was made may fail on the rows of another day."""
    statement, values = query(curriculum, run_id, n, served, seed)
    try:
        with connection.begin_nested():  # an error would end PostgreSQL's whole transaction
            answer = connection.execute(statement, values)
            found = [row[0] for row in answer.fetchmany(n)]
            answer.close()  # it may have had more
    except sa.exc.DBAPIError as error:
        if not _is_wrong(error):
            raise
        raise InvalidSetting("curriculum", curriculum, f"SQL that runs; the database said: {_words(error)}") from error
    return found


def _is_wrong(error: sa.exc.DBAPIError) -> bool:
    """Whether the statement is at fault, not the moment. SQLite calls both by one name."""
    busy = any(word in str(error.orig) for word in ("locked", "busy"))
    return isinstance(error, sa.exc.ProgrammingError | sa.exc.DataError | sa.exc.NotSupportedError) or (
        isinstance(error, sa.exc.OperationalError) and error.orig is not None and not busy and _from_sqlite(error)
    )


def _from_sqlite(error: sa.exc.DBAPIError) -> bool:
    return "sqlite" in type(error.orig).__module__


def _words(error: sa.exc.DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]


def _try(
    database: Database, setting: str, said: str, statement: sa.Executable, values: dict[str, int], locks: bool = False
) -> None:
    try:
        with database.writing() if locks else database.reading() as connection:
            connection.execute(statement, values).fetchmany(1)
    except sa.exc.DBAPIError as error:
        words = _words(error)
        writes = "readonly" in words or "read-only" in words  # as SQLite and PostgreSQL say it
        allowed = "SQL that only reads" if writes else "SQL that this database runs"
        raise InvalidSetting(setting, said, f"{allowed}; it said: {words}") from error
