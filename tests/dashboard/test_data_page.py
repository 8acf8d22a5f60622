"""How many rows a table has, told without counting them."""

from __future__ import annotations

from types import SimpleNamespace

import sqlalchemy as sa

from samplestore.dashboard import data
from samplestore.models import Base
from samplestore.queries import data_page
from samplestore.store import Store
from tests.support import factory as f
from tests.support.processes import wait_until


def test_rows_are_told_before_anyone_has_counted_them(store: Store) -> None:
    """ANALYZE never ran. On SQLite the highest row number is known, on PostgreSQL its statistics."""
    run = f.make_run(store)
    f.finish_all(run, f.register(run))
    with store.database.reading() as c:
        counted = {
            name: c.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for name, table in Base.metadata.tables.items()
        }
    if not store.database.is_sqlite:
        # A session hands in what it counted when it ends.
        store.database.writer.dispose()
        store.database.reader.dispose()

    def told() -> dict[str, int | None]:
        return {t["table"]: t["rows"] for t in data_page.sizes(store.database, run.id)["tables"]}

    assert not data_page.sizes(store.database, run.id)["analyzed"]
    assert wait_until(lambda: told() == counted, what=f"{counted}", timeout=30)
    assert counted["sample"] > 0 and counted["batch_group"] == 0 and counted["ledger_total"] > 0


def test_what_postgres_has_forgotten_is_said_with_what_to_type() -> None:
    """A crash of its server empties the statistics."""
    row = SimpleNamespace(reltuples=-1, counted=0, own_bytes=8192)
    assert data_page._about(row) is None and data_page._about(None) is None
    assert data_page._about(SimpleNamespace(reltuples=40.0, counted=0, own_bytes=8192)) == 40
    assert data_page._about(SimpleNamespace(reltuples=-1, counted=0, own_bytes=0)) == 0
    assert data_page._about(SimpleNamespace(reltuples=40.0, counted=50, own_bytes=8192)) == 50
    html = data.tables({"tables": [{"table": "sample", "rows": None, "bytes": 8192, "at_most": False}]})
    assert "not known" in html and "psql -c ANALYZE" in html
