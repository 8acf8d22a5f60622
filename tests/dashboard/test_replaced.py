"""What happens to a database under pages that are open: removed, replaced, migrated."""

from __future__ import annotations

from pathlib import Path

import pytest
import streamlit as st

import samplestore
from samplestore import migrations
from samplestore.engine import Database
from tests.dashboard.test_app import fresh_caches, page, start, text
from tests.support import factory as f

__all__ = ["fresh_caches"]


def make(path: Path, name: str, prompts: int) -> None:
    for old in path.parent.glob(path.name + "*"):
        old.unlink()
    migrations.upgrade(Database(str(path)))
    with samplestore.open(str(path)) as store:
        f.make_run(store, name, prompts=prompts)


@pytest.mark.parametrize("name", ["groups", "fleet", "data"])
def test_another_file_at_the_same_path_is_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.db"
    make(path, "first", 2)
    at = page(start(monkeypatch, str(path)), name)
    assert "run first" in text(at)
    make(path, "second", 4)
    assert "There is no such run" in text(at.run()), "the address names a run that this database does not have"
    at = page(start(monkeypatch, str(path)), name)
    assert "run second" in text(at) and "first" not in text(at)


def test_a_live_page_is_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.db"
    make(path, "same", 2)
    at = start(monkeypatch, str(path)).run()
    assert "pending 4" in text(at)
    make(path, "same", 4)
    assert "pending 8" in text(at.run())
    for old in tmp_path.iterdir():
        old.unlink()
    assert "There is no database here" in text(at.run())
    assert list(tmp_path.iterdir()) == [], "looking makes no file"
    make(path, "same", 3)
    assert "pending 6" in text(at.run())


@pytest.mark.parametrize("name", ["overview", "groups", "trajectory", "fleet", "batches", "data", "aborts", "group"])
def test_a_schema_that_changed_meanwhile_is_told(db_url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with samplestore.open(db_url) as store:
        run = f.make_run(store)
        at = start(monkeypatch, db_url)
        shown = at.run() if name == "overview" else page(at, name)
        assert "another schema" not in text(shown)
        f.execute(run, "UPDATE alembic_version SET version_num = '9999'")
    st.cache_data.clear()  # a second has passed
    assert "The database has another schema" in text(at.run())


@pytest.mark.parametrize("name", ["overview", "groups"])
def test_a_server_that_was_restarted_is_asked_again(
    postgres_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that were kept are gone then; no reader has to load a page twice for it."""
    with samplestore.open(postgres_url) as store:
        f.make_run(store, "served")
        at = start(monkeypatch, postgres_url)
        at.run() if name == "overview" else page(at, name)
        st.cache_data.clear()
        ended = f.rows(
            store,
            "SELECT pg_terminate_backend(pid) AS done FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
    assert ended and all(r["done"] for r in ended)
    shown = text(at.run())
    assert "served" in shown and "can't be read" not in shown
