"""Statements that are sent as strings: what Core would do at each call must be done, or refused."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store
from samplestore.models import Request, Sample
from samplestore.models import Run as RunRow
from samplestore.statements.prepared import Over, Prepared, given

from ..support import factory as f

run_table, request, sample = RunRow.__table__, Request.__table__, Sample.__table__


def test_values_pass_by_their_types(store: Store) -> None:
    """JSON and absent values arrive as through Core, given once and many times."""
    run = f.make_run(store)
    write = Prepared(
        sa.update(run_table)
        .where(run_table.c.id == sa.bindparam("of_run"))
        .values(
            settings=sa.bindparam("b_settings"),
            name=sa.func.coalesce(sa.bindparam("b_name", type_=sa.Text), run_table.c.name),
            timeline=7,
        )
    )
    stored = sa.select(run_table.c.settings, run_table.c.name, run_table.c.timeline).where(run_table.c.id == run.id)
    for text in ("50%(s)s :x", "é"):
        values = {"of_run": run.id, "b_settings": {"stop": [text, None]}, "b_name": None}
        for values_given in (values, [values, values]):
            run.transact(lambda tx, said=values_given: tx.execute(write, said))
            found = run.database.read(lambda c: c.execute(stored).one())
            assert tuple(found) == ({"stop": [text, None]}, run.name, 7)


def test_a_value_that_is_not_given_is_refused(store: Store) -> None:
    run = f.make_run(store)
    one = Prepared(sa.select(run_table.c.id).where(run_table.c.id == sa.bindparam("of_run")))
    with pytest.raises(sa.exc.DBAPIError):
        run.transact(lambda tx: tx.execute(one, {"of_another": run.id}))


def test_defaults_that_nobody_would_fill_in_are_refused(store: Store) -> None:
    """Sent as a string, `stored_tokens` would be NULL."""
    run = f.make_run(store)
    careless = Prepared(sa.insert(request).values(started_at=0.0).inline(), ["rid", "run_id", "sample_id"])
    with pytest.raises(TypeError, match="fills in no defaults"):
        run.transact(lambda tx: tx.execute(careless, {"rid": "x"}))


def test_a_list_of_rows_is_one_statement_with_the_types_of_each(store: Store) -> None:
    """Of every length, also of those that SQLite takes in parts; absent values, text that looks like a placeholder,
    and names that a statement does not use."""
    run = f.make_run(store, prompts=1)
    rows = given({"n": sa.BigInteger, "label": sa.Text, "score": sa.Double, "unused": sa.Text, "id": sa.BigInteger})
    more = Over(rows, sa.update(sample).where(sample.c.id == rows.c.id).values(
        n_aborts=sample.c.n_aborts + rows.c.n, error=rows.c.label, reward=rows.c.score,
    ).returning(sample.c.id, sample.c.n_aborts))  # fmt: skip
    (claim,) = run.claim(f.register(run), 1)
    n = 150  # 64 + 64 + 16 + 4 + 2
    ids = [claim.sample_id, *range(10**6, 10**6 + n - 1)]
    values = [
        {"id": id, "n": 3, "label": None if i else "%(n)s ?", "score": None if i else 0.5, "unused": object()}
        for i, id in enumerate(ids)
    ]
    for time in (1, 2):
        for length in (1, 3, n):
            found = run.transact(lambda tx, length=length: more.rows(tx.connection, values[:length]))
            assert [row.id for row in found] == [claim.sample_id]
        assert found[0].n_aborts == 9 * time
    assert run.transact(lambda tx: more.execute(tx.connection, values[1:])) == 0
    one = f.rows(run, "SELECT error, reward FROM sample WHERE id = :id", id=claim.sample_id)
    assert one == [{"error": "%(n)s ?", "reward": 0.5}]


def test_a_connection_that_has_seen_many_texts_prepares_appends_once(sqlite_url: str) -> None:
    """The authorizer is asked whenever a statement is prepared. A driver that keeps the most used ones and has no room
    left would prepare each anew, at every append."""
    with samplestore.open(sqlite_url) as store:  # which made the schema: many texts on one connection
        run = f.make_run(store)
        claim = run.claim(f.register(run), 1)[0]
        raw = run.transact(lambda tx: tx.connection.connection.driver_connection)
        for n in range(300):
            raw.execute(f"SELECT {n}").fetchall()
        asked: list[object] = []
        raw.set_authorizer(lambda *what: asked.append(what) or 0)  # which makes all be prepared once more
        f.add(run, claim)
        assert asked
        asked.clear()
        f.add(run, claim)
        raw.set_authorizer(None)
        assert asked == []
