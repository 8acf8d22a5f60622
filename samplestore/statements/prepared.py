"""Statements that are compiled once a dialect and sent as strings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect

from samplestore import driver

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """One dialect's string, its constants, and what turns values of a type (JSON, bytes) into the driver's and back: by
    the name of a parameter, by the place of a column."""

    sql: str
    constants: dict[str, Any]
    turns: list[tuple[str, Callable[[Any], Any]]]
    returns: list[tuple[int, Callable[[Any], Any]]]

    def parameters(self, values: Values) -> dict[str, Any]:
        given = {**self.constants, **values}
        for name, turn in self.turns:
            given[name] = turn(given[name])
        return given


class Prepared:
    """A Core statement for a sample's every request or segment. Core stays the one source of its SQL, but runs it for
    90 us of CPU a call, where the string takes 15 and SQLite 2.

    columns   of an INSERT ... VALUES: those that are given; their defaults are not looked up
    execute() gives rows as the driver does, rows() decodes JSON in them. No expanding IN: see lists.
    """

    def __init__(self, statement: Any, columns: Sequence[str] | None = None) -> None:
        self.statement, self.columns = statement, columns
        self._compiled: dict[str, _Compiled] = {}

    def execute(self, connection: Connection, values: Values | Sequence[Values]) -> driver.Answer:
        """Run it with these values, or once for each of several."""
        compiled = self._of(connection.dialect)
        if isinstance(values, Mapping):
            return driver.run(connection, compiled.sql, compiled.parameters(values))
        return driver.run(connection, compiled.sql, [compiled.parameters(each) for each in values])

    def rows(self, connection: Connection, values: Values) -> Sequence[Any]:
        """All rows, with names for attributes."""
        compiled = self._of(connection.dialect)
        found = driver.run(connection, compiled.sql, compiled.parameters(values), binary=True).fetchall()
        if not compiled.returns:
            return found
        turned = []
        for row in found:
            made = list(row)
            for place, turn in compiled.returns:
                made[place] = turn(made[place])
            turned.append(row._make(made))
        return turned

    def _of(self, dialect: Dialect) -> _Compiled:
        return self._compiled.get(dialect.name) or self._compile(dialect)

    def _compile(self, dialect: Dialect) -> _Compiled:
        made = self.statement.compile(dialect=dialect, column_keys=self.columns)
        if made.insert_prefetch or made.update_prefetch:
            raise TypeError(f"a prepared statement fills in no defaults: {made.string}")
        turns = [
            (name, turn)
            for bind, name in made.bind_names.items()
            if not isinstance(bind.type, sa.ARRAY)
            and (turn := bind.type.dialect_impl(dialect).bind_processor(dialect)) is not None
        ]
        constants = {name: bind.effective_value for bind, name in made.bind_names.items() if not bind.required}
        columns = self.statement.exported_columns if self.statement.is_select or self.statement.is_dml else ()
        returns: list[tuple[int, Callable[[Any], Any]]] = [
            (place, turn)
            for place, column in enumerate(columns)
            if isinstance(kind := column.type.dialect_impl(dialect), sa.JSON)
            and (turn := kind.result_processor(dialect, None)) is not None
        ]
        compiled = self._compiled[dialect.name] = _Compiled(made.string, constants, turns, returns)
        return compiled


GIVEN = "given"  # the rows of an Over
ROWS, N_ROWS = "rows_of_given", "n_rows_of_given"  # their parameters, on PostgreSQL
LARGEST = 64  # rows of one execution, on SQLite


def given(types: Mapping[str, Any]) -> sa.TableClause:
    """The table that an Over reads its rows from. `types`: SQLAlchemy's, by the names of values in a row."""
    return sa.table(GIVEN, *(sa.column(name, type) for name, type in types.items()))


class Over:
    """A Core statement for a list of rows at once, which it reads as a table `given`.

    Executed once for each row it takes SQLite twice as long, and it gives Python to another thread and takes it back as
    often: beside a busy event loop that was half of what an append costs. To PostgreSQL every execution is a round
    trip; there the rows are one value of JSON, since psycopg takes longer to write twenty arrays than the server to
    insert their rows. Bytes are an array beside it, in binary format: as text they take four times as long.
    """

    def __init__(self, rows: sa.TableClause, statement: Any) -> None:
        self.given, self.statement = rows, statement
        self._blobs = frozenset(column.name for column in rows.c if isinstance(column.type, sa.LargeBinary))
        self._json = frozenset(column.name for column in rows.c if isinstance(column.type, sa.JSON))
        self._texts: dict[tuple[str, int], tuple[str, list[str]]] = {}

    def execute(self, connection: Connection, rows: Sequence[Values]) -> int:
        """Run it; gives how many rows it changed."""
        return sum(answer.rowcount for answer in self._answers(connection, rows))

    def rows(self, connection: Connection, rows: Sequence[Values]) -> list[Any]:
        """Run it; gives the rows that it returns, with names for attributes."""
        return [row for answer in self._answers(connection, rows) for row in answer.fetchall()]

    def _answers(self, connection: Connection, rows: Sequence[Values]) -> Iterator[driver.Answer]:
        if connection.dialect.name == "postgresql":
            sql, names = self._texts.get(("postgresql", 0)) or self._text(connection.dialect, 0)
            blobs = {name: [row[name] for row in rows] for name in self._blobs if name in names}
            plain = [name for name in names if name not in blobs]
            listed = [{name: row[name] for name in plain} for row in rows]
            yield driver.run(connection, sql, {**blobs, ROWS: json.dumps(listed, allow_nan=False), N_ROWS: len(rows)})
            return
        if self._json:  # the driver takes none; a missing one is NULL, as on PostgreSQL
            rows = [{**row, **{name: self._dumped(row[name]) for name in self._json}} for row in rows]
        at = 0
        while at < len(rows):  # in powers of two: few statements, so that the driver keeps them all prepared
            n = min(LARGEST, 1 << (len(rows) - at).bit_length() - 1)
            sql, names = self._texts.get(("sqlite", n)) or self._text(connection.dialect, n)
            chosen = itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],)  # noqa: B023 - used at once
            yield driver.run(connection, sql, tuple(chain.from_iterable(map(chosen, rows[at : at + n]))))
            at += n

    @staticmethod
    def _dumped(value: Any) -> str | None:
        return None if value is None else json.dumps(value, allow_nan=False)

    def _text(self, dialect: Dialect, n: int) -> tuple[str, list[str]]:
        made = self.statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True}).string
        used = [column for column in self.given.c if re.search(rf"\b{GIVEN}\.{column.name}\b", made)]
        names = [column.name for column in used]
        if dialect.name == "postgresql":
            used.sort(key=lambda column: column.name in self._blobs)
            names = [column.name for column in used]
            kinds = {column.name: column.type.compile(dialect) for column in used}
            record = ", ".join(f"{name} {kind}" for name, kind in kinds.items() if name not in self._blobs)
            arrays = [f"unnest(%({name})b::{kinds[name]}[])" for name in names if name in self._blobs]
            parts = [f"json_to_recordset(%({ROWS})s::json) AS ({record})", *arrays]
            # The limit is for the planner, which takes every JSON for a hundred rows and then reads whole tables.
            source = f"SELECT * FROM ROWS FROM ({', '.join(parts)}) LIMIT %({N_ROWS})s"  # noqa: S608 - names of our own
        else:
            source = "VALUES " + ", ".join([f"({', '.join('?' * len(names))})"] * n)
        rest = f", {made[5:]}" if made.startswith("WITH ") else f" {made}"
        done = self._texts[(dialect.name, n)] = (f"WITH {GIVEN} ({', '.join(names)}) AS ({source}){rest}", names)
        return done
