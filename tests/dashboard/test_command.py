"""`samplestore dashboard` before and while it becomes the server."""

from __future__ import annotations

import json
import sqlite3
import urllib.request
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from samplestore.dashboard import command
from tests.support.demo_data import Demo
from tests.support.processes import Processes, free_port

app = typer.Typer()
app.command()(command.dashboard)

RUN = "import typer; from samplestore.dashboard.command import dashboard; typer.run(dashboard)"


@pytest.fixture
def no_exec(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The calls that would have replaced this process."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execve", lambda path, argv, env: calls.append((argv, env)))
    return calls


def test_the_database_never_stands_in_the_arguments(
    no_exec: list[tuple[list[str], dict[str, str]]], demo_sqlite: Demo
) -> None:
    done = CliRunner().invoke(
        app, ["--db", demo_sqlite.url, "--port", "8600", "--tokenizer", str(demo_sqlite.tokenizer)]
    )
    assert done.exit_code == 0, done.output
    assert f"http://127.0.0.1:8600/?run={demo_sqlite.run}" in done.output
    ((argv, env),) = no_exec
    assert not any("demo.db" in arg for arg in argv)
    assert env["SAMPLESTORE_DATABASE_URL"] == demo_sqlite.url
    assert env["SAMPLESTORE_DASHBOARD_TOKENIZER"] == str(demo_sqlite.tokenizer)
    for flag in ("--server.address=127.0.0.1", "--browser.gatherUsageStats=false", "--server.fileWatcherType=none"):
        assert flag in argv


def test_a_missing_database_ends_with_3_and_makes_no_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--db", str(tmp_path / "none.db")])
    assert done.exit_code == 3
    assert "samplestore db upgrade" in done.output
    assert list(tmp_path.iterdir()) == []


def test_another_schema_ends_with_3(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "old.db") as connection:
        connection.execute("CREATE TABLE t (x)")
    done = CliRunner().invoke(app, ["--db", str(tmp_path / "old.db")])
    assert done.exit_code == 3 and "schema" in done.output


def test_what_can_not_be_used_ends_with_1(
    no_exec: list[tuple[list[str], dict[str, str]]], demo_sqlite: Demo, tmp_path: Path
) -> None:
    (tmp_path / "text.db").write_text("this is no database, only a rather long line of text")
    for args, told in (
        (["--db", demo_sqlite.url, "--run", "nope"], demo_sqlite.run),
        (["--db", demo_sqlite.url, "--tokenizer", str(tmp_path / "nowhere")], "tokenizer"),
        (["--db", str(tmp_path / "text.db")], "is not a database of SQLite"),
        (["--db", "postgresql://u:secret-word@127.0.0.1:1/x"], "can't be read"),
    ):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 1, done.output
        assert told in done.output and "secret-word" not in done.output
    assert not no_exec


def test_without_streamlit_the_extra_is_named(demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["--db", demo_sqlite.url])
    assert done.exit_code == 1 and "pip install 'samplestore[dashboard]'" in done.output


def test_an_open_address_is_warned_about(no_exec: list[tuple[list[str], dict[str, str]]], demo_sqlite: Demo) -> None:
    done = CliRunner().invoke(app, ["--db", demo_sqlite.url, "--host", "0.0.0.0"])
    assert "warning" in done.output and "http://127.0.0.1:8501/" in done.output


def test_it_serves_and_ends_on_sigterm(processes: Processes, demo_sqlite: Demo) -> None:
    import sys

    port = free_port()
    server = processes.start(
        [sys.executable, "-c", RUN, "--db", demo_sqlite.url, "--port", str(port)], name="dashboard"
    )

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    server.wait_for(healthy, what="it answers", timeout=60)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/host-config", timeout=5) as answer:
        json.load(answer)
    arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert b"streamlit" in arguments and b"demo.db" not in arguments
    server.terminate(20)
