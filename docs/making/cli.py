"""docs/reference/cli.md, from the commands and their options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from making.pages import cell, code, page, paragraphs, table


def cli() -> str:
    return page(
        "Commands",
        "Every command, from its own definition. `samplestore COMMAND --help` shows the same. "
        "Commands that read take `--json`, which prints one JSON object with `schema_version`. "
        "The examples stand together on [the command line](../howto/command-line.md), where a test runs them. "
        "Exit codes: 0 ok, 1 failure, 2 usage, 3 database missing or of another schema, 4 engine unreachable, "
        "5 check failed, 130 interrupted.",
        _commands(),
    )


NOT_OURS = ("help", "install_completion", "show_completion")


def _commands() -> Iterator[str]:
    from samplestore.cli.app import COMMANDS, build, load

    yield from _command("samplestore", build(), children=False)
    examples, panel = _examples(), ""
    for name, listed in COMMANDS.items():
        if listed.panel != panel:
            panel = listed.panel
            yield from (f"## {panel}", "")
        yield from _command(f"samplestore {name}", load(name), short=listed.help, example=examples.get(name, ""))


def _examples() -> dict[str, str]:
    """Command -> its first example on the page of examples."""
    found: dict[str, str] = {}
    for line in (Path(__file__).parents[1] / "howto" / "command-line.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"(?:\$ )?(samplestore ([a-z][a-z-]*).*)", line):
            found.setdefault(match[2], match[1])
    return found


def _command(path: str, command: Any, children: bool = True, short: str = "", example: str = "") -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in NOT_OURS]
    group = children and hasattr(command, "commands")
    usage = " ".join([path, *(a.metavar or a.name.upper() for a in arguments), *(["COMMAND"] if group else [])])
    yield from (f"### `{usage}`", "")
    yield from paragraphs(command.help or short)
    if example:
        yield from ("```bash", example, "```", "")
    rows = [
        (code(a.metavar or a.name.upper()), "required" if a.required else "", cell(a.help or "")) for a in arguments
    ]
    rows += [(_flags(o), _default(o), _help(o)) for o in options]
    if rows:
        yield from table(("option", "default", ""), rows)
    if group:
        for name, child in command.commands.items():
            yield from _command(f"{path} {name}", child)


def _flags(option: Any) -> str:
    flags = " / ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return code(flags)
    return code(f"{flags} {option.metavar or _kind(option)}")


def _kind(option: Any) -> str:
    """What an option takes. Newer releases of typer describe it by its annotation, older ones by a click type."""
    described = getattr(option, "type_descriptor", None)
    if described is None:
        choices = getattr(option.type, "choices", None)
        return "|".join(map(str, choices)) if choices else str(option.type.name).upper()
    kind = described.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    return {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH"}.get(kind, "VALUE")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default
    if value is None or callable(value) or value == () or (option.is_flag and value is False):
        return ""
    return code(str(value).lower() if isinstance(value, bool) else value)


def _help(option: Any) -> str:
    variable = f" (${option.envvar})" if isinstance(option.envvar, str) else ""
    return cell(f"{option.help or ''}{variable}")
