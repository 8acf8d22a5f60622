"""samplestore db upgrade, downgrade, current, check: the schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, database, existing_url
from samplestore.cli.output import emit_json, note, say
from samplestore.words import amount

if TYPE_CHECKING:
    from samplestore.engine import Database

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The schema of a database.")


@contextmanager
def _connected(db: str | None, *, must_exist: bool) -> Iterator[Database]:
    from samplestore.engine import Database

    found = Database(
        existing_url(db) if must_exist else database(db), reconnect_s=0.0
    )  # a person waits: a server that is away is told at once
    try:
        yield found
    finally:
        found.close()


@app.command()
def upgrade(db: Db = None) -> None:
    """Make the database where it is not there, and bring its schema to what this samplestore needs."""
    from samplestore import migrations

    with _connected(db, must_exist=False) as found:
        if found.is_sqlite:  # this command makes what is not there; the others only where the folder is
            found.path.parent.mkdir(parents=True, exist_ok=True)
        before = migrations.current(found) if found.exists() else None
        after = migrations.upgrade(found)
        was = "it was already there" if before == after else f"it was {before or 'without a schema'}"
        say(f"{found.shown_url}: schema revision {after} ({was})")


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="An older revision, e.g. 0002.")],
    db: Db = None,
) -> None:
    """Bring the schema back to an older REVISION, for an older samplestore. Refused where something would be lost.

    Stop workers and trainers before.
    """
    from samplestore import migrations

    with _connected(db, must_exist=True) as found:
        if not migrations.known(revision):
            raise exits.CommandError(
                f"there is no schema revision {revision!r}; this samplestore knows 0001 to {migrations.REVISION}. "
                "See: samplestore db current",
                exits.USAGE,
            )
        before, after = migrations.current(found), migrations.downgrade(found, revision)
        say(f"{found.shown_url}: schema revision {after} (it was {before})")


@app.command()
def current(db: Db = None, as_json: AsJson = False) -> None:
    """The schema revision of the database, and the one that this samplestore needs."""
    from samplestore import migrations

    with _connected(db, must_exist=True) as found:
        revision = migrations.current(found)
        if as_json:
            emit_json({"database": found.shown_url, "revision": revision, "needed": migrations.REVISION})
        else:
            needed = f"this samplestore needs {migrations.REVISION}"
            say(f"{found.shown_url}: schema revision {revision or 'none'} ({needed})")


@app.command()
def check(db: Db = None, as_json: AsJson = False) -> None:
    """Compare the schema, table by table, with what this samplestore needs. Exit code 5 if they differ."""
    from samplestore import migrations

    with _connected(db, must_exist=True) as found:
        migrations.require_current(found)
        differences = [_told(item) for item in migrations.differences(found)]
        url = found.shown_url
    if as_json:
        emit_json({"database": url, "ok": not differences, "differences": differences})
    elif not differences:
        say(f"ok: {url} has the schema that this samplestore needs")
    else:
        for difference in differences:
            say(difference)
    if differences:
        note(
            f"error: the schema of {url} was changed by hand ({amount(len(differences), 'difference')}). "
            "Look further with: samplestore doctor"
        )
        raise typer.Exit(exits.CHECK)


def _told(difference: Any) -> str:
    """One of Alembic's differences in words, e.g. "add_column: run.note"; they name what an upgrade would do."""
    if isinstance(difference, list):  # changes of one column
        return "; ".join(_told(item) for item in difference)
    kind, *rest = difference
    names = [_named(item) for item in rest if item is not None and not isinstance(item, dict)]
    return f"{kind}: {'.'.join(name for name in names if name)}"


def _named(item: Any) -> str:
    name = getattr(item, "name", None)
    table = getattr(item, "table", None)
    if name is not None and table is not None and "Column" not in type(item).__name__:
        return f"{table.name}.{name}"
    return str(item if name is None else name)
