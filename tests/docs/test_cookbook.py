"""Every SQL question of the documentation has an answer, on both databases."""

from __future__ import annotations

import sqlalchemy as sa

import samplestore
from tests.docs.pages import runnable
from tests.docs.small_run import build


def test_every_question_is_answered(db_url: str) -> None:
    build(db_url, steps=2)
    questions = runnable("sql")
    assert len(questions) >= 12
    with samplestore.open(db_url, create=False) as store:
        for block in questions:
            where = f"{block.page}:{block.line}"
            try:
                with store.database.reading() as connection:
                    answer = connection.execute(sa.text(block.text)).mappings().all()
            except sa.exc.DBAPIError as error:
                raise AssertionError(f"{where}: {error}") from error
            assert answer, f"{where}: no row"
            # A join that goes wrong leaves NULLs, not errors.
            assert any(value is not None for value in answer[0].values()), f"{where}: {answer}"


def test_answers_are_right(db_url: str) -> None:
    """The questions whose numbers are known beforehand."""
    build(db_url, steps=2)
    found = {}
    with samplestore.open(db_url, create=False) as store, store.database.reading() as connection:
        for block in runnable("sql"):
            found[block.text.partition("\n")[0]] = connection.execute(sa.text(block.text)).all()
    assert found["SELECT versions, count(*) AS samples"] == [(1, 11), (2, 1)]
    assert found["SELECT count(*) AS resumes, sum(resumed_tokens) AS tokens_kept"] == [(1, 4)]
    assert found["SELECT b.step, bg.staleness, count(*) AS groups"] == [(1, 0, 1), (2, 1, 1)]
    lost = found[
        "SELECT engine, lost_reason, count(*) AS requests, sum(generated_tokens) AS generated, sum(lost_tokens) AS lost"
    ]
    assert [tuple(row)[1:] for row in lost] == [("abort", 1, 6, 2)]
    ready = found["SELECT cur.depth - (2 * v.common_depth - v.depth) AS staleness, count(*) AS groups"]
    assert ready == [(2, 3)]
