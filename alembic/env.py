"""Alembic's entry. The library passes its connection; a developer's `alembic` opens SAMPLESTORE_DATABASE_URL."""

from __future__ import annotations

import os

from alembic import context

from samplestore import faults
from samplestore.engine import Database
from samplestore.models import Base


def run(connection) -> None:  # type: ignore[no-untyped-def]
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite can't alter most of a table in place
        transactional_ddl=True,  # both databases roll DDL back; Alembic assumes that SQLite doesn't
        compare_type=True,
        on_version_apply=lambda **_: faults.reached("migrating"),
    )
    with context.begin_transaction():
        context.run_migrations()


if (given := context.config.attributes.get("connection")) is not None:
    run(given)
else:
    database = Database(os.environ["SAMPLESTORE_DATABASE_URL"])
    with database.writing() as opened:
        run(opened)
