"""docs/reference/schema.md, from the models and views."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from making.pages import cell, code, page, paragraphs, table


def schema() -> str:
    return page(
        "Schema",
        "The tables, from `samplestore/models.py`, and the [views](#views) on them. Times are seconds since the epoch "
        "by the database's clock. The only way to this schema is `samplestore db upgrade`. Reading it with SQL is "
        "supported, writing is not: only the verbs keep counters, ledger and fences right. "
        "Types are given as SQLite / PostgreSQL where they differ. "
        "How to read it with SQL, SQLAlchemy and pandas: [SQL](../howto/sql.md). "
        "Questions to start from: [cookbook](../cookbook.md).",
        _schema(),
    )


def _schema() -> Iterator[str]:
    from samplestore.models import Base

    mapped = {m.local_table.name: m for m in Base.registry.mappers}
    tables = list(Base.metadata.tables.values())
    yield from _diagram(tables)
    for t in tables:
        mapper = mapped[t.name]
        yield from (f"## {t.name}", "", f"`samplestore.{mapper.class_.__name__}`", "")
        yield from paragraphs(mapper.class_.__doc__)
        rows = [
            (code(c.name), cell(_type(c.type)), "yes" if c.nullable else "", _key(c), cell(c.comment or ""))
            for c in t.c
        ]
        yield from table(("column", "type", "null", "key", ""), rows)
        yield from _constraints(t)
        yield from _reached(mapper)
    yield from _views()


def _diagram(tables: list[Any]) -> Iterator[str]:
    """Keys only: the tables below have the rest."""
    yield from ("```mermaid", "erDiagram")
    for t in tables:
        for key in sorted(t.foreign_keys, key=lambda k: k.parent.name):
            many = "|o--o{" if key.parent.nullable else "||--o{"
            yield f'    {key.column.table.name} {many} {t.name} : "{key.parent.name}"'
    for t in tables:
        yield f"    {t.name} {{"
        for c in t.c:
            keys = ", ".join(filter(None, ("PK" if c.primary_key else "", "FK" if c.foreign_keys else "")))
            if keys:
                yield f"        {_type(c.type).partition(' / ')[0].lower()} {c.name} {keys}"
        yield "    }"
    yield from ("```", "")


def _reached(mapper: Any) -> Iterator[str]:
    """What a mapped class has beside its columns."""
    rows = []
    for r in sorted(mapper.relationships, key=lambda r: str(r.key)):
        kind = f"list[{r.mapper.class_.__name__}]" if r.uselist else r.mapper.class_.__name__
        rows.append((code(r.key), code(kind), cell(r.doc or "")))
    for name, value in vars(mapper.class_).items():
        if isinstance(value, property):
            told = str(inspect.signature(value.fget).return_annotation) if value.fget else ""
            rows.append((code(name), code(told), cell(inspect.getdoc(value) or "")))
    if rows:
        yield from table(("attribute of the class", "", ""), rows)


def _views() -> Iterator[str]:
    from samplestore.views import VIEWS

    yield from ("## Views", "", "Common questions as tables. Their names are plural, those of tables singular.", "")
    for view in VIEWS:
        yield from (f"### {view.name}", "", view.doc, "")
        # What a database derives is not what Core declares, only its kind is.
        kinds = {"Integer": "whole number", "Double": "number", "Text": "text"}
        rows = [(code(c.name), kinds[_kind_of(c.type)], cell(view.columns[c.name])) for c in view.table.c]
        yield from table(("column", "type", ""), rows)


def _kind_of(kind: Any) -> str:
    import sqlalchemy as sa

    return next(k.__name__ for k in (sa.Integer, sa.Double, sa.Text) if isinstance(kind, k))


def _type(kind: Any) -> str:
    from sqlalchemy.dialects import postgresql, sqlite

    ours, theirs = (kind.compile(dialect=d.dialect()) for d in (sqlite, postgresql))
    return ours if ours == theirs else f"{ours} / {theirs}"


def _key(column: Any) -> str:
    target = next((f"→ {k.column.table.name}.{k.column.name}" for k in column.foreign_keys), "")
    return " ".join(filter(None, ("primary" if column.primary_key else "", target)))


def _constraints(t: Any) -> Iterator[str]:
    import sqlalchemy as sa

    lines = []
    for c in t.constraints:
        if isinstance(c, sa.UniqueConstraint):
            lines.append(f"- unique ({', '.join(x.name for x in c.columns)})")
        elif isinstance(c, sa.CheckConstraint):
            lines.append(f"- check `{c.sqltext}`")
    for i in t.indexes:
        where = i.dialect_options["sqlite"]["where"]
        what = f"{'unique ' if i.unique else ''}index `{i.name}` ({', '.join(x.name for x in i.columns)})"
        lines.append(f"- {what}" + (f" where `{where}`" if where is not None else ""))
    yield from sorted(lines)
    if lines:
        yield ""
