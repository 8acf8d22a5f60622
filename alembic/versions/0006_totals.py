"""kept totals of requests and events; samples that were resumed can be counted from an index

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ROOM = {"fillfactor": 80}

# What samplestore/statements/totals.py counted when this was written.
REQUESTS = """
INSERT INTO request_total
    (run_id, worker_id, reason, ended, unknown, generated, stored, prompt, cached, lost, resumes, resumed, at)
SELECT run_id, 0, reason,
    count(generated_tokens),
    sum(CASE WHEN generated_tokens IS NULL AND finished_at IS NOT NULL THEN 1 ELSE 0 END),
    coalesce(sum(generated_tokens), 0),
    sum(CASE WHEN generated_tokens IS NULL THEN 0 ELSE stored_tokens END),
    coalesce(sum(CASE WHEN generated_tokens IS NOT NULL THEN prompt_tokens END), 0),
    coalesce(sum(CASE WHEN generated_tokens IS NOT NULL THEN cached_tokens END), 0),
    coalesce(sum(CASE WHEN generated_tokens IS NOT NULL THEN lost_tokens END), 0),
    sum(CASE WHEN resumed_tokens > 0 THEN 1 ELSE 0 END),
    sum(resumed_tokens),
    coalesce(max(finished_at), 0)
FROM (
    SELECT request.*,
        CASE WHEN generated_tokens IS NOT NULL AND lost_tokens <> 0
            THEN substr(coalesce(lost_reason, ''), 1, 200) ELSE '' END AS reason
    FROM request
) AS told
GROUP BY run_id, reason
"""
EVENTS = """
INSERT INTO event_total (run_id, worker_id, kind, reason, n, tokens)
SELECT run_id, 0, kind, why, count(*), coalesce(sum(tokens), 0)
FROM (
    SELECT run_id, kind, tokens,
        CASE WHEN kind IN ('abort', 'release', 'reap') THEN substr(coalesce(reason, ''), 1, 200) ELSE '' END AS why
    FROM event
) AS told
GROUP BY run_id, kind, why
"""


def upgrade() -> None:
    op.create_table(
        "request_total",
        *_key("reason", "why tokens were lost; empty: none, or nobody said"),
        sa.Column("ended", INT, nullable=False, comment="requests of which it is known how much was generated"),
        sa.Column("unknown", INT, nullable=False, comment="requests that ended without"),
        sa.Column("generated", INT, nullable=False, comment="tokens, as all below but resumes"),
        sa.Column("stored", INT, nullable=False),
        sa.Column("prompt", INT, nullable=False),
        sa.Column("cached", INT, nullable=False),
        sa.Column("lost", INT, nullable=False),
        sa.Column("resumes", INT, nullable=False, comment="requests that went on from stored tokens"),
        sa.Column("resumed", INT, nullable=False, comment="tokens that they went on from"),
        sa.Column("at", sa.Double(), nullable=False, comment="when the last of them ended; 0: none did"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_request_total_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "worker_id", "reason", name=op.f("pk_request_total")),
        postgresql_with=ROOM,
    )
    op.create_table(
        "event_total",
        *_key("kind"),
        sa.Column("reason", sa.Text(), nullable=False, comment="of aborts, releases and reaps; empty for others"),
        sa.Column("n", INT, nullable=False),
        sa.Column("tokens", INT, nullable=False, comment="that the events tell of"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_event_total_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "worker_id", "kind", "reason", name=op.f("pk_event_total")),
        postgresql_with=ROOM,
    )
    for statement in (REQUESTS, EVENTS):
        op.execute(statement)
    resumed = sa.text("n_resumes > 0")
    op.create_index("ix_sample_resumed", "sample", ["run_id"], sqlite_where=resumed, postgresql_where=resumed)


def _key(name: str, comment: str | None = None) -> list[sa.Column[object]]:
    return [
        sa.Column("run_id", INT, nullable=False),
        sa.Column("worker_id", INT, autoincrement=False, nullable=False),
        sa.Column(name, sa.Text(), nullable=False, comment=comment),
    ]


def downgrade() -> None:
    op.drop_index("ix_sample_resumed", table_name="sample")
    op.drop_table("event_total")
    op.drop_table("request_total")
