"""The hot statements find their rows through their indexes: cost with the window, never with history."""

# ruff: noqa: E501 - SQL reads better in one line

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from samplestore import Store
from samplestore.models import Request, Worker
from samplestore.run import Run
from samplestore.verbs import batches, liveness, prompts, samples, stages, weights
from samplestore.verbs.tx import Tx
from tests.support import factory as f

HISTORY = 3000  # consumed groups, with two samples each


@pytest.fixture
def run(store: Store) -> Run:
    """A run with a long history, and a window that is small beside it."""
    run = f.make_run(store, prompts=8, stages=["reward"], groups_per_step=4)
    worker = f.register(run)
    for claim in run.claim(worker, 4):
        f.answer(run, claim)
    for stage in run.claim_stages(worker, 2):
        run.score(stage, 1.0)
    f.execute(
        run,
        f"""INSERT INTO sample_group (run_id, prompt_id, number, epoch, timeline, state, n_samples, n_open, n_unscored, n_failed, created_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {HISTORY})
        SELECT g.run_id, g.prompt_id, 1000 + i, 0, 0, 'consumed', 2, 0, 0, 0, 0 FROM n, (SELECT * FROM sample_group LIMIT 1) g""",
    )
    columns = "group_id, \"index\", run_id, incarnation, status, closed, priority, not_before, attempt, let_go, failures, " \
        "n_tokens, n_loss_tokens, n_segments, n_aborts, n_resumes, version_unknown, logprob_sum, created_at"  # fmt: skip
    f.execute(
        run,
        f"INSERT INTO sample ({columns}) SELECT g.id, i, g.run_id, 0, 'completed', 0, 0, 0, 1, 1, 0, 9, 9, 1, 0, 0, 0, -1, 0 "
        "FROM sample_group g, (SELECT 0 AS i UNION SELECT 1) j WHERE g.state = 'consumed'",
    )
    f.execute(
        run,
        "INSERT INTO stage (run_id, group_id, sample_id, incarnation, name, status, attempt, let_go, failures, not_before, created_at) "
        "SELECT run_id, group_id, id, 0, 'reward', 'done', 1, 1, 0, 0, 0 FROM sample WHERE n_tokens = 9",
    )
    f.execute(
        run,
        "INSERT INTO segment (sample_id, incarnation, seq, start, n_tokens, kind, loss, version_min, version_max, owner, attempt, "
        "logprob_sum, created_at, payload) SELECT id, 0, 0, 0, 9, 'generated', 1, 0, 0, 1, 1, -1, 0, :p FROM sample WHERE n_tokens = 9",
        p=b"\x02" + bytes(36),
    )
    # most workers of a long run are gone
    f.execute(
        run,
        f"""INSERT INTO worker (run_id, kind, name, host, pid, state, started_at, heartbeat, ttl_s, info)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {HISTORY})
        SELECT run_id, kind, name, host, pid, 'gone', 0, 0, 30, info FROM n, (SELECT * FROM worker LIMIT 1) w""",
    )
    f.execute(run, "ANALYZE")
    return run


def full_scans(told: str, table: str) -> list[str]:
    """Lines of a plan that read a whole table."""
    lines = told.splitlines()
    return [
        line
        for line in lines
        if re.search(rf"(SCAN {table}\b(?! USING (COVERING )?INDEX))|(Seq Scan on {table}\b)", line)
    ]


def test_no_index_holds_a_heartbeat(store: Store) -> None:
    """On PostgreSQL each beat would rewrite it."""
    for table, column in ((Worker, "heartbeat"), (Request, "finished_at")):
        for index in table.__table__.indexes:
            assert column not in [c.name for c in index.columns], index


def plans(run: Run, work: Callable[[Tx], Any]) -> list[tuple[str, str]]:
    """(statement, plan) of all statements that a verb sends, planned as they were sent."""
    sent: list[tuple[str, Any]] = []

    def listen(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        sent.append((statement, parameters[0] if many and parameters else parameters))

    sa.event.listen(run.database.writer, "before_cursor_execute", listen)
    try:
        run.transact(work)
    finally:
        sa.event.remove(run.database.writer, "before_cursor_execute", listen)
    explain = "EXPLAIN QUERY PLAN " if run.database.is_sqlite else "EXPLAIN "
    told = []
    with run.database.writing() as connection:
        for statement, parameters in sent:
            if statement.lstrip().split(" ")[0].split("\n")[0] in ("SELECT", "UPDATE", "DELETE", "WITH"):
                rows = connection.exec_driver_sql(explain + statement, parameters).fetchall()
                told.append((statement, "\n".join(str(row[-1]) for row in rows)))
    return told


def test_no_verb_of_the_loop_reads_all_history(run: Run) -> None:
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims: list[Any] = []
    found: list[Any] = []
    verbs: dict[str, Callable[[Tx], Any]] = {
        "admit": prompts.admit,
        "claim": lambda tx: claims.extend(samples.claim(tx, worker, 2)),
        "append": lambda tx: samples.append(tx, claims[0], 0, [1], [-0.5], 0),
        "finish": lambda tx: samples.finish(tx, claims[0]),
        "release": lambda tx: samples.release(tx, claims[1], "x"),
        "claim_stages": lambda tx: found.extend(stages.claim_stages(tx, worker, 2)),
        "score": lambda tx: stages.score(tx, found[0], 1.0),
        "heartbeat": lambda tx: liveness.heartbeat(tx, worker),
        "lease": lambda tx: batches.lease(tx, trainer, 0, 1, f.POLICY),
        "lease by mean": lambda tx: batches.lease(tx, trainer, 1, 1, {**f.POLICY, "staleness": "mean"}),
        "reap": liveness.reap,
        "publish": lambda tx: weights.publish(tx, "/w", 1),
    }
    used: dict[str, str] = {}
    wrong = []
    for name, verb in verbs.items():
        told = plans(run, verb)
        used[name] = "\n".join(plan for _, plan in told)
        for statement, plan in told:
            for table in ("sample", "sample_group", "stage", "segment", "worker", "prompt"):
                wrong += [f"{name}: {line.strip()}\n    {statement[:400]}" for line in full_scans(plan, table)]
    assert not wrong, "\n".join(wrong)
    assert "ix_sample_claim" in used["claim"]
    assert "ix_stage_claim" in used["claim_stages"]
    assert "ix_sample_group_" in used["lease"] and "ix_sample_group_" in used["lease by mean"]


def test_a_claim_reads_in_order_and_sorts_nothing(run: Run) -> None:
    worker = f.register(run)
    (statement,) = [(s, p) for s, p in plans(run, lambda tx: samples.claim(tx, worker, 2)) if "picked" in s]
    assert "ix_sample_claim" in statement[1]
    assert "TEMP B-TREE FOR ORDER BY" not in statement[1], statement[1]
    assert "Sort Key: sample" not in statement[1], "the few that were picked may be sorted, the table may not"
