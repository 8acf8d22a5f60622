"""Named arrays beside segments: stored in the transaction of what brings them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.arrays import Prepared
from samplestore.clock import db_now
from samplestore.errors import InvalidSegment
from samplestore.models import SegmentArray
from samplestore.verbs.tx import Tx

segment_array = SegmentArray.__table__


def store(tx: Tx, sample_id: int, incarnation: int, seq: int, made: Prepared) -> None:
    """Put an array beside a segment, in place of one of the same name. Repeatable. Raises InvalidSegment where the
    sample's other segments have arrays of this name that are of another kind: they could not be put together."""
    of_sample = (segment_array.c.sample_id == sample_id) & (segment_array.c.incarnation == incarnation)
    other = tx.execute(
        sa.select(segment_array.c.dtype, segment_array.c.shape)
        .where(of_sample, segment_array.c.name == made.name, segment_array.c.seq != seq)
        .limit(1)
    ).one_or_none()
    if other is not None and (other.dtype, list(other.shape)[1:]) != (made.dtype, made.shape[1:]):
        raise InvalidSegment(
            f"{made.name} is {made.dtype} [rows, {_dims(made.shape)}], but an earlier segment has {other.dtype} "
            f"[rows, {_dims(other.shape)}]",
            field=made.name,
        )
    key = {"sample_id": sample_id, "incarnation": incarnation, "seq": seq, "name": made.name}
    tx.execute(sa.delete(segment_array).filter_by(**key))
    tx.execute(sa.insert(segment_array).values(created_at=db_now(), **row_of(sample_id, incarnation, seq, made)))


def holds(tx: Tx, sample_id: int, incarnation: int, seq: int, made: Prepared) -> bool:
    """Whether this very array is stored there. A file's name is the hash of its bytes; an array that was pruned since
    is there no more."""
    row = tx.execute(
        sa.select(segment_array).filter_by(sample_id=sample_id, incarnation=incarnation, seq=seq, name=made.name)
    ).one_or_none()
    if row is None:
        return False
    given = (made.dtype, list(made.shape), made.sidecar, made.data)
    return (row.dtype, list(row.shape), row.sidecar, row.data) == given


def row_of(sample_id: int, incarnation: int, seq: int, made: Prepared) -> dict[str, Any]:
    """The row of an array, all but the time."""
    return {
        "sample_id": sample_id, "incarnation": incarnation, "seq": seq, "name": made.name, "dtype": made.dtype,
        "shape": made.shape, "codec": "raw", "sidecar": made.sidecar, "n_bytes": made.n_bytes, "data": made.data,
    }  # fmt: skip


def _dims(shape: list[int]) -> str:
    return ", ".join(map(str, shape[1:])) or "-"
