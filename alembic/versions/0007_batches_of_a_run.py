"""a run's newest batches by an index; hot tables are vacuumed early; views that odd rewards do not break

Revision ID: 0007
Revises: 0006
"""

# ruff: noqa: E501 - as SQLAlchemy writes it

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# What samplestore/views.py made when this was written, and before. The databases differ in the name of one type.
DOUBLE = {"sqlite": "DOUBLE", "postgresql": "DOUBLE PRECISION"}
COUNTABLE = "CASE WHEN (abs(sample.reward) < CAST(1e-100 AS {double})) THEN CAST(0.0 AS {double}) WHEN (sample.reward > CAST(1e+50 AS {double})) THEN CAST(1e+50 AS {double}) WHEN (sample.reward < CAST(-1e+50 AS {double})) THEN CAST(-1e+50 AS {double}) ELSE sample.reward END"
VERSION_REWARDS = """
CREATE VIEW version_rewards AS
SELECT ended.run_id, ended.run, ended.version, ended.step, count(*) AS samples, count(ended.reward) AS scored, avg(CAST(ended.reward AS {double})) AS reward_mean, sqrt(CASE WHEN (avg(CAST(ended.reward * ended.reward AS {double})) - avg(CAST(ended.reward AS {double})) * avg(CAST(ended.reward AS {double})) < 0) THEN CAST(0 AS {double}) ELSE avg(CAST(ended.reward * ended.reward AS {double})) - avg(CAST(ended.reward AS {double})) * avg(CAST(ended.reward AS {double})) END) AS reward_std, avg(CASE WHEN (ended.status = 'truncated') THEN CAST(1 AS {double}) ELSE CAST(0 AS {double}) END) AS truncated_ratio, avg(CAST(ended.n_tokens AS {double})) AS mean_tokens
FROM (SELECT run.id AS run_id, run.name AS run, sample.version_max AS version, weight_version.step AS step, sample.status AS status, sample.n_tokens AS n_tokens, {countable} AS reward
FROM sample JOIN run ON run.id = sample.run_id JOIN sample_group ON sample_group.id = sample.group_id LEFT OUTER JOIN weight_version ON weight_version.run_id = sample.run_id AND weight_version.version = sample.version_max
WHERE sample.status IN ('completed', 'truncated') AND sample_group.evaluation_id IS NULL) AS ended GROUP BY ended.run_id, ended.run, ended.version, ended.step
"""
VERSION_REWARDS_0005 = """
CREATE VIEW version_rewards AS
SELECT run.id AS run_id, run.name AS run, sample.version_max AS version, weight_version.step, count(*) AS samples, count(sample.reward) AS scored, avg(CAST(sample.reward AS {double})) AS reward_mean, sqrt(CASE WHEN (avg(CAST(sample.reward * sample.reward AS {double})) - avg(CAST(sample.reward AS {double})) * avg(CAST(sample.reward AS {double})) < 0) THEN CAST(0 AS {double}) ELSE avg(CAST(sample.reward * sample.reward AS {double})) - avg(CAST(sample.reward AS {double})) * avg(CAST(sample.reward AS {double})) END) AS reward_std, avg(CASE WHEN (sample.status = 'truncated') THEN CAST(1 AS {double}) ELSE CAST(0 AS {double}) END) AS truncated_ratio, avg(CAST(sample.n_tokens AS {double})) AS mean_tokens
FROM sample JOIN run ON run.id = sample.run_id JOIN sample_group ON sample_group.id = sample.group_id LEFT OUTER JOIN weight_version ON weight_version.run_id = sample.run_id AND weight_version.version = sample.version_max
WHERE sample.status IN ('completed', 'truncated') AND sample_group.evaluation_id IS NULL GROUP BY run.id, run.name, sample.version_max, weight_version.step
"""
BATCH_STEPS = """
CREATE VIEW batch_steps AS
SELECT run.id AS run_id, run.name AS run, batch.id AS batch_id, batch.timeline, batch.step, batch.state, batch.current_version, batch.n_groups, batch.n_samples, batch.n_tokens, (SELECT max(batch_group.staleness) AS max_1
FROM batch_group
WHERE batch_group.batch_id = batch.id) AS staleness_max, (SELECT avg(CAST(batch_group.staleness AS {double})) AS avg_1
FROM batch_group
WHERE batch_group.batch_id = batch.id) AS staleness_mean, (SELECT avg(CAST({reward} AS {double})) AS avg_2
FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id
WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS reward_mean, (SELECT avg(CASE WHEN (sample.status = 'truncated') THEN CAST(1 AS {double}) ELSE CAST(0 AS {double}) END) AS avg_3
FROM batch_group JOIN sample ON sample.group_id = batch_group.group_id
WHERE batch_group.batch_id = batch.id AND sample.status IN ('completed', 'truncated')) AS truncated_ratio, batch.created_at, batch.settled_at
FROM batch JOIN run ON run.id = batch.run_id
"""

# What was claimed and finished stays in the index that claims read until a vacuum, and each claim walks over all of it.
# PostgreSQL waits for a fifth of a table: at ten million samples, a million lives, claims took three times as long.
HOT = (
    "engine", "event_total", "ledger_total", "request", "request_total", "sample", "sample_group", "stage", "worker",
)  # fmt: skip
EARLY = {"autovacuum_vacuum_scale_factor": 0.01, "autovacuum_vacuum_threshold": 1000}


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite leaves no dead rows; the lock stops no reader and no writer
        for table in HOT:
            op.execute(f"ALTER TABLE {table} SET ({', '.join(f'{name} = {value}' for name, value in EARLY.items())})")
    # Within the migration's transaction, and so not CONCURRENTLY: PostgreSQL lets nobody lease or settle a batch while
    # the index is made, which is milliseconds. `batch` has a row a step, thousands where there are millions of samples.
    op.create_index("ix_batch_run", "batch", ["run_id", "id"], unique=False)
    views(VERSION_REWARDS.replace("{countable}", COUNTABLE), BATCH_STEPS.replace("{reward}", COUNTABLE))


def downgrade() -> None:
    views(VERSION_REWARDS_0005, BATCH_STEPS.replace("{reward}", "sample.reward"))
    op.drop_index("ix_batch_run", table_name="batch")
    if op.get_bind().dialect.name == "postgresql":
        for table in HOT:
            op.execute(f"ALTER TABLE {table} RESET ({', '.join(EARLY)})")


def views(*texts: str) -> None:
    """Replace views. Their columns stay, so that PostgreSQL can leave what was granted on them, and the views that
    somebody made on top."""
    connection = op.get_bind()
    dialect = connection.dialect.name
    for text in texts:
        made = text.replace("{double}", DOUBLE[dialect])
        if dialect == "sqlite":
            connection.exec_driver_sql(f"DROP VIEW {made.split()[2]}")
        else:
            made = made.replace("CREATE VIEW", "CREATE OR REPLACE VIEW")
        connection.exec_driver_sql(made)  # as it stands: `:name` would be a parameter elsewhere
