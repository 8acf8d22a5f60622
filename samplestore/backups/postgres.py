"""Backups of a PostgreSQL database: pg_dump and pg_restore."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

from samplestore import migrations
from samplestore.backups import arrays
from samplestore.backups.restored import ANOTHER, Restored, checked, refuse_newer, require_idle
from samplestore.engine import Database
from samplestore.errors import BackupError
from samplestore.store import Store


def server(database: Database) -> list[str]:
    """How to reach it, without the password: other users see arguments."""
    url = database.url.set(drivername="postgresql")._replace(password=None)  # set() takes None for "leave it"
    return ["--no-password", f"--dbname={url.render_as_string(hide_password=False)}"]


def run(command: list[str], database: Database | None) -> str:
    """What a tool of PostgreSQL prints; with the password of `database`, if one is given. Raises BackupError."""
    tool = shutil.which(command[0])
    if tool is None:
        raise BackupError(
            f"{command[0]}, which does this for PostgreSQL, is not installed. Debian: apt-get install postgresql-client"
        )
    password = None if database is None else database.url.password
    env = {**os.environ, **({"PGPASSWORD": str(password)} if password else {})}
    done = subprocess.run([tool, *command[1:]], env=env, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        _failed(command[0], done.stderr)
    return done.stdout


def _failed(tool: str, said: str) -> NoReturn:
    lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
    raise BackupError(
        f"{tool} failed: {(lines or ['it said nothing'])[0].strip()}. Look further with: samplestore doctor"
    )


def copy(database: Database, made: Path) -> None:
    """A snapshot of the database. Raises BackupError."""
    run(["pg_dump", "--format=custom", f"--file={made}", *server(database)], database)


def dumped_revision(dump: Path) -> str:
    """The schema revision in a pg_dump file, which is read to its table of contents. Raises BackupError."""
    said = run(["pg_restore", "--data-only", "--table=alembic_version", "--file=-", str(dump)], None)
    found = re.search(r"^COPY [^\n]*alembic_version[^\n]*\n([^\n]*)\n\\\.", said, re.MULTILINE)
    if found is None:
        raise BackupError(f"{dump} holds no database of samplestore. {ANOTHER}")
    return found[1].strip()


def restore(backup: Path, database: Database, overwrite: bool) -> Restored:
    """See backup.restore."""
    revision = dumped_revision(backup)
    refuse_newer(str(backup), revision)
    if not migrations.is_blank(database):
        if not overwrite:
            raise BackupError(
                f"{database.shown_url} has tables. Make an empty database with createdb, or replace them: --overwrite"
            )
        require_idle(database)
    database.close_connections()
    options = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"]
    clean = ["--clean", "--if-exists"] if overwrite else []
    run(["pg_restore", *options, *clean, *server(database), str(backup)], database)
    put: arrays.Copies = []  # a database that breaks a promise stays, and its files with it
    runs = checked(Store(database), revision, backup, put)
    return Restored(database.shown_url, revision, runs, len(put))
