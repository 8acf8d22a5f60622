"""samplestore doctor: is this machine, this database and what works on it in good health?"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from samplestore import __version__
from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, existing_url
from samplestore.cli.output import emit_json, note, printable, table
from samplestore.cli.typed import to_type
from samplestore.words import amount, amount_is, which

if TYPE_CHECKING:
    from samplestore.engine import Database

GIB = 1 << 30
LEAST_FREE, LITTLE_FREE = GIB // 2, 5 * GIB
LARGE_WAL = GIB  # a reader that stays keeps the WAL from being reused
HEALTH_TIMEOUT_S = 5.0
OK, WARN, FAIL = "ok", "warn", "FAIL"
CHECKS = "samplestore.checks"  # entry points: checks of what the core does not import


class Result(NamedTuple):
    check: str
    state: str
    said: str
    exit_code: int = exits.OK


def doctor(
    db: Db = None,
    engines: Annotated[
        bool, typer.Option("--engines", help="Ask every engine whether it is there (exit 4 if not).")
    ] = False,
    router: Annotated[
        str | None,
        typer.Option(
            "--router",
            metavar="URL",
            help="Check this router too: its engines, and whether it retries. For that an engine that refuses "
            "everything joins its list for some seconds. Needs no database.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check SQLite or PostgreSQL, file system, disk, schema, workers and engines. Exit code 5 on problems."""
    from samplestore.config import database_url
    from samplestore.logs import mask

    results: list[Result] = []
    if db or not router or database_url() is not None:
        results += _results(existing_url(db), engines)
    if router:
        results += _router(router)
    code = min((r.exit_code for r in results if r.state == FAIL), default=exits.OK)
    if as_json:
        emit_json(
            {
                "ok": code == exits.OK,
                "checks": [{"check": r.check, "state": r.state.lower(), "said": mask(r.said)} for r in results],
            }
        )
    else:
        table(("check", "state", ""), [(r.check, r.state, mask(r.said)) for r in results])
    if code:
        first = next(r for r in results if r.state == FAIL and r.exit_code == code)
        note(f"error: {first.check}: {mask(first.said)}")
        raise typer.Exit(code)


def _results(url: str, ask_engines: bool) -> Iterator[Result]:
    from samplestore.engine import Database
    from samplestore.errors import SampleStoreError

    yield Result("samplestore", OK, f"{__version__}, Python {sys.version.split()[0]}")
    try:
        found = Database(url, reconnect_s=0.0, busy_s=5.0)
    except SampleStoreError as error:
        yield Result("database", FAIL, str(error), exits.DATABASE)
        return
    try:
        yield from _sqlite(found) if found.is_sqlite else ()
        broken = False
        for result in _database(found):
            yield result
            broken |= result.state == FAIL and result.exit_code == exits.DATABASE
        if not broken:
            yield from _processes(found, ask_engines)
    finally:
        found.close()


def _sqlite(found: Database) -> Iterator[Result]:
    from samplestore.filesystem import mount_of
    from samplestore.urls import FIXED_SQLITE, sqlite_module

    module = sqlite_module()
    version = f"{module.sqlite_version} ({module.__name__})"
    if module.sqlite_version_info >= FIXED_SQLITE:
        yield Result("SQLite", OK, version)
    else:
        needed = ".".join(map(str, FIXED_SQLITE))
        yield Result(
            "SQLite",
            FAIL,
            f"{version} can corrupt a WAL file; {needed} is fixed. Run: pip install pysqlite3",
            exits.CHECK,
        )
    folder = next(p for p in found.path.parents if p.exists())
    try:
        mounts = Path("/proc/mounts").read_text(errors="surrogateescape")
    except OSError:
        mounts = ""  # not Linux: nothing to ask
    mount = mount_of(Path(os.path.realpath(folder)), mounts)
    yield Result("file system", OK, f"{mount[1]} at {mount[0]}" if mount else "unknown here; WAL below tells")
    yield _disk(folder)


def _disk(folder: Path) -> Result:
    usage = shutil.disk_usage(folder)
    said = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB at {folder}"
    if usage.free < LEAST_FREE:
        return Result(
            "disk", FAIL, f"{said}: writes will fail soon. Look with: du -xsh {quote(str(folder))}", exits.CHECK
        )
    return Result("disk", WARN if usage.free < LITTLE_FREE else OK, said)


def _database(found: Database) -> Iterator[Result]:
    from samplestore import migrations
    from samplestore.errors import SampleStoreError

    try:
        migrations.require_current(found)
    except SampleStoreError as error:
        yield Result("schema", FAIL, str(error), exits.DATABASE)
        return
    except Exception as error:  # drivers have error classes of their own, which are not imported to be named here
        if not exits.is_database_error(error):
            raise
        said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        yield Result(
            "database",
            FAIL,
            f"{said}. Is it there? Try: samplestore db current --db {quote(found.shown_url)}",
            exits.DATABASE,
        )
        return
    yield Result("database", OK, found.shown_url)
    yield Result("schema", OK, f"revision {migrations.REVISION}")
    yield from _wal(found) if found.is_sqlite else _server(found)


def _wal(found: Database) -> Iterator[Result]:
    from samplestore import readers

    with found.reading() as connection:
        mode = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
    if mode == "wal":
        yield Result("WAL", OK, "on")
    else:
        yield Result(
            "WAL",
            FAIL,
            f"journal mode is {mode}. Run: samplestore db upgrade --db {quote(found.shown_url)}",
            exits.CHECK,
        )
    wal = found.path.with_name(found.path.name + "-wal")
    size = wal.stat().st_size if wal.exists() else 0
    if size > LARGE_WAL:
        kept = f"{size / GIB:.1f} GiB: {readers.told(str(found.path))} keeps it from being used again"
        yield Result("WAL size", WARN, f"{kept}. It shrinks when that ends")


def _server(found: Database) -> Iterator[Result]:
    with found.reading() as connection:
        version, commit, fsync = (
            str(connection.exec_driver_sql(f"SHOW {name}").scalar())
            for name in ("server_version", "synchronous_commit", "fsync")
        )
    yield Result("PostgreSQL", OK, version)
    if commit == "off":
        cure = "Run: ALTER SYSTEM SET synchronous_commit = on"
        yield Result("synchronous_commit", FAIL, f"off: acknowledged segments may be lost. {cure}", exits.CHECK)
    if fsync == "off":
        yield Result("fsync", WARN, "off: a power failure may destroy the database")


def _processes(found: Database, ask_engines: bool) -> Iterator[Result]:
    from samplestore.queries.inspect import engines, silent_workers, waiting_workers

    silent = silent_workers(found)
    if silent:
        names = ", ".join(f"{w['id']} of run {w['run']}" for w in silent[:10])
        cure = f"Run: {to_type('reap', '--run', silent[0]['run'])}"
        n = len(silent)
        said = f"{amount_is(n, 'live worker')} silent ({printable(names)}). {cure}"
        yield Result("workers", FAIL, said, exits.CHECK)
    else:
        yield Result("workers", OK, "none is silent")
    known = engines(found)
    failed = [e["url"] for e in known if e["state"] == "failed"]
    behind = sum(e["version"] != e["current_version"] for e in known)
    said = f"{len(known)} registered, {behind} not at their run's current weights"
    if not known and (waiting := waiting_workers(found)):
        said = f"none has answered the {amount(waiting, 'live rollout worker')}. Look at their --engine or --router"
        yield Result("engines", FAIL, said, exits.CHECK)
    elif failed:
        cure = "See: samplestore engines list"
        yield Result("engines", FAIL, f"{len(failed)} failed ({failed[0]}). {cure}", exits.CHECK)
    else:
        yield Result("engines", OK, said)
    if ask_engines:
        away = [(e["url"], why) for e in known if (why := _unreachable(e["url"]))]
        if away:
            said = (
                f"{len(away)} of {amount(len(known), 'engine')} {which(len(away), 'does', 'do')} not answer; "
                f"{away[0][0]}: {away[0][1]}. See: samplestore engines list"
            )
            yield Result("engine health", FAIL, said, exits.ENGINE)
        else:
            yield Result("engine health", OK, "none is registered" if not known else f"{len(known):,} answered")


def _router(url: str) -> list[Result]:
    """Found by its entry point: the core imports no workers."""
    from importlib.metadata import entry_points

    if not url.startswith(("http://", "https://")):
        raise exits.CommandError(f"{url!r} is no http://HOST:PORT. See: samplestore doctor --help", exits.USAGE)
    found = [entry for entry in entry_points(group=CHECKS) if entry.name == "router"]
    if not found:
        raise exits.CommandError(
            "this installation has no router check. Run: pip install --force-reinstall samplestore"
        )
    checked: list[Result] = found[0].load()(url)
    return checked


def _unreachable(url: str) -> str | None:
    """Why an engine does not answer; None if it does. Any HTTP answer below 500 is a sign of life."""
    import http.client
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, build_opener

    if not url.startswith(("http://", "https://")):
        return "no http URL"  # urllib would read local files too
    opener = build_opener(ProxyHandler({}))  # engines are in this network: a proxy for the world does not know them
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S):
            return None
    except HTTPError as error:
        with error:
            return f"HTTP {error.code}" if error.code >= 500 else None
    except URLError as error:
        return str(error.reason)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
