"""Reading prompt files: JSON lines (plain or gzip) and Parquet, one row at a time, each with its line.

A row that can't be read becomes an InvalidRow and reading goes on, so that one run lists everything that is wrong.
A file that can't be read as a whole (damaged, or of another kind) raises PromptFileError.
"""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from samplestore.errors import MissingExtra, SampleStoreError

MAX_LINE_BYTES = 16 * 1024 * 1024
PARQUET_ROWS = 256  # rows held at once
LISTED = 20  # refused rows that a message lists
SHOWN = 80  # characters of an offending value that a message repeats

_UTF8_BOM = b"\xef\xbb\xbf"
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = SHOWN
_repr.maxlevel, _repr.maxlist, _repr.maxdict = 3, 4, 4


class PromptFileError(SampleStoreError):
    """A prompt file that can't be read at all. Nothing of it is stored, also not with skip_invalid."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True, slots=True)
class InvalidRow:
    """A row that was refused. `line` counts from 1 (Parquet: the row); `shown` is the value, bounded and escaped."""

    source: str
    line: int
    field: str
    reason: str
    shown: str = ""

    def __str__(self) -> str:
        got = f" (got {self.shown})" if self.shown else ""
        return f"{self.source}:{self.line}: {self.field}: {self.reason}{got}"

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("source", "line", "field", "reason", "shown")}


class InvalidImport(SampleStoreError):
    """Rows that were refused; nothing of the file was stored. `rows` has the first 1000, the message the first 20."""

    def __init__(self, source: str, rows: list[InvalidRow], refused: int) -> None:
        self.source, self.rows, self.refused = source, rows, refused
        listed = "\n".join(f"  {row}" for row in rows[:LISTED])
        more = f"\n  and {refused - LISTED:,} more" if refused > LISTED else ""
        what = "1 row was" if refused == 1 else f"{refused:,} rows were"
        super().__init__(
            f"{source}: {what} refused, nothing of it was stored:\n{listed}{more}\n"
            "Correct the file, and run again: samplestore import FILE --run NAME"
        )


ReadRow: TypeAlias = tuple[int, dict[str, Any]] | InvalidRow


def show(value: Any) -> str:
    """A value for an error message: bounded, and escaped so that a file can't send control codes to a terminal."""
    try:
        text = _repr.repr(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def printable(text: str, limit: int) -> str:
    """Text of unknown origin as part of a message: bounded, on one line, without control codes."""
    part = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return part if part.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in part)


class PromptFile:
    """The rows of one file, streamed. The kind is told by the content: Parquet, gzip, else JSON lines.

    size, done   progress, in bytes of the file (Parquet: in rows); size is 0 where it is unknown (a pipe)
    """

    def __init__(self, path: str | PathLike[str], *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.path, self.name = Path(path), str(path)
        self.max_line_bytes = max_line_bytes
        self.size = self.done = 0

    def __iter__(self) -> Iterator[ReadRow]:
        """Yields (line, row) or InvalidRow. Raises PromptFileError."""
        try:
            with self.path.open("rb") as raw:
                head = raw.peek(4)[:4]
                if head == b"PAR1":
                    yield from self._parquet()
                    return
                self._refuse_other_kinds(head)
                self.size = self.path.stat().st_size if self.path.is_file() else 0
                if head.startswith(b"\x1f\x8b"):
                    yield from self._gzip(raw)
                else:
                    yield from self._lines(cast(BinaryIO, raw), raw)
        except FileNotFoundError as error:
            raise PromptFileError(self.name, "no such file") from error
        except IsADirectoryError as error:
            raise PromptFileError(self.name, "is a folder; name the files in it") from error
        except OSError as error:
            raise PromptFileError(self.name, f"can't be read: {error.strerror or error}") from error

    def _refuse_other_kinds(self, head: bytes) -> None:
        if self.path.suffix == ".parquet":
            raise PromptFileError(self.name, "is named .parquet and is no Parquet file (it does not begin with PAR1)")
        if head == b"\x28\xb5\x2f\xfd":
            raise PromptFileError(self.name, f"is compressed with zstd; unpack it first: zstd -d {self.name}")
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise PromptFileError(
                self.name, f"is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 {self.name} > prompts.jsonl"
            )

    def _gzip(self, raw: Any) -> Iterator[ReadRow]:
        line = 0
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                for row in self._lines(cast(BinaryIO, stream), raw):
                    line = row.line if isinstance(row, InvalidRow) else row[0]
                    yield row
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # A file cut short looks like a shorter data set: training on it unnoticed is what this prevents.
            raise PromptFileError(self.name, f"the gzip data is damaged after line {line}: {error}") from error

    def _lines(self, stream: BinaryIO, raw: Any) -> Iterator[ReadRow]:
        line, first, limit = 0, True, self.max_line_bytes
        while data := stream.readline(limit + 2):  # 2: room for \r\n
            line += 1
            body = data.rstrip(b"\r\n")
            if len(body) > limit or (len(data) == limit + 2 and not data.endswith(b"\n")):
                n_bytes = len(data) + _skip_line(stream, data)
                yield InvalidRow(self.name, line, "(line)", f"has {n_bytes:,} bytes, the limit is {limit:,}")
            elif body := (body.removeprefix(_UTF8_BOM) if line == 1 else body).strip():
                if first and body.startswith(b"["):
                    cure = f"write one object per line: jq -c '.[]' {self.name} > prompts.jsonl"
                    raise PromptFileError(self.name, f"is a JSON array; {cure}")
                first = False
                row = parse_line(body, self.name, line)
                yield row if isinstance(row, InvalidRow) else (line, row)
            self.done = raw.tell() if self.size else 0

    def _parquet(self) -> Iterator[ReadRow]:
        try:
            import pyarrow as pa  # type: ignore[import-untyped]
            import pyarrow.parquet as pq  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingExtra("reading Parquet files", "prompts") from error
        try:
            with pq.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                if twice := sorted({n for n in names if names.count(n) > 1}):
                    raise PromptFileError(self.name, f"has two columns named {show(twice[0])}")
                self.size = file.metadata.num_rows
                for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                    yield from self._batch(batch)
        except pa.ArrowException as error:
            raise PromptFileError(self.name, f"is no readable Parquet file: {show(str(error))}") from error

    def _batch(self, batch: Any) -> Iterator[ReadRow]:
        try:
            rows = batch.to_pylist(maps_as_pydicts="strict")
        except (UnicodeDecodeError, KeyError, ValueError, OverflowError):
            rows = None  # one bad value fails the whole batch: go by row, so that only its row is refused
        for i in range(batch.num_rows):
            self.done += 1
            if rows is not None:
                yield self.done, {name: _without_nulls(value) for name, value in rows[i].items()}
            else:
                yield self._one_row(batch.slice(i, 1))

    def _one_row(self, one: Any) -> ReadRow:
        row = {}
        for name, column in zip(one.schema.names, one.columns, strict=True):
            try:
                row[name] = _without_nulls(column.to_pylist(maps_as_pydicts="strict")[0])
            except (UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
                return InvalidRow(
                    self.name, self.done, printable(name, SHOWN), f"the value can't be read: {show(str(error))}"
                )
        return self.done, row


def read_rows(path: str | PathLike[str], *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[ReadRow]:
    """The rows of a JSON-lines (also gzip) or Parquet file: (line, row), or an InvalidRow. Raises PromptFileError."""
    return iter(PromptFile(path, max_line_bytes=max_line_bytes))


def parse_line(body: bytes, source: str, line: int) -> dict[str, Any] | InvalidRow:
    """One line of JSON: an object, or why not. NaN and Infinity pass here and are refused with their field later."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_no_key_twice)
    except UnicodeDecodeError as error:
        return InvalidRow(source, line, "(line)", f"byte {error.start} is not UTF-8", show(body[error.start :][:8]))
    except _KeyTwice as error:
        return InvalidRow(source, line, printable(error.key, SHOWN), "stands twice in one object")
    except json.JSONDecodeError as error:
        near = show(error.doc[max(0, error.pos - 10) : error.pos + 30])
        return InvalidRow(source, line, "(line)", f"not JSON: {error.msg} at character {error.pos}", near)
    except RecursionError:
        return InvalidRow(source, line, "(line)", "is nested too deeply")
    except ValueError:  # only an integer beyond Python's limit of digits is left
        return InvalidRow(source, line, "(line)", "holds an integer with too many digits")
    if not isinstance(value, dict):
        return InvalidRow(source, line, "(line)", "is not a JSON object", show(value))
    return value


class _KeyTwice(ValueError):
    def __init__(self, key: str) -> None:
        self.key = key


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json.loads keeps the last of two equal keys: a prompt would be lost without a word.
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _KeyTwice(key)
            seen.add(key)
    return made


def _skip_line(stream: BinaryIO, data: bytes) -> int:
    """Read on to the end of the line that begins with `data`; how many bytes that were."""
    skipped = 0
    while data and not data.endswith(b"\n"):
        data = stream.readline(1 << 20)
        skipped += len(data)
    return skipped


def _without_nulls(value: Any) -> Any:
    """Parquet gives every struct all fields of the column: an absent tool_calls would reach the template as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
