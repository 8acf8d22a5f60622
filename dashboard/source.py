"""Where pages get their data: one read-only store per database, opened once, and errors told as what to do next."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import streamlit as st

from samplestore import migrations
from samplestore.dashboard.readonly import ENV_DATABASE, ENV_TOKENIZER, open_read_only
from samplestore.errors import DatabaseMissing, MissingExtra, RunNotFound, SampleStoreError, SchemaMismatch
from samplestore.queries import browse, ledger, status, trajectory, why
from samplestore.run import Run
from samplestore.store import Store
from samplestore.tokenizers import Tokenizer, TokenizerError, load_tokenizer

FRESH_S = 1.0  # several readers of one page share what was read


class Problem(Exception):
    """Something a reader can act on. `kind`: missing, schema, no_runs, unknown_run, locked, unreachable, other."""

    def __init__(self, kind: str, title: str, text: str) -> None:
        self.kind, self.title, self.text = kind, title, text
        super().__init__(f"{title}. {text}")


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything on the first page. `status`, `ledger`: see samplestore.queries; `why` as JSON."""

    database: str
    size_bytes: int | None
    revision: str | None
    settings: dict[str, Any]
    status: dict[str, Any]
    ledger: dict[str, Any]
    why: dict[str, Any]
    recent: list[dict[str, Any]]


def database_url() -> str:
    url = os.environ.get(ENV_DATABASE, "")
    if not url:
        raise Problem("missing", "No database was named", "Start it with: samplestore dashboard --db FILE_OR_URL")
    return url


@st.cache_resource(max_entries=4, show_spinner=False)
def _store(url: str) -> Store:
    return open_read_only(url)


def store() -> Store:
    """This database's store. Checked again each time: a file may have been removed or migrated under a running page."""
    found = _store(database_url())
    if not found.database.exists():
        _store.clear()
        raise DatabaseMissing(found.database.shown_url)
    return found


def run(name: str | None) -> Run:
    """The run that the address names, or the newest. Raises RunNotFound."""
    return store().existing_run(name)


@st.cache_data(ttl=FRESH_S, max_entries=32, show_spinner=False)
def _overview(url: str, run_name: str) -> Overview:
    database, of = _store(url).database, _store(url).existing_run(run_name)
    migrations.require_current(database)
    return Overview(
        database.shown_url,
        database.path.stat().st_size if database.is_sqlite else None,
        migrations.REVISION,
        of.settings.as_json(),
        status.status(database, of.id),
        ledger.read(database, of.id, exact=False),
        why.why(database, of.id, of.settings).as_json(),
        browse.recent(database, of.id, 8),
    )


def overview(of: Run) -> Overview:
    store()
    return _overview(database_url(), of.name)


@st.cache_data(ttl=FRESH_S, max_entries=32, max_size=256 * 1024 * 1024, show_spinner=False)
def _trajectory(
    url: str, run_id: int, group: int, index: int, incarnation: int | None, start: int | None, limit: int
) -> trajectory.Trajectory | None:
    return trajectory.read(
        _store(url).database, run_id, group, index, incarnation=incarnation, start=start, limit=limit
    )


def read_trajectory(of: Run, group: int, index: int, incarnation: int | None, start: int | None, limit: int) -> Any:
    return _trajectory(database_url(), of.id, group, index, incarnation, start, limit)


@st.cache_resource(max_entries=2, show_spinner="Loading the tokenizer")
def _tokenizer(path: str) -> Tokenizer:
    # The bare file decodes as well as the folder, and needs only `tokenizers`, not transformers.
    file = Path(path) / "tokenizer.json"
    return load_tokenizer(file if file.is_file() else path)


def tokenizer() -> tuple[Tokenizer | None, str | None]:
    """(tokenizer, None), or (None, why tokens are shown as ids)."""
    path = os.environ.get(ENV_TOKENIZER, "")
    if not path:
        return None, "Tokens are shown as ids. For text: samplestore dashboard --tokenizer FOLDER (the model's folder)"
    try:
        return _tokenizer(path), None
    except (TokenizerError, MissingExtra) as error:
        return None, f"Tokens are shown as ids: {error}"


def problem_of(error: Exception) -> Problem:
    """What went wrong, in words that say what to do. Raises `error` again when it is a bug rather than a state."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, DatabaseMissing):
        return Problem("missing", "There is no database here", str(error))
    if isinstance(error, SchemaMismatch):
        return Problem("schema", "The database has another schema", str(error))
    if isinstance(error, RunNotFound):
        if not error.known:
            text = f"Create a run with: samplestore add-prompts FILE --run {error.name or 'NAME'}"
            return Problem("no_runs", "The database has no runs yet", text)
        return Problem("unknown_run", "There is no such run", str(error))
    if isinstance(error, sa.exc.DBAPIError):
        told = str(error.orig).strip().splitlines()[0][:300] if str(error.orig).strip() else type(error.orig).__name__
        if "locked" in told:
            text = "Another program holds a lock that keeps readers out (samplestore's own writers never do)."
            return Problem("locked", "The database is locked", f"{text} The driver says: {told}")
        return Problem("unreachable", "The database can't be read", f"The driver says: {told}")
    if isinstance(error, SampleStoreError):
        return Problem("other", "That did not work", str(error))
    raise error


EXPECTED = (Problem, SampleStoreError, sa.exc.DBAPIError)
