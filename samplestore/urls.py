"""Which database a URL names, and which SQLite serves it."""

from __future__ import annotations

import re
import sqlite3
from os import PathLike, fspath
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from samplestore.errors import DatabaseUnusable, SampleStoreError

OLDEST_SQLITE = (3, 38, 0)  # RETURNING, and JSON built in
FIXED_SQLITE = (3, 51, 3)  # first release without the WAL-reset corruption
_SLASHES = re.compile(r"(?:sqlite|postgres|postgresql)(?:\+\w+)?:", re.IGNORECASE)  # where no "//" follows


def sqlite_module() -> Any:
    """The platform's SQLite where it is recent enough, else the bundled one."""
    if sqlite3.sqlite_version_info >= FIXED_SQLITE:
        return sqlite3
    try:
        import pysqlite3
    except ImportError:
        return sqlite3  # the gate keeps our own processes from the bug; `doctor` names the version
    return pysqlite3


def parse_url(url: str | PathLike[str] | URL) -> URL:
    """A database URL. Bare paths are SQLite files; postgresql:// means psycopg 3."""
    if isinstance(url, PathLike):
        return URL.create("sqlite", database=fspath(url))
    if not isinstance(url, str | URL):
        raise SampleStoreError(f'{url!r} is no database. Name one: "rollouts.db", or --db postgresql://...')
    if isinstance(url, str) and "://" not in url:
        if scheme := _SLASHES.match(url):  # taken for a file, its password would be part of the file's name
            told = f"this database URL has no // after its {scheme[0].lower()}"
            raise SampleStoreError(f"{told}. Use sqlite:///FILE or --db postgresql://...")
        return URL.create("sqlite", database=url)
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:  # not told what it was: the password may stand anywhere in it
        raise SampleStoreError("this is no database URL. Use sqlite:///FILE or --db postgresql://...") from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.host:  # two slashes: what comes first is a machine's name to a URL
            meant = "/".join(filter(None, (parsed.host, parsed.database)))
            raise SampleStoreError(f"sqlite://{meant} has a slash too few. Use --db sqlite:///{meant}")
        return URL.create("sqlite", database=parsed.database)
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise SampleStoreError(f"{backend} databases are not supported; use sqlite:///FILE or postgresql://...")


def require_sqlite(url: str) -> None:
    """Raises DatabaseUnusable where SQLite is too old for the statements."""
    module = sqlite_module()
    if module.sqlite_version_info < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        told = f"needs SQLite {needed} or newer, and this Python has {module.sqlite_version}"
        raise DatabaseUnusable(url, told, "Run: pip install pysqlite3")
