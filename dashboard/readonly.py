"""Opening a database to read it only. No Streamlit here: the command needs it before the server starts."""

from __future__ import annotations

from samplestore import migrations
from samplestore.engine import Database
from samplestore.errors import DatabaseMissing
from samplestore.store import Store

ENV_DATABASE = "SAMPLESTORE_DATABASE_URL"  # never argv: it may hold a password
ENV_TOKENIZER = "SAMPLESTORE_DASHBOARD_TOKENIZER"
ENV_ACTIONS = "SAMPLESTORE_DASHBOARD_ACTIONS"  # 1: pages offer what changes the run
BUSY_S = 3.0  # a page that waits longer looks broken


def open_read_only(url: str) -> Store:
    """A store whose writer is never used. Unlike samplestore.open it leaves no gate file beside a missing database.

    Raises DatabaseMissing, SchemaMismatch, SQLAlchemy's errors.
    """
    database = Database(url, busy_s=BUSY_S)
    try:
        if database.is_sqlite and (not database.path.is_file() or database.path.stat().st_size == 0):
            raise DatabaseMissing(database.shown_url)
        migrations.require_current(database)
    except BaseException:
        database.reader.dispose()
        raise
    return Store(database)
