"""which groups were pruned, and the indexes that removing a whole run needs

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from samplestore.errors import DowngradeRefused

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Added in place on both databases: no table is made anew, and no row is written.
    op.add_column("sample_group", sa.Column("pruned_at", sa.Double(), nullable=True, comment="when its tokens went"))
    # The database looks here for each parent row that is deleted; without an index it reads the whole table each time.
    op.create_index("ix_sample_group_prompt_id", "sample_group", ["prompt_id"], unique=False)
    op.create_index("ix_batch_group_group_id", "batch_group", ["group_id"], unique=False)
    # Prune asks which samples share a prefix; most share none, and then the index is empty.
    shares = sa.text("parent_id IS NOT NULL")
    op.create_index("ix_sample_parent", "sample", ["parent_id"], sqlite_where=shares, postgresql_where=shares)


def downgrade() -> None:
    # the payload of a pruned segment is one byte, which older code takes for damage
    segments = op.get_bind().execute(sa.text("SELECT count(*) FROM segment WHERE length(payload) = 1")).scalar()
    if segments:
        raise DowngradeRefused("0002", f"{segments} segments that were pruned")
    op.drop_index("ix_sample_parent", table_name="sample")
    op.drop_index("ix_batch_group_group_id", table_name="batch_group")
    op.drop_index("ix_sample_group_prompt_id", table_name="sample_group")
    op.drop_column("sample_group", "pruned_at")
