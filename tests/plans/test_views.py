"""A question about one run costs with that run, not with its neighbours in the database."""

# ruff: noqa: E501, F811 - SQL reads better in one line; `run` is a fixture

from __future__ import annotations

import re

import pytest
import sqlalchemy as sa

from samplestore import Store, hooks, views
from samplestore.queries import batch_list, plans, status
from samplestore.run import Run
from tests.plans.test_plans import HISTORY, full_scans, run  # noqa: F401
from tests.support import factory as f
from tests.support.meter import measured

LARGE = ("sample", "sample_group", "segment", "prompt", "event", "request", "batch_group")  # `batch` has a row a step


@pytest.fixture
def small(store: Store, run: Run) -> Run:
    """A small run beside one with a long history."""
    f.execute(
        run,
        f"""INSERT INTO request (run_id, rid, sample_id, incarnation, attempt, worker_id, stored_tokens, resumed_tokens, started_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {HISTORY})
        SELECT s.run_id, 'x' || i, s.id, 0, 0, 1, 0, 0, 0 FROM n JOIN sample s ON s.id = n.i""",
    )
    f.execute(
        run,
        "INSERT INTO event (run_id, at, kind, reason, worker_id, sample_id) SELECT run_id, 1, 'abort', 'x', 1, sample_id FROM request",
    )
    f.execute(
        run,
        """INSERT INTO batch (run_id, timeline, step, state, owner, attempt, current_version, n_groups, n_samples, n_tokens, created_at, policy)
        SELECT run_id, 0, number, 'committed', 1, 0, 0, 1, 2, 18, 0, '{}' FROM sample_group WHERE state = 'consumed'""",
    )
    f.execute(
        run,
        """INSERT INTO batch_group (batch_id, group_id, position, state)
        SELECT b.id, g.id, 0, 'committed' FROM batch b JOIN sample_group g ON g.number = b.step AND g.run_id = b.run_id""",
    )
    small = f.make_run(store, "small")
    f.finish_all(small, f.register(small))
    f.execute(run, "ANALYZE")
    return small


def test_a_view_finds_the_rows_of_a_run_by_indexes(small: Run) -> None:
    explain = "EXPLAIN QUERY PLAN " if small.database.is_sqlite else "EXPLAIN "
    with small.database.reading() as connection:
        for view in views.VIEWS:
            rows = connection.execute(sa.text(f"{explain}SELECT * FROM {view.name} WHERE run_id = :r"), {"r": small.id})
            plan = "\n".join(str(row[-1]) for row in rows)
            for table in LARGE:
                assert not full_scans(plan, table), f"{view.name}\n{plan}"
                # nor a whole index
                assert not re.search(rf"SCAN {table}\b", plan), f"{view.name}\n{plan}"


def test_a_run_finds_its_newest_batches_among_those_of_others(small: Run) -> None:
    """Its own were leased before thousands of its neighbour's, so that who walks back from the newest reads those."""
    trainer = f.register(small, "trainer")
    first, second = (f.lease(small, trainer, step, 1) for step in (0, 1))
    assert first is not None and second is not None
    f.execute(
        small,
        """INSERT INTO batch (run_id, timeline, step, state, owner, attempt, current_version, n_groups, n_samples, n_tokens, created_at, policy)
        SELECT run_id, 0, 100000 + step, 'committed', 1, 0, 0, 1, 2, 18, 0, '{}' FROM batch WHERE run_id <> :r""",
        r=small.id,
    )
    f.execute(small, "ANALYZE")
    db, found = small.database, []
    with measured(db) as reading:
        found += [row["id"] for row in batch_list.page(db, small.id)]
        found += [row["id"] for row in batch_list.page(db, small.id, below=second)]
        with db.reading() as connection:
            newest = [plans.newest(connection, small.id, step, 0) for step in (1, 0, 2)]
        found += [row and row.id for row in newest]
        assert status.totals_of(db, small.id)["batches"]["last"]["step"] == 1
        hooks.show_all(small, lambda args, groups, source: found.append(len(groups)), second)
    assert found == [second, first, first, second, first, None, 1]
    assert [line for line in reading.whole_tables() if " batch" in line.partition("\n")[0]] == []
    assert reading.work < HISTORY * (10 if db.is_sqlite else 1), reading.work


def test_no_view_reads_payloads(small: Run) -> None:
    for view in views.VIEWS:
        for dialect in views.DIALECTS:
            assert "payload" not in view.sql(dialect) and "segment_array" not in view.sql(dialect)
