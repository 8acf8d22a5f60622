"""Statements past SQLAlchemy's execution: their rows, and errors that are told and repeated as any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store, driver

from ..support import factory as f


def test_rows_have_names_and_one_means_one(store: Store) -> None:
    run = f.make_run(store, prompts=3)
    with store.database.reading() as connection:
        found = driver.run(connection, "SELECT id, position FROM prompt ORDER BY position").fetchall()
        assert [row.position for row in found] == [0, 1, 2]
        one = driver.run(connection, "SELECT name FROM run").one()
        assert one.name == run.name
        assert driver.run(connection, "SELECT id FROM prompt WHERE position > 2").one_or_none() is None
        assert driver.run(connection, "SELECT id FROM prompt WHERE position > 2").scalar() is None
        with pytest.raises(sa.exc.NoResultFound):
            driver.run(connection, "SELECT id FROM prompt WHERE position > 2").one()
        with pytest.raises(sa.exc.MultipleResultsFound):
            driver.run(connection, "SELECT id FROM prompt").one()


class Asked:
    """A cursor that notes whether its rows are asked for one by one or all at once."""

    def __init__(self, cursor: Any) -> None:
        self.cursor, self.description, self.how = cursor, cursor.description, ""

    def __iter__(self) -> Iterator[Any]:
        self.how = "one by one"
        return iter(self.cursor)

    def __next__(self) -> Any:
        return next(self.cursor)

    def fetchall(self) -> list[Any]:
        self.how = "all"
        rows: list[Any] = self.cursor.fetchall()
        return rows


def test_postgresqls_rows_are_made_at_once(store: Store) -> None:
    """psycopg has them all, and takes twice as long to be asked for each. SQLite reads the next when it is asked."""
    f.make_run(store, prompts=3)
    with store.database.reading() as connection:
        answer = driver.run(connection, "SELECT id FROM prompt")
        answer.cursor = asked = Asked(answer.cursor)
        assert len(answer.fetchall()) == 3
    assert asked.how == ("one by one" if store.database.is_sqlite else "all")


def test_errors_are_sqlalchemys(store: Store) -> None:
    run = f.make_run(store)
    with pytest.raises(sa.exc.IntegrityError) as caught, store.database.writing() as connection:
        driver.run(connection, "INSERT INTO prompt SELECT * FROM prompt")
    assert not caught.value.connection_invalidated
    f.sound(run)


def test_whoever_listens_hears_all_statements(store: Store) -> None:
    run = f.make_run(store)
    claim = run.claim(f.register(run), 1)[0]
    heard: list[str] = []
    sa.event.listen(store.database.writer, "before_cursor_execute", lambda *a: heard.append(a[2]))
    assert f.add(run, claim, 3) == 3
    assert any("INSERT INTO segment" in statement for statement in heard)
    f.sound(run)


def test_a_write_is_repeated_on_a_new_connection(postgres_url: str) -> None:
    """The server ends the connections that the pool keeps: nobody asks before a write whether they live."""
    with samplestore.open(postgres_url) as store, samplestore.open(postgres_url) as other:
        run = f.make_run(store)
        claim = run.claim(f.register(run), 1)[0]
        f.execute(
            other,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        assert f.add(run, claim, 3) == 3
        assert store.database.reconnects >= 1
        f.sound(run)
