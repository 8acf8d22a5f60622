"""Named arrays of samples, put together from what their segments have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from samplestore import arrays, codec
from samplestore.arrayfiles import ArrayFiles
from samplestore.engine import Database
from samplestore.errors import ArrayNotStored, NotInRun
from samplestore.models import PromptRow, Sample, SampleGroup, Segment, SegmentArray

sample, segment, array, group, prompt = (
    t.__table__ for t in (Sample, Segment, SegmentArray, SampleGroup, PromptRow)
)  # fmt: skip

Whole: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]  # rows, and which of them are there
PART = 500  # samples a statement
# What stands before a sample's own tokens: the prompt, and of a fork also what it shares with its parent. One with a
# prompt of its own has that among its own tokens.
OWN_PROMPT = sample.c.parent_id.is_not(None) & sample.c.parent_upto.is_(None)
BEFORE = prompt.c.n_tokens + sa.func.coalesce(sample.c.parent_upto, 0)
PROMPT_TOKENS = sa.case((OWN_PROMPT, 0), else_=BEFORE).label("prompt_tokens")


def one(database: Database, run_id: int, sample_id: int, name: str, files: Callable[[], ArrayFiles]) -> Whole:
    """(rows [n, ...], present [n]) of a named array. n: response tokens; of "routed_experts" prompt and response tokens
    less one. Rows that nobody stored (an engine died before its last word) are 0 and not present. An array that no
    segment of the sample has is [0]; a name that is none of samplestore.arrays and that no sample of the run has is
    taken for a typing error. `files` opens the side-car files. Raises NotInRun, ArrayNotStored, ArrayFileError."""
    with database.reading() as connection:
        row = connection.execute(
            sa.select(PROMPT_TOKENS, sample.c.n_tokens)
            .select_from(
                sample.join(group, group.c.id == sample.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)
            )
            .where(sample.c.id == sample_id, sample.c.run_id == run_id)
        ).one_or_none()
        if row is None:
            raise NotInRun("sample", [sample_id])
        parts = of_samples(connection, [sample_id], [name])
        found = parts.get((sample_id, name))
        if not found and name not in arrays.KNOWN:
            _require_stored(connection, run_id, name)
    if not found:
        return np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.bool_)
    return together(name, found, row.prompt_tokens, row.n_tokens, files)


def _require_stored(connection: sa.Connection, run_id: int, name: str) -> None:
    """Raises ArrayNotStored where no sample of the run has an array of this name."""
    mine = array.join(sample, (sample.c.id == array.c.sample_id) & (sample.c.run_id == run_id))
    stored = sa.select(array.c.name).select_from(mine)
    if connection.execute(stored.where(array.c.name == name).limit(1)).scalar() is None:
        raise ArrayNotStored(name, sorted(connection.execute(stored.distinct()).scalars()), "run")


def of_samples(
    connection: sa.Connection, sample_ids: Sequence[int], names: Sequence[str]
) -> Mapping[tuple[int, str], list[Any]]:
    """The stored parts of named arrays of samples' current incarnations, in order, by (sample id, name)."""
    found: dict[tuple[int, str], list[Any]] = defaultdict(list)
    own = (array.c.sample_id == segment.c.sample_id) & (array.c.incarnation == segment.c.incarnation)
    for at in range(0, len(sample_ids), PART):
        rows = connection.execute(
            sa.select(
                array.c.sample_id, array.c.name, segment.c.start, segment.c.n_tokens, array.c.dtype, array.c.shape,
                array.c.sidecar, array.c.data,
            )
            .select_from(
                array.join(sample, (sample.c.id == array.c.sample_id) & (sample.c.incarnation == array.c.incarnation))
                .join(segment, own & (array.c.seq == segment.c.seq))
            )
            .where(array.c.sample_id.in_(sample_ids[at : at + PART]), array.c.name.in_(names))
            .order_by(array.c.sample_id, array.c.seq)
        )  # fmt: skip
        for row in rows:
            found[(row.sample_id, row.name)].append(row)
    return found


def lengths(connection: sa.Connection, sample_ids: Sequence[int]) -> dict[int, tuple[int, int]]:
    """(prompt tokens, response tokens) of samples."""
    found: dict[int, tuple[int, int]] = {}
    for at in range(0, len(sample_ids), PART):
        rows = connection.execute(
            sa.select(sample.c.id, PROMPT_TOKENS, sample.c.n_tokens)
            .select_from(
                sample.join(group, group.c.id == sample.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id)
            )
            .where(sample.c.id.in_(sample_ids[at : at + PART]))
        )
        found |= {row.id: (row.prompt_tokens, row.n_tokens) for row in rows}
    return found


def names_of(connection: sa.Connection, sample_ids: Sequence[int]) -> list[str]:
    """Names of the arrays that these samples have."""
    query = sa.select(array.c.name).where(array.c.sample_id.in_(sample_ids[:PART])).distinct().order_by(array.c.name)
    return list(connection.execute(query).scalars())


def empty(connection: sa.Connection, sample_ids: Sequence[int], name: str) -> npt.NDArray[Any] | None:
    """No rows, of the dtype and shape that a named array has; None where none of these samples has it."""
    for at in range(0, len(sample_ids), PART):
        query = sa.select(array.c.dtype, array.c.shape).where(
            array.c.sample_id.in_(sample_ids[at : at + PART]), array.c.name == name
        )
        row = connection.execute(query.order_by(array.c.sample_id).limit(1)).one_or_none()
        if row is not None:
            return np.zeros((0, *row.shape[1:]), codec.dtype_of(row.dtype))
    return None


def together(
    name: str, parts: Sequence[Any], prompt_tokens: int, response_tokens: int, files: Callable[[], ArrayFiles]
) -> Whole:
    """The rows of one sample's array. Where two parts have the same token, the later one counts."""
    first = arrays.first_place(name, prompt_tokens)
    rows = arrays.last_row(name, prompt_tokens, response_tokens) - first
    tables = [codec.decode_array(p.dtype, list(p.shape), _bytes(p, files)) for p in parts]
    whole = np.zeros((rows, *tables[0].shape[1:]), dtype=np.result_type(*tables))
    present = np.zeros(rows, dtype=np.bool_)
    for part, table in zip(parts, tables, strict=True):
        end = arrays.last_row(name, prompt_tokens, part.start + part.n_tokens) - first
        whole[end - len(table) : end] = table
        present[end - len(table) : end] = True
    return whole, present


def _bytes(part: Any, files: Callable[[], ArrayFiles]) -> bytes:
    return bytes(part.data) if part.sidecar is None else files().get(part.sidecar)


def sizes(connection: sa.Connection, run_id: int) -> list[dict[str, Any]]:
    """What a run's named arrays take, by name: how many, and their bytes in the database and in side-car files."""
    rows = connection.execute(
        sa.select(array.c.name, sa.func.count().label("arrays"), sa.func.sum(array.c.n_bytes).label("bytes"))
        .select_from(array.join(sample, sample.c.id == array.c.sample_id))
        .where(sample.c.run_id == run_id)
        .group_by(array.c.name)
        .order_by(array.c.name)
    )
    return [{"name": r.name, "arrays": int(r.arrays), "bytes": int(r.bytes or 0)} for r in rows]
