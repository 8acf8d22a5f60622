"""docs/reference/settings.md, from the settings of runs and workers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from making.pages import cell, code, page, table


def settings() -> str:
    return page(
        "Settings",
        "A run's settings are stored once, when it is created. A worker's settings are read at its start.",
        _settings(),
    )


def _settings() -> Iterator[str]:
    from samplestore import config
    from samplestore.runsettings import RunSettings

    yield from ("## Of a run", "")
    yield (
        "`store.run(name, **settings)`, or `samplestore add-prompts --set NAME=VALUE`. `store.run` with other values "
        'than stored raises `RunSettingsConflict`. `samplestore add-prompts` creates runs with `stages=["reward"]`.'
    )
    yield ""
    told = _documented(RunSettings)
    rows = [
        (code(f.name), code(f.type), code(repr(_field_default(f))), cell(told[f.name])) for f in fields(RunSettings)
    ]
    yield from table(("setting", "type", "default", ""), rows)
    yield from ("## Of a worker", "")
    yield (
        f"From the `[worker]` table of a TOML file, then environment variables `{config.ENV_WORKER}<SETTING>`, then "
        f"flags of `samplestore worker`; the later one wins. The file is `--config FILE`, else `${config.ENV_FILE}`, "
        f"else `./{config.DEFAULT_FILE}`. `{config.ENV_DATABASE}` or `[database] url` names the database for every "
        "command. `samplestore config show` tells each value and where it comes from."
    )
    yield ""
    flags, helps = _worker_flags()
    told = {**helps, **_documented(config.WorkerConfig)}
    rows = []
    for name, field in config.WorkerConfig.model_fields.items():
        default = field.get_default(call_default_factory=True)
        rows.append((code(name), code(repr(default)), code(flags.get(name, "")), cell(told.get(name, ""))))
    yield from table(("setting", "default", "flag", ""), rows)


def _worker_flags() -> tuple[dict[str, str], dict[str, str]]:
    """(flag, help) of each setting that `samplestore worker` has a flag for."""
    from samplestore.cli.app import load

    options = {p.name: p for p in load("worker").params if p.param_type_name == "option"}
    options["engines"] = options.pop("engine")
    return {name: o.opts[0] for name, o in options.items()}, {name: o.help or "" for name, o in options.items()}


def _field_default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _documented(cls: type) -> dict[str, str]:
    """name -> text, from the aligned list of a class's docstring. "a, b   text" is about both."""
    told: dict[str, str] = {}
    last: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        if match := re.fullmatch(r"([a-z_]+(?:, [a-z_]+)*) {2,}(.+)", line):
            last = match[1].split(", ")
            told.update(dict.fromkeys(last, match[2]))
        elif line.startswith("  ") and last:
            told.update({name: f"{told[name]} {line.strip()}" for name in last})
    return told
