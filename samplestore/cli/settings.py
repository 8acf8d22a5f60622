"""samplestore config show, samplestore version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from samplestore import __version__
from samplestore.cli.common import AsJson, Db
from samplestore.cli.output import emit_json, say, table

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The settings in force and where they come from.")

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Configuration file.",
        show_default="$SAMPLESTORE_CONFIG, else ./samplestore.toml",
    ),
]


@app.callback()
def _group() -> None:
    """A callback keeps `config` a group although it has one command."""


@app.command()
def show(config: ConfigFile = None, db: Db = None, as_json: AsJson = False) -> None:
    """The settings that a worker started here would use, and where each comes from. Passwords are masked."""
    import os

    from samplestore.config import ENV_DATABASE, config_path, resolve, sources
    from samplestore.logs import mask

    flag = None if db == os.environ.get(ENV_DATABASE) else db  # typer fills --db from the variable too
    settings = resolve(config, {"db": flag})
    origin = sources(settings)
    values = {name: getattr(settings, name) for name in origin}
    values["db"] = mask(settings.db) or None
    values["router"] = settings.router and mask(settings.router)
    values["engines"] = [mask(url) for url in settings.engines]
    file = config_path(config)
    if as_json:
        listed = {name: {"value": value, "source": origin[name]} for name, value in values.items()}
        emit_json({"file": None if file is None else str(file), "settings": listed})
        return
    say(f"file: {file or 'none (./samplestore.toml is not there)'}")
    table(("setting", "value", "source"), [(name, _told(value), origin[name]) for name, value in values.items()])


def _told(value: object) -> str:
    import json

    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def version(as_json: AsJson = False) -> None:
    """Show the version."""
    if as_json:
        emit_json({"version": __version__})
    else:
        say(f"samplestore {__version__}")
