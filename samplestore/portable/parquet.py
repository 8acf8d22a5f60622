"""Rows of exports as Parquet: list columns, bounded row groups, the same bytes for the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from samplestore.errors import MissingExtra
from samplestore.portable.samples import COLUMNS, FORMAT, STRUCTS

ROWS, TOKENS = 1024, 1 << 20  # of a row group, whichever comes first
READ_ROWS = 64  # held at once
MAX_VALUES = 1 << 25  # of a column in a row group that is read: a few bytes can stand for any number of them
META = {b"samplestore.format": str(FORMAT).encode()}


def arrow() -> tuple[Any, Any]:
    """(pyarrow, pyarrow.parquet). Raises MissingExtra."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra("Parquet", "prompts") from error
    return pa, pq


def schema(pa: Any) -> Any:
    """Of the files: COLUMNS, in their order. JSON columns are text."""
    kinds = {
        "str": pa.string(), "json": pa.string(), "int": pa.int64(), "float": pa.float64(), "bytes": pa.binary(),
        "ids": pa.list_(pa.int32()), "mask": pa.list_(pa.int8()), "floats": pa.list_(pa.float32()),
        "strings": pa.list_(pa.string()), "ints": pa.list_(pa.int64()),
    }  # fmt: skip
    for name, members in STRUCTS.items():
        kinds[name] = pa.list_(pa.struct([pa.field(key, kinds[kind]) for key, kind in members.items()]))
    return pa.schema([pa.field(name, kinds[kind]) for name, kind in COLUMNS.items()], metadata=META)


def write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """One file of these rows; how many there were."""
    pa, pq = arrow()
    shape, written = schema(pa), 0
    with pq.ParquetWriter(path, shape, compression="zstd", use_dictionary=["run_uuid", "run", "dataset"]) as file:
        for part in _row_groups(rows):
            columns = [
                pa.array([_cell(kind, row[name]) for row in part], shape.field(name).type)
                for name, kind in COLUMNS.items()
            ]
            file.write_batch(pa.record_batch(columns, schema=shape))
            written += len(part)
    return written


def _row_groups(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    part: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row["response_ids"]) + sum(len(a["data"]) // 8 for a in row["arrays"])
        if len(part) >= ROWS or size >= TOKENS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _cell(kind: str, value: Any) -> Any:
    if kind == "json":
        return None if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)
    if kind == "rewards":
        return [{**one, "details": _cell("json", one["details"])} for one in value]
    return value


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, a few in memory at a time. Raises pyarrow's ArrowException, ValueError for a column of JSON
    that holds none, or a row group with more than MAX_VALUES values."""
    _, pq = arrow()
    with pq.ParquetFile(path) as file:
        _require_bounded(file.metadata)
        for batch in file.iter_batches(batch_size=READ_ROWS):
            for row in batch.to_pylist():
                yield {name: _value(COLUMNS.get(name, ""), value) for name, value in row.items()}


def _require_bounded(about: Any) -> None:
    for at in range(about.num_row_groups):
        part = about.row_group(at)
        most = max((part.column(i).num_values for i in range(part.num_columns)), default=0)
        if most > MAX_VALUES:
            raise ValueError(f"row group {at} has {most:,} values in one column; at most {MAX_VALUES:,} are read")


def _value(kind: str, value: Any) -> Any:
    if kind == "json" and isinstance(value, str):
        return json.loads(value)
    if kind == "rewards" and isinstance(value, list):
        return [
            {**one, "details": _value("json", one.get("details"))} if isinstance(one, dict) else one for one in value
        ]
    return value


def is_ours(path: Path) -> bool:
    """Whether a Parquet file has the columns of an export. Raises pyarrow's ArrowException."""
    _, pq = arrow()
    return {"id", "segments", "response_ids"} <= set(pq.read_schema(path).names)
