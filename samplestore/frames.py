"""Tables as pandas DataFrames."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.errors import InvalidSetting, MissingExtra
from samplestore.models import Base, Run, Sample

NAMES = {"runs": "run", "groups": "sample_group", "samples": "sample", "segments": "segment", "events": "event",
         "requests": "request", "batches": "batch", "versions": "weight_version", "workers": "worker"}  # fmt: skip


def frame(store: Any, name: str, run: str | None = None, limit: int = 100_000) -> Any:
    """A pandas DataFrame of runs, groups, samples, segments, events, requests, batches, versions or workers, newest
    first, blobs left out; of all runs, or of `run` (raises RunNotFound). More rows than `limit` are cut off, and the
    frame says so in `frame.attrs["cut_off"]`."""
    try:
        import pandas as pd
    except ImportError:
        raise MissingExtra("store.frame()", "dashboard") from None
    if name not in NAMES:
        raise InvalidSetting("table", name, " | ".join(NAMES))
    table = Base.metadata.tables[NAMES[name]]
    columns = [c for c in table.c if not isinstance(c.type, sa.LargeBinary)]
    query = sa.select(*columns)
    if run is not None and table is not Run.__table__:
        query = query.where(_of_run(table, store.existing_run(run).id))
    order = table.c.get("id")
    if order is None:
        order = next(iter(table.primary_key.columns))
    with store.database.reading() as connection:
        rows = connection.execute(query.order_by(order.desc()).limit(limit + 1)).fetchall()
    result = pd.DataFrame([tuple(r) for r in rows[:limit]], columns=[c.name for c in columns])
    result.attrs["cut_off"] = len(rows) > limit
    return result


def _of_run(table: sa.Table, run_id: int) -> sa.ColumnElement[bool]:
    """Rows of one run; segments belong to it through their sample."""
    if "run_id" in table.c:
        return table.c.run_id == run_id
    return table.c.sample_id.in_(sa.select(Sample.id).where(Sample.run_id == run_id))
