"""docs/reference/errors.md, from the error classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

from making.pages import cell, code, page, table

ERROR_MODULES = (
    "samplestore.errors",
    "samplestore.config",
    "samplestore.prompts",
    "samplestore.promptfiles",
    "samplestore.portable.imports",
    "samplestore.portable.exports",
    "samplestore.portable.replaced",
    "samplestore.portable.slime_files",
    "samplestore.copies.runs",
    "samplestore.copies.copying",
    "samplestore.copies.hidden",
    "samplestore.tokenizers",
    "samplestore.cli.exits",
    "samplestore.workers.chat",
    "samplestore.workers.episode_runs",
    "samplestore.workers.filters",
    "samplestore.workers.replies",
    "samplestore.workers.rewards",
    "samplestore.slime.settings",
    "samplestore.interop.trl",
)


def errors() -> str:
    return page(
        "Errors",
        "Everything that samplestore raises on purpose is a `SampleStoreError`; each carries the fields listed and a "
        "message that says what to do next. What to do about each: [troubleshooting](../troubleshooting.md). "
        "The exit code is what a command ends with.",
        _errors(),
    )


def error_classes() -> list[type]:
    from samplestore.errors import SampleStoreError

    found = []
    for name in ERROR_MODULES:
        module = import_module(name)
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
        found += [c for c in own if issubclass(c, SampleStoreError)]
    return found


def _errors() -> Iterator[str]:
    from samplestore.cli.exits import CommandError, exit_code

    rows = []
    for cls in error_classes():
        given = [] if cls.__init__ is Exception.__init__ else list(inspect.signature(cls).parameters)
        if "args" in given or "self" in given:
            given = []
        doc = (inspect.getdoc(cls) or "").partition("\n\n")[0] if cls.__doc__ else ""
        status = "as it says" if cls is CommandError else str(exit_code(cls.__new__(cls)))
        rows.append((code(f"{cls.__module__}.{cls.__name__}"), code(", ".join(given)), status, cell(doc)))
    yield from table(("class", "fields", "exit code", ""), rows)
