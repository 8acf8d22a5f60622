"""Every command that the documentation names exists, with the options that it is given there."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from samplestore.cli.app import COMMANDS, load
from tests.docs.pages import ROOT, page, pages

HANDWRITTEN = [p.name for p in pages() if "/reference/" not in p.name]


def problem(words: list[str]) -> str | None:
    """Why `samplestore WORDS` is no command; None if it is one."""
    words = [w for w in words if w not in ("--debug", "--version", "--help", "--install-completion")]
    if not words or words[0] == "COMMAND":
        return None
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]!r}"
    command: Any = load(words[0])
    rest = words[1:]
    if hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return f"{words[0]} has no command {rest[:1]}"
        command, rest = command.commands[rest[0]], rest[1:]
    if command.context_settings.get("ignore_unknown_options"):
        return None  # what it does not know belongs to the program that it starts
    known = {name for p in command.params for name in [*p.opts, *p.secondary_opts]}
    unknown = [w for w in rest if w.startswith("--") and w.partition("=")[0] not in known]
    return f"{words[0]} has no option {unknown[0]}" if unknown else None


def missing(command: Any, rest: list[str]) -> list[str]:
    """Required options that are not given."""
    needed = [p for p in command.params if p.required and p.param_type_name == "option"]
    return [p.opts[0] for p in needed if not set(p.opts) & set(rest)]


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_commands_in_code_blocks(name: str) -> None:
    for line in page(name).shell_lines():
        words = shlex.split(line)
        if words[0] == "samplestore":
            assert problem(words[1:]) is None, f"{name}: {line}: {problem(words[1:])}"
            command = load(words[1])
            if not hasattr(command, "commands"):
                assert not missing(command, words), f"{name}: {line}: {missing(command, words)}"
        elif words[:2] == ["python", "-m"]:
            _check_module(name, words[2], words[3:])
        else:
            known = {"make", "pip", "sqlite3", "psql", "createdb", "export"}
            assert words[0] in known, f"{name}: a command that nothing checks: {line}"
            if words[0] == "make":
                assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), line


def _check_module(name: str, module: str, options: list[str]) -> None:
    found = find_spec(module)
    assert found is not None and found.origin is not None, f"{name}: no module {module}"
    if module.startswith("samplestore."):
        source = Path(found.origin).read_text()
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in source, f"{name}: {module} has no {option}"


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_commands_in_prose(name: str) -> None:
    for text in page(name).inline():
        if match := re.fullmatch(r"samplestore ([a-z-]+.*)", text):
            words = match[1].replace("…", "X").split()
            if hasattr(load(words[0]), "commands") and len(words) == 1:
                continue
            assert problem(words) is None, f"{name}: `{text}`: {problem(words)}"


def test_every_command_is_in_the_reference() -> None:
    headings = "\n".join(page("docs/reference/cli.md").headings)
    for name in COMMANDS:
        assert f"`samplestore {name}" in headings, name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["starus"], "no command"),
        (["status", "--wach"], "no option"),
        (["engines", "lsit"], "has no command"),
        (["status", "--watch", "--db", "x"], None),
        (["sglang", "engine", "--model", "m", "--tp-size", "2"], None),
        (["sglang", "engin", "--model", "m"], "has no command"),
    ],
)
def test_the_check_can_fail(words: list[str], told: str | None) -> None:
    said = problem(words)
    assert said is None if told is None else told in str(said)
