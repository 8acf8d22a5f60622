"""docs/howto/command-line.md: every example runs, prints what the page says, and every command has one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from samplestore.cli.app import COMMANDS, load
from tests.cli.conftest import Cli, cli
from tests.cli.test_looks import tokenizer
from tests.docs.pages import Block, page
from tests.docs.small_run import build
from tests.support.processes import Processes
from tests.support.scripted_engine import ScriptedEngine

__all__ = ["cli"]  # the fixture: an empty folder, and no settings from the environment

PAGE = "docs/howto/command-line.md"
# Processes with tests of their own: tests/engine, tests/dashboard, tests/examples, tests/worker/test_sglang_*.
SHOWN_ONLY = {"demo", "engine", "dashboard", "sglang"}
ENGINE = "http://127.0.0.1:30000"


def examples(block: Block) -> list[tuple[str, list[str]]]:
    """(command line, lines that it prints) of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def blocks() -> list[Block]:
    return [b for b in page(PAGE).blocks if b.language == "console" and "run" in b.words]


def prepare(template: Path) -> None:
    """What the page's folder holds."""
    shutil.copyfile(template, "rollouts.db")
    build("rollouts.db", steps=2)
    whole, damaged = sqlite3.connect("rollouts.db"), sqlite3.connect("damaged.db")
    whole.backup(damaged)
    damaged.execute("UPDATE segment SET payload = x'0200' WHERE sample_id = 3")
    damaged.commit()
    for connection in (whole, damaged):
        connection.close()
    (toml,) = (b.text for b in page(PAGE).blocks if b.language == "toml")
    Path("samplestore.toml").write_text(toml)
    write("prompts.jsonl", [{"prompt_ids": [1, 2, i], "label": str(i)} for i in range(2)])
    write("test.jsonl", [{"prompt_ids": [3, 4], "label": "x"}])
    write("responses.jsonl", [{"prompt_ids": [1, 2], "response_ids": [7, 8], "log_probs": [-0.5, -0.5]}])
    Path("model").mkdir()
    tokenizer(Path("model")).rename("model/tokenizer.json")
    Path("my_rewards.py").write_text("def score(sample):\n    return float(sample.response_length)\n")


def write(name: str, rows: list[object]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def printed(told: str, wanted: list[str]) -> str | None:
    """The first wanted line that is not among the lines told, in order; None if all are. `...` is anything, and any
    number of spaces is one."""
    rest = iter(told.splitlines())
    for line in wanted:
        parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
        pattern = ".*".join(parts)
        if not any(re.fullmatch(pattern + r".*" if "..." in line else pattern, " ".join(t.split())) for t in rest):
            return line
    return None


def test_every_example_runs(cli: Cli, sqlite_template: Path, processes: Processes) -> None:
    prepare(sqlite_template)
    engine = ScriptedEngine()
    try:
        for block in blocks():
            code = next((int(w.removeprefix("exit=")) for w in block.words if w.startswith("exit=")), 0)
            for line, wanted in examples(block):
                program, *words = shlex.split(line.replace(ENGINE, engine.url))
                assert program == "samplestore", line
                if words[0] in ("worker", "reward"):  # they change their process: signals, collector, thread pools
                    process = processes.start([sys.executable, "-m", "samplestore.cli", *words], name=words[0])
                    assert process.wait(120) == code, f"{line}\n{process.log()}"
                    continue
                answer = cli(*words)
                assert answer.code == code, f"{line}\n{answer.err}"
                missing = printed(answer.out + answer.err, wanted)
                assert missing is None, f"{line}: not printed: {missing!r}\n{answer.out}{answer.err}"
        told = cli("status", "--run", "letters", "--json").json
        assert told["groups"]["ready"] == 2, "the worker and the rewards of the page did their work"
    finally:
        engine.close()


def test_every_command_has_an_example() -> None:
    run = {shlex.split(line)[1] for block in blocks() for line, _ in examples(block)}
    shown = {shlex.split(line)[1] for line in page(PAGE).shell_lines()}
    assert shown == SHOWN_ONLY
    assert run | shown == set(COMMANDS), "every command stands on the page, once at least"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_have_only_options_that_exist(name: str) -> None:
    from tests.docs.test_commands import problem

    load(name)
    for block in blocks():
        for line, _ in examples(block):
            words = shlex.split(line)[1:]
            if words[0] == name:
                assert problem(words) is None, line


def test_a_line_that_is_not_printed_is_found() -> None:
    told = "a   1\nb 2\nc 3"
    assert printed(told, ["a 1", "c ..."]) is None
    assert printed(told, ["c 3", "a 1"]) == "a 1"
    assert printed(told, ["b"]) == "b"
