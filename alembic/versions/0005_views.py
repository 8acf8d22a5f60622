"""views: ready groups, fates of tokens, causes of aborts, rewards by version, batches

Revision ID: 0005
Revises: 0004
"""

# ruff: noqa: E501 - as SQLAlchemy writes it

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# What samplestore/views.py made when this was written. A view that changes gets a later migration; tests/schema compares.
VIEWS = {
    "sqlite": {
        "ready_groups": """
CREATE VIEW ready_groups AS
SELECT ready.run_id, ready.run, ready.group_id, ready.number, ready.prompt_id, ready.dataset, ready.epoch, ready.n_samples, ready.n_failed, ready.n_tokens, ready.reward_mean, ready.reward_std, ready.oldest_version, ready.staleness_oldest, ready.staleness_newest, ready.staleness_mean, ready.max_staleness, CAST(CASE WHEN (ready.mode = 'newest') THEN ready.staleness_newest WHEN (ready.mode = 'mean') THEN ready.staleness_mean ELSE ready.staleness_oldest END AS DOUBLE) AS staleness, CASE WHEN (CAST(CASE WHEN (ready.mode = 'newest') THEN ready.staleness_newest WHEN (ready.mode = 'mean') THEN ready.staleness_mean ELSE ready.staleness_oldest END AS DOUBLE) <= ready.max_staleness) THEN 1 ELSE 0 END AS in_window, ready.ready_at, ((julianday('now') - 2440587.5) * 86400.0) - ready.ready_at AS waited_s
FROM (SELECT run.id AS run_id, run.name AS run, sample_group.id AS group_id, sample_group.number AS number, sample_group.prompt_id AS prompt_id, prompt.dataset AS dataset, sample_group.epoch AS epoch, sample_group.n_samples AS n_samples, sample_group.n_failed AS n_failed, sample_group.n_tokens AS n_tokens, sample_group.reward_mean AS reward_mean, sample_group.reward_std AS reward_std, sample_group.oldest_version AS oldest_version, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT weight_version_1.depth
FROM weight_version AS weight_version_1 JOIN run ON run.id = weight_version_1.run_id AND run.current_version = weight_version_1.version
WHERE run.id = sample_group.run_id) - (SELECT 2 * weight_version_2.common_depth - weight_version_2.depth AS anon_1
FROM weight_version AS weight_version_2
WHERE weight_version_2.run_id = sample_group.run_id AND weight_version_2.version = sample_group.oldest_version) END AS staleness_oldest, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT CASE WHEN (sum(CASE WHEN (per_sample.staleness IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE max(per_sample.staleness) END AS anon_2
FROM (SELECT sample.id AS sample_id, sample.group_id AS group_id, CASE WHEN (sum(CASE WHEN (v.version IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE min(now.depth - (2 * v.common_depth - v.depth)) END AS staleness
FROM sample JOIN segment ON segment.sample_id = sample.id AND segment.incarnation = sample.incarnation LEFT OUTER JOIN weight_version AS v ON v.run_id = sample.run_id AND v.version = segment.version_min
WHERE segment.loss = 1 AND segment.kind = 'generated' AND sample.status != 'failed' AND sample.group_id = sample_group.id GROUP BY sample.id, sample.group_id) AS per_sample) END AS staleness_newest, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT CASE WHEN (sum(CASE WHEN (per_sample.staleness IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE max(per_sample.staleness) END AS anon_3
FROM (SELECT sample.id AS sample_id, sample.group_id AS group_id, CASE WHEN (sum(CASE WHEN (v.version IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE CAST(sum(segment.n_tokens * (now.depth - (2 * v.common_depth - v.depth))) AS DOUBLE) / (sum(segment.n_tokens) + 0.0) END AS staleness
FROM sample JOIN segment ON segment.sample_id = sample.id AND segment.incarnation = sample.incarnation LEFT OUTER JOIN weight_version AS v ON v.run_id = sample.run_id AND v.version = segment.version_min
WHERE segment.loss = 1 AND segment.kind = 'generated' AND sample.status != 'failed' AND sample.group_id = sample_group.id GROUP BY sample.id, sample.group_id) AS per_sample) END AS staleness_mean, coalesce(CAST(JSON_EXTRACT(run.settings, '$."staleness_mode"') AS VARCHAR), 'oldest') AS mode, coalesce(CAST(JSON_EXTRACT(run.settings, '$."max_staleness"') AS INTEGER), 1) AS max_staleness, sample_group.ready_at AS ready_at
FROM sample_group JOIN run ON run.id = sample_group.run_id JOIN prompt ON prompt.id = sample_group.prompt_id JOIN weight_version AS now ON now.run_id = run.id AND now.version = run.current_version
WHERE sample_group.state = 'ready') AS ready
""",
        "token_fate": """
CREATE VIEW token_fate AS
SELECT run.id AS run_id, run.name AS run, nullif(ledger_total.version, -1) AS version, ledger_total.fate, ledger_total.reason, CAST(sum(ledger_total.amount) AS BIGINT) AS tokens
FROM ledger_total JOIN run ON run.id = ledger_total.run_id GROUP BY run.id, run.name, ledger_total.version, ledger_total.fate, ledger_total.reason
HAVING sum(ledger_total.amount) != 0
""",
        "abort_causes": """
CREATE VIEW abort_causes AS
SELECT stopped.run_id, stopped.run, stopped.kind, stopped.reason, stopped.engine, stopped.worker_id, stopped.version, count(*) AS times, CAST(sum(coalesce(stopped.tokens, 0)) AS BIGINT) AS tokens_kept, CAST(sum(coalesce(stopped.lost_tokens, 0)) AS BIGINT) AS tokens_lost, CAST(sum(coalesce(stopped.prefilled_again, 0)) AS BIGINT) AS prefilled_again
FROM (SELECT run.id AS run_id, run.name AS run, stop.kind AS kind, stop.reason AS reason, call.engine AS engine, stop.worker_id AS worker_id, (SELECT max(segment.version_max) AS max_1
FROM segment
WHERE segment.sample_id = call.sample_id AND segment.incarnation = call.incarnation AND segment.request_rid = call.rid) AS version, stop.tokens AS tokens, call.lost_tokens AS lost_tokens, (SELECT CASE WHEN (later.resumed_tokens > 0) THEN later.prompt_tokens - coalesce(later.cached_tokens, 0) END AS anon_1
FROM request AS later
WHERE later.sample_id = call.sample_id AND later.incarnation = call.incarnation AND later.id > call.id ORDER BY later.id
 LIMIT 1 OFFSET 0) AS prefilled_again
FROM (SELECT event.run_id AS run_id, event.kind AS kind, event.reason AS reason, event.worker_id AS worker_id, event.tokens AS tokens, (SELECT request.id
FROM request
WHERE request.sample_id = event.sample_id AND request.worker_id = event.worker_id AND request.started_at <= event.at ORDER BY request.id DESC
 LIMIT 1 OFFSET 0) AS call_id
FROM event
WHERE event.kind IN ('abort', 'reap', 'fail')) AS stop JOIN run ON run.id = stop.run_id LEFT OUTER JOIN request AS call ON call.id = stop.call_id) AS stopped GROUP BY stopped.run_id, stopped.run, stopped.kind, stopped.reason, stopped.engine, stopped.worker_id, stopped.version
""",
        "version_rewards": """
CREATE VIEW version_rewards AS
SELECT run.id AS run_id, run.name AS run, sample.version_max AS version, weight_version.step, count(*) AS samples, count(sample.reward) AS scored, avg(CAST(sample.reward AS DOUBLE)) AS reward_mean, sqrt(CASE WHEN (avg(CAST(sample.reward * sample.reward AS DOUBLE)) - avg(CAST(sample.reward AS DOUBLE)) * avg(CAST(sample.reward AS DOUBLE)) < 0) THEN CAST(0 AS DOUBLE) ELSE avg(CAST(sample.reward * sample.reward AS DOUBLE)) - avg(CAST(sample.reward AS DOUBLE)) * avg(CAST(sample.reward AS DOUBLE)) END) AS reward_std, avg(CASE WHEN (sample.status = 'truncated') THEN CAST(1 AS DOUBLE) ELSE CAST(0 AS DOUBLE) END) AS truncated_ratio, avg(CAST(sample.n_tokens AS DOUBLE)) AS mean_tokens
FROM sample JOIN run ON run.id = sample.run_id JOIN sample_group ON sample_group.id = sample.group_id LEFT OUTER JOIN weight_version ON weight_version.run_id = sample.run_id AND weight_version.version = sample.version_max
WHERE sample.status IN ('completed', 'truncated') AND sample_group.evaluation_id IS NULL GROUP BY run.id, run.name, sample.version_max, weight_version.step
""",
        "batch_steps": """
CREATE VIEW batch_steps AS
SELECT run.id AS run_id, run.name AS run, batch.id AS batch_id, batch.timeline, batch.step, batch.state, batch.current_version, batch.n_groups, batch.n_samples, batch.n_tokens, (SELECT max(batch_group.staleness) AS max_1
FROM batch_group
WHERE batch_group.batch_id = batch.id) AS staleness_max, (SELECT avg(CAST(batch_group.staleness AS DOUBLE)) AS avg_1
FROM batch_group
WHERE batch_group.batch_id = batch.id) AS staleness_mean, (SELECT avg(CAST(sample.reward AS DOUBLE)) AS avg_2
FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id
WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS reward_mean, (SELECT avg(CASE WHEN (sample.status = 'truncated') THEN CAST(1 AS DOUBLE) ELSE CAST(0 AS DOUBLE) END) AS avg_3
FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id
WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS truncated_ratio, batch.created_at, batch.settled_at
FROM batch JOIN run ON run.id = batch.run_id
""",
    },
    "postgresql": {
        "ready_groups": """
CREATE VIEW ready_groups AS
SELECT ready.run_id, ready.run, ready.group_id, ready.number, ready.prompt_id, ready.dataset, ready.epoch, ready.n_samples, ready.n_failed, ready.n_tokens, ready.reward_mean, ready.reward_std, ready.oldest_version, ready.staleness_oldest, ready.staleness_newest, ready.staleness_mean, ready.max_staleness, CAST(CASE WHEN (ready.mode = 'newest') THEN ready.staleness_newest WHEN (ready.mode = 'mean') THEN ready.staleness_mean ELSE ready.staleness_oldest END AS DOUBLE PRECISION) AS staleness, CASE WHEN (CAST(CASE WHEN (ready.mode = 'newest') THEN ready.staleness_newest WHEN (ready.mode = 'mean') THEN ready.staleness_mean ELSE ready.staleness_oldest END AS DOUBLE PRECISION) <= ready.max_staleness) THEN 1 ELSE 0 END AS in_window, ready.ready_at, extract(epoch from clock_timestamp())::double precision - ready.ready_at AS waited_s
FROM (SELECT run.id AS run_id, run.name AS run, sample_group.id AS group_id, sample_group.number AS number, sample_group.prompt_id AS prompt_id, prompt.dataset AS dataset, sample_group.epoch AS epoch, sample_group.n_samples AS n_samples, sample_group.n_failed AS n_failed, sample_group.n_tokens AS n_tokens, sample_group.reward_mean AS reward_mean, sample_group.reward_std AS reward_std, sample_group.oldest_version AS oldest_version, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT weight_version_1.depth
FROM weight_version AS weight_version_1 JOIN run ON run.id = weight_version_1.run_id AND run.current_version = weight_version_1.version
WHERE run.id = sample_group.run_id) - (SELECT 2 * weight_version_2.common_depth - weight_version_2.depth AS anon_1
FROM weight_version AS weight_version_2
WHERE weight_version_2.run_id = sample_group.run_id AND weight_version_2.version = sample_group.oldest_version) END AS staleness_oldest, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT CASE WHEN (sum(CASE WHEN (per_sample.staleness IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE max(per_sample.staleness) END AS anon_2
FROM (SELECT sample.id AS sample_id, sample.group_id AS group_id, CASE WHEN (sum(CASE WHEN (v.version IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE min(now.depth - (2 * v.common_depth - v.depth)) END AS staleness
FROM sample JOIN segment ON segment.sample_id = sample.id AND segment.incarnation = sample.incarnation LEFT OUTER JOIN weight_version AS v ON v.run_id = sample.run_id AND v.version = segment.version_min
WHERE segment.loss = 1 AND segment.kind = 'generated' AND sample.status != 'failed' AND sample.group_id = sample_group.id GROUP BY sample.id, sample.group_id) AS per_sample) END AS staleness_newest, CASE WHEN (sample_group.import_key IS NOT NULL AND substr(sample_group.import_key, 1, 1) != '+') THEN 0 ELSE (SELECT CASE WHEN (sum(CASE WHEN (per_sample.staleness IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE max(per_sample.staleness) END AS anon_3
FROM (SELECT sample.id AS sample_id, sample.group_id AS group_id, CASE WHEN (sum(CASE WHEN (v.version IS NULL) THEN 1 ELSE 0 END) > 0) THEN NULL ELSE CAST(sum(segment.n_tokens * (now.depth - (2 * v.common_depth - v.depth))) AS DOUBLE PRECISION) / CAST(sum(segment.n_tokens) AS NUMERIC) END AS staleness
FROM sample JOIN segment ON segment.sample_id = sample.id AND segment.incarnation = sample.incarnation LEFT OUTER JOIN weight_version AS v ON v.run_id = sample.run_id AND v.version = segment.version_min
WHERE segment.loss = 1 AND segment.kind = 'generated' AND sample.status != 'failed' AND sample.group_id = sample_group.id GROUP BY sample.id, sample.group_id) AS per_sample) END AS staleness_mean, coalesce(CAST(run.settings ->> 'staleness_mode' AS VARCHAR), 'oldest') AS mode, coalesce(CAST(run.settings ->> 'max_staleness' AS INTEGER), 1) AS max_staleness, sample_group.ready_at AS ready_at
FROM sample_group JOIN run ON run.id = sample_group.run_id JOIN prompt ON prompt.id = sample_group.prompt_id JOIN weight_version AS now ON now.run_id = run.id AND now.version = run.current_version
WHERE sample_group.state = 'ready') AS ready
""",
        "token_fate": """
CREATE VIEW token_fate AS
SELECT run.id AS run_id, run.name AS run, nullif(ledger_total.version, -1) AS version, ledger_total.fate, ledger_total.reason, CAST(sum(ledger_total.amount) AS BIGINT) AS tokens
FROM ledger_total JOIN run ON run.id = ledger_total.run_id GROUP BY run.id, run.name, ledger_total.version, ledger_total.fate, ledger_total.reason
HAVING sum(ledger_total.amount) != 0
""",
        "abort_causes": """
CREATE VIEW abort_causes AS
SELECT stopped.run_id, stopped.run, stopped.kind, stopped.reason, stopped.engine, stopped.worker_id, stopped.version, count(*) AS times, CAST(sum(coalesce(stopped.tokens, 0)) AS BIGINT) AS tokens_kept, CAST(sum(coalesce(stopped.lost_tokens, 0)) AS BIGINT) AS tokens_lost, CAST(sum(coalesce(stopped.prefilled_again, 0)) AS BIGINT) AS prefilled_again
FROM (SELECT run.id AS run_id, run.name AS run, stop.kind AS kind, stop.reason AS reason, call.engine AS engine, stop.worker_id AS worker_id, (SELECT max(segment.version_max) AS max_1
FROM segment
WHERE segment.sample_id = call.sample_id AND segment.incarnation = call.incarnation AND segment.request_rid = call.rid) AS version, stop.tokens AS tokens, call.lost_tokens AS lost_tokens, (SELECT CASE WHEN (later.resumed_tokens > 0) THEN later.prompt_tokens - coalesce(later.cached_tokens, 0) END AS anon_1
FROM request AS later
WHERE later.sample_id = call.sample_id AND later.incarnation = call.incarnation AND later.id > call.id ORDER BY later.id
 LIMIT 1) AS prefilled_again
FROM (SELECT event.run_id AS run_id, event.kind AS kind, event.reason AS reason, event.worker_id AS worker_id, event.tokens AS tokens, (SELECT request.id
FROM request
WHERE request.sample_id = event.sample_id AND request.worker_id = event.worker_id AND request.started_at <= event.at ORDER BY request.id DESC
 LIMIT 1) AS call_id
FROM event
WHERE event.kind IN ('abort', 'reap', 'fail')) AS stop JOIN run ON run.id = stop.run_id LEFT OUTER JOIN request AS call ON call.id = stop.call_id) AS stopped GROUP BY stopped.run_id, stopped.run, stopped.kind, stopped.reason, stopped.engine, stopped.worker_id, stopped.version
""",
        "version_rewards": """
CREATE VIEW version_rewards AS
SELECT run.id AS run_id, run.name AS run, sample.version_max AS version, weight_version.step, count(*) AS samples, count(sample.reward) AS scored, avg(CAST(sample.reward AS DOUBLE PRECISION)) AS reward_mean, sqrt(CASE WHEN (avg(CAST(sample.reward * sample.reward AS DOUBLE PRECISION)) - avg(CAST(sample.reward AS DOUBLE PRECISION)) * avg(CAST(sample.reward AS DOUBLE PRECISION)) < 0) THEN CAST(0 AS DOUBLE PRECISION) ELSE avg(CAST(sample.reward * sample.reward AS DOUBLE PRECISION)) - avg(CAST(sample.reward AS DOUBLE PRECISION)) * avg(CAST(sample.reward AS DOUBLE PRECISION)) END) AS reward_std, avg(CASE WHEN (sample.status = 'truncated') THEN CAST(1 AS DOUBLE PRECISION) ELSE CAST(0 AS DOUBLE PRECISION) END) AS truncated_ratio, avg(CAST(sample.n_tokens AS DOUBLE PRECISION)) AS mean_tokens
FROM sample JOIN run ON run.id = sample.run_id JOIN sample_group ON sample_group.id = sample.group_id LEFT OUTER JOIN weight_version ON weight_version.run_id = sample.run_id AND weight_version.version = sample.version_max
WHERE sample.status IN ('completed', 'truncated') AND sample_group.evaluation_id IS NULL GROUP BY run.id, run.name, sample.version_max, weight_version.step
""",
        "batch_steps": """
CREATE VIEW batch_steps AS
SELECT run.id AS run_id, run.name AS run, batch.id AS batch_id, batch.timeline, batch.step, batch.state, batch.current_version, batch.n_groups, batch.n_samples, batch.n_tokens, (SELECT max(batch_group.staleness) AS max_1
FROM batch_group
WHERE batch_group.batch_id = batch.id) AS staleness_max, (SELECT avg(CAST(batch_group.staleness AS DOUBLE PRECISION)) AS avg_1
FROM batch_group
WHERE batch_group.batch_id = batch.id) AS staleness_mean, (SELECT avg(CAST(sample.reward AS DOUBLE PRECISION)) AS avg_2
FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id
WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS reward_mean, (SELECT avg(CASE WHEN (sample.status = 'truncated') THEN CAST(1 AS DOUBLE PRECISION) ELSE CAST(0 AS DOUBLE PRECISION) END) AS avg_3
FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id
WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS truncated_ratio, batch.created_at, batch.settled_at
FROM batch JOIN run ON run.id = batch.run_id
""",
    },
}


def upgrade() -> None:
    connection = op.get_bind()
    for statement in VIEWS[connection.dialect.name].values():
        connection.exec_driver_sql(statement)  # as it stands: `:name` would be a parameter elsewhere


def downgrade() -> None:
    for name in VIEWS["sqlite"]:
        op.execute(f"DROP VIEW {name}")
