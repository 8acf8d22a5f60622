"""samplestore expire: close groups that are too old."""

from __future__ import annotations

from typing import Annotated

import typer

from samplestore.cli import exits
from samplestore.cli.common import Db, Reason, TheRun, chosen_run, listed, opened
from samplestore.cli.control import existing_groups, one_run
from samplestore.cli.output import say


def expire(
    groups: Annotated[
        list[int] | None,
        typer.Argument(metavar="[GROUP...]", help="Group ids (`samplestore groups` shows them).", show_default=False),
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
            "say which groups: their ids, or --max-staleness N. See: samplestore expire --help", exits.USAGE
        )
    if not groups:
        with chosen_run(db, run) as found:
            done = found.expire(max_staleness=max_staleness, reason=reason)
            say(f"run {found.name}: {done:,} groups that were more than {max_staleness} versions behind are stale")
        return
    if not reason:
        raise exits.CommandError("say why these groups go: --reason TEXT. See: samplestore expire --help", exits.USAGE)
    with opened(db) as store:
        rows = existing_groups(store, groups)
        owner = store.existing_run(one_run(rows, "groups", "expire"))
        done = owner.expire([row["id"] for row in rows], reason=reason)
        say(f"run {owner.name}: {done:,} groups are stale (numbers {listed([row['number'] for row in rows])})")
