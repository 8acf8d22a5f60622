"""what engines tell of themselves: token counter, context length, release, load

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from samplestore.errors import DowngradeRefused

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def columns() -> list[sa.Column]:
    return [
        sa.Column("counter", INT, nullable=True, comment="tokens that it has generated, as it counted when last read"),
        sa.Column("counter_at", sa.Double(), nullable=True, comment="when that was; rises with every reading"),
        sa.Column(
            "generated_tokens",
            INT,
            server_default=sa.text("0"),
            nullable=False,
            comment="sum of the counter's steps since the run knows the engine",
        ),
        sa.Column("context_length", INT, nullable=True),
        sa.Column("release", sa.Text(), nullable=True, comment="the version of SGLang"),
        sa.Column("running", INT, nullable=True, comment="requests when last seen"),
        sa.Column("queued", INT, nullable=True),
    ]


def upgrade() -> None:
    # Both databases add and drop such columns in place: no table is made anew, and no row is written.
    for column in columns():
        op.add_column("engine", column)


def downgrade() -> None:
    told = "SELECT count(*) FROM engine WHERE counter IS NOT NULL OR context_length IS NOT NULL OR release IS NOT NULL"
    engines = op.get_bind().execute(sa.text(told)).scalar()
    if engines:
        raise DowngradeRefused("0001", f"what {engines} engines told of themselves")
    for column in reversed(columns()):
        op.drop_column("engine", column.name)
