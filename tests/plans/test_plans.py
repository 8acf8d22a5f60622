"""The hot statements find their rows through their indexes: cost with the window, never with history."""

# ruff: noqa: E501 - SQL reads better in one line

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from samplestore import Store
from samplestore.models import Request, Worker
from samplestore.queries import inspect
from samplestore.run import Run
from samplestore.types import EngineFacts
from samplestore.verbs import appends, batches, evaluation, flow, liveness, prompts, samples, stages, steps, weights
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
    f.execute(
        run,
        f"""INSERT INTO prompt (run_id, position, content_key, dataset, n_tokens, created_at, prompt, metadata, prompt_ids)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {HISTORY})
        SELECT p.run_id, 1000 + i, 'history ' || i, p.dataset, p.n_tokens, 0, p.prompt, p.metadata, p.prompt_ids
        FROM n, (SELECT * FROM prompt LIMIT 1) p""",
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
        sent.append((statement, parameters[0] if many and isinstance(parameters, list) else parameters))

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
        "append": lambda tx: appends.append(tx, claims[0], 0, [1], [-0.5], 0),
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


def test_serving_by_data_set_filters_and_evaluations_read_no_history(run: Run) -> None:
    run.add_prompts([{"prompt_ids": [9, i]} for i in range(2)], dataset="test", evaluation=True)
    f.execute(run, "UPDATE prompt SET dataset_position = position WHERE dataset_position IS NULL")
    f.execute(run, "ANALYZE")
    mixed = {
        "datasets": {"default": {}},
        "groups_per_step": 6,
        "group_filters": ("reward_std",),
        "sample_deadline_s": 5.0,
    }
    run.settings = replace(run.settings, **mixed)
    worker = f.register(run)
    verbs: dict[str, Callable[[Tx], Any]] = {
        "admit by weight": prompts.admit,
        "start an evaluation": lambda tx: evaluation.start(tx, "test", 2),
        "claim of an evaluation": lambda tx: samples.claim(tx, worker, 4),
        "claim filters": lambda tx: stages.claim_stages(tx, worker, 2, ("filter",)),
        "reap with a deadline": liveness.reap,
    }
    wrong = []
    for name, verb in verbs.items():
        for statement, plan in plans(run, verb):
            for table in ("sample", "sample_group", "stage", "segment", "worker", "prompt"):
                wrong += [f"{name}: {line.strip()}\n    {statement[:400]}" for line in full_scans(plan, table)]
    assert not wrong, "\n".join(wrong)
    assert f.value(run, "SELECT count(*) FROM sample_group WHERE evaluation_id IS NOT NULL") == 2
    assert f.value(run, "SELECT n_served FROM dataset WHERE name = 'default'") > 8


def test_claims_with_limits_and_steps_read_no_history(run: Run) -> None:
    """Before anybody has analyzed the tables, too: then SQLite guesses which index is the better."""
    if run.database.is_sqlite:
        f.execute(run, "DELETE FROM sqlite_stat1")
        run.database.close_connections()
    run.add_prompts([{"prompt_ids": [9, i]} for i in range(2)], dataset="test", evaluation=True)
    worker = f.register(run)
    limits = {"max_inflight_samples": 100, "max_inflight_groups": 100}
    run.settings = replace(run.settings, groups_per_step=6, max_aborts=3, mode="partial", **limits)
    run.start_evaluation("test", 2)
    verbs: dict[str, Callable[[Tx], Any]] = {
        "claim": lambda tx: steps.claim(tx, worker, 2, 0),
        "claim without evaluations": lambda tx: steps.claim(tx, worker, 2, 0, False),
        "in flight": steps._in_flight,
        "evaluations": lambda tx: flow._evaluations(tx, None),
        "waits": flow.evaluation_waits,
    }
    for name, verb in verbs.items():
        told = plans(run, verb)
        for statement, plan in told:
            for table in ("sample", "sample_group"):
                assert not full_scans(plan, table), f"{name}: {plan}\n{statement}"
            # by the run alone is all that it ever had
            ends = re.search(r"SCAN (sample|sample_group)\b", plan)  # of an index, too
            assert not ends, f"{name}: {plan}\n{statement}"
            by_run = re.search(r"(ix_sample_run_status|ix_sample_group_state) \(run_id=\?\)", plan)
            assert not by_run, f"{name}: {plan}\n{statement}"


def test_a_claim_reads_in_order_and_sorts_nothing(run: Run) -> None:
    worker = f.register(run)
    (statement,) = [(s, p) for s, p in plans(run, lambda tx: samples.claim(tx, worker, 2)) if "picked" in s]
    assert "ix_sample_claim" in statement[1]
    assert "TEMP B-TREE FOR ORDER BY" not in statement[1], statement[1]
    assert "Sort Key: sample" not in statement[1], "the few that were picked may be sorted, the table may not"


def test_the_engine_verbs_pass_by_engines_that_are_gone(run: Run) -> None:
    """An engine that is started again on another port is another row: a long run has many that are gone."""
    f.execute(
        run,
        f"""INSERT INTO engine (run_id, url, state, attempt, failures, not_before, created_at, updated_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {HISTORY})
        SELECT r.id, 'http://10.0.0.1:' || i, 'gone', 0, 0, 0, 0, 0 FROM n, run r""",
    )
    f.execute(run, "ANALYZE")
    url = "http://10.0.0.2:1"
    verbs: dict[str, Callable[[Tx], Any]] = {
        "see": lambda tx: weights.see_engine(tx, url, "default", facts=EngineFacts(counter=1)),
        "base": lambda tx: weights.counter_base(tx, url),
        "broken": lambda tx: weights.engine_broken(tx, 1, url, "NaN"),
        "failed": lambda tx: weights.failed_engines(tx, run.id),
        "recovered": lambda tx: weights.engine_recovered(tx, url),
    }
    for name, verb in verbs.items():
        told = [(statement, plan) for statement, plan in plans(run, verb) if "engine" in statement]
        assert told, name
        for statement, plan in told:
            assert not full_scans(plan, "engine"), f"{name}: {plan}\n{statement}"


def test_requests_of_a_sample_are_found_by_their_index(run: Run) -> None:
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    run.begin_request(claim, "r")
    f.execute(
        run,
        f"""INSERT INTO request (run_id, rid, sample_id, incarnation, attempt, worker_id, stored_tokens, resumed_tokens, started_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {HISTORY})
        SELECT s.run_id, 'x' || i, s.id, 0, 0, 1, 0, 0, 0 FROM n, (SELECT * FROM sample WHERE status = 'completed' LIMIT 1) s""",
    )
    f.execute(run, "ANALYZE")
    sent: list[tuple[str, Any]] = []

    def listen(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        sent.append((statement, parameters))

    sa.event.listen(run.database.reader, "before_cursor_execute", listen)
    try:
        assert [r["rid"] for r in inspect.requests(run.database, claim.sample_id, 0, 10)] == ["r"]
    finally:
        sa.event.remove(run.database.reader, "before_cursor_execute", listen)
    (statement, parameters) = next(item for item in sent if "FROM request" in item[0])
    with run.database.reading() as connection:
        explain = "EXPLAIN QUERY PLAN " if run.database.is_sqlite else "EXPLAIN "
        plan = "\n".join(str(row[-1]) for row in connection.exec_driver_sql(explain + statement, parameters))
    assert "ix_request_sample_id" in plan, plan
