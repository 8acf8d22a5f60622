"""Settings: file, then environment, then flags; errors that name where a setting came from. And the logs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samplestore.config import ConfigError, WorkerConfig, load_worker_config, sources
from samplestore.logs import mask, setup_logging
from samplestore.migrations import REVISION
from tests.cli.conftest import Cli

FILE = """
[database]
url = "from-file.db"

[worker]
concurrency = 64
router = "http://127.0.0.1:30000/"
mode = "sliced"

[worker.sampling]
temperature = 0.8
top_p = 0.9
"""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("SAMPLESTORE_") and name != "SAMPLESTORE_TEST_TAG":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(FILE)
    return path


def told(config: WorkerConfig) -> dict[str, tuple[Any, str]]:
    """Settings that are no defaults, and their sources."""
    return {name: (getattr(config, name), source) for name, source in sources(config).items() if source != "default"}


def test_defaults() -> None:
    config = load_worker_config(None, {"db": "a.db"})
    assert told(config) == {"db": ("a.db", "flag")}
    assert (config.concurrency, config.flush_tokens, config.flush_seconds, config.mode) == (32, 1024, 2.0, "stream")
    assert (config.slice_tokens, config.reward_processes, config.reward_timeout_s, config.reward_memory_mb) == (
        *(256, 1),
        *(30, 2048),
    )
    assert (config.poll_seconds, config.drain_timeout_s, config.update_timeout_s) == (0.5, 60, 300)
    assert (config.request_timeout_s, config.abort_timeout_s, config.exit_when_done) == (600, 10, False)
    assert (config.router, config.engines, config.max_new_tokens, config.sampling) == (None, [], None, {})


def test_the_file_then_the_environment_then_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"file {file}"
    assert told(load_worker_config(file, {})) == {
        "db": ("from-file.db", source),
        "router": ("http://127.0.0.1:30000", source),
        "concurrency": (64, source),
        "mode": ("sliced", source),
        "sampling": ({"temperature": 0.8, "top_p": 0.9}, source),
    }
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", "from-env.db")
    monkeypatch.setenv("SAMPLESTORE_WORKER_CONCURRENCY", "5")
    monkeypatch.setenv("SAMPLESTORE_WORKER_EXIT_WHEN_DONE", "true")
    monkeypatch.setenv("SAMPLESTORE_WORKER_ENGINES", "http://a:1, http://b:2")
    monkeypatch.setenv("SAMPLESTORE_WORKER_SAMPLING__TEMPERATURE", "0.5")
    seen = told(load_worker_config(file, {}))
    assert seen["db"] == ("from-env.db", "env SAMPLESTORE_DATABASE_URL")
    assert seen["concurrency"] == (5, "env SAMPLESTORE_WORKER_CONCURRENCY")
    assert seen["exit_when_done"] == (True, "env SAMPLESTORE_WORKER_EXIT_WHEN_DONE")
    assert seen["engines"][0] == ["http://a:1", "http://b:2"]
    assert seen["mode"] == ("sliced", source)
    assert seen["sampling"] == (
        {"temperature": 0.5, "top_p": 0.9},
        f"{source}, env SAMPLESTORE_WORKER_SAMPLING__TEMPERATURE",
    )
    flags = {"db": "flag.db", "concurrency": 7, "engines": ["http://c:3"], "sampling": '{"top_p": 0.1}', "mode": None}
    seen = told(load_worker_config(file, flags))
    assert (seen["db"], seen["concurrency"]) == (("flag.db", "flag"), (7, "flag"))
    assert seen["engines"] == (["http://c:3"], "flag")
    assert seen["sampling"][0] == {"temperature": 0.5, "top_p": 0.1}
    assert seen["mode"] == ("sliced", source), "a flag that was not given overrides nothing"


def test_where_the_file_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("samplestore.toml").write_text('[database]\nurl = "here.db"\n')
    assert load_worker_config(None, {}).db == "here.db"
    monkeypatch.setenv("SAMPLESTORE_CONFIG", str(file))
    assert load_worker_config(None, {}).db == "from-file.db"
    assert load_worker_config(Path("samplestore.toml"), {}).db == "here.db"
    monkeypatch.setenv("SAMPLESTORE_CONFIG", "gone.toml")
    with pytest.raises(ConfigError, match=r"there is no file gone.toml \(SAMPLESTORE_CONFIG\)"):
        load_worker_config(None, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[worker]\nconcurency = 3",
            r"my.toml: unknown setting worker.concurency. Did you mean concurrency\? Allowed: db, ",
        ),
        ("[wroker]\nx = 3", r"my.toml: unknown table wroker. Did you mean worker\? Allowed: database, worker"),
        ("[database]\nuri = 'x'", r"my.toml: unknown setting database.uri. Did you mean url\? Allowed: url"),
        ("[database]\nurl = 3", r"my.toml: database.url must be text, not 3"),
        ("worker = 3", r"my.toml: worker must be a table; write \[worker\]"),
        ("[worker]\nconcurrency = ", r"my.toml is no TOML: "),
        ("[worker]\nconcurrency = 'many'", r"concurrency = 'many' \(file .*my.toml\): must be a valid integer"),
        ("[worker]\nsampling = 3", r"sampling = 3 \(file .*my.toml\): must be a valid dictionary"),
        ("[worker.sampling]\ntemperature = nan", r"sampling \(file .*my.toml\): sampling must be what JSON can hold"),
    ],
)
def test_errors_of_the_file_name_it(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        load_worker_config(file, {"db": "x"})
    assert raised.value.exit_code == 2
    assert str(raised.value).endswith("samplestore config show")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"concurrency": 0}, r"concurrency = 0 \(flag\): must be greater than or equal to 1"),
        ({"flush_seconds": float("inf")}, r"flush_seconds = inf \(flag\): must be a finite number"),
        ({"poll_seconds": 0.0}, r"poll_seconds = 0.0 \(flag\): must be greater than"),
        ({"mode": "fast"}, r"mode = 'fast' \(flag\): must be 'stream', 'sliced' or 'unary'"),
        ({"log_level": "loud"}, r"log_level = 'loud' \(flag\): must be 'debug'"),
        ({"max_new_tokens": -1}, r"max_new_tokens = -1 \(flag\)"),
        ({"router": "localhost:30000"}, r"'localhost:30000' is no URL of an engine or router; use http://HOST:PORT"),
        ({"engines": ["file:///etc/passwd"]}, r"is no URL of an engine or router"),
        ({"router": "http://h:port"}, r"is no URL: "),
        ({"sampling": "{"}, r"sampling \(flag --sampling\) is no JSON: "),
        ({"sampling": "[1]"}, r"sampling \(flag --sampling\) must be a JSON object, not \[1\]"),
        ({"concurency": 1}, r"flag: unknown setting concurency. Did you mean concurrency\?"),
    ],
)
def test_errors_of_flags(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_worker_config(None, {"db": "x", **flags})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SAMPLESTORE_WORKER_CONCURENCY", "1", "Did you mean SAMPLESTORE_WORKER_CONCURRENCY"),
        ("SAMPLESTORE_WORKER_CONCURRENCY__X", "1", "unknown variable SAMPLESTORE_WORKER_CONCURRENCY__X"),
        ("SAMPLESTORE_WORKER_CONCURRENCY", "many", r"concurrency = 'many' \(env SAMPLESTORE_WORKER_CONCURRENCY\)"),
        ("SAMPLESTORE_WORKER_SAMPLING", "[1]", r"sampling \(env SAMPLESTORE_WORKER_SAMPLING\) must be a JSON object"),
        ("SAMPLESTORE_WORKER_ENGINES", "[1]", r"engines.*\(env SAMPLESTORE_WORKER_ENGINES\)|valid string"),
        ("SAMPLESTORE_WORKER_ENGINES", "[http", r"engines = '\[http' \(env SAMPLESTORE_WORKER_ENGINES\)"),
    ],
)
def test_errors_of_the_environment(variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=said):
        load_worker_config(None, {"db": "x"})


def test_a_worker_needs_a_database() -> None:
    with pytest.raises(ConfigError, match="no database is named"):
        load_worker_config(None, {})


def test_made_directly_it_reads_neither_file_nor_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("samplestore.toml").write_text("[worker]\nconcurrency = 3\n")
    monkeypatch.setenv("SAMPLESTORE_WORKER_CONCURRENCY", "4")
    assert WorkerConfig(db="x").concurrency == 32


# -- the commands


def test_config_show(cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = cli("config", "show", "--config", file)
    assert shown.code == 0, shown.err
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["concurrency", "64", "file", str(file)] in rows
    assert ["flush_tokens", "1024", "default"] in rows
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", "postgresql://me:geheim@host/db?password=geheim2")
    monkeypatch.setenv("SAMPLESTORE_WORKER_ROUTER", "http://u:geheim3@r:1")
    for flags in ([], ["--json"]):
        answer = cli("config", "show", *flags)
        assert answer.code == 0 and "geheim" not in answer.out + answer.err
    settings = answer.json["settings"]
    assert settings["db"] == {
        "value": "postgresql://me:***@host/db?password=***",
        "source": "env SAMPLESTORE_DATABASE_URL",
    }
    assert settings["router"]["value"] == "http://u:***@r:1"
    assert len(settings) == len(WorkerConfig.model_fields)


def test_a_wrong_configuration_exits_2(cli: Cli, file: Path) -> None:
    file.write_text("[worker]\nconcurency = 3\n")
    answer = cli("config", "show", "--config", file)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: {file}: unknown setting worker.concurency. Did you mean concurrency?")
    secret = cli("config", "show", "--db", "postgresql://u:geheim@h/d", "--config", "gone.toml")
    assert secret.code == 2 and "geheim" not in secret.err


def test_the_database_comes_from_flag_then_environment_then_file(
    cli: Cli, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("samplestore.toml").write_text(f'[database]\nurl = "{sqlite_url}"\n')
    assert cli("db", "current").out.endswith(f"schema revision {REVISION} (this samplestore needs {REVISION})\n")
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", "elsewhere.db")
    assert "elsewhere.db" in cli("db", "current").err
    assert cli("db", "current", "--db", sqlite_url.removeprefix("sqlite:///")).code == 0


# -- logs


@pytest.fixture
def logs(capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []  # pytest's own; basicConfig(force=True) would close them
    yield capsys
    root.handlers, root.level = before, level


def test_text_logs_are_one_line_each_and_masked(logs: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "text")
    log = logging.getLogger("samplestore.test")
    log.debug("not shown")
    log.info("open %s", "postgresql://u:p@ss@h/db", extra={"sample": 3, "said": "a\nlevel=error \x1b[31m"})
    try:
        raise ValueError("http://u:geheim@h")
    except ValueError:
        log.exception("failed")
    captured = logs.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.endswith(
        'level=info logger=samplestore.test msg="open postgresql://u:***@h/db" sample=3 '
        'said="a\\nlevel=error \\u001b[31m"'
    )
    assert second.startswith("time=2") and "Traceback" in second and "geheim" not in second


def test_json_logs(logs: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning", "json")
    logging.getLogger("a").info("not shown")
    logging.getLogger("a").warning("x http://v:w@h", extra={"worker": 3})
    told = json.loads(logs.readouterr().err)
    assert told | {"time": 0} == {"time": 0, "level": "warning", "logger": "a", "msg": "x http://v:***@h", "worker": 3}


def test_unknown_levels_and_formats() -> None:
    with pytest.raises(ValueError, match="use one of debug"):
        setup_logging("loud")
    with pytest.raises(ValueError, match="use one of text"):
        setup_logging("info", "xml")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg://u:***@h/d"),
        ("http://:tok@h http://x:y@z", "http://:***@h http://x:***@z"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("host=h password=abc dbname=x", "host=h password=*** dbname=x"),
    ],
)
def test_mask(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.parametrize(("value", "fits"), [(0, True), (64, True), (63, False), (-1, False)])
def test_no_memory_limit_is_a_limit_of_0(value: int, fits: bool) -> None:
    if fits:
        assert load_worker_config(None, {"db": "a.db", "reward_memory_mb": value}).reward_memory_mb == value
        return
    with pytest.raises(ConfigError, match="reward_memory_mb = "):
        load_worker_config(None, {"db": "a.db", "reward_memory_mb": value})


def test_names_of_slime_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "slime.toml"
    path.write_text("[worker]\nsglang_server_concurrency = 64\n")
    with pytest.raises(ConfigError, match=r"Did you mean concurrency\?"):
        load_worker_config(path, {"db": "a.db"})
