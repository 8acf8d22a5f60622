"""samplestore add-prompts, end to end: files in, rows in SQLite and PostgreSQL out."""

from __future__ import annotations

import gzip
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
import typer
from typer.testing import CliRunner, Result

import samplestore
from samplestore.cli.add_prompts import add_prompts
from samplestore.models import PromptRow
from samplestore.prompts import InvalidPrompts, prepare_all
from samplestore.tokenizers import Tokenizer

app = typer.Typer()
app.command()(add_prompts)

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"{i} + 1 🙂"}], "label": i + 1, "metadata": {"i": i}, "dataset": "sums"}
    for i in range(20)
]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def call(db: str, model: Path, *args: Any, run: str = "gsm8k") -> Result:
    wanted = ["--db", db, "--run", run, "--tokenizer", str(model), *map(str, args)]
    return CliRunner().invoke(app, wanted, catch_exceptions=False)


def stored(db: str, run: str = "gsm8k") -> list[PromptRow]:
    with samplestore.open(db, create=False) as store:
        if run not in store.run_names():
            return []
        run_id = store.existing_run(run).id
        with store.session() as session:
            wanted = sa.select(PromptRow).where(PromptRow.run_id == run_id).order_by(PromptRow.position)
            return list(session.scalars(wanted))


def test_adds_and_repeating_is_harmless(db_url: str, model: Path, tokenizer: Tokenizer, jsonl: Path) -> None:
    first = call(db_url, model, jsonl, "--samples-per-prompt", 4, "--epochs", 2, "--seed", 7)
    assert (first.exit_code, first.stdout) == (0, "added 20 prompts, 0 already there (run gsm8k)\n"), first.output
    rows = stored(db_url)
    expected, _ = prepare_all(ROWS, tokenizer)
    assert [row.content_key for row in rows] == [prompt.content_key for prompt in expected]
    for row, prompt in zip(rows, expected, strict=True):
        assert (row.prompt, row.label, row.meta, row.dataset) == (
            prompt.prompt, prompt.label, prompt.metadata, "sums",
        )  # fmt: skip
        assert np.frombuffer(row.prompt_ids, "<i4").tolist() == prompt.prompt_ids.tolist()
        assert tokenizer.decode(np.frombuffer(row.prompt_ids, "<i4")) == tokenizer.render(row.prompt)
    again = call(db_url, model, jsonl)
    assert again.stdout == "added 0 prompts, 20 already there (run gsm8k)\n"
    assert [row.id for row in stored(db_url)] == [row.id for row in rows]
    with samplestore.open(db_url) as store:
        settings = store.existing_run("gsm8k").settings
    assert (settings.samples_per_prompt, settings.epochs, settings.seed) == (4, 2, 7)


def test_bad_lines_are_listed_and_nothing_is_stored(db_url: str, model: Path, jsonl: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"prompt": ""}\n{"prompt": "x", "metadata": {"s": NaN}}\n{oops\n')
    result = call(db_url, model, jsonl, bad)
    assert result.exit_code == 1 and result.stdout == ""
    for line in (
        f"{bad}:2: prompt: is empty",
        f"{bad}:3: metadata.s: is not a finite number",
        f"{bad}:4: (line): not JSON",
    ):
        assert line in result.stderr
    assert "--skip-invalid" in result.stderr
    with samplestore.open(db_url) as store:
        assert store.run_names() == [], "the run was made although nothing was stored"
    skipped = call(db_url, model, jsonl, bad, "--skip-invalid")
    assert skipped.exit_code == 0
    assert skipped.stdout == "added 21 prompts, 0 already there, 3 refused (run gsm8k)\n"
    assert f"refused: {bad}:2: prompt: is empty" in skipped.stderr


def test_bad_rows_are_capped(sqlite_url: str, model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": ""}\n' * 50)
    result = call(sqlite_url, model, bad)
    assert result.stderr.count("is empty") == 20 and "and 30 more" in result.stderr
    none_left = call(sqlite_url, model, bad, "--skip-invalid")
    assert none_left.exit_code == 1 and "all 50 rows were refused" in none_left.stderr
    bad.write_text("\n")
    assert "there are no rows" in call(sqlite_url, model, bad).stderr


def test_over_long_prompts_are_refused_with_the_limit(sqlite_url: str, model: Path, jsonl: Path) -> None:
    result = call(sqlite_url, model, jsonl, "--max-prompt-tokens", 5)
    assert result.exit_code == 1 and "the limit is 5 (--max-prompt-tokens)" in result.stderr
    assert stored(sqlite_url) == []


def test_repeated_rows_are_stored_once_and_reported(db_url: str, model: Path, jsonl: Path, tmp_path: Path) -> None:
    packed = tmp_path / "again.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    result = call(db_url, model, jsonl, packed)
    assert result.stdout == "added 20 prompts, 0 already there, 20 repeated in the files (run gsm8k)\n"
    assert [row.position for row in stored(db_url)] == list(range(20))


def test_parquet_with_other_names(db_url: str, model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = pa.table(
        {"question": ["1 + 1", "2 + 2"], "answer": ["2", "4"], "info": [{"id": 1}, {"id": 2}], "level": [3, 5]}
    )
    pq.write_table(table, tmp_path / "q.parquet")
    keys = ("--prompt-key", "question", "--label-key", "answer", "--metadata-key", "info")
    refused = call(db_url, model, tmp_path / "q.parquet", *keys)
    assert refused.exit_code == 1 and "level: is not one of question" in refused.stderr
    assert "--extra-to-metadata" in refused.stderr
    options = (*keys, "--extra-to-metadata", "--apply-chat-template", "--dataset", "mini")
    assert call(db_url, model, tmp_path / "q.parquet", *options).exit_code == 0
    rows = stored(db_url)
    assert [(r.prompt, r.label, r.meta, r.dataset) for r in rows] == [
        ("1 + 1", "2", {"id": 1, "level": 3}, "mini"), ("2 + 2", "4", {"id": 2, "level": 5}, "mini"),
    ]  # fmt: skip
    assert tokenizer.decode(np.frombuffer(rows[0].prompt_ids, "<i4")).startswith("<|im_start|>user\n1 + 1<|im_end|>")


def test_json_output(sqlite_url: str, model: Path, jsonl: Path, tmp_path: Path) -> None:
    told = json.loads(call(sqlite_url, model, jsonl, "--json").stdout)
    assert told.pop("schema_version") == 1
    assert told == {"run": "gsm8k", "added": 20, "existing": 0, "duplicates": 0, "invalid": 0, "invalid_rows": []}
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": ""}\n')
    result = call(sqlite_url, model, bad, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1 and "1 row was refused" in told["error"]
    assert told["invalid_rows"] == [
        {"source": str(bad), "line": 1, "field": "prompt", "reason": "is empty", "shown": ""}
    ]  # fmt: skip


def test_other_settings_than_stored_are_refused_before_work(sqlite_url: str, model: Path, jsonl: Path) -> None:
    assert call(sqlite_url, model, jsonl, "--seed", 1).exit_code == 0
    more = jsonl.with_name("more.jsonl")
    more.write_text('{"prompt": "new"}\n{"prompt": ""}\n')
    result = call(sqlite_url, model, more, "--seed", 2)
    assert result.exit_code == 1 and "seed: stored 1, given 2" in result.stderr, result.output
    assert "refused" not in result.stderr, "the files were read first"
    assert len(stored(sqlite_url)) == 20


def test_mistakes_make_no_database(tmp_path: Path, model: Path, jsonl: Path) -> None:
    db = str(tmp_path / "new.db")
    assert "no such file" in call(db, model, tmp_path / "typo.jsonl").stderr
    hub = call(db, Path("some-lab/Some-7B"), jsonl)
    assert hub.exit_code == 1 and "hf download" in hub.stderr
    assert call(db, model, jsonl, "--prompt-key", "label").exit_code == 1
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": ""}\n')
    for refused in ([bad], [jsonl, bad]):
        assert "1 row was refused" in call(db, model, *refused).stderr
    assert call(db, model, bad, "--skip-invalid").exit_code == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("new.db")] == []
    assert call(db, model, jsonl).exit_code == 0 and len(stored(db)) == 20, "a new SQLite file is made"


def test_database_from_the_environment(
    sqlite_url: str, model: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", sqlite_url)
    args = [str(jsonl), "--run", "gsm8k", "--tokenizer", str(model)]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert len(stored(sqlite_url)) == 20


def test_prompt_ids_without_a_tokenizer(sqlite_url: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"prompt_ids": [1, 2, 3]}\n')
    args = [str(file), "--db", sqlite_url, "--run", "r"]
    assert CliRunner().invoke(app, args).exit_code == 0
    file.write_text('{"prompt": "a"}\n')
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1 and f"{file}:1: has no prompt_ids" in result.stderr


def test_library_call(db_url: str, model: Path, tokenizer: Tokenizer) -> None:
    with samplestore.open(db_url) as store:
        run = store.run("lib", samples_per_prompt=2)
        done = run.add_prompts(ROWS, tokenizer=model)
        assert (done.added, done.existing, done.invalid) == (20, 0, 0)
        with pytest.raises(InvalidPrompts, match="rows:2: prompt: is empty"):
            run.add_prompts([{"prompt": "new"}, {"prompt": ""}], tokenizer=tokenizer)
        done = run.add_prompts([{"prompt": "new"}, {"prompt": ""}, ROWS[0]], tokenizer=tokenizer, skip_invalid=True)
        assert (done.added, done.existing, done.invalid) == (1, 1, 1)
    assert len(stored(db_url, "lib")) == 21


def test_text_is_stored_unchanged(db_url: str) -> None:
    """What looks like an escape, what JSON escapes, and what SQL or a terminal could take for its own."""
    texts = [
        "the six characters \\u0000",
        "\\\\u0000",
        "quote ' \" %s :name",
        "naïve 🙂 \x1b[31m\x7f\u2028",
        "\\N \t\r\n",
    ]
    with samplestore.open(db_url) as store:
        store.run("gsm8k").add_prompts(
            [{"prompt": t, "label": t, "metadata": {t: t}, "prompt_ids": [1]} for t in texts]
        )
    rows = stored(db_url)
    assert [(r.prompt, r.label, r.meta) for r in rows] == [(t, t, {t: t}) for t in texts]


def test_progress_bar_only_on_a_terminal(sqlite_url: str, tmp_path: Path) -> None:
    """A real pseudo-terminal as stderr: the bar is drawn there, and stdout stays the result alone."""
    path = tmp_path / "sums.jsonl"  # of ids: a tokenizer would take seconds to load in each of the two processes
    path.write_text("".join(json.dumps({"prompt_ids": [1, i]}) + "\n" for i in range(20)))
    code = "import typer; from samplestore.cli.add_prompts import add_prompts; typer.run(add_prompts)"
    command = [sys.executable, "-c", code, str(path), "--db", sqlite_url, "--run"]
    terminal, stderr = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([*command, "shown"], stdout=subprocess.PIPE, stderr=stderr, env=env) as process:
        os.close(stderr)
        drawn = _read_terminal(terminal, deadline=time.monotonic() + 60)
        assert process.stdout is not None
        assert process.stdout.read() == b"added 20 prompts, 0 already there (run shown)\n", drawn
    os.close(terminal)
    assert b"sums.jsonl" in drawn and b"100%" in drawn
    plain = subprocess.run([*command, "plain"], capture_output=True, timeout=60, env={**env, "FORCE_COLOR": "1"})
    assert (plain.returncode, plain.stderr) == (0, b""), plain.stderr


def _read_terminal(terminal: int, deadline: float) -> bytes:
    drawn = b""
    while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # EIO: the process closed its end
            break
        if not part:
            break
        drawn += part
    return drawn
