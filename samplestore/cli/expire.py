"""samplestore expire: close groups that are too old."""

from __future__ import annotations

from typing import Annotated

import typer

from samplestore.cli import exits
from samplestore.cli.common import Db, Reason, TheRun, chosen_run, listed
from samplestore.cli.control import existing_groups, naming
from samplestore.cli.output import say
from samplestore.words import amount, which


def expire(
    groups: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[GROUP...]", min=0, help="Numbers of groups (`samplestore groups` shows them).", show_default=False
        ),
    ] = None,
    reason: Reason = None,
    max_staleness: Annotated[
        int | None,
        typer.Option("--max-staleness", min=0, help="All groups that are more versions behind than this."),
    ] = None,
    db: Db = None,
    run: TheRun = None,
) -> None:
    """Close groups as stale: those that are named, or all that are too many versions behind.

    Their tokens have the fate stale, and whoever generates for them is told to stop. A group that a trainer holds or
    has consumed can't be closed. A rewind to weights that make a group fresh again brings it back; `drop` is for good.
    """
    if bool(groups) == (max_staleness is not None):
        raise exits.CommandError(
            "say which groups: their numbers, or --max-staleness N. See: samplestore expire --help", exits.USAGE
        )
    if groups and not reason:
        raise exits.CommandError("say why these groups go: --reason TEXT. See: samplestore expire --help", exits.USAGE)
    with chosen_run(db, run) as found:
        if groups:
            named = existing_groups(found, groups)
            with naming(named):
                done = found.expire([*named], reason=reason)
            told = f" ({listed([*named.values()])})"
        else:
            done = found.expire(max_staleness=max_staleness, reason=reason)
            told = f" that {which(done, 'was', 'were')} more than {amount(max_staleness or 0, 'version')} behind"
        say(f"run {found.name}: {amount(done, 'group')}{told} {which(done, 'is', 'are')} stale")
