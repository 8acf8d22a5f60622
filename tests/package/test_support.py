"""The helpers of the other tests: what starts must end, and what crashes must come back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from samplestore import migrations
from samplestore.engine import Database
from tests.support import postgres
from tests.support.postgres import Databases, PostgresServer
from tests.support.processes import HOST, Processes, pids, wait_until
from tests.support.router import Router

# A process whose child leaves its group by setsid() and writes its pid to the file that it is given.
ESCAPER = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".part", sys.argv[1])
signal.pause()
"""


def running(pid: int) -> bool:
    """False for a zombie too: it holds nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not pids(), reason="needs /proc")
def test_close_kills_a_child_that_left_the_group(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    parent = processes.start([sys.executable, "-c", ESCAPER, tmp_path / "pid"], name="escaper")
    parent.wait_for((tmp_path / "pid").exists, what="its child runs")
    child = int((tmp_path / "pid").read_text())
    assert os.getsid(child) != os.getsid(parent.pid)
    processes.close()
    wait_until(lambda: not running(child), what="the child is dead", timeout=5)
    assert parent.returncode == -signal.SIGKILL


def test_waiting_for_a_process_that_died_shows_its_log(processes: Processes) -> None:
    process = processes.start([sys.executable, "-c", "import sys; print('no licence'); sys.exit(3)"], name="broken")
    with pytest.raises(AssertionError, match=r"broken exited with 3[\s\S]*no licence"):
        process.wait_for_log("ready")


def test_wait_until_names_what_did_not_happen() -> None:
    with pytest.raises(TimeoutError, match="the sea is dry: not within 0 s"):
        wait_until(lambda: False, what="the sea is dry", timeout=0)


def test_both_databases_are_migrated_and_fresh(db_url: str) -> None:
    database = Database(db_url)
    try:
        assert migrations.current(database) == migrations.REVISION
        migrations.require_current(database)
    finally:
        database.close()


def test_postgres_databases_are_separate(postgres_server: Databases, postgres_template: str, postgres_url: str) -> None:
    other = postgres_server.create(template=postgres_template)
    try:
        with postgres_server.connect(other) as connection:
            connection.execute("CREATE TABLE only_here (id int)")
        with postgres_server.connect(make_url(postgres_url).database) as connection:
            row = connection.execute("SELECT to_regclass('only_here')").fetchone()
            assert row == (None,)
    finally:
        postgres_server.drop(other)


def test_a_killed_postgres_keeps_what_it_acknowledged(postgres_crash_server: PostgresServer) -> None:
    server = postgres_crash_server
    with server.connect() as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        connection.execute("CREATE TABLE t (id int)")
        connection.execute("INSERT INTO t VALUES (17)")
        old = server.pid
        server.kill()
        assert not running(old)
    server.start()
    with server.connect() as connection:
        assert connection.execute("SELECT id FROM t").fetchone() == (17,)
    assert "recovery" in server.log()
    folder = server.folder
    server.close()
    assert not folder.exists()


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_postgres_ci_fails_and_others_skip(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv(postgres.ENV_URL, raising=False)
    monkeypatch.setattr(postgres, "binaries", lambda: None)
    with pytest.raises(outcome, match="apt-get install postgresql"):
        postgres.shared_databases()


def test_the_environment_can_name_a_server(postgres_server: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgres.ENV_URL, postgres_server.url("postgres").replace("+psycopg", ""))
    named = postgres.shared_databases()
    name = named.create()
    named.close()  # leaves a server alone that it did not start
    with postgres_server.connect(name) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == (name,)
    postgres_server.drop(name)


class FakeEngine(BaseHTTPRequestHandler):
    """Just enough of an engine for the router to take it in."""

    def do_GET(self) -> None:
        body = b'{"model_path": "tiny", "served_model_name": "tiny", "tokenizer_path": ""}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engine_url() -> Iterator[str]:
    server = ThreadingHTTPServer((HOST, 0), FakeEngine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_router_takes_engines_in_and_out(router: Router, engine_url: str) -> None:
    assert router.workers() == []
    router.add_worker(engine_url)
    assert [worker["url"] for worker in router.workers()] == [engine_url]
    router.remove_worker(engine_url)
    assert router.workers() == []
    router.stop()
    assert not router.healthy()
