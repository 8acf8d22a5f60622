"""A run with a million samples behind it, built with set-based SQL: nothing of it is special but its size."""

# ruff: noqa: E501 - SQL reads better in one line

from __future__ import annotations

import sqlalchemy as sa

from samplestore import Store
from samplestore.run import Run
from samplestore.verbs.recount import recount
from tests.support import factory as f

GROUPS, PER_GROUP = 250_000, 4
VERSIONS, BATCH, DROPPED_EVERY = 2_000, 25, 50
PROMPTS, WORKERS, ABORTS = 1_000, 2_000, 200_000
TOKENS = 8  # of a segment


def build(store: Store, segments: int = 1, tokens: int = TOKENS) -> Run:
    """The run, analyzed; after its history stands a window of 32 groups that nobody has claimed.

    segments   of each sample; tokens: of each segment
    """
    length = segments * tokens  # of a sample
    run = f.make_run(
        store, "million", prompts=PROMPTS, admit=False, samples_per_prompt=PER_GROUP, stages=["reward"],
        groups_per_step=16, epochs=None,
    )  # fmt: skip
    f.register(run)
    statements = [
        (
            f"""INSERT INTO weight_version (run_id, version, timeline, parent, step, depth, common_depth, label, path, created_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {VERSIONS})
        SELECT :r, i, 0, i - 1, i, i, i, 'v' || i, '/w/' || i, i FROM n"""
        ),
        f"UPDATE run SET current_version = {VERSIONS}, last_version = {VERSIONS}, n_groups = {GROUPS}, epoch = {GROUPS // PROMPTS} WHERE id = :r",
        (
            f"""INSERT INTO worker (run_id, kind, name, host, pid, state, started_at, heartbeat, ttl_s, info)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {WORKERS})
        SELECT run_id, kind, name, host, pid, 'gone', 0, 0, 30, info FROM n, (SELECT * FROM worker WHERE run_id = :r LIMIT 1) w"""
        ),
        (
            f"""INSERT INTO sample_group (run_id, prompt_id, number, epoch, timeline, state, reason, n_samples, n_open, n_unscored, n_failed, n_tokens, oldest_version, reward_mean, reward_std, created_at, ready_at, settled_at)
        WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {GROUPS - 1})
        SELECT :r, p.id, i, i / {PROMPTS}, 0, CASE WHEN i % {DROPPED_EVERY} = 0 THEN 'dropped' ELSE 'consumed' END, CASE WHEN i % {DROPPED_EVERY} = 0 THEN 'filtered' END, {PER_GROUP}, 0, 0, 0, {PER_GROUP * length}, i * {VERSIONS} / {GROUPS}, 0.5, 0.5, i, i, i
        FROM n JOIN prompt p ON p.run_id = :r AND p.position = i % {PROMPTS}"""
        ),
        (
            f"""INSERT INTO sample (group_id, "index", run_id, incarnation, status, closed, priority, not_before, attempt, let_go, failures, n_tokens, n_loss_tokens, n_segments, n_aborts, n_resumes, version_min, version_max, oldest_version, version_unknown, logprob_sum, reward, finish_reason, created_at, claimed_at, progress_at, finished_at, finished_by)
        SELECT g.id, j.i, :r, 0, 'completed', CASE WHEN g.state = 'dropped' THEN 1 ELSE 0 END, 0, 0, 1, 1, 0, {length}, {length}, {segments}, 0, CASE WHEN g.number % 10 = 0 THEN 1 ELSE 0 END, g.oldest_version, g.oldest_version, g.oldest_version, 0, -8, 1, 'stop', g.created_at, g.created_at, g.created_at, g.created_at, 1
        FROM sample_group g, (SELECT 0 AS i UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3) j WHERE g.run_id = :r ORDER BY g.id, j.i"""
        ),
        (
            f"""INSERT INTO segment (sample_id, incarnation, seq, start, n_tokens, kind, loss, version_min, version_max, owner, attempt, finish_reason, logprob_sum, created_at, payload)
        WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {segments - 1})
        SELECT id, 0, i, i * {tokens}, {tokens}, 'generated', 1, oldest_version, oldest_version, 1, 1, 'stop', -8, created_at, :p FROM sample, n WHERE run_id = :r ORDER BY id, i"""
        ),
        (
            """INSERT INTO stage (run_id, group_id, sample_id, incarnation, name, status, attempt, let_go, failures, not_before, outcome, value, created_at, settled_at)
        SELECT run_id, group_id, id, 0, 'reward', 'done', 1, 1, 0, 0, 'ok', 1, created_at, created_at FROM sample WHERE run_id = :r ORDER BY id"""
        ),
        (
            f"""INSERT INTO request (run_id, rid, sample_id, incarnation, attempt, worker_id, engine, prompt_tokens, cached_tokens, generated_tokens, stored_tokens, lost_tokens, resumed_tokens, started_at, finished_at)
        SELECT run_id, 'r' || id, id, 0, 1, 1, 'http://e', 3, 0, {length}, {length}, 0, CASE WHEN n_resumes > 0 THEN 2 ELSE 0 END, created_at, created_at FROM sample WHERE run_id = :r ORDER BY id"""
        ),
        (
            f"""INSERT INTO batch (run_id, timeline, step, state, owner, attempt, current_version, n_groups, n_samples, n_tokens, created_at, settled_at, policy)
        WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {GROUPS // BATCH - 1})
        SELECT :r, 0, i, 'committed', 1, 0, i * {VERSIONS * BATCH} / {GROUPS}, {BATCH}, {BATCH * PER_GROUP}, {BATCH * PER_GROUP * length}, i, i, '{{}}' FROM n"""
        ),
        (
            f"""INSERT INTO batch_group (batch_id, group_id, position, state, staleness)
        SELECT (SELECT min(id) FROM batch WHERE run_id = :r) + number / {BATCH}, id, number % {BATCH}, 'committed', 0
        FROM sample_group WHERE run_id = :r AND state = 'consumed' ORDER BY id"""
        ),
        (
            f"""INSERT INTO event (run_id, at, kind, reason, worker_id, group_id, sample_id, tokens)
        SELECT run_id, created_at, CASE WHEN id % 2 = 0 THEN 'abort' ELSE 'release' END, 'weights', 1, group_id, id, {length} FROM sample WHERE run_id = :r ORDER BY id LIMIT {ABORTS}"""
        ),
        (
            f"""INSERT INTO event (run_id, at, kind, step, version)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {VERSIONS}) SELECT :r, i, 'publish', i, i FROM n"""
        ),
        (
            f"""INSERT INTO ledger_total (run_id, worker_id, fate, reason, version, amount)
        SELECT :r, 0, CASE WHEN state = 'dropped' THEN 'dropped' ELSE 'consumed' END, CASE WHEN state = 'dropped' THEN 'filtered' ELSE '' END, oldest_version, count(*) * {PER_GROUP * length}
        FROM sample_group WHERE run_id = :r GROUP BY state, oldest_version"""
        ),
    ]
    payload = b"\x02" + bytes(8 * tokens)
    unchecked = _may_leave_out_checks(store)
    for statement in statements:
        values = {"r": run.id} | ({"p": payload} if ":p" in statement else {})
        with store.database.writing() as connection:
            if unchecked:
                connection.execute(sa.text("SET LOCAL session_replication_role = replica"))
            connection.execute(sa.text(statement), values)
    run.transact(recount)
    run.admit()
    analyze(store)
    return run


def _may_leave_out_checks(store: Store) -> bool:
    """Whether foreign keys need not be looked up: on PostgreSQL that is done row by row, which takes as long as all the
    rest, and only a superuser may leave it out."""
    if store.database.is_sqlite:
        return False
    return bool(f.value(store, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"))


def analyze(store: Store) -> None:
    """What autovacuum does on PostgreSQL, and `PRAGMA optimize` would do on SQLite."""
    if store.database.is_sqlite:
        f.execute(store, "ANALYZE")
        return
    with store.database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE"))
