"""What `run.metrics()` reads: through indexes, never the history of a run, and in a fixed number of statements."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from samplestore.queries import metrics
from samplestore.run import Run
from tests.plans.test_plans import HISTORY, full_scans, run
from tests.support import factory as f

__all__ = ["run"]  # the fixture: a run with a long history and a small window

MOST_STATEMENTS = 25
TABLES = ("sample", "sample_group", "stage", "segment", "worker", "prompt", "request", "event", "batch", "batch_group")


def reads(run: Run, work: Any) -> list[tuple[str, str]]:
    """(statement, plan) of all that is read."""
    sent: list[tuple[str, Any]] = []

    def listen(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        sent.append((statement, parameters[0] if many and isinstance(parameters, list) else parameters))

    sa.event.listen(run.database.reader, "before_cursor_execute", listen)
    try:
        work()
    finally:
        sa.event.remove(run.database.reader, "before_cursor_execute", listen)
    explain = "EXPLAIN QUERY PLAN " if run.database.is_sqlite else "EXPLAIN "
    with run.database.reading() as connection:
        return [
            (s, "\n".join(str(r[-1]) for r in connection.exec_driver_sql(explain + s, p).fetchall()))
            for s, p in sent
            if s.lstrip().split()[0] in ("SELECT", "WITH")
        ]


def test_metrics_read_no_history(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "RECENT_GROUPS", 8)  # as small beside the history as it is in a long run
    trainer = f.register(run, "trainer")
    f.lease(run, trainer, 0, 1)
    f.execute(
        run,
        f"""INSERT INTO event (run_id, at, kind) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE
        i < {HISTORY}) SELECT id, 0, 'abort' FROM n, run""",
    )
    f.execute(
        run,
        "INSERT INTO request (run_id, rid, sample_id, incarnation, attempt, worker_id, stored_tokens, resumed_tokens, "
        "started_at) SELECT run_id, 'h' || id, id, 0, 1, 1, 9, 0, 0 FROM sample WHERE n_tokens = 9",
    )
    f.execute(
        run,
        f"""INSERT INTO batch (run_id, timeline, step, state, owner, attempt, current_version, n_groups, n_samples,
        n_tokens, created_at, policy) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE
        i < {HISTORY}) SELECT id, 0, -i, 'committed', {trainer}, 0, 0, 1, 2, 18, 0, '{{}}' FROM n, run""",
    )
    f.execute(
        run,
        "INSERT INTO batch_group (batch_id, group_id, position, state) SELECT b.id, g.id, 0, 'committed' "
        "FROM batch b JOIN sample_group g ON g.number = 1000 - b.step WHERE b.step < 0",
    )
    f.execute(run, "UPDATE run SET n_groups = (SELECT max(number) + 1 FROM sample_group)")
    f.execute(run, "ANALYZE")
    told = reads(run, run.metrics)
    wrong = [
        f"{line.strip()}\n    {statement[:500]}"
        for statement, plan in told
        for table in TABLES
        for line in full_scans(plan, table)
    ]
    assert not wrong, "\n".join(wrong)
    assert len(told) <= MOST_STATEMENTS
    used = "\n".join(plan for _, plan in told)
    for index in ("ix_sample_claim", "ix_sample_owned", "ix_worker_live", "ix_event_run_id_kind_at", "uq_batch_step"):
        assert index in used, index


def test_the_guard_can_fail(run: Run) -> None:
    def scan() -> None:
        run.database.read(lambda c: c.execute(sa.text("SELECT sum(n_tokens) FROM sample")).scalar())

    ((_, plan),) = reads(run, scan)
    assert full_scans(plan, "sample")
