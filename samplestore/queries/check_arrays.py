"""Promises about named arrays: what a row says, and that the file which a row names is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from samplestore import arrays
from samplestore.arrayfiles import ArrayFiles, open_files
from samplestore.errors import SampleStoreError
from samplestore.models import Run, Sample, SampleGroup, Segment, SegmentArray
from samplestore.runsettings import RunSettings
from samplestore.types import Finding

run, sample, group, segment, array = (t.__table__ for t in (Run, Sample, SampleGroup, Segment, SegmentArray))

EXAMPLES = 5


def findings(connection: sa.Connection, run_id: int, settings: RunSettings) -> Iterator[Finding]:
    """Arrays whose bytes are not as many as dtype and shape say, or lie nowhere; files that are missing or cut."""
    rows = connection.execution_options(yield_per=1000).execute(
        sa.select(
            array.c.sample_id, array.c.seq, array.c.name, array.c.dtype, array.c.shape, array.c.sidecar,
            array.c.n_bytes, sa.func.length(array.c.data).label("in_row"),
        )
        .select_from(array.join(sample, sample.c.id == array.c.sample_id))
        .where(sample.c.run_id == run_id)
        .order_by(array.c.sample_id, array.c.seq, array.c.name)
    )  # fmt: skip
    wrong: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    files: ArrayFiles | None = None
    for row in rows:
        shown = {"sample": row.sample_id, "seq": row.seq, "array": row.name}
        try:
            size = arrays.size_of(row.dtype, list(row.shape))
        except ValueError:
            size = -1
        if size != row.n_bytes or (row.sidecar is None and row.in_row != size):
            wrong.append({**shown, "expected": size, "bytes": row.n_bytes, "in_row": row.in_row})
        elif row.sidecar is not None:
            files = files or _files(connection, run_id, settings)
            there = None if files is None else files.size(row.sidecar)
            if there != size:
                missing.append({**shown, "file": row.sidecar, "expected": size, "there": there})
    for code, message, found in (
        ("array_size", "an array's bytes are not what its dtype and shape say", wrong),
        ("array_file", "the file of an array is missing or has another size (array_url of the run)", missing),
    ):
        if found:
            yield Finding(code, message, len(found), found[:EXAMPLES])


def _files(connection: sa.Connection, run_id: int, settings: RunSettings) -> ArrayFiles | None:
    uuid = connection.execute(sa.select(run.c.uuid).where(run.c.id == run_id)).scalar_one()
    try:
        return None if settings.array_url is None else open_files(settings, uuid)
    except SampleStoreError:  # a kind of URL that this machine can't read: its files can't be seen
        return None
