"""first schema

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

# ruff: noqa: E501
revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "run",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("settings", JSON, nullable=False),
        sa.Column("timeline", ID, nullable=False),
        sa.Column("current_version", ID, nullable=False),
        sa.Column("last_version", ID, nullable=False, comment="highest version ever given out; never reused"),
        sa.Column("n_prompts", ID, nullable=False),
        sa.Column("n_groups", ID, nullable=False, comment="groups ever created; the next group's number"),
        sa.Column("epoch", ID, nullable=False),
        sa.Column("chunk_start", ID, nullable=False),
        sa.Column("chunk_stop", ID, nullable=False),
        sa.Column("chunk_next", ID, nullable=False),
        sa.Column("abort_seq", ID, nullable=False, comment="raised by abort_inflight; workers follow it"),
        sa.Column("abort_reason", sa.Text(), nullable=True),
        sa.Column("retention_step", ID, nullable=False, comment="steps up to here were pruned; no rewind below"),
        sa.CheckConstraint("state IN ('running', 'paused', 'draining')", name=op.f("ck_run_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("name", name=op.f("uq_run_name")),
        sa.UniqueConstraint("uuid", name=op.f("uq_run_uuid")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "batch",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("timeline", ID, nullable=False),
        sa.Column("step", ID, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("owner", ID, nullable=False),
        sa.Column("attempt", ID, nullable=False),
        sa.Column("current_version", ID, nullable=False, comment="the run's current version when it was leased"),
        sa.Column("n_groups", ID, nullable=False),
        sa.Column("n_samples", ID, nullable=False),
        sa.Column("n_tokens", ID, nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.Column("policy", JSON, nullable=False),
        sa.Column("plan", JSON, nullable=True),
        sa.CheckConstraint("state IN ('leased', 'committed', 'released', 'rewound')", name=op.f("ck_batch_state")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_batch_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_batch_owned",
        "batch",
        ["owner"],
        unique=False,
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index(
        "uq_batch_step",
        "batch",
        ["run_id", "timeline", "step"],
        unique=True,
        sqlite_where=sa.text("state IN ('leased', 'committed')"),
        postgresql_where=sa.text("state IN ('leased', 'committed')"),
    )

    op.create_table(
        "engine",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", ID, nullable=True, comment="what it serves; NULL: unknown"),
        sa.Column("label", sa.Text(), nullable=True, comment="what it reports"),
        sa.Column("owner", ID, nullable=True, comment="worker.id of who drives its update"),
        sa.Column("attempt", ID, nullable=False),
        sa.Column("failures", ID, nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.CheckConstraint("state IN ('live', 'failed', 'gone')", name=op.f("ck_engine_state")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_engine_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_engine")),
        postgresql_with={"fillfactor": 80},
        sqlite_autoincrement=True,
    )
    op.create_index(
        "uq_engine_live_url",
        "engine",
        ["url"],
        unique=True,
        sqlite_where=sa.text("state <> 'gone'"),
        postgresql_where=sa.text("state <> 'gone'"),
    )

    op.create_table(
        "event",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("worker_id", ID, nullable=True),
        sa.Column("group_id", ID, nullable=True),
        sa.Column("sample_id", ID, nullable=True),
        sa.Column("step", ID, nullable=True),
        sa.Column("version", ID, nullable=True),
        sa.Column("tokens", ID, nullable=True),
        sa.Column("details", JSON, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_event_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_event_run_id_kind_at", "event", ["run_id", "kind", "at"], unique=False)

    op.create_table(
        "ledger_total",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("worker_id", ID, autoincrement=False, nullable=False),
        sa.Column("fate", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("version", ID, autoincrement=False, nullable=False, comment="-1: unknown"),
        sa.Column("amount", ID, nullable=False),
        sa.CheckConstraint(
            "fate IN ('in_flight', 'resumable', 'awaiting_stage', 'ready', 'leased', 'consumed', 'dropped', 'stale', 'failed', 'superseded')",
            name=op.f("ck_ledger_total_fate"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_ledger_total_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "worker_id", "fate", "reason", "version", name=op.f("pk_ledger_total")),
        postgresql_with={"fillfactor": 80},
        sqlite_autoincrement=False,
    )
    op.create_table(
        "prompt",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("position", ID, nullable=False),
        sa.Column("content_key", sa.Text(), nullable=False),
        sa.Column("dataset", sa.Text(), nullable=False),
        sa.Column("n_tokens", ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("prompt", JSON, nullable=False),
        sa.Column("label", JSON, nullable=True),
        sa.Column("metadata", JSON, nullable=False),
        sa.Column("tools", JSON, nullable=True),
        sa.Column("template_args", JSON, nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False, comment="int32 little-endian"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_prompt_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompt")),
        sa.UniqueConstraint("run_id", "content_key", name=op.f("uq_prompt_run_id_content_key")),
        sa.UniqueConstraint("run_id", "position", name=op.f("uq_prompt_run_id_position")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "timeline",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("number", ID, nullable=False),
        sa.Column("parent", ID, nullable=True),
        sa.Column("forked_at_step", ID, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_timeline_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_timeline")),
    )
    op.create_table(
        "weight_version",
        sa.Column("run_id", ID, nullable=False),
        sa.Column("version", ID, nullable=False),
        sa.Column("timeline", ID, nullable=False),
        sa.Column("parent", ID, nullable=True),
        sa.Column("step", ID, nullable=True),
        sa.Column("depth", ID, nullable=False, comment="weight updates since the run's first weights"),
        sa.Column(
            "common_depth", ID, nullable=False, comment="depth of the last ancestor shared with the current timeline"
        ),
        sa.Column("label", sa.Text(), nullable=False, comment="what engines report as weight_version"),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("abandoned_at", sa.Double(), nullable=True, comment="when a rewind left it behind"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_weight_version_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_weight_version")),
        sa.UniqueConstraint("run_id", "label", name=op.f("uq_weight_version_run_id_label")),
    )
    op.create_table(
        "worker",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", ID, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat", sa.Double(), nullable=False),
        sa.Column("ttl_s", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True, comment="fatal error, shown to a waiting trainer"),
        sa.Column("info", JSON, nullable=False),
        sa.CheckConstraint("kind IN ('rollout', 'reward', 'trainer', 'tool')", name=op.f("ck_worker_kind")),
        sa.CheckConstraint("state IN ('live', 'dead', 'gone')", name=op.f("ck_worker_state")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_worker_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker")),
        postgresql_with={"fillfactor": 80},
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_worker_live",
        "worker",
        ["id"],
        unique=False,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )

    op.create_table(
        "sample_group",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("prompt_id", ID, nullable=False),
        sa.Column("number", ID, nullable=False, comment="serving order within the run"),
        sa.Column("epoch", ID, nullable=False),
        sa.Column("timeline", ID, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True, comment="why dropped or stale"),
        sa.Column("n_samples", ID, nullable=False),
        sa.Column("n_open", ID, nullable=False, comment="samples not finished"),
        sa.Column("n_unscored", ID, nullable=False, comment="stages not settled"),
        sa.Column("n_failed", ID, nullable=False),
        sa.Column("n_tokens", ID, nullable=True, comment="response tokens, set when ready"),
        sa.Column("oldest_version", ID, nullable=True, comment="stalest version of a trained token, set when ready"),
        sa.Column("reward_mean", sa.Double(), nullable=True),
        sa.Column("reward_std", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.Column("straggling_at", sa.Double(), nullable=True, comment="when the group passed its deadline"),
        sa.Column("superseded_by", ID, nullable=True),
        sa.CheckConstraint(
            "state IN ('open', 'scoring', 'ready', 'leased', 'consumed', 'dropped', 'stale', 'superseded')",
            name=op.f("ck_sample_group_state"),
        ),
        sa.CheckConstraint("n_open >= 0 AND n_unscored >= 0", name=op.f("ck_sample_group_counters")),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompt.id"], name=op.f("fk_sample_group_prompt_id_prompt")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_sample_group_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sample_group")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_sample_group_run_id_number")),
        postgresql_with={"fillfactor": 80},
        sqlite_autoincrement=True,
    )
    op.create_index("ix_sample_group_state", "sample_group", ["run_id", "state", "number"], unique=False)
    op.create_index(
        "ix_sample_group_window",
        "sample_group",
        ["run_id", "number"],
        unique=False,
        sqlite_where=sa.text("state IN ('open', 'scoring', 'ready')"),
        postgresql_where=sa.text("state IN ('open', 'scoring', 'ready')"),
    )

    op.create_table(
        "batch_group",
        sa.Column("batch_id", ID, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.Column("position", ID, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("staleness", ID, nullable=True, comment="at the lease"),
        sa.CheckConstraint(
            "state IN ('leased', 'committed', 'released', 'rewound')", name=op.f("ck_batch_group_state")
        ),
        sa.ForeignKeyConstraint(["batch_id"], ["batch.id"], name=op.f("fk_batch_group_batch_id_batch")),
        sa.ForeignKeyConstraint(["group_id"], ["sample_group.id"], name=op.f("fk_batch_group_group_id_sample_group")),
        sa.PrimaryKeyConstraint("batch_id", "group_id", name=op.f("pk_batch_group")),
    )
    op.create_index(
        "uq_batch_group_live",
        "batch_group",
        ["group_id"],
        unique=True,
        sqlite_where=sa.text("state IN ('leased', 'committed')"),
        postgresql_where=sa.text("state IN ('leased', 'committed')"),
    )

    op.create_table(
        "sample",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.Column("index", ID, nullable=False, comment="place within the group"),
        sa.Column("incarnation", ID, nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("closed", ID, nullable=False, comment="1: its group does not want it any more"),
        sa.Column("priority", ID, nullable=False, comment="lower goes first"),
        sa.Column("not_before", sa.Double(), nullable=False, comment="back-off after a failure"),
        sa.Column("owner", ID, nullable=True, comment="worker.id"),
        sa.Column("attempt", ID, nullable=False, comment="the fence: rises at every change of owner"),
        sa.Column("let_go", ID, nullable=False, comment="attempt that its owner ended itself; makes repeats harmless"),
        sa.Column("failures", ID, nullable=False),
        sa.Column("n_tokens", ID, nullable=False, comment="response tokens of this incarnation"),
        sa.Column("n_loss_tokens", ID, nullable=False),
        sa.Column("n_segments", ID, nullable=False, comment="the next seq"),
        sa.Column("n_aborts", ID, nullable=False),
        sa.Column("n_resumes", ID, nullable=False),
        sa.Column("version_min", ID, nullable=True),
        sa.Column("version_max", ID, nullable=True),
        sa.Column("oldest_version", ID, nullable=True, comment="stalest version of a token with loss=1"),
        sa.Column("version_unknown", ID, nullable=False, comment="1: some trained token has no known version"),
        sa.Column("logprob_sum", sa.Double(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("parent_id", ID, nullable=True, comment="fan-out: whose prefix this sample shares"),
        sa.Column("parent_upto", ID, nullable=True, comment="fan-out: tokens of the parent that it shares"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("progress_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("finished_by", ID, nullable=True, comment="worker.id"),
        sa.CheckConstraint(
            "owner IS NULL OR status IN ('pending', 'aborted')", name=op.f("ck_sample_owned_is_unfinished")
        ),
        sa.CheckConstraint(
            "status IN ('pending', 'aborted', 'completed', 'truncated', 'failed')", name=op.f("ck_sample_status")
        ),
        sa.ForeignKeyConstraint(["group_id"], ["sample_group.id"], name=op.f("fk_sample_group_id_sample_group")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_sample_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sample")),
        sa.UniqueConstraint("group_id", "index", name=op.f("uq_sample_group_id_index")),
        postgresql_with={"fillfactor": 80},
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_sample_claim",
        "sample",
        ["run_id", "priority", "status", "group_id", "index"],
        unique=False,
        sqlite_where=sa.text("owner IS NULL AND closed = 0 AND status IN ('pending', 'aborted')"),
        postgresql_where=sa.text("owner IS NULL AND closed = 0 AND status IN ('pending', 'aborted')"),
    )
    op.create_index(
        "ix_sample_owned",
        "sample",
        ["owner"],
        unique=False,
        sqlite_where=sa.text("owner IS NOT NULL"),
        postgresql_where=sa.text("owner IS NOT NULL"),
    )
    op.create_index("ix_sample_run_status", "sample", ["run_id", "status"], unique=False)

    op.create_table(
        "episode_step",
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("incarnation", ID, nullable=False),
        sa.Column("number", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("attempt", ID, nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("result", JSON, nullable=True),
        sa.CheckConstraint("state IN ('started', 'done', 'failed')", name=op.f("ck_episode_step_state")),
        sa.ForeignKeyConstraint(["sample_id"], ["sample.id"], name=op.f("fk_episode_step_sample_id_sample")),
        sa.PrimaryKeyConstraint("sample_id", "incarnation", "number", name=op.f("pk_episode_step")),
    )
    op.create_table(
        "request",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("rid", sa.Text(), nullable=False),
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("incarnation", ID, nullable=False),
        sa.Column("attempt", ID, nullable=False),
        sa.Column("worker_id", ID, nullable=False),
        sa.Column("engine", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", ID, nullable=True),
        sa.Column("cached_tokens", ID, nullable=True),
        sa.Column("generated_tokens", ID, nullable=True, comment="NULL: the worker died before it knew"),
        sa.Column("stored_tokens", ID, nullable=False),
        sa.Column("lost_tokens", ID, nullable=True),
        sa.Column("lost_reason", sa.Text(), nullable=True),
        sa.Column("resumed_tokens", ID, nullable=False, comment="response tokens that a resume carried over"),
        sa.Column("retractions", ID, nullable=True),
        sa.Column("temperature", sa.Double(), nullable=True, comment="the temperature that the log-probs carry"),
        sa.Column("queue_s", sa.Double(), nullable=True),
        sa.Column("e2e_s", sa.Double(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("spec", JSON, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_request_run_id_run")),
        sa.ForeignKeyConstraint(["sample_id"], ["sample.id"], name=op.f("fk_request_sample_id_sample")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_request")),
        sa.UniqueConstraint("rid", name=op.f("uq_request_rid")),
        postgresql_with={"fillfactor": 80},
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_request_open",
        "request",
        ["worker_id"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index("ix_request_sample_id", "request", ["sample_id"], unique=False)

    op.create_table(
        "segment",
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("incarnation", ID, nullable=False),
        sa.Column("seq", ID, nullable=False),
        sa.Column("start", ID, nullable=False, comment="response position of its first token"),
        sa.Column("n_tokens", ID, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("loss", ID, nullable=False),
        sa.Column("version_min", ID, nullable=True),
        sa.Column("version_max", ID, nullable=True),
        sa.Column("owner", ID, nullable=False),
        sa.Column("attempt", ID, nullable=False),
        sa.Column("request_rid", sa.Text(), nullable=True),
        sa.Column("engine", sa.Text(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("logprob_sum", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column(
            "payload", sa.LargeBinary(), nullable=False, comment="codec.py: format byte, ids int32, log-probs float32"
        ),
        sa.CheckConstraint("kind IN ('generated', 'environment')", name=op.f("ck_segment_kind")),
        sa.CheckConstraint("n_tokens > 0", name=op.f("ck_segment_n_tokens")),
        sa.ForeignKeyConstraint(["sample_id"], ["sample.id"], name=op.f("fk_segment_sample_id_sample")),
        sa.PrimaryKeyConstraint("sample_id", "incarnation", "seq", name=op.f("pk_segment")),
    )
    op.create_table(
        "segment_array",
        sa.Column("sample_id", ID, nullable=False),
        sa.Column("incarnation", ID, nullable=False),
        sa.Column("seq", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("shape", JSON, nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("sidecar", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["sample_id"], ["sample.id"], name=op.f("fk_segment_array_sample_id_sample")),
        sa.PrimaryKeyConstraint("sample_id", "incarnation", "seq", "name", name=op.f("pk_segment_array")),
    )
    op.create_table(
        "stage",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("run_id", ID, nullable=False),
        sa.Column("group_id", ID, nullable=False),
        sa.Column("sample_id", ID, nullable=True, comment="NULL: work on the whole group"),
        sa.Column("incarnation", ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("owner", ID, nullable=True),
        sa.Column("attempt", ID, nullable=False),
        sa.Column("let_go", ID, nullable=False),
        sa.Column("failures", ID, nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True, comment="ok, verifier_error, verifier_timeout"),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("elapsed_s", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.Column("details", JSON, nullable=True),
        sa.CheckConstraint("status IN ('pending', 'done', 'failed')", name=op.f("ck_stage_status")),
        sa.ForeignKeyConstraint(["group_id"], ["sample_group.id"], name=op.f("fk_stage_group_id_sample_group")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_stage_run_id_run")),
        sa.ForeignKeyConstraint(["sample_id"], ["sample.id"], name=op.f("fk_stage_sample_id_sample")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stage")),
        sa.UniqueConstraint("sample_id", "incarnation", "name", name=op.f("uq_stage_sample_id_incarnation_name")),
        postgresql_with={"fillfactor": 80},
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_stage_claim",
        "stage",
        ["run_id", "id"],
        unique=False,
        sqlite_where=sa.text("owner IS NULL AND status = 'pending'"),
        postgresql_where=sa.text("owner IS NULL AND status = 'pending'"),
    )
    op.create_index("ix_stage_group_id", "stage", ["group_id"], unique=False)
    op.create_index(
        "ix_stage_owned",
        "stage",
        ["owner"],
        unique=False,
        sqlite_where=sa.text("owner IS NOT NULL"),
        postgresql_where=sa.text("owner IS NOT NULL"),
    )
