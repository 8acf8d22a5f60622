"""Statements that are strings already, given to the driver's own cursor: SQLAlchemy's way to it takes 20 us a
statement, and a commit of one append has four. Errors are SQLAlchemy's, as everywhere else."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import MultipleResultsFound, NoResultFound

from samplestore import pgcursor


@cache
def _row_maker(names: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """What a namedtuple's _make does, without a call of Python for each row."""
    return partial(tuple.__new__, namedtuple("Row", names))  # type: ignore[misc]


class Answer:
    """What a cursor brought: the rows of a statement, with names, or how many it changed."""

    __slots__ = ("cursor", "rowcount", "steps")

    def __init__(self, cursor: Any, steps: bool = False) -> None:
        """steps: its rows are read as they are asked for, by SQLite; those of PostgreSQL are all there"""
        self.cursor, self.steps = cursor, steps
        self.rowcount: int = cursor.rowcount

    def fetchall(self) -> Sequence[Any]:
        make = _row_maker(tuple(column[0] for column in self.cursor.description))
        # A row of SQLite's that is named is let go before the next is read. psycopg makes all of them at once in half
        # the time that it takes to be asked for each.
        return list(map(make, self.cursor if self.steps else self.cursor.fetchall()))

    def one_or_none(self) -> Any:
        """Raises MultipleResultsFound."""
        rows = self.fetchall()
        if len(rows) > 1:
            raise MultipleResultsFound("more than one row where one was asked for")
        return rows[0] if rows else None

    def one(self) -> Any:
        """Raises NoResultFound, MultipleResultsFound."""
        if (row := self.one_or_none()) is None:
            raise NoResultFound("no row where one was asked for")
        return row

    def scalar(self) -> Any:
        """The first value of the first row, or None."""
        row = self.cursor.fetchone()
        return None if row is None else row[0]


def run(connection: Connection, sql: str, values: Any = None, *, binary: bool = False) -> Answer:
    """Send `sql` with its values: a mapping, or a list of them for as many executions.

    binary   PostgreSQL answers in its binary format: payloads arrive in half the time
    """
    if connection.dispatch.before_cursor_execute:  # somebody listens, a test or a tracer: they hear of all statements
        heard = connection.exec_driver_sql(sql, values)
        return Answer(heard.cursor if heard.cursor is not None else _Closed(heard.rowcount))
    cursor: Any = connection.connection.cursor()
    try:
        if isinstance(values, list):
            cursor.executemany(sql, values)
        elif values is None:
            cursor.execute(sql)
        elif binary and connection.dialect.name == "postgresql":
            cursor.execute(sql, values, binary=True)
        else:
            cursor.execute(sql, values)
    except connection.dialect.loaded_dbapi.Error as error:
        raise _wrapped(connection, cursor, sql, error) from error
    return Answer(cursor, steps=connection.dialect.name == "sqlite")


@contextmanager
def committed(connection: Connection) -> Iterator[None]:
    """The end of a transaction on PostgreSQL: what the block sends, reading no answer, goes with the COMMIT."""
    try:
        with pgcursor.committed(connection.connection.driver_connection):
            yield
    except connection.dialect.loaded_dbapi.Error as error:
        raise _wrapped(connection, None, "COMMIT", error) from error


class _Closed:
    """A cursor that SQLAlchemy has closed already: it had no rows."""

    description = ()

    def __init__(self, rowcount: int) -> None:
        self.rowcount = rowcount

    def fetchall(self) -> list[Any]:
        return []

    def fetchone(self) -> None:
        return None


def _wrapped(connection: Connection, cursor: Any, sql: str, error: Any) -> Exception:
    """The error as SQLAlchemy tells it. The values are left out: they hold payloads."""
    dialect = connection.dialect
    driver = dialect.loaded_dbapi
    lost = dialect.is_disconnect(error, connection.connection.driver_connection, cursor)
    told: Exception = sa.exc.DBAPIError.instance(
        sql, None, error, driver.Error, hide_parameters=True, connection_invalidated=lost, dialect=dialect
    )
    if lost and not connection.invalidated:
        connection.invalidate(error)
        connection.engine.dispose()  # the others of the pool are as dead
    return told
