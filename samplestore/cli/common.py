"""Options that commands share, and how they open a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from samplestore.cli import exits
from samplestore.cli.typed import to_type

if TYPE_CHECKING:
    from samplestore.run import Run
    from samplestore.store import Store

Db: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="SAMPLESTORE_DATABASE_URL",
        metavar="URL",
        help="Database: a SQLite file or postgresql://...",
        show_default="url of samplestore.toml",
    ),
]


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the shell: runs of the database that was typed, or is configured. Where there is none, nothing."""
    try:
        with opened(ctx.params.get("db")) as store:
            return [name for name in store.run_names() if name.startswith(incomplete)]
    except Exception:  # the shell would show a traceback in the middle of the line
        return []


RunName: TypeAlias = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run.", show_default="the newest", autocompletion=complete_run),
]
TheRun: TypeAlias = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run.", show_default="the only one", autocompletion=complete_run),
]
MadeRun: TypeAlias = Annotated[
    str,
    typer.Option("--run", metavar="NAME", help="The run; created if it is not there.", autocompletion=complete_run),
]
RunPlace: TypeAlias = Annotated[  # some commands take it by place too
    str | None,
    typer.Argument(metavar="[RUN]", help="The same as --run.", show_default=False, autocompletion=complete_run),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Reason: TypeAlias = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why; kept in the events.", show_default=False)
]
NeededReason: TypeAlias = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the events.")]


def database(db: str | None) -> str:
    """The database's URL or path: --db, $SAMPLESTORE_DATABASE_URL, or the configuration file. Raises ConfigError."""
    if db:
        return db
    from samplestore import config

    found = config.database_url()
    if found is None:
        raise config.no_database("samplestore status --db FILE")
    return found[0]


def existing_url(db: str | None) -> str:
    """database(db), where that is no file or one that is there. Nothing beside a missing file is made, no gate either.
    Raises DatabaseMissing."""
    from samplestore.errors import DatabaseMissing
    from samplestore.urls import parse_url

    url = database(db)
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database and not Path(parsed.database).exists():
        raise DatabaseMissing(str(Path(parsed.database).absolute()))
    return url


@contextmanager
def opened(db: str | None) -> Iterator[Store]:
    """An existing store; never makes a file. Raises DatabaseMissing, SchemaMismatch, ConfigError."""
    import samplestore

    store = samplestore.open(existing_url(db), create=False)
    try:
        yield store
    except KeyboardInterrupt:
        raise  # closing waits for the writer gate, and whoever pressed Ctrl-C has waited enough
    except BaseException:  # typer.Exit and SystemExit too
        store.close()
        raise
    store.close()


@contextmanager
def opened_run(db: str | None, name: str | None) -> Iterator[Run]:
    """An existing run; without a name the newest. Raises RunNotFound besides."""
    with opened(db) as store:
        yield existing(store, name)


@contextmanager
def chosen_run(db: str | None, name: str | None) -> Iterator[Run]:
    """The run of `chosen`, in a store of its own."""
    with opened(db) as store:
        yield chosen(store, name)


def chosen(store: Store, name: str | None) -> Run:
    """An existing run for what can't be taken back: the newest is a guess, so where there are several it is named.
    Raises RunNotFound, CommandError."""
    names = store.run_names()
    if name is None and len(names) > 1:
        raise exits.CommandError(
            f"the database has several runs ({', '.join(names[:20])}): name one with --run NAME. "
            f"List them with: {to_type('runs')}",
            exits.USAGE,
        )
    return existing(store, name)


def existing(store: Store, name: str | None) -> Run:
    """An existing run; without a name the newest. Raises RunNotFound, CommandError where there are none."""
    if name is None and not store.run_names():
        create = to_type("add-prompts", "FILE", "--run", "NAME")
        raise exits.CommandError(f"{store.database.shown_url} has no runs yet. Create one with: {create}")
    return store.existing_run(name)


def one_name(place: str | None, option: str | None, command: str) -> str | None:
    """The run that was named, by place or with --run. Raises CommandError where these are two."""
    if place is not None and option is not None and place != option:
        raise exits.CommandError(
            f"two runs are named, {place!r} and {option!r}. Say one: {to_type(command, '--run', option)}",
            exits.USAGE,
        )
    return place if option is None else option


def listed(numbers: Sequence[int | str]) -> str:
    """Ids in a sentence."""
    return ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10:,} more" if len(numbers) > 10 else "")
