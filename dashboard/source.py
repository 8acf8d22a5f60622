"""Where pages get their data: one read-only store per database, opened once, and errors told as what to do next."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import sqlalchemy as sa
import streamlit as st

from samplestore import migrations
from samplestore.dashboard import evaluated, find
from samplestore.dashboard.readonly import ENV_DATABASE, ENV_TOKENIZER, open_read_only
from samplestore.engine import Database
from samplestore.errors import DatabaseMissing, MissingExtra, RunNotFound, SampleStoreError, SchemaMismatch
from samplestore.media import Image
from samplestore.queries import (
    abort_list,
    aborts,
    batch_list,
    data_page,
    evaluation,
    fleet,
    group_list,
    images,
    sample_page,
    trajectory,
)
from samplestore.queries import (
    group_page as group_queries,
)
from samplestore.run import Run
from samplestore.store import Store
from samplestore.tokenizers import Tokenizer, TokenizerError, load_tokenizer

FRESH_S = 1.0  # several readers of one page share what was read


class Problem(Exception):
    """Something a reader can act on. `kind`: missing, schema, no_runs, unknown_run, locked, unreachable, other."""

    def __init__(self, kind: str, title: str, text: str) -> None:
        self.kind, self.title, self.text = kind, title, text
        super().__init__(f"{title}. {text}")


def database_url() -> str:
    url = os.environ.get(ENV_DATABASE, "")
    if not url:
        raise Problem("missing", "No database was named", "Start it with: samplestore dashboard --db FILE_OR_URL")
    return url


File = tuple[int, int]  # device and inode: a connection stays with them, whatever its path leads to later


def _file_of(database: Database) -> File | None:
    """The file that a SQLite path leads to now. None: none, or PostgreSQL."""
    if not database.is_sqlite or not database.path.exists():
        return None
    found = database.path.stat()
    return found.st_dev, found.st_ino


@st.cache_resource(max_entries=4, show_spinner=False)
def _opened(url: str) -> tuple[Store, File | None]:
    file = _file_of(Database(url))  # before it is opened: what comes in between is seen as another file
    return open_read_only(url), file


def opened(url: str) -> Store:
    """The read-only store of a database, opened once."""
    return _opened(url)[0]


@st.cache_data(ttl=FRESH_S, max_entries=4, show_spinner=False)
def _require_current(url: str) -> None:
    migrations.require_current(opened(url).database)


def store() -> Store:
    """This database's store. Looked at again each time: under a running page a file may have been removed, migrated, or
    replaced by another one, of which nothing that is known is true. Raises DatabaseMissing, SchemaMismatch."""
    url = database_url()
    found, file = _opened(url)
    now = _file_of(found.database)
    if now != file:
        found.database.reader.dispose()
        st.cache_data.clear()
        st.cache_resource.clear()
        if now is None:
            raise DatabaseMissing(found.database.shown_url)
        st.rerun()
    _require_current(url)
    return found


def run(name: str | None) -> Run:
    """The run that the address names, or the newest. Raises RunNotFound."""
    return store().existing_run(name)


@st.cache_data(ttl=FRESH_S, max_entries=32, max_size=256 * 1024 * 1024, show_spinner=False)
def _trajectory(
    url: str, run_id: int, group: int, index: int, incarnation: int | None, start: int | None, limit: int
) -> trajectory.Trajectory | None:
    return trajectory.read(
        opened(url).database, run_id, group, index, incarnation=incarnation, start=start, limit=limit
    )


def read_trajectory(of: Run, group: int, index: int, incarnation: int | None, start: int | None, limit: int) -> Any:
    return _trajectory(database_url(), of.id, group, index, incarnation, start, limit)


@dataclass(frozen=True, slots=True)
class Groups:
    page: group_list.GroupPage
    as_of: float


@st.cache_data(ttl=FRESH_S, max_entries=32, show_spinner=False)
def _groups(url: str, run_id: int, where: group_list.GroupFilter, order: str, after: str | None, limit: int) -> Groups:
    found = group_list.page(opened(url).database, run_id, where, after=after, order=order, limit=limit)
    return Groups(found, time.time())


def group_page(of: Run, where: group_list.GroupFilter, order: str, after: str | None, limit: int) -> Groups:
    return _groups(database_url(), of.id, where, order, after, limit)


def group(of: Run, number: int) -> group_queries.GroupView | None:
    return group_queries.read(store().database, of.id, number)


def evidence(of: Run, found: trajectory.Trajectory) -> sample_page.Evidence:
    s = found.sample
    return sample_page.evidence(store().database, s["id"], s["group_id"], found.incarnation)


@dataclass(frozen=True, slots=True)
class Aborts:
    totals: dict[str, Any]
    over_time: dict[str, Any]
    resumed: dict[str, int]


@st.cache_data(ttl=60.0, max_entries=16, max_size=64 * 1024 * 1024, show_spinner=False)
def _images(url: str, run_id: int, digests: tuple[str, ...]) -> list[Image]:
    database = opened(url).database
    found = database.read(lambda c: images.read(c, run_id, digests))
    return [found[digest] for digest in digests]


def pictures(of: Run, digests: Sequence[str]) -> list[Image]:
    """The images of these digests, in order."""
    return _images(database_url(), of.id, tuple(digests))


@st.cache_data(ttl=FRESH_S, max_entries=16, show_spinner=False)
def _aborts(url: str, run_id: int, since_s: float) -> Aborts:
    database = opened(url).database
    over_time = abort_list.over_time(database, run_id, since_s)
    looked_back_s = over_time["until"] - over_time["since"]  # of whole bars: everything on the page counts the same
    return Aborts(
        aborts.read(database, run_id, looked_back_s), over_time,
        abort_list.resumed_after(database, run_id, looked_back_s),
    )  # fmt: skip


def interruptions(of: Run, since_s: float) -> Aborts:
    store()
    return _aborts(database_url(), of.id, since_s)


@st.cache_data(ttl=FRESH_S, max_entries=16, show_spinner=False)
def _fleet(url: str, run_id: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    database = opened(url).database
    return fleet.workers(database, run_id), fleet.engines(database, run_id)


def workers_and_engines(of: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    store()
    return _fleet(database_url(), of.id)


def batches(of: Run, below: int | None, limit: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(batches, timelines)"""
    database = store().database
    return batch_list.page(database, of.id, below=below, limit=limit), batch_list.timelines(database, of.id)


@st.cache_data(ttl=10 * FRESH_S, max_entries=16, show_spinner=False)
def _evaluations(url: str, run_id: int) -> list[evaluation.Evaluation]:
    return evaluation.newest(opened(url).database, run_id, evaluated.ROWS)


def evaluations(of: Run) -> list[evaluation.Evaluation]:
    store()
    return _evaluations(database_url(), of.id)


@st.cache_data(ttl=10 * FRESH_S, max_entries=16, show_spinner=False)
def _sizes(url: str, run_id: int) -> dict[str, Any]:
    return data_page.sizes(opened(url).database, run_id)


def sizes(of: Run) -> dict[str, Any]:
    store()
    return _sizes(database_url(), of.id)


@st.cache_data(ttl=60.0, max_entries=8, max_size=128 * 1024 * 1024, show_spinner=False)
def _ids(url: str, run_id: int, group: int, index: int, life: int | None, n_tokens: int) -> tuple[int, Any]:
    """n_tokens: part of the key, so that a sample that grew is read again."""
    return sample_page.response_ids(opened(url).database, run_id, group, index, life)


def all_ids(of: Run, found: trajectory.Trajectory) -> Any:
    """int32 [n] of prompt and response together, at most sample_page.MAX_SCAN."""
    where = (found.group["number"], found.sample["index"], found.incarnation, found.n_tokens)
    return _ids(database_url(), of.id, *where)[1]


@st.cache_data(ttl=60.0, max_entries=32, show_spinner=False)
def _lowest(url: str, run_id: int, group: int, index: int, life: int | None, n: int) -> tuple[int, float] | None:
    return sample_page.least_likely(opened(url).database, run_id, group, index, life)


def least_likely(of: Run, found: trajectory.Trajectory) -> tuple[int, float] | None:
    where = (found.group["number"], found.sample["index"], found.incarnation, found.n_tokens)
    return _lowest(database_url(), of.id, *where)


@st.cache_data(ttl=60.0, max_entries=64, show_spinner=False)
def _hits(url: str, tokenizer_path: str, of: tuple[int, ...], wanted: str, _ids: Any, _decoder: Any) -> find.Hits:
    return find.find(_ids, wanted, _decoder)


def hits(of: Run, found: trajectory.Trajectory, wanted: str, decoder: Tokenizer | None) -> find.Hits:
    """Where a text stands in a sample. Kept for the next window: a long response takes a second to decode."""
    where = (of.id, found.group["number"], found.sample["index"], found.incarnation, found.n_tokens)
    path = os.environ.get(ENV_TOKENIZER, "")
    return _hits(database_url(), path, where, wanted, all_ids(of, found), decoder)


def array_values(of: Run, found: trajectory.Trajectory, name: str) -> Any:
    return sample_page.array_window(store().database, of.id, found, name, of.array_files)


def staleness_of(of: Run, found: trajectory.Trajectory) -> dict[int, int]:
    told = [s.version_min for s in found.spans if s.version_min is not None]
    return sample_page.staleness_of(store().database, of.id, told)


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
            text = f"Create a run with: samplestore add-prompts FILE --run {quote(error.name or 'NAME')}"
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
