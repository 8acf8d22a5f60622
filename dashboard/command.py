"""`samplestore dashboard`: check the database, then become the Streamlit server."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import quote, urlencode

import typer

from samplestore.cli.exits import USAGE, CommandError
from samplestore.errors import MissingExtra, RunNotFound

DEMO_STEPS, DEMO_S = 14, 3000.0
NEAR = 100  # ports after a taken one, among which a free one is looked for
LOCAL = ("127.0.0.1", "localhost", "::1")


def dashboard(
    db: Annotated[
        str | None,
        typer.Option("--db", envvar="SAMPLESTORE_DATABASE_URL", help="Database: a SQLite file or postgresql://..."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="The run to open first; the newest if left out.")] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8501,
    host: Annotated[str, typer.Option("--host", help="Address to listen on. There is no login.")] = "127.0.0.1",
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="FOLDER", help="The model's folder, to show text instead of token ids."),
    ] = None,
    open_at: Annotated[
        str | None,
        typer.Option("--open", metavar="GROUP[/SAMPLE]", help="Print the address of this group or sample."),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Show a made-up run that goes on, in a new temporary folder: needs no database, no GPU."
        ),
    ] = False,
    allow_actions: Annotated[
        bool,
        typer.Option("--allow-actions", help="Let pages requeue, abort and drop, with a reason that is recorded."),
    ] = False,
) -> None:
    """Look at a run in the browser: counts, groups, samples token by token, aborts, workers, batches. Read-only, unless
    --allow-actions is given."""
    if find_spec("streamlit") is None:
        raise MissingExtra("the dashboard", "dashboard")
    where = _place(open_at)
    if not demo and db is None:
        raise CommandError("no database was named. Try: samplestore dashboard --db FILE_OR_URL, or --demo", USAGE)
    _require_free(host, port)
    url, living = db or "", None
    if demo:
        url, tokenizer, living = _demo()
    folder = _tokenizer(tokenizer)
    name = _check(url, run)
    typer.echo(f"dashboard: {link(host, port, name, where[0], **where[1])}")
    if host not in LOCAL:
        typer.echo(f"warning: anyone who reaches {host}:{port} can read all prompts and answers", err=True)
        if allow_actions:
            typer.echo("warning: and can requeue, abort and drop with --allow-actions", err=True)
    if living is not None and living.stdin is not None:
        os.set_inheritable(living.stdin.fileno(), True)  # the demo goes on until the server's end of it is closed
    _become_server(url, host, port, folder, allow_actions)


def link(host: str, port: int, run: str | None, page: str = "", **query: str) -> str:
    """The address of a page: of the overview if left out."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)  # noqa: S104 - only compared
    asked = {**({"run": run} if run else {}), **query}
    return f"http://{shown}:{port}/{page}" + (f"?{urlencode(asked, quote_via=quote)}" if asked else "")


PLACE = re.compile(r"(\d{1,15})(?:/(\d{1,9}(?:/\d{1,9})?))?")


def _place(named: str | None) -> tuple[str, dict[str, str]]:
    """(page, query) of GROUP, GROUP/SAMPLE or GROUP/SAMPLE/INCARNATION."""
    if named is None:
        return "", {}
    found = PLACE.fullmatch(named)
    if found is None:
        raise CommandError(f"{named!r} names no group or sample. Try: samplestore dashboard --open 12/3", USAGE)
    return ("group", {"group": found[1]}) if found[2] is None else ("trajectory", {"sample": named})


def _require_free(host: str, port: int) -> None:
    """Raises CommandError where nobody can listen at this address: the server would only say so in the middle of its
    own log."""
    problem = _bind(host, port)
    if problem is None:
        return
    if problem.errno == errno.EADDRINUSE:
        free = next((p for p in range(port + 1, min(port + NEAR, 65536)) if _bind(host, p) is None), None)
        said = f"port {port} is taken, perhaps by another dashboard"
        raise CommandError(f"{said}. Try: samplestore dashboard --port {free or 'NUMBER'}")
    if problem.errno == errno.EACCES:
        raise CommandError(f"this user may not listen on port {port}. Try: samplestore dashboard --port 8501")
    raise CommandError(f"this machine can't listen on {host!r} ({problem.strerror}). Try: --host 127.0.0.1", USAGE)


def _bind(host: str, port: int) -> OSError | None:
    """Why nobody can listen there, or None."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: a port of which connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        return error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
    return None


def _demo() -> tuple[str, str, subprocess.Popen[str]]:
    """(database, tokenizer folder, the process that goes on with the run) of a new demo. It takes some seconds."""
    from samplestore import migrations
    from samplestore.dashboard import demo_live
    from samplestore.engine import Database

    folder = Path(tempfile.mkdtemp(prefix="samplestore-demo-"))
    url = f"sqlite:///{folder / 'demo.db'}"
    typer.echo(f"demo: a made-up run in {folder}, which goes on until you end the dashboard; delete the folder then")
    migrations.upgrade(Database(url))
    living = demo_live.start(url, folder / "tokenizer", DEMO_STEPS, DEMO_S)
    if living is None:
        raise CommandError("the demo's run can't be written, for the reason above. Try: samplestore doctor")
    return url, str(folder / "tokenizer"), living


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
    SQLAlchemy's errors."""
    from samplestore.dashboard.readonly import open_read_only

    store = open_read_only(db)
    try:
        return store.existing_run(run).name
    except RunNotFound as error:
        if error.known or run is not None:
            raise
        return None
    finally:
        store.database.reader.dispose()


def _become_server(db: str, host: str, port: int, tokenizer: str | None, allow_actions: bool) -> NoReturn:
    """Replace this process, so that signals reach the server itself. Flags go before any config file of the user's."""
    from samplestore.dashboard.readonly import ENV_ACTIONS, ENV_DATABASE, ENV_TOKENIZER

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
    for name in (ENV_TOKENIZER, ENV_ACTIONS):
        environment.pop(name, None)
    if allow_actions:
        environment[ENV_ACTIONS] = "1"
    if tokenizer is not None:
        environment[ENV_TOKENIZER] = tokenizer
    app = Path(__file__).with_name("app.py")
    args = [f"--{key}={value}" for key, value in flags.items()]
    sys.stdout.flush()
    command = [sys.executable, "-m", "samplestore.dashboard.server", "run", str(app), *args]
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is what we want
