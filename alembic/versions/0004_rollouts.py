"""what rollouts need beyond single turns: group stages, named arrays, imports

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from samplestore.errors import DowngradeRefused

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    # Added in place on both databases: no table is made anew.
    stages_and_arrays()
    serving()
    steps()
    episodes()


def downgrade() -> None:
    no_episodes()
    no_steps()
    no_serving()
    no_stages_and_arrays()


# -- stages of groups, named arrays, imported samples

GROUP_STAGE = sa.text("sample_id IS NULL")
IMPORTED = sa.text("import_key IS NOT NULL")
IN_FILE = sa.text("sidecar IS NOT NULL")


def stages_and_arrays() -> None:
    # The old constraint names samples, and NULL differs from NULL: two workers could make a group's stage twice.
    op.create_index(
        "uq_stage_group", "stage", ["group_id", "incarnation", "name"], unique=True,
        sqlite_where=GROUP_STAGE, postgresql_where=GROUP_STAGE,
    )  # fmt: skip
    op.add_column("sample_group", sa.Column("import_key", sa.Text(), nullable=True, comment="what an import came from"))
    op.create_index(
        "uq_sample_group_import", "sample_group", ["run_id", "import_key"], unique=True,
        sqlite_where=IMPORTED, postgresql_where=IMPORTED,
    )  # fmt: skip
    op.add_column(
        "sample",
        sa.Column(
            "n_without_logprob", INT, server_default=sa.text("0"), nullable=False,
            comment="trained tokens that came without a log-prob (imports)",
        ),
    )  # fmt: skip
    op.add_column("segment_array", sa.Column("n_bytes", INT, nullable=True, comment="of the array, wherever it lies"))
    op.execute("UPDATE segment_array SET n_bytes = length(data)")
    # Sizes are summed without touching the blobs.
    op.create_index("ix_segment_array_size", "segment_array", ["name", "n_bytes", "sample_id"])
    # Prune asks whether any row still names a file.
    op.create_index(
        "ix_segment_array_sidecar", "segment_array", ["sidecar"], sqlite_where=IN_FILE, postgresql_where=IN_FILE
    )


def no_stages_and_arrays() -> None:
    for what, told in (
        ("stages of groups", "SELECT count(*) FROM stage WHERE sample_id IS NULL"),
        ("imported groups", "SELECT count(*) FROM sample_group WHERE import_key IS NOT NULL"),
        ("arrays in side-car files", "SELECT count(*) FROM segment_array WHERE sidecar IS NOT NULL"),
    ):
        if n := op.get_bind().execute(sa.text(told)).scalar():
            raise DowngradeRefused("0003", f"{n} {what}")
    op.drop_index("ix_segment_array_sidecar", table_name="segment_array")
    op.drop_index("ix_segment_array_size", table_name="segment_array")
    op.drop_column("segment_array", "n_bytes")
    op.drop_column("sample", "n_without_logprob")
    op.drop_index("uq_sample_group_import", table_name="sample_group")
    op.drop_column("sample_group", "import_key")
    op.drop_index("uq_stage_group", table_name="stage")


# -- filters, data sets with an order of their own, evaluations

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
EVALUATED = sa.text("evaluation_id IS NOT NULL")
NUMBER_PROMPTS = """
UPDATE prompt SET dataset_position = n.place FROM (
  SELECT id, row_number() OVER (PARTITION BY run_id, dataset ORDER BY position) - 1 AS place FROM prompt
) AS n WHERE n.id = prompt.id
"""
# The cursor stays 0: without the setting `datasets` the place in the one order is that of `run`, which stays there.
FILL_DATASETS = """
INSERT INTO dataset (run_id, name, purpose, n_prompts, n_served, epoch, chunk_start, chunk_stop, chunk_next)
SELECT prompt.run_id, prompt.dataset, 'train', count(*), coalesce(sum(served.n), 0), 0, 0, 0, 0
  FROM prompt LEFT JOIN (SELECT prompt_id, count(*) AS n FROM sample_group GROUP BY prompt_id) AS served
    ON served.prompt_id = prompt.id
 GROUP BY prompt.run_id, prompt.dataset
"""


def serving() -> None:
    op.add_column("sample", sa.Column("removed", sa.Text(), nullable=True, comment="why its tokens carry no loss"))
    op.add_column(
        "sample_group", sa.Column("evaluation_id", INT, nullable=True, comment="NULL: it is there to be trained on")
    )
    op.create_index(
        "ix_sample_group_evaluation", "sample_group", ["evaluation_id"],
        sqlite_where=EVALUATED, postgresql_where=EVALUATED,
    )  # fmt: skip
    op.add_column("prompt", sa.Column("dataset_position", INT, nullable=True, comment="dense within its data set"))
    op.execute(NUMBER_PROMPTS)
    op.create_index("uq_prompt_dataset_position", "prompt", ["run_id", "dataset", "dataset_position"], unique=True)
    op.create_table(
        "dataset",
        sa.Column("run_id", INT, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("n_prompts", INT, nullable=False),
        sa.Column("n_served", INT, nullable=False, comment="groups admitted from it"),
        sa.Column("epoch", INT, nullable=False),
        sa.Column("chunk_start", INT, nullable=False),
        sa.Column("chunk_stop", INT, nullable=False),
        sa.Column("chunk_next", INT, nullable=False),
        sa.CheckConstraint("purpose IN ('train', 'eval', 'import')", name=op.f("ck_dataset_purpose")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_dataset_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_dataset")),
    )
    op.execute(FILL_DATASETS)
    op.create_table(
        "evaluation",
        sa.Column("id", INT, autoincrement=True, nullable=False),
        sa.Column("run_id", INT, nullable=False),
        sa.Column("dataset", sa.Text(), nullable=False),
        sa.Column("version", INT, nullable=False, comment="the run's current version when it began"),
        sa.Column("n_samples", INT, nullable=False, comment="of each prompt"),
        sa.Column("n_groups", INT, nullable=False),
        sa.Column("settings_key", sa.Text(), nullable=False, comment="sha256 of what was asked"),
        sa.Column("max_new_tokens", INT, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("sampling", JSON, nullable=False, comment="over the run's"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_evaluation_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluation")),
        sa.UniqueConstraint(
            "run_id", "dataset", "version", "settings_key",
            name=op.f("uq_evaluation_run_id_dataset_version_settings_key"),
        ),
        sqlite_autoincrement=True,
    )  # fmt: skip


def no_serving() -> None:
    for what, told in (
        ("evaluations", "SELECT count(*) FROM evaluation"),
        ("data sets with an order of their own", "SELECT count(*) FROM dataset WHERE chunk_stop > 0"),
        ("data sets for evaluation", "SELECT count(*) FROM dataset WHERE purpose = 'eval'"),
        ("samples that a filter took out of the loss", "SELECT count(*) FROM sample WHERE removed IS NOT NULL"),
    ):
        if n := op.get_bind().execute(sa.text(told)).scalar():
            raise DowngradeRefused("0003", f"{n} {what}")
    op.drop_table("evaluation")
    op.drop_table("dataset")
    op.drop_index("uq_prompt_dataset_position", table_name="prompt")
    op.drop_column("prompt", "dataset_position")
    op.drop_index("ix_sample_group_evaluation", table_name="sample_group")
    op.drop_column("sample_group", "evaluation_id")
    op.drop_column("sample", "removed")


# -- steps of the modes sync and partial

NEVER = sa.text("-1")
SETTINGS_0003 = frozenset(
    (
        "samples_per_prompt groups_per_step max_staleness staleness_mode stale epochs seed stages max_attempts "
        "max_deaths on_failed group_deadline_s on_straggler progress_deadline_s heartbeat_ttl_s max_new_tokens "
        "sampling weight_update abort_all"
    ).split()
)
# Settings of 0004, with the values that say what 0003 did. Written out: the code's own may change with a later schema.
DEFAULTS_0004: dict[str, object] = {
    "group_stages": [], "reward_weights": {}, "array_url": None, "array_folder": None, "array_file_bytes": 65536,
    "sample_deadline_s": None, "sampling_seed": None, "group_filters": [], "sample_filters": [], "order": "fifo",
    "datasets": {}, "curriculum": None, "mode": "async", "over_sampling_batch_size": None, "resume": True,
    "max_aborts": None, "mask_offpolicy": False, "max_inflight_samples": None, "max_inflight_groups": None,
    "max_samples_per_engine": None, "max_groups_per_engine": None,
}  # fmt: skip


def steps() -> None:
    for name, comment in (
        ("step_filled", "weight version for which a step was filled with groups"),
        ("step_over", "weight version for which enough groups are ready or taken"),
    ):
        op.add_column("run", sa.Column(name, INT, server_default=NEVER, nullable=False, comment=comment))


def no_steps() -> None:
    """Older code refuses settings that it does not know, so they are taken out; one that is not its default would be
    lost, and the run would go on as another."""
    table = sa.table("run", sa.column("id", INT), sa.column("name", sa.Text()), sa.column("settings", JSON))
    runs = op.get_bind().execute(sa.select(table)).fetchall()
    for row in runs:
        known = {name: value for name, value in row.settings.items() if name in SETTINGS_0003}
        for name in sorted(row.settings.keys() - known.keys()):
            value = row.settings[name]
            if name not in DEFAULTS_0004 or value != DEFAULTS_0004[name]:
                raise DowngradeRefused("0003", f"the setting {name}={value!r:.200} of run {row.name!r}")
        if known != row.settings:
            op.get_bind().execute(sa.update(table).where(table.c.id == row.id).values(settings=known))
    op.drop_column("run", "step_over")
    op.drop_column("run", "step_filled")


# -- episodes, fan-out, images of prompts, determinism


def episodes() -> None:
    for column in (
        sa.Column("kind", sa.Text(), server_default=sa.text("'step'"), nullable=False, comment="which call of ctx"),
        sa.Column("start", INT, nullable=True, comment="response position where it began"),
        sa.Column("stop", INT, nullable=True, comment="response position where it ended"),
        sa.Column("asked", JSON, nullable=True, comment="what the function asked for; a replay must ask the same"),
    ):
        op.add_column("episode_step", column)
    op.add_column("request", sa.Column("sampling_seed", INT, nullable=True, comment="the seed that was asked for"))
    op.add_column("request", sa.Column("greedy", INT, nullable=True, comment="1: temperature 0, no draw at all"))
    op.add_column("prompt", sa.Column("images", JSON, nullable=True, comment="digests of its images, in order"))
    op.create_table(
        "prompt_image",
        sa.Column("run_id", INT, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False, comment="hex sha256 of the bytes"),
        sa.Column("media_type", sa.Text(), nullable=False),
        sa.Column("n_bytes", INT, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_prompt_image_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "digest", name=op.f("pk_prompt_image")),
    )


def no_episodes() -> None:
    for what, told in (
        ("images of prompts", "SELECT count(*) FROM prompt_image"),
        ("calls of episodes", "SELECT count(*) FROM episode_step"),
        ("samples that share the prefix of another", "SELECT count(*) FROM sample WHERE parent_id IS NOT NULL"),
    ):
        if n := op.get_bind().execute(sa.text(told)).scalar():
            raise DowngradeRefused("0003", f"{n} {what}")
    op.drop_table("prompt_image")
    op.drop_column("prompt", "images")
    op.drop_column("request", "greedy")
    op.drop_column("request", "sampling_seed")
    for name in ("asked", "stop", "start", "kind"):
        op.drop_column("episode_step", name)
