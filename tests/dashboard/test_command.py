"""`samplestore dashboard` before and while it becomes the server."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from samplestore.cli.app import run as run_cli
from samplestore.dashboard import command, demo_live
from samplestore.dashboard.readonly import open_read_only
from samplestore.queries import status
from tests.cli.conftest import Answer
from tests.dashboard.browsing import RUN, healthy
from tests.support.demo_data import Demo
from tests.support.processes import Processes, free_port

Dashboard = Callable[..., Answer]
Replaced = list[tuple[list[str], dict[str, str]]]  # (argv, environment) of each call


@pytest.fixture
def dashboard(capfd: pytest.CaptureFixture[str]) -> Dashboard:
    """`samplestore dashboard` in this process."""

    def call(*args: object) -> Answer:
        capfd.readouterr()
        code = run_cli(["dashboard", *map(str, args)])
        return Answer(code, *capfd.readouterr())

    return call


@pytest.fixture
def no_exec(monkeypatch: pytest.MonkeyPatch) -> Replaced:
    """The calls that would have replaced this process."""
    calls: Replaced = []
    monkeypatch.setattr("os.execve", lambda path, argv, env: calls.append((argv, env)))
    return calls


def test_the_database_never_stands_in_the_arguments(dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo) -> None:
    done = dashboard("--db", demo_sqlite.url, "--port", "8600", "--tokenizer", str(demo_sqlite.tokenizer))
    assert done.code == 0, done.err
    assert f"http://127.0.0.1:8600/?run={demo_sqlite.run}" in done.out
    ((argv, env),) = no_exec
    assert not any("demo.db" in arg for arg in argv)
    assert env["SAMPLESTORE_DATABASE_URL"] == demo_sqlite.url
    assert env["SAMPLESTORE_DASHBOARD_TOKENIZER"] == str(demo_sqlite.tokenizer)
    for flag in ("--server.address=127.0.0.1", "--browser.gatherUsageStats=false", "--server.fileWatcherType=none"):
        assert flag in argv


def test_a_missing_database_ends_with_3_and_makes_no_file(dashboard: Dashboard, tmp_path: Path) -> None:
    done = dashboard("--db", str(tmp_path / "none.db"))
    assert done.code == 3
    assert "samplestore db upgrade" in done.err
    assert list(tmp_path.iterdir()) == []


def test_another_schema_ends_with_3(dashboard: Dashboard, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "old.db") as connection:
        connection.execute("CREATE TABLE t (x)")
    done = dashboard("--db", str(tmp_path / "old.db"))
    assert done.code == 3 and "schema" in done.err


def test_what_can_not_be_used_is_told_as_every_command_tells_it(
    dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo, tmp_path: Path
) -> None:
    (tmp_path / "text.db").write_text("this is no database, only a rather long line of text")
    for args, code, told in (
        (["--db", demo_sqlite.url, "--run", "no\x1b[31m"], 1, f"The database has: {demo_sqlite.run}."),
        (["--db", demo_sqlite.url, "--tokenizer", str(tmp_path / "nowhere")], 1, "tokenizer"),
        (["--db", str(tmp_path / "text.db")], 3, "is not a database of SQLite"),
        (
            ["--db", "postgresql://u:secret-word@127.0.0.1:1/x"],
            3,
            "samplestore doctor --db postgresql://u:***@127.0.0.1:1/x\n",
        ),
        (["--db", "postgres:/u:secret-word@127.0.0.1/x"], 1, "this database URL has no // after its postgres:"),
    ):
        done = dashboard(*args)
        assert done.code == code, done.err
        assert done.err.startswith("error: ") and told in done.err and done.err.count("\n") == 1
        assert "secret-word" not in done.err and "\x1b" not in done.err
    assert not no_exec


def test_without_streamlit_the_extra_is_named(
    dashboard: Dashboard, demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    done = dashboard("--db", demo_sqlite.url)
    assert done.code == 1 and "pip install 'samplestore[dashboard]'" in done.err


def test_an_open_address_is_warned_about(dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo) -> None:
    done = dashboard("--db", demo_sqlite.url, "--host", "0.0.0.0")
    assert "warning" in done.err and "http://127.0.0.1:8501/" in done.out


def test_it_serves_and_ends_on_sigterm(processes: Processes, demo_sqlite: Demo) -> None:
    import sys

    port = free_port()
    server = processes.start(
        [sys.executable, "-c", RUN, "--db", demo_sqlite.url, "--port", str(port)], name="dashboard"
    )

    server.wait_for(lambda: healthy(port), what="it answers", timeout=60)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/host-config", timeout=5) as answer:
        json.load(answer)
    arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert b"samplestore.dashboard.server" in arguments and b"demo.db" not in arguments
    server.terminate(20)


def test_a_group_or_a_sample_can_be_linked(dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo) -> None:
    for named, page in (
        ("3", "group?run=gsm8k-demo&group=3"),
        ("12/3/1", "trajectory?run=gsm8k-demo&sample=12%2F3%2F1"),
    ):
        done = dashboard("--db", demo_sqlite.url, "--open", named)
        assert f"http://127.0.0.1:8501/{page}\n" in done.out
    done = dashboard("--db", demo_sqlite.url, "--open", "../etc")
    assert done.code == 2 and "samplestore dashboard --open 12/3" in done.err


def test_actions_have_to_be_asked_for(
    dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLESTORE_DASHBOARD_ACTIONS", "1")  # left over in a shell: it does not count
    dashboard("--db", demo_sqlite.url)
    dashboard("--db", demo_sqlite.url, "--allow-actions")
    assert [env.get("SAMPLESTORE_DASHBOARD_ACTIONS") for _, env in no_exec] == [None, "1"]


def test_without_a_database_the_demo_is_offered(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMPLESTORE_DATABASE_URL", raising=False)
    done = dashboard()
    assert done.code == 2 and "--demo" in done.err


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of demos that were started; they end with the test."""
    started: list[subprocess.Popen[str]] = []
    start = demo_live.start

    def kept(*args: Any) -> subprocess.Popen[str] | None:
        living = start(*args)
        started.extend([living] if living is not None else [])
        return living

    monkeypatch.setattr(demo_live, "start", kept)
    yield started
    for living in started:
        living.communicate(timeout=30)  # which closes its input


def test_the_demo_is_a_run_of_its_own(
    dashboard: Dashboard, no_exec: Replaced, lives: list[subprocess.Popen[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(command, "DEMO_STEPS", 5)
    done = dashboard("--demo", "--port", free_port())
    assert done.code == 0 and "?run=gsm8k-demo" in done.out, done.err
    ((_, env),) = no_exec
    store = open_read_only(env["SAMPLESTORE_DATABASE_URL"])
    run = store.existing_run()
    told = status.status(store.database, run.id)
    book = run.ledger(exact=True)
    with store.database.reading() as c:
        times = "SELECT max(at) - min(at) FROM event"
        lasted = c.execute(sa.text(times)).scalar_one()
        longest, mean = c.execute(sa.text("SELECT max(n_tokens), avg(n_tokens) FROM sample WHERE n_tokens > 0")).one()
    store.database.reader.dispose()
    assert Path(env["SAMPLESTORE_DASHBOARD_TOKENIZER"]).is_relative_to(tmp_path)
    assert told["groups"]["consumed"] >= 16 and told["resumed_samples"] > 5 and told["current_version"] == 5
    assert book["closed"] and run.check() == []
    assert 0.5 * command.DEMO_S < lasted <= command.DEMO_S + 60, "its times are drawn out"
    assert longest > 4 * mean, "lengths are long-tailed"
    (living,) = lives
    assert living.poll() is None and {w["pid"] for w in told["workers"]} == {living.pid}
    assert living.stdin is not None and os.get_inheritable(living.stdin.fileno()), "it lives as long as the server"


def test_a_taken_port_is_told_with_another(dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = dashboard("--db", demo_sqlite.url, "--port", port)
        assert done.code == 1 and not no_exec
        assert done.err.startswith(f"error: port {port} is taken") and done.err.count("\n") == 1
        other = int(done.err.split("samplestore dashboard --port ")[1])
        assert port < other <= port + command.NEAR
    assert dashboard("--db", demo_sqlite.url, "--port", other).code == 0 and len(no_exec) == 1


def test_a_taken_port_costs_no_demo(dashboard: Dashboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert dashboard("--demo", "--port", taken.getsockname()[1]).code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["192.0.2.7", "no such host", "x" * 300])
def test_an_address_that_is_not_here(host: str, dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo) -> None:
    done = dashboard("--db", demo_sqlite.url, "--host", host)
    assert done.code == 2 and not no_exec
    assert "this machine can't listen on" in done.err and done.err.rstrip().endswith("--host 127.0.0.1")


def test_a_port_that_is_not_allowed(
    dashboard: Dashboard, no_exec: Replaced, demo_sqlite: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_bind", lambda host, port: PermissionError(13, "Permission denied"))
    done = dashboard("--db", demo_sqlite.url, "--port", "80")
    assert done.code == 1 and not no_exec
    assert "may not listen on port 80. Try: samplestore dashboard --port 8501" in done.err
