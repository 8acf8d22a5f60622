"""The command group: a table of commands, each imported when it is invoked and no sooner.

`samplestore --help`, `--version` and completion must feel immediate, so the one-line helps stand here and importing
this module costs typer only.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from samplestore import __version__
from samplestore.cli import exits
from samplestore.cli.output import note
from samplestore.cli.typed import TYPED, to_type
from samplestore.errors import MissingExtra, SampleStoreError
from samplestore.words import did_you_mean

ENTRY_POINTS = "samplestore.commands"
ENV_DEBUG = "SAMPLESTORE_DEBUG"


class Listed(NamedTuple):
    """A command: MODULE:NAME of a function or typer app ("" is an entry point), its help, its place in the listing."""

    target: str
    help: str
    panel: str


RUN, LOOK, CONTROL, CARE = "Run", "Look", "Control", "Database and settings"
CLI = "samplestore.cli."

COMMANDS: dict[str, Listed] = {
    "demo": Listed("", "The whole loop on this machine: engines, router, worker, trainer, dashboard.", RUN),
    "add-prompts": Listed(CLI + "add_prompts:add_prompts", "Data set files into a run.", RUN),
    "import": Listed(CLI + "import_samples:import_samples", "Samples from elsewhere into a run.", RUN),
    "import-samples": Listed(CLI + "import_samples:import_samples", "The older name of import.", RUN),
    "export": Listed(CLI + "export:export", "Samples as Parquet, JSON lines or slime's debug rollouts.", RUN),
    "worker": Listed("", "Generate: claim samples, stream them from the engines, store segments.", RUN),
    "reward": Listed("", "Score finished samples and groups, without an engine.", RUN),
    "eval": Listed(CLI + "evaluate:evaluate", "Evaluate the current weights on a data set; pass@k by version.", RUN),
    "engine": Listed("", "Serve a small model on the CPU behind SGLang's interface.", RUN),
    "sglang": Listed("", "Real SGLang: install it, start its servers and routers.", RUN),
    "dashboard": Listed("", "Open the dashboard on a database.", RUN),
    "status": Listed(CLI + "status:status", "What a run looks like now.", LOOK),
    "why": Listed(CLI + "status:why", "Why is no batch ready?", LOOK),
    "simulate": Listed(CLI + "simulate:simulate", "What another staleness window would have dropped or masked.", LOOK),
    "runs": Listed(CLI + "status:runs", "The runs of a database.", LOOK),
    "groups": Listed(CLI + "groups:groups", "Groups of a run, newest first; filtered, page by page.", LOOK),
    "show": Listed(CLI + "show:show", "One sample: status, segments, text by weight version, rewards, events.", LOOK),
    "aborts": Listed(CLI + "aborts:aborts", "What was interrupted: why, when, where, and what it cost.", LOOK),
    "tail": Listed(CLI + "tail:tail", "The run's events, as they happen.", LOOK),
    "metrics": Listed(CLI + "metrics:metrics", "The run as numbers: what wandb and Prometheus get.", LOOK),
    "ledger": Listed(
        CLI + "verify:ledger", "Where every generated token is, recounted; exit 5 if it does not close.", LOOK
    ),
    "check": Listed(CLI + "verify:check", "Verify every promise that a query can; exit 5 with findings.", LOOK),
    "pause": Listed(CLI + "control:pause", "Workers claim nothing more; what is in flight goes on.", CONTROL),
    "resume": Listed(CLI + "control:resume", "Workers claim again.", CONTROL),
    "drain": Listed(CLI + "control:drain", "Workers finish what they hold and leave.", CONTROL),
    "abort": Listed(CLI + "control:abort", "Abort what is in flight; partial samples stay resumable.", CONTROL),
    "reap": Listed(CLI + "control:reap", "Free what dead workers hold.", CONTROL),
    "requeue": Listed(CLI + "control:requeue", "Start samples afresh; their tokens are superseded.", CONTROL),
    "drop": Listed(CLI + "control:drop", "Drop groups: they will not be trained on.", CONTROL),
    "expire": Listed(CLI + "expire:expire", "Close groups that are too old: their tokens are stale.", CONTROL),
    "fork": Listed(CLI + "merge:fork", "A new run that stands where a checkpoint of another one stood.", CONTROL),
    "rewind": Listed(CLI + "control:rewind", "Go back to the checkpoint of a step.", CONTROL),
    "engines": Listed("", "Engines: list them, pause, update, abort; memory and caches.", CONTROL),
    "db": Listed(CLI + "database:app", "The schema: upgrade, downgrade, current, check.", CARE),
    "prune": Listed(CLI + "retention:prune", "Remove old tokens, or a whole run; give the space back.", CARE),
    "backup": Listed(CLI + "retention:backup", "A consistent copy, while everything runs.", CARE),
    "merge": Listed(CLI + "merge:merge", "Runs of several databases into one.", CARE),
    "restore": Listed(CLI + "retention:restore", "A database of a backup, checked.", CARE),
    "doctor": Listed(
        CLI + "doctor:doctor", "Check database, disk, schema, workers and engines; exit 5 on problems.", CARE
    ),
    "config": Listed(CLI + "settings:app", "The settings in force and where they come from: show.", CARE),
    "version": Listed(CLI + "settings:version", "Show the version.", CARE),
}
EXTRAS = {"dashboard": "dashboard", "engine": "engine"}  # what to install where a command's imports are missing


class LazyGroup(TyperGroup):
    """Lists COMMANDS with their static helps; imports a command when its arguments are parsed or completed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The listing's stand-in of a command: a name and its help."""
        listed = COMMANDS.get(cmd_name)
        return listed and TyperCommand(cmd_name, help=listed.help, rich_help_panel=listed.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        command = load(args[0])
        if command is None:
            if ctx.resilient_parsing:
                return None, None, args[1:]
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], COMMANDS)}")
        _unfold(command)
        return args[0], command, args[1:]


def _unfold(command: Any) -> None:
    """A paragraph of help is folded by the terminal: line breaks of the source would stay in the middle of it."""
    command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or "") or None
    for child in getattr(command, "commands", {}).values():
        _unfold(child)


def load(name: str) -> Any:
    """The command of this name, ready to run; None if there is none. Raises MissingExtra, CommandError."""
    listed = COMMANDS.get(name)
    target = listed.target if listed and listed.target else _installed(name)
    if target is None:
        if listed is None:
            return None
        raise exits.CommandError(
            f"this installation has no `samplestore {name}`. Run: pip install --force-reinstall samplestore"
        )
    module, _, attribute = target.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "samplestore":
            raise
        raise MissingExtra(f"samplestore {name} (no module {error.name})", EXTRAS.get(name, "demo")) from error
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name)(found)
        found = app
    command = typer.main.get_command(found)
    command.name = name
    return command


def _installed(name: str) -> str | None:
    """MODULE:NAME of an entry point, of samplestore's own or of another package."""
    from importlib.metadata import entry_points  # 50 ms that --help need not pay

    return next((entry.value for entry in entry_points(group=ENTRY_POINTS, name=name)), None)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"samplestore {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar=ENV_DEBUG, help="Show tracebacks of errors.", show_default=False)
    ] = False,
) -> None:
    """A durable, queryable rollout store for RL post-training.

    Exit codes: 0 ok, 1 failure, 2 usage, 3 database missing or of another schema, 4 engine unreachable, 5 check failed, 130 interrupted.
    """  # noqa: E501 - a line break here would be one in the help
    if debug:
        os.environ[ENV_DEBUG] = "1"


def build() -> Any:
    """The root command."""
    app = typer.Typer(name="samplestore", cls=LazyGroup, no_args_is_help=True)
    app.callback()(_root)
    return typer.main.get_command(app)


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code. Deliberate errors become one paragraph on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that can't show a character gets its escape
    debug = os.environ.get(ENV_DEBUG)
    given = sys.argv[1:] if args is None else list(args)
    for arg in given:
        if not _is_text(arg):
            _tell(f"{arg!r} is not UTF-8: neither a database nor JSON can hold it. See: samplestore --help")
            return exits.USAGE
    try:
        TYPED.set(given)
        result = build().main(args=[*given], prog_name="samplestore", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else exits.OK
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILED
    except typer.Abort:
        note("error: cancelled, nothing was changed")
        return exits.FAILED
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except Exception as error:
        return _report(error)
    finally:
        _restore(debug)


def _is_text(arg: str) -> bool:
    """Python hands bytes that are not UTF-8 on as lone surrogates, which nothing can write."""
    try:
        arg.encode()
    except UnicodeEncodeError:
        return False
    return True


def _restore(debug: str | None) -> None:
    """--debug is for one command line, also where several run in one process (tests)."""
    if debug is None:
        os.environ.pop(ENV_DEBUG, None)


def _report(error: Exception) -> int:
    """Tell an error on stderr; raise it again if it is none that anybody foresaw."""
    if os.environ.get(ENV_DEBUG, "") not in ("", "0") and not hasattr(error, "format_message"):
        traceback.print_exception(error)
        return exits.exit_code(error)
    if isinstance(error, SampleStoreError):
        _tell(exits.with_next_command(error), lines=bool(getattr(error, "rows", None)))
    elif hasattr(error, "format_message"):  # a usage error of typer
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error}\n" if str(error) else "")
            return exits.USAGE
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "samplestore"
        _tell(f"{exits.ended(error.format_message())} See: {path} --help")
        return int(getattr(error, "exit_code", exits.USAGE))
    elif exits.is_database_error(error):
        first = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        _tell(f"the database said: {first.rstrip('.')}. Look further with: {to_type(*exits.DOCTOR)}")
    elif isinstance(error, OSError) and error.filename is not None:  # a name that was given can't be used
        place = os.fsdecode(error.filename)
        _tell(f"{place}: {error.strerror or error}. Look at it with: ls -ld {shlex.quote(place)}")
    else:
        raise error
    return exits.exit_code(error)


def _tell(text: str, *, lines: bool = False) -> None:
    from samplestore.logs import mask

    note(f"error: {mask(text)}", lines=lines)
