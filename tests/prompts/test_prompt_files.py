"""Reading files: every refusal with its line, damaged files refused whole, Parquet equal to JSON lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from samplestore.prompts import InvalidRow, Prompt, PromptFile, PromptFileError, prepare, read_rows
from samplestore.tokenizers import Tokenizer

GOOD = b'{"prompt": "a"}\n'


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
        (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter at character 14"),
        (b'{"prompt": "a", "prompt": "b"}', "stands twice in one object"),
        (b'{"prompt": "a", "metadata": {"k": 1, "k": 2}}', "stands twice in one object"),
        (b'"just text"', "is not a JSON object"),
        (b"3", "is not a JSON object"),
        (b'{"metadata": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"metadata": ' + b"[" * 200_000, "is nested too deeply"),
        (b'{"prompt": "' + b"x" * 300_000 + b'"}', "has 300,015 bytes, the limit is 250,000"),
    ],
)
def test_bad_lines_are_named_and_reading_goes_on(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "p.jsonl", GOOD + b"\n" + line + b"\n" + GOOD)
    first, bad, last = read_rows(path, max_line_bytes=250_000)
    assert first == (1, {"prompt": "a"}) and last == (4, {"prompt": "a"})
    assert isinstance(bad, InvalidRow) and reason in bad.reason
    assert str(bad).startswith(f"{path}:3: ") and len(str(bad)) < 400 + len(str(path))


def test_bom_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert list(read_rows(path)) == [(1, {"prompt": "a"}), (4, {"prompt": "b"})]


def test_line_limit_is_exact(tmp_path: Path) -> None:
    size = len(GOOD) - 1
    for ending in (b"\n", b"\r\n", b""):
        path = write(tmp_path / "p.jsonl", GOOD[:-1] + ending)
        assert list(read_rows(path, max_line_bytes=size)) == [(1, {"prompt": "a"})]
        (row,) = read_rows(path, max_line_bytes=size - 1)
        assert isinstance(row, InvalidRow)


def test_gzip_whatever_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", gzip.compress(GOOD * 3))
    file = PromptFile(path)
    assert [row[0] for row in file if not isinstance(row, InvalidRow)] == [1, 2, 3]
    assert file.size == file.done == path.stat().st_size


def test_damaged_gzip_is_refused_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl.gz", gzip.compress(GOOD * 1000)[:-9])
    with pytest.raises(PromptFileError, match="gzip data is damaged after line"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("p.json", b'[{"prompt": "a"}]', "is a JSON array; write one object per line: jq"),
        ("p.json", b'\n[\n{"prompt": "a"}]', "is a JSON array"),
        ("p.parquet", GOOD, "is no Parquet file"),
        ("p.parquet", b"PAR1" + b"x" * 100, "is no readable Parquet file"),
        ("p.jsonl.zst", b"\x28\xb5\x2f\xfdxxxx", "zstd -d"),
        ("p.jsonl", "x".encode("utf-16"), "is UTF-16"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    with pytest.raises(PromptFileError, match=reason):
        list(read_rows(write(tmp_path / name, data)))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="no such file"):
        list(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(PromptFileError, match="is a folder"):
        list(read_rows(tmp_path))


ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2"}],
        "label": {"answer": 4.0},
        "metadata": {"level": 1, "tags": ["a", "b"]},
        "tools": [{"name": "add", "parameters": {"x": "int"}}],
        "dataset": "sums",
    },
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        ],
        "metadata": {"level": 2},
        "tools": [{"name": "find", "parameters": {"where": "str"}}],
    },
]


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Parquet fills the fields that a struct lacks with null: they must not reach template, store or key."""
    jsonl = write(tmp_path / "p.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))
    parquet = tmp_path / "p.data"
    pq.write_table(pa.Table.from_pylist(ROWS, schema=_schema()), parquet)
    raw = pq.read_table(parquet).to_pylist()
    assert raw[0]["messages"][0] == {"role": "system", "content": "be brief", "tool_calls": None}, "no null to guard"
    a, b = (list(prepare(read_rows(path), tokenizer)) for path in (jsonl, parquet))
    assert all(isinstance(made, Prompt) for made in (*a, *b)), (a, b)
    assert a == b and a[0] != a[1]
    assert [made.tools for made in b if isinstance(made, Prompt)] == [row["tools"] for row in ROWS]
    assert ["CALLS" in tokenizer.decode(made.prompt_ids) for made in b if isinstance(made, Prompt)] == [False, True]


def _schema() -> pa.Schema:
    rows = pa.array(ROWS).type
    fields = {field.name: field.type for field in rows}
    fields["metadata"] = pa.struct([("level", pa.int64()), ("tags", pa.list_(pa.string()))])
    return pa.schema(list(fields.items()))


def test_parquet_rows_are_streamed_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(1000)]}), path)
    file = PromptFile(path)
    rows = iter(file)
    assert next(rows) == (1, {"prompt": "p0"})
    assert (file.done, file.size) == (1, 1000)
    assert list(rows)[-1] == (1000, {"prompt": "p999"})


def test_parquet_bad_value_names_its_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.parquet"
    buffers = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).buffers()
    texts = pa.Array.from_buffers(
        pa.string(), 3, buffers
    )  # no check that these are UTF-8: other writers have none either
    pq.write_table(pa.table({"prompt": texts}), path)
    good, refused, fine = prepare(read_rows(path), tokenizer)
    assert isinstance(good, Prompt) and isinstance(fine, Prompt)
    assert isinstance(refused, InvalidRow) and (refused.line, refused.field) == (2, "prompt")


def test_parquet_types_that_json_lacks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "label": [b"raw"]}), path)
    (refused,) = prepare(read_rows(path), tokenizer)
    assert isinstance(refused, InvalidRow) and refused.field == "label" and "type bytes" in refused.reason
