"""The command line itself: help, exit codes, errors, laziness, output on terminals and pipes."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shlex import quote
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import errors, prompts
from samplestore.cli import app, exits
from samplestore.cli.common import complete_run
from samplestore.cli.output import printable
from samplestore.cli.typed import TYPED
from samplestore.copies import copying
from samplestore.migrations import REVISION
from samplestore.models import EngineRow
from samplestore.workers.replies import EngineError
from tests.cli.conftest import HOSTILE, Cli, Small
from tests.support.processes import Processes, free_port

HEAVY = {"sqlalchemy", "alembic", "torch", "aiohttp", "streamlit", "pandas", "pydantic", "numpy", "transformers"}
ENGINES = ("list", "pause", "continue", "update", "abort", "release-memory", "resume-memory", "flush-cache", "forget")
NESTED = {"db": ("upgrade", "current", "check"), "engines": ENGINES, "config": ("show",)}
COMMANDS = [[name] for name in app.COMMANDS] + [[name, sub] for name, subs in NESTED.items() for sub in subs]
SCRIPT = [sys.executable, "-m", "samplestore.cli"]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SAMPLESTORE_") or k == "SAMPLESTORE_TEST_TAG"}
    return {**kept, "COLUMNS": "120", **more}


# -- help and laziness


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(cli: Cli, command: list[str]) -> None:
    answer = cli(*command, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert f"samplestore {' '.join(command)}" in answer.out
    described = answer.out.split("Options")[0].split("[OPTIONS]")[-1]
    assert len(re.findall(r"\w+", described)) > 1, "no description"


def test_the_entry_points_are_those_of_the_table() -> None:
    installed = {e.name for e in importlib.metadata.entry_points(group=app.ENTRY_POINTS)}
    assert {name for name, listed in app.COMMANDS.items() if not listed.target} <= installed


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []], ids=" ".join)
def test_help_and_version_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    listing = tmp_path / "modules"
    code = (
        "import sys\nfrom samplestore.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    code = end.code\n"
        f"open({str(listing)!r}, 'w').write(' '.join(sys.modules))\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == (0 if arguments else 2), done.stderr
    loaded = {name.partition(".")[0] for name in listing.read_text().split()}
    assert "samplestore" in loaded and not loaded & HEAVY
    assert done.stdout.strip() == f"samplestore {samplestore.__version__}" or "ledger" in done.stdout


def test_one_commands_help_imports_that_command_only(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom samplestore.cli.app import run\nassert run(['check', '--help']) == 0\n"
        "print([m for m in sys.modules if m.startswith('samplestore.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert "samplestore.cli.verify" in loaded
    assert not loaded & {"samplestore.cli.status", "samplestore.cli.doctor", "samplestore.cli.add_prompts"}


def test_a_command_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setitem(app.COMMANDS, "dashboard", app.Listed("no_such_package.command:main", "x", app.RUN))
    answer = cli("dashboard")
    assert answer.code == 1
    assert answer.err.endswith("Run: pip install 'samplestore[dashboard]'\n")
    assert "dashboard" in cli("--help").out


def test_completion_knows_commands_options_and_runs(sqlite_url: str) -> None:
    def complete(words: str) -> set[str]:
        told = {
            "_SAMPLESTORE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        done = subprocess.run(SCRIPT, env=environment(**told), capture_output=True, text=True, timeout=60)
        return set(done.stdout.split())

    assert {"status", "show"} <= complete("samplestore s")
    assert "--groups" in complete("samplestore why --g")
    with samplestore.open(sqlite_url) as store:
        store.run("gsm8k")
        store.run("grpo")
        store.run("math")
    assert complete(f"samplestore status --db {sqlite_url} --run g") == {"gsm8k", "grpo"}
    for url, begun, names in ((sqlite_url, "m", ["math"]), (sqlite_url, "x", []), ("nowhere.db", "g", [])):
        assert complete_run(SimpleNamespace(params={"db": url}), begun) == names


# -- exit codes


def test_usage_errors_exit_2(cli: Cli, small: Small) -> None:
    for arguments, said in (
        (["stauts"], "No such command 'stauts'. Did you mean 'status'? See: samplestore --help"),
        (["status", "--nope"], "See: samplestore status --help"),
        (["groups", "--limit", "0"], "See: samplestore groups --help"),
        (["show"], "See: samplestore show --help"),
        (["db", "upgrad"], "See: samplestore db --help"),
    ):
        answer = cli(*arguments)
        assert (answer.code, answer.out) == (2, ""), arguments
        assert answer.err.startswith("error: ") and answer.err.endswith(said + "\n"), answer.err
        assert answer.err.count("\n") == 1, "one paragraph"


def test_arguments_that_are_no_text_exit_2(cli: Cli, small: Small) -> None:
    """Bytes that are not UTF-8 arrive as lone surrogates."""
    for arguments in (["status", "--run", "\udcff"], ["pause", "--reason", "a\udc80"], ["\udcff"]):
        answer = cli(*arguments, "--db", small.url)
        assert (answer.code, answer.out) == (2, ""), answer.err
        assert "is not UTF-8" in answer.err and answer.err.endswith("See: samplestore --help\n")


def test_a_url_without_its_slashes_is_no_file_name(cli: Cli) -> None:
    """As a file it would be told, with the password."""
    for url in ("postgres:/u:geheim@h/x", "postgresql+psycopg:u:geheim@h/x", "sqlite:/geheim.db"):
        for command in ("status", "doctor", "dashboard"):
            answer = cli(command, "--db", url)
            assert answer.code == 1 and "has no // after its" in answer.err, answer.err
            assert "geheim" not in answer.err + answer.out
    assert os.listdir() == []


def test_no_database_named_is_a_usage_error(cli: Cli) -> None:
    answer = cli("status")
    assert (answer.code, answer.out) == (2, "")
    assert "SAMPLESTORE_DATABASE_URL" in answer.err and answer.err.endswith("samplestore status --db FILE\n")


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["check"],
        ["groups"],
        ["runs"],
        ["pause"],
        ["reap"],
        ["engines", "list"],
        ["db", "current"],
        ["db", "check"],
        ["doctor"],
        ["show", "1"],
        ["drop", "1", "--reason", "x"],
    ],
    ids=" ".join,
)
def test_a_missing_database_exits_3_and_is_not_made(cli: Cli, command: list[str]) -> None:
    for url in ("missing.db", "sqlite:///missing.db"):
        answer = cli(*command, "--db", url)
        assert answer.code == 3, answer.err
        assert re.search(r"Create it with: samplestore db upgrade --db \S+missing.db$", answer.err.rstrip()), answer.err
        assert os.listdir() == [], "a reading command made a file"


def test_another_schema_exits_3(cli: Cli, db_url: str) -> None:
    with samplestore.open(db_url) as store:
        store.database.write(lambda c: c.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    for command in (["status"], ["db", "check"], ["doctor"], ["db", "upgrade"]):
        answer = cli(*command, "--db", db_url)
        assert answer.code == 3 and answer.err.endswith("pip install -U samplestore\n"), answer.err
    assert "9999" in cli("db", "current", "--db", db_url).out


def test_an_unreachable_server_exits_3(cli: Cli) -> None:
    url = f"postgresql://someone:geheim@127.0.0.1:{free_port()}/x"
    for command in (["status"], ["doctor"], ["db", "upgrade"], ["db", "current"]):
        answer = cli(*command, "--db", url)
        assert answer.code == 3, answer.err
        assert "refused" in answer.err and re.search(r"pg_isready -h|samplestore d", answer.err), answer.err
        assert "geheim" not in answer.err + answer.out


def test_a_file_that_is_no_database(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, but long enough to look like a file with something in it" * 20)
    for command in ("status", "doctor"):
        answer = cli(command, "--db", tmp_path / "notes.txt")
        assert answer.code in (1, 3) and "not a database" in answer.err and "Traceback" not in answer.err


def test_a_run_that_is_not_there_exits_1(cli: Cli, db_url: str) -> None:
    new, create = cli("status", "--db", db_url), f"samplestore add-prompts FILE --run NAME --db {quote(db_url)}"
    assert new.code == 0 and new.out.endswith(f"{create}\n"), "a new database is in order"
    empty = cli("check", "--db", db_url)
    assert empty.code == 1 and empty.err.endswith(f"{create}\n")
    with samplestore.open(db_url) as store:
        store.run("small")
    answer = cli("status", "--db", db_url, "--run", "smal")
    assert answer.code == 1 and "The database has: small." in answer.err


def test_an_unreachable_engine_exits_4(cli: Cli, small: Small) -> None:
    assert cli("doctor", "--db", small.url).code == 0
    answer = cli("doctor", "--db", small.url, "--engines")
    assert answer.code == 4 and answer.err.endswith("See: samplestore engines list\n")
    assert "1 of 1 engine does not answer; http://127.0.0.1:9: " in answer.err


def test_a_reachable_engine_is_well(cli: Cli, small: Small) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with samplestore.open(small.url) as store:
            here = sa.update(EngineRow).values(url=f"http://127.0.0.1:{server.server_port}")
            store.database.write(lambda connection: connection.execute(here))
        answer = cli("doctor", "--db", small.url, "--engines", "--json")
        server.shutdown()
    assert answer.code == 0, answer.err
    assert {"check": "engine health", "state": "ok", "said": "1 answered"} in answer.json["checks"]


def test_a_changed_schema_exits_5(cli: Cli, db_url: str) -> None:
    assert cli("db", "check", "--db", db_url).out.startswith("ok: ")
    assert cli("db", "check", "--db", db_url, "--json").json["ok"] is True
    with samplestore.open(db_url) as store:
        store.database.write(lambda connection: connection.execute(sa.text("ALTER TABLE run ADD COLUMN note TEXT")))
    answer = cli("db", "check", "--db", db_url)
    assert answer.code == 5
    assert answer.out == "remove_column: run.note\n"
    assert answer.err.endswith("samplestore doctor\n")
    assert cli("db", "check", "--db", db_url, "--json").json["differences"] == ["remove_column: run.note"]


def test_an_old_sqlite_fails_the_doctor(cli: Cli, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from samplestore import urls

    told = {c["check"]: c for c in cli("doctor", "--db", sqlite_url, "--json").json["checks"]}
    assert told["WAL"] == {"check": "WAL", "state": "ok", "said": "on"}
    assert {"SQLite", "file system", "disk", "schema", "workers", "engines"} <= set(told)
    monkeypatch.setattr(urls, "FIXED_SQLITE", (99, 0, 0))
    answer = cli("doctor", "--db", sqlite_url)
    assert answer.code == 5 and answer.err.endswith("Run: pip install pysqlite3\n")


def test_ctrl_c_exits_130(processes: Processes, sqlite_url: str) -> None:
    """A lock that another process holds keeps `pause` waiting; Ctrl-C ends it."""
    with samplestore.open(sqlite_url) as store:
        store.run("small")
        gate = store.database.gate
        assert gate is not None
        with gate.hold():
            waiting = processes.start([*SCRIPT, "pause", "--db", sqlite_url], name="pause")
            stat = Path(f"/proc/{waiting.pid}/task")
            # the gate is waited for in a thread of its own
            waiting.wait_for(lambda: len(list(stat.iterdir())) > 1, what="it waits for the gate")
            os.kill(waiting.pid, signal.SIGINT)
            assert waiting.wait(timeout=20) == 130  # less than the 30 s that it waits for the gate
        assert "Traceback" not in waiting.log()


# -- errors


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cli("status", "--db", "missing.db")
    assert "Traceback" not in plain.err
    wanted = cli("--debug", "status", "--db", "missing.db")
    assert wanted.code == 3 and "Traceback" in wanted.err and "DatabaseMissing" in wanted.err
    assert "Traceback" not in cli("status", "--db", "missing.db").err, "--debug must not stay"
    monkeypatch.setenv("SAMPLESTORE_DEBUG", "1")
    assert "Traceback" in cli("status", "--db", "missing.db").err
    monkeypatch.setenv("SAMPLESTORE_DEBUG", "0")
    assert "Traceback" not in cli("status", "--db", "missing.db").err


@pytest.mark.parametrize(
    "error",
    [
        errors.DatabaseMissing("runs/a.db"),
        errors.SchemaMismatch("a.db", None, "0001", True),
        errors.StoreBusy("a.gate", 30.0, 12, 1.0),
        errors.RunNotFound("x", ["a"]),
        errors.RunSettingsConflict("x", {"seed": 1}, {"seed": 2}),
        errors.InvalidTransition("group", 1, "consumed", "drop", "open"),
        errors.RewindTooFar(1, 4, "pruned up to step"),
        errors.MissingExtra("x", "dashboard"),
        errors.SampleStoreError("two\nlines of text"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_is_one_paragraph_that_ends_with_a_command(error: errors.SampleStoreError) -> None:
    text = exits.with_next_command(error)
    assert "\n" not in text, "only errors that list rows have lines"
    assert re.search(r"samplestore (--help|[a-z])|pip install|ps -fp", text.rsplit(". ", 1)[-1])
    assert text.count("Look further with") <= 1


@pytest.mark.parametrize(
    ("typed", "error", "end"),
    [
        ("export --to x", errors.InvalidSetting("format", "x", "a | b"), "use a | b. See: samplestore export --help"),
        ("export", errors.InvalidSetting("format", "x", "a. Did you mean 'a'?"), "'a'? See: samplestore export --help"),
        ("--debug eval x", errors.SampleStoreError("no"), "no. See: samplestore eval --help"),
        ("engines list", EngineError("busy", "full"), "full. Look further with: samplestore doctor"),
        ("eval --db a.db", errors.WorkerFailed(3, "w", "no"), "no. Look further with: samplestore tail --db a.db"),
        ("eval", errors.EvaluationTimeout(3, 60.0, 7, "no worker"), "see it with: samplestore eval --list"),
        ("drop 1", errors.InvalidTransition("group", 1, "leased", "drop", "open"), "with: samplestore groups"),
        ("runs", errors.BatchTimeout(1.0, "none"), "none. Look further with: samplestore why"),
        ("worker", errors.LeaseLost("sample", 4, 1, 9, 2), "with: samplestore show 4"),
        ("runs", errors.ReadTooLong(300.0), "with store.session() as session: ..."),
        ("runs", errors.WorkerDead(3), "register again: run.register(kind, name)"),
        ("runs", errors.StoreClosed("/a.db"), "Open it again: samplestore.open('/a.db')"),
        ("fork", copying.SourceMoved("x", "went on"), "Repeat the command: it begins anew"),
        ("add-prompts f", prompts.TokenizerNeeded("a.jsonl", 3), "(tokenizer=... in Python)"),
        ("status", errors.DatabaseUnusable("/a", "is odd", "Look at it"), "samplestore doctor"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Exception) else "",
)  # fmt: skip
def test_a_message_without_a_next_step_ends_with_what_can_help(
    typed: str, error: errors.SampleStoreError, end: str
) -> None:
    """Of databases and engines the doctor; of what was typed the help of its command."""
    token = TYPED.set(typed.split())
    try:
        told = exits.with_next_command(error)
    finally:
        TYPED.reset(token)
    assert told.endswith(end) and told.count("ith: samplestore") <= 1, told


def test_a_bug_is_not_hidden(cli: Cli, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("samplestore.queries.inspect.runs", broken)
    with pytest.raises(ZeroDivisionError):
        cli("runs", "--db", small.url)


# -- output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plain ü 伟 🛒", "plain ü 伟 🛒"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\nb\tc\rd\x00", "a\\nb\\tc\\rd\\x00"),
        ("\x9b31m \x7f", "\\x9b31m \\x7f"),
        ("\u202eevil\u2066\u2028", "\\u202eevil\\u2066\\u2028"),
        ("\ud800", "\\ud800"),
    ],
)
def test_printable(text: str, told: str) -> None:
    assert printable(text) == told


def on_terminal(arguments: list[str], **env: str) -> str:
    """What a command writes to a terminal of 200 columns."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*SCRIPT, *arguments],
        stdout=slave,
        stderr=slave,
        stdin=slave,
        env=environment(TERM="xterm", COLUMNS="200", **env),
    ) as process:
        os.close(slave)
        told = b""
        try:
            while part := os.read(master, 65536):
                told += part
        except OSError:  # Linux reports the end of a terminal as EIO
            pass
        assert process.wait(timeout=60) == 0, told.decode()
    os.close(master)
    return told.decode()


def test_tables_are_drawn_on_terminals_without_markup(small: Small) -> None:
    drawn = on_terminal(["status", "--db", small.url])
    assert "───" in drawn and "\x1b[1m" in drawn
    assert "worker-[red]x" in drawn, "markup of untrusted text was interpreted"
    assert "\x1b[31mred" not in drawn and "\\x1b[31mred" in drawn
    assert "\x1b[31m" not in on_terminal(["status", "--db", small.url], NO_COLOR="1")


def test_a_closed_pipe_is_no_traceback(small: Small) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*SCRIPT, "status", "--db", small.url], stdout=writer, stderr=subprocess.PIPE, env=environment()
    )
    os.close(writer)
    assert done.returncode == 1 and done.stderr == b""


def test_a_terminal_without_unicode(small: Small) -> None:
    done = subprocess.run(
        [*SCRIPT, "groups", "--db", small.url],
        capture_output=True,
        env=environment(PYTHONIOENCODING="ascii"),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert b"\\xb1 std" in done.stdout


def test_watch_looks_again_until_ctrl_c(processes: Processes, sqlite_url: str) -> None:
    with samplestore.open(sqlite_url) as store:
        run = store.run("small")
        watching = processes.start(
            [*SCRIPT, "status", "--watch", "--interval", "0.1", "--json", "--db", sqlite_url], name="watch"
        )
        watching.wait_for(lambda: watching.log().count("\n") >= 1, what="the first look")
        run.pause(HOSTILE)
        watching.wait_for(lambda: '"paused"' in watching.log(), what="it sees the change")
    os.kill(watching.pid, signal.SIGINT)
    assert watching.wait(timeout=30) == 130 and "Traceback" not in watching.log()
    states = [json.loads(line)["state"] for line in watching.log().splitlines()]
    assert states[0] == "running" and states[-1] == "paused"


# -- db upgrade


def test_upgrade_makes_and_repeats(cli: Cli, tmp_path: Path) -> None:
    answer = cli("db", "upgrade", "--db", "new/rollouts.db")
    assert answer.code == 0 and answer.out.endswith(
        f"rollouts.db: schema revision {REVISION} (it was without a schema)\n"
    )
    assert sqlite3.connect("new/rollouts.db").execute("SELECT count(*) FROM run").fetchone() == (0,)
    assert cli("db", "upgrade", "--db", "new/rollouts.db").out.endswith("(it was already there)\n")
    assert cli("db", "current", "--db", "new/rollouts.db", "--json").json["revision"] == REVISION


def test_upgrade_of_an_empty_postgres(cli: Cli, postgres_empty_url: str) -> None:
    missing = cli("status", "--db", postgres_empty_url)
    assert missing.code == 3 and "samplestore db upgrade --db" in missing.err
    assert "schema revision none" in cli("db", "current", "--db", postgres_empty_url).out
    assert cli("db", "upgrade", "--db", postgres_empty_url).code == 0
    assert cli("db", "check", "--db", postgres_empty_url).code == 0
