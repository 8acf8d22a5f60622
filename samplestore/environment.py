"""What a database or its machine says when the environment is at fault, as errors that name the cure.

Two kinds. StoreUnavailable passes: the disk is full, the server is away or out of connections; whoever can wait repeats
the same call. DatabaseUnusable does not: a person has to do something.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from shlex import quote

import sqlalchemy as sa
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from samplestore.errors import DatabaseUnusable, SampleStoreError, StoreUnavailable

FULL_DISK = 1 << 20  # with less than this free, an I/O error of SQLite is most likely this one

# PostgreSQL: SQLSTATE, or what the server says before a session exists (libpq hands on the text alone).
_SERVER_FULL = re.compile(r"too many (clients|connections)|connection slots are reserved")
_NO_DATABASE = re.compile(r'database "[^"]*" does not exist')
_NOT_LET_IN = re.compile(
    r"authentication failed|no password supplied|role \"[^\"]*\" does not exist|pg_hba\.conf|not permitted"
)
# A WITH that ends in one of these writes: an operator's curriculum may be such a slip of the pen.
_WRITES = re.compile(
    r"\b(insert\s+(or\s+\w+\s+)?into|replace\s+into|delete\s+from|update\s+.{1,300}?\sset)\b", re.IGNORECASE | re.DOTALL
)


def explain(url: str, path: Path | None, error: DBAPIError, *, writing: bool) -> SampleStoreError | None:
    """The error to raise in place of `error`; None where the environment is not at fault, or only the connection broke.

    path      of a SQLite file; None for PostgreSQL
    writing   a write that a read-only session refuses is a mistake in the caller, and stays what it is
    """
    said = first_line(error)
    if path is None:
        return _postgres(url, error, said)
    if "readonly database" in said and not writing and not _reads(error.statement):
        return None
    return _sqlite(url, path, said)


def _reads(statement: str | None) -> bool:
    """SQLite says "readonly" too where it may not write the files beside a database that is only read."""
    if not statement:
        return True
    first = statement.split(None, 1)[0].upper()
    return first in ("SELECT", "BEGIN", "PRAGMA") or (first == "WITH" and not _WRITES.search(statement))


def first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0].rstrip(".")


def server_away(url: str, error: DBAPIError) -> StoreUnavailable:
    at = make_url(url)
    parts = (("-h", at.host or at.query.get("host")), ("-p", at.port or at.query.get("port")))
    where = "".join(f" {flag} {quote(str(part))}" for flag, part in parts if part)
    return StoreUnavailable(url, f"its server does not answer ({first_line(error)})", f"Look at: pg_isready{where}")


# The oldest transaction that waits for nobody: one that wrote, if there is one, since others hold few locks.
_KEEPS = sa.text(
    "SELECT pid, application_name, state, extract(epoch FROM clock_timestamp() - xact_start) AS seconds "
    "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL "
    "AND wait_event_type IS DISTINCT FROM 'Lock' ORDER BY backend_xid IS NULL, xact_start LIMIT 1"
)


def lock_keeper(reader: Engine) -> str:
    """Which session of a PostgreSQL server most likely keeps a lock that was waited for too long, in words."""
    try:
        with reader.connect() as connection, connection.begin():
            row = connection.execute(_KEEPS).one_or_none()
    except SQLAlchemyError:  # out of connections, too
        return "who holds it is unknown"
    if row is None:
        return "who held it is gone by now"
    who = f"session {row.pid} ({row.application_name or 'without a name'}, {row.state or 'not ours to see'})"
    return f"the oldest transaction, open for {row.seconds:.0f} s, is that of {who}"


def _postgres(url: str, error: DBAPIError, said: str) -> SampleStoreError | None:
    state = getattr(error.orig, "sqlstate", None)
    text = str(error.orig)
    if state == "53100" or "No space left on device" in text:
        return StoreUnavailable(url, f"the disk of its server is full ({said})", "Make room there: df -h")
    if state == "53300" or _SERVER_FULL.search(text):
        cure = "Stop idle processes, or raise max_connections: SHOW max_connections"
        return StoreUnavailable(url, f"its server has no connection left ({said})", cure)
    if state == "3D000" or _NO_DATABASE.search(text):
        name = quote(make_url(url).database or "NAME")
        return DatabaseUnusable(url, "is not there, though its server is", f"Make it with: createdb {name}")
    if state in ("28000", "28P01") or _NOT_LET_IN.search(text):
        return DatabaseUnusable(url, f"lets nobody in by these names ({said})", "Try them with: psql URL")
    if state == "42501":
        return DatabaseUnusable(
            url, f"does not let this user do that ({said})", "Look at its rights: psql -c '\\dp' URL"
        )
    if state == "25006" and "recovery" in text:
        return DatabaseUnusable(url, "is a standby, which can't be written", "Use the primary: --db postgresql://...")
    return None


def _sqlite(url: str, path: Path, said: str) -> SampleStoreError | None:
    folder = path.parent
    if "database or disk is full" in said or ("disk I/O error" in said and _free(folder) < FULL_DISK):
        return StoreUnavailable(url, "its disk is full", f"Make room: df -h {quote(str(folder))}")
    if "disk I/O error" in said:
        return DatabaseUnusable(url, "can't be read or written: the disk reports an error", "Look at: dmesg | tail")
    if "file is not a database" in said:
        return DatabaseUnusable(url, "is not a database of SQLite", f"See what it is: ls -l {quote(str(path))}")
    if "malformed" in said:
        return DatabaseUnusable(url, "is damaged", "Restore a backup beside it: samplestore restore BACKUP --db FILE")
    if "unable to open database file" in said or "readonly database" in said:
        return DatabaseUnusable(url, *closed(path))
    return None


def closed(path: Path) -> tuple[str, str]:
    """Why a file can't be opened, and what to type."""
    folder = path.parent
    if path.is_dir():
        return "is a folder", f"Name a file in it: --db {quote(str(path / 'rollouts.db'))}"
    if not folder.is_dir():
        return "can't be made: there is no folder for it", f"Make it with: mkdir -p {quote(str(folder))}"
    if path.exists() and not os.access(path, os.R_OK):
        return "may not be read by this user", f"Look at its rights: ls -l {quote(str(path))}"
    if path.exists() and not os.access(path, os.W_OK):
        return "may not be written by this user", f"Look at its rights: ls -l {quote(str(path))}"
    return (
        "can't be opened: SQLite writes files beside it, also to read, and may not write in this folder",
        f"Copy it to a folder of yours, or look at the rights: ls -ld {quote(str(folder))}",
    )


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return FULL_DISK
