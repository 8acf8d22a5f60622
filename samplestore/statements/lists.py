"""A list of ids as one bound value: IN with a list of binds is another statement for each length."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles


class _Ids(sa.types.TypeDecorator[Any]):
    """JSON text on SQLite, bigint[] on PostgreSQL."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> Any:
        return dialect.type_descriptor(postgresql.ARRAY(sa.BigInteger) if dialect.name == "postgresql" else sa.Text())

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        return list(value) if dialect.name == "postgresql" else json.dumps(list(value))


class among(sa.ColumnElement[bool]):
    """`column` is one of the ids in the bound list `name`. For statements that are sent as strings."""

    inherit_cache = False
    type = sa.Boolean()

    def __init__(self, column: Any, name: str) -> None:
        self.column, self.ids = column, sa.bindparam(name, type_=_Ids)

    def self_group(self, against: Any = None) -> among:
        return self  # not "... = 1", which SQLite answers without an index


@compiles(among, "sqlite")
def _sqlite(element: among, compiler: Any, **kw: Any) -> str:
    ids = compiler.process(element.ids, **kw)
    column = compiler.process(element.column, **kw)
    return f"{column} IN (SELECT value FROM json_each({ids}))"  # noqa: S608 - both are compiled from Core


@compiles(among, "postgresql")
def _postgresql(element: among, compiler: Any, **kw: Any) -> str:
    # the same rows: neither cares for order or repetition of the ids
    return f"{compiler.process(element.column, **kw)} = ANY ({compiler.process(element.ids, **kw)})"
