"""Writes docs/reference/*.md from the code: python docs/generate.py

A test compares the files with what this script makes, so that they can't go out of date unnoticed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Made by docs/generate.py. Do not edit: change the code and run `python docs/generate.py`. -->"

# ---- common


def page(title: str, lead: str, body: Iterator[str]) -> str:
    return "\n".join([NOTE, f"# {title}", "", lead, "", *body]).rstrip() + "\n"


def cell(value: object) -> str:
    """Text for a table cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def code(value: object) -> str:
    return f"`{cell(value)}`" if str(value) else ""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def paragraphs(doc: str | None) -> Iterator[str]:
    """A docstring: prose as prose, what is aligned in columns as it stands."""
    for part in re.split(r"\n\s*\n", inspect.cleandoc(doc or "")):
        if not part:
            continue
        aligned = any(re.search(r"\S {2,}\S", line) for line in part.splitlines()) or part.startswith(" ")
        yield from (["```text", part, "```"] if aligned else [part])
        yield ""


# ---- cli.md


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
    for line in (FOLDER.parent / "howto" / "command-line.md").read_text(encoding="utf-8").splitlines():
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


# ---- schema.md


def schema() -> str:
    return page(
        "Schema",
        "The tables, from `samplestore/models.py`, and the [views](#views) on them. Times are seconds since the epoch "
        "by the database's clock. The only way to this schema is `samplestore db upgrade`. Reading it with SQL is "
        "supported, writing is not: only the verbs keep counters, ledger and fences right. "
        "Types are given as SQLite / PostgreSQL where they differ. "
        "How to read it with SQL, SQLAlchemy and pandas: [SQL](../howto/sql.md). "
        "Questions to start from: [cookbook](../cookbook.md).",
        _schema(),
    )


def _schema() -> Iterator[str]:
    from samplestore.models import Base

    mapped = {m.local_table.name: m for m in Base.registry.mappers}
    tables = list(Base.metadata.tables.values())
    yield from _diagram(tables)
    for t in tables:
        mapper = mapped[t.name]
        yield from (f"## {t.name}", "", f"`samplestore.{mapper.class_.__name__}`", "")
        yield from paragraphs(mapper.class_.__doc__)
        rows = [
            (code(c.name), cell(_type(c.type)), "yes" if c.nullable else "", _key(c), cell(c.comment or ""))
            for c in t.c
        ]
        yield from table(("column", "type", "null", "key", ""), rows)
        yield from _constraints(t)
        yield from _reached(mapper)
    yield from _views()


def _diagram(tables: list[Any]) -> Iterator[str]:
    """Keys only: the tables below have the rest."""
    yield from ("```mermaid", "erDiagram")
    for t in tables:
        for key in sorted(t.foreign_keys, key=lambda k: k.parent.name):
            many = "|o--o{" if key.parent.nullable else "||--o{"
            yield f'    {key.column.table.name} {many} {t.name} : "{key.parent.name}"'
    for t in tables:
        yield f"    {t.name} {{"
        for c in t.c:
            keys = ", ".join(filter(None, ("PK" if c.primary_key else "", "FK" if c.foreign_keys else "")))
            if keys:
                yield f"        {_type(c.type).partition(' / ')[0].lower()} {c.name} {keys}"
        yield "    }"
    yield from ("```", "")


def _reached(mapper: Any) -> Iterator[str]:
    """What a mapped class has beside its columns."""
    rows = []
    for r in sorted(mapper.relationships, key=lambda r: str(r.key)):
        kind = f"list[{r.mapper.class_.__name__}]" if r.uselist else r.mapper.class_.__name__
        rows.append((code(r.key), code(kind), cell(r.doc or "")))
    for name, value in vars(mapper.class_).items():
        if isinstance(value, property):
            told = str(inspect.signature(value.fget).return_annotation) if value.fget else ""
            rows.append((code(name), code(told), cell(inspect.getdoc(value) or "")))
    if rows:
        yield from table(("attribute of the class", "", ""), rows)


def _views() -> Iterator[str]:
    from samplestore.views import VIEWS

    yield from ("## Views", "", "Common questions as tables. Their names are plural, those of tables singular.", "")
    for view in VIEWS:
        yield from (f"### {view.name}", "", view.doc, "")
        # What a database derives is not what Core declares, only its kind is.
        kinds = {"Integer": "whole number", "Double": "number", "Text": "text"}
        rows = [(code(c.name), kinds[_kind_of(c.type)], cell(view.columns[c.name])) for c in view.table.c]
        yield from table(("column", "type", ""), rows)


def _kind_of(kind: Any) -> str:
    import sqlalchemy as sa

    return next(k.__name__ for k in (sa.Integer, sa.Double, sa.Text) if isinstance(kind, k))


def _type(kind: Any) -> str:
    from sqlalchemy.dialects import postgresql, sqlite

    ours, theirs = (kind.compile(dialect=d.dialect()) for d in (sqlite, postgresql))
    return ours if ours == theirs else f"{ours} / {theirs}"


def _key(column: Any) -> str:
    target = next((f"→ {k.column.table.name}.{k.column.name}" for k in column.foreign_keys), "")
    return " ".join(filter(None, ("primary" if column.primary_key else "", target)))


def _constraints(t: Any) -> Iterator[str]:
    import sqlalchemy as sa

    lines = []
    for c in t.constraints:
        if isinstance(c, sa.UniqueConstraint):
            lines.append(f"- unique ({', '.join(x.name for x in c.columns)})")
        elif isinstance(c, sa.CheckConstraint):
            lines.append(f"- check `{c.sqltext}`")
    for i in t.indexes:
        where = i.dialect_options["sqlite"]["where"]
        what = f"{'unique ' if i.unique else ''}index `{i.name}` ({', '.join(x.name for x in i.columns)})"
        lines.append(f"- {what}" + (f" where `{where}`" if where is not None else ""))
    yield from sorted(lines)
    if lines:
        yield ""


# ---- settings.md


def settings() -> str:
    return page(
        "Settings",
        "A run's settings are stored once, when it is created. A worker's settings are read at its start.",
        _settings(),
    )


def _settings() -> Iterator[str]:
    from samplestore import config
    from samplestore.types import RunSettings

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


# ---- errors.md

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


# ---- python-api.md

API = (
    ("samplestore.store", "Store"),
    ("samplestore.run", "Run"),
    ("samplestore.batch", "Batch"),
    ("samplestore.delivery", "BatchGroupView"),
    ("samplestore.tensors", "BatchSample"),
    ("samplestore.mismatch", "Mismatch"),
    ("samplestore.mismatch", "Distance"),
    ("samplestore.mismatch", "SampleMismatch"),
    ("samplestore.datasets", "Steps"),
    ("samplestore.workers.episodes", "Context"),
    ("samplestore.workers.episodes", "Turn"),
    ("samplestore.media", "Image"),
    ("samplestore.slimehooks", "HookSample"),
    ("samplestore.queries.determinism", "Determinism"),
    ("samplestore.types", "Claim"),
    ("samplestore.types", "StageClaim"),
    ("samplestore.types", "RequestInfo"),
    ("samplestore.types", "WeightVersion"),
    ("samplestore.types", "Added"),
    ("samplestore.types", "Heartbeat"),
    ("samplestore.types", "Reaped"),
    ("samplestore.types", "Finding"),
    ("samplestore.types", "Why"),
    ("samplestore.slime", "StoreDataSource"),
    ("samplestore.slime", "StoreDataBuffer"),
    ("samplestore.interop.leases", "Leases"),
    ("samplestore.interop.trl", "StoreRollouts"),
    ("samplestore.interop.verl", "KeyValues"),
)

FUNCTIONS = (
    ("samplestore.datasets", ("torch_dataset",)),
    ("samplestore.advantages", ("advantages",)),
    ("samplestore.planning", ("plan", "micro_batches")),
    (
        "samplestore.ratios",
        ("log_ratio", "token_ratio", "sequence_ratio", "truncated", "masked", "kl_k1", "kl_k3"),
    ),
    ("samplestore.slime", ("generate_rollout", "observe", "observe_all", "publish_weights")),
    ("samplestore.interop.trl", ("rollout", "stored_reward")),
    ("samplestore.interop.verl", ("dataproto",)),
    ("samplestore.interop.areal", ("trajectories", "trajectory", "samples_of")),
    ("samplestore.interop.prime_rl", ("training_samples", "sample_of")),
    ("samplestore.interop.skyrl", ("generator_output",)),
)


def api() -> str:
    return page(
        "Python API",
        "`import samplestore` costs nothing; names are loaded when they are first used. Each verb of a run is one "
        "transaction and can be repeated. Errors: [errors](errors.md). Settings: [settings](settings.md). "
        "How the verbs go together: [trainer](../howto/trainer.md).",
        _api(),
    )


def _api() -> Iterator[str]:
    import samplestore.batches
    import samplestore.store
    from samplestore import tensors

    yield from ("## samplestore.open", "")
    yield from _function("samplestore.open", samplestore.store.open)
    for module, name in API:
        cls = getattr(import_module(module), name)
        yield from (f"## {name}", "", f"`{module}.{name}`", "")
        if cls.__doc__ and not cls.__doc__.startswith(f"{name}("):
            yield from paragraphs(cls.__doc__)
        if hasattr(cls, "__dataclass_fields__"):
            yield from table(("field", "type"), [(code(f.name), code(f.type)) for f in fields(cls)])
        for attribute, value in vars(cls).items():
            if not attribute.startswith("_"):
                yield from _member(name, attribute, value)
        if name == "Run":
            yield from ("### Options of `run.batch`", "")
            yield from _function("run.batch", samplestore.batches.take, skip=("run",))
        if name == "Batch":
            yield from ("### What `tensors` and `arrays` return", "", inspect.cleandoc(tensors.__doc__ or ""), "")
    for module, names in FUNCTIONS:
        yield from (f"## {module}", "")
        yield from paragraphs(import_module(module).__doc__)
        for name in names:
            yield from _function(f"{module}.{name}", getattr(import_module(module), name))


def _member(owner: str, name: str, value: Any) -> Iterator[str]:
    if isinstance(value, property) or type(value).__name__ == "cached_property":
        doc = inspect.getdoc(value) or ""
        yield from (f"### `{owner}.{name}` (property)", "")
        yield from paragraphs(doc)
    elif inspect.isfunction(value):
        yield from (f"### `{owner}.{name}`", "")
        yield from _function(name, value, skip=("self",))


def _function(name: str, function: Any, skip: tuple[str, ...] = ()) -> Iterator[str]:
    told = inspect.signature(function)
    told = told.replace(parameters=[p for p in told.parameters.values() if p.name not in skip])
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(told))
    if len(name + shown) > 110:
        inner = re.sub(r"(?<=[\w\])'\"*]), (?=\*|\w+:)", ",\n    ", shown[1 : shown.rindex(")")])
        shown = f"(\n    {inner},\n{shown[shown.rindex(')') :]}"
    yield from ("```python", f"{name}{shown}", "```")
    yield ""
    yield from paragraphs(function.__doc__)


PAGES = {
    "cli.md": cli,
    "python-api.md": api,
    "schema.md": schema,
    "settings.md": settings,
    "errors.md": errors,
}


def made() -> dict[str, str]:
    """Name of each page -> its text."""
    return {name: make() for name, make in PAGES.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in made().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}\n")


if __name__ == "__main__":
    main()
