"""`samplestore dashboard`: check the database, then become the Streamlit server."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import quote

import typer

from samplestore.errors import DatabaseMissing, MissingExtra, RunNotFound, SampleStoreError, SchemaMismatch

EXIT_FAILED, EXIT_DATABASE = 1, 3
LOCAL = ("127.0.0.1", "localhost", "::1")


def dashboard(
    db: Annotated[
        str,
        typer.Option("--db", envvar="SAMPLESTORE_DATABASE_URL", help="Database: a SQLite file or postgresql://..."),
    ],
    run: Annotated[str | None, typer.Option("--run", help="The run to open first; the newest if left out.")] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8501,
    host: Annotated[str, typer.Option("--host", help="Address to listen on. There is no login.")] = "127.0.0.1",
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="FOLDER", help="The model's folder, to show text instead of token ids."),
    ] = None,
) -> None:
    """Look at a run in the browser: counts, staleness, aborts, and trajectories token by token. Read-only."""
    try:
        if find_spec("streamlit") is None:
            raise MissingExtra("the dashboard", "dashboard")
        folder = _tokenizer(tokenizer)
        name = _check(db, run)
    except SampleStoreError as error:
        typer.echo(f"error: {error}", err=True)
        told = isinstance(error, DatabaseMissing | SchemaMismatch)
        raise typer.Exit(EXIT_DATABASE if told else EXIT_FAILED) from None
    typer.echo(f"dashboard: {link(host, port, name)}")
    if host not in LOCAL:
        typer.echo(f"warning: anyone who reaches {host}:{port} can read all prompts and answers", err=True)
    _become_server(db, host, port, folder)


def link(host: str, port: int, run: str | None) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)  # noqa: S104 - only compared
    return f"http://{shown}:{port}/" + (f"?run={quote(run, safe='')}" if run else "")


def _tokenizer(folder: str | None) -> str | None:
    """The folder, once it is known to hold a tokenizer: a typing error should end here, not on a page."""
    if folder is None:
        return None
    from samplestore.tokenizers import load_tokenizer

    file = Path(folder) / "tokenizer.json"
    load_tokenizer(file if file.is_file() else folder)
    return str(Path(folder).absolute())


def _check(db: str, run: str | None) -> str | None:
    """The run to open, or None where the database has none yet. Raises DatabaseMissing, SchemaMismatch, RunNotFound,
    SampleStoreError for a database that can't be reached."""
    from sqlalchemy.exc import DBAPIError

    from samplestore.dashboard.readonly import open_read_only

    try:
        store = open_read_only(db)
        try:
            return store.existing_run(run).name
        except RunNotFound as error:
            if error.known or run is not None:
                raise
            return None
        finally:
            store.database.reader.dispose()
    except DBAPIError as error:
        told = str(error.orig).strip().splitlines() or [type(error.orig).__name__]
        raise SampleStoreError(f"the database can't be read: {told[0]}. Check --db") from error


def _become_server(db: str, host: str, port: int, tokenizer: str | None) -> NoReturn:
    """Replace this process, so that signals reach the server itself. Flags go before any config file of the user's."""
    from samplestore.dashboard.readonly import ENV_DATABASE, ENV_TOKENIZER

    flags = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "server.showEmailPrompt": "false",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "type",
        "theme.light.primaryColor": "#0062A0",
        "theme.dark.primaryColor": "#56B4E9",
    }
    # The database by environment only: its URL may hold a password, and everyone can read a process's arguments.
    environment = {**os.environ, ENV_DATABASE: db, "PYTHONUNBUFFERED": "1"}
    environment.pop(ENV_TOKENIZER, None)
    if tokenizer is not None:
        environment[ENV_TOKENIZER] = tokenizer
    app = Path(__file__).with_name("app.py")
    args = [f"--{key}={value}" for key, value in flags.items()]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "streamlit", "run", str(app), *args], environment)  # noqa: S606 - no shell is what we want
