"""samplestore prune, backup, restore: what an operator does for the disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, TheRun, chosen_run, database, opened
from samplestore.cli.output import emit_json, say
from samplestore.cli.typed import to_type
from samplestore.words import amount, which

if TYPE_CHECKING:
    from samplestore.retention import Pruned

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def prune(
    db: Db = None,
    run: TheRun = None,
    keep_steps: Annotated[
        int | None,
        typer.Option(
            "--keep-steps", metavar="N", min=0, help="Keep the tokens of the last N steps.", show_default=False
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove the whole run; name it with --run.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Also write the database anew without gaps; nobody may work meanwhile.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove tokens that no checkpoint of the last N steps needs, and give their space back.

    Counters, versions, rewards and the ledger stay. A rewind further back than N steps is refused from then on.
    Workers and trainers go on meanwhile.
    """
    from samplestore import retention

    if (keep_steps is None) == (not everything):
        raise exits.CommandError(
            "say what may go: the tokens of old steps, or a whole run. Try: samplestore prune --keep-steps 20",
            exits.USAGE,
        )
    if everything and run is None:
        raise exits.CommandError(
            f"--all removes a whole run: name it. Try: {to_type('prune', '--all', '--run', 'NAME')}", exits.USAGE
        )
    with chosen_run(db, run) as found:
        if everything:
            _ask(
                yes,
                to_type("prune", "--all", "--run", found.name, "--yes"),
                f"Remove run {found.name} and all it holds",
            )
        done = retention.remove(found) if everything else retention.prune(found, keep_steps or 0)
        if full:
            retention.rewrite(found.database)
        after = retention.disk_bytes(found.database)
        url, name, sqlite = found.database.shown_url, found.name, found.database.is_sqlite
    if as_json:
        emit_json({"run": name, **done.as_json(), "after": after})
    else:
        _told(done, name, url, after, sqlite, keep_steps)


def _told(done: Pruned, name: str, url: str, after: int, sqlite: bool, keep: int | None) -> None:
    what = "it is gone" if done.retention_step is None else f"steps up to {done.retention_step} are pruned"
    say(
        f"run {name}: {what}; {amount(done.groups, 'group')}, {amount(done.segments, 'segment')}, "
        f"{amount(done.freed_bytes, 'byte')} of tokens removed in {amount(done.slices, 'transaction')} "
        f"(slowest {1000 * done.slowest_s:.0f} ms)"
    )
    if done.files:
        say(f"{amount(done.files, 'array file')} removed; {which(done.files, 'its', 'their')} bytes are among those")
    given = done.before - after
    say(
        f"{url}: {amount(done.before, 'byte')} before, {after:,} now; {amount(max(0, given), 'byte')} given back to "
        "the disk"
    )
    if given < done.freed_bytes:
        why = "a page goes back when all of it is free" if sqlite else "PostgreSQL keeps the gaps"
        again = to_type("prune", "--run", name, "--keep-steps", str(keep), "--full")
        say(
            f"the rest is used again by what comes ({why})"
            + ("" if keep is None else f"; to give it back too: {again}")
        )


def backup(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The file to make.", show_default=False)],
    db: Db = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """A consistent copy in one file, while everything runs; checked before it counts.

    SQLite databases become a SQLite file, PostgreSQL's one of pg_dump.
    """
    from samplestore.backups.backup import backup as copy

    with opened(db) as store:
        url = store.database.shown_url
        done = copy(store.database, target, overwrite=overwrite)
    if as_json:
        emit_json({"database": url, **done.as_json()})
    else:
        say(f"{done.target}: {amount(done.size, 'byte')}, schema revision {done.revision}, of {url}")
        if done.arrays:
            say(f"{done.target}.arrays: {amount(done.arrays, 'array file')}; keep the folder beside the file")


def restore(
    backup: Annotated[
        Path, typer.Argument(metavar="BACKUP", help="What `samplestore backup` made.", show_default=False)
    ],
    db: Db = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a database of a backup, after checking it: its bytes, its schema, every promise of every run.

    An older schema is migrated. Who was at work when the backup was taken is declared dead, and its samples are free.
    """
    from samplestore.backups.backup import restore as rebuild
    from samplestore.engine import Database

    found = Database(database(db), reconnect_s=0.0)
    try:
        done = rebuild(backup, found, overwrite=overwrite)
    finally:
        found.close()
    if as_json:
        emit_json(done.as_json())
    else:
        say(
            f"{done.database}: {amount(len(done.runs), 'run')} of {backup} (schema revision {done.revision}), all "
            "checked. Discard checkpoints that are newer than its last committed step"
        )


def _ask(yes: bool, command: str, question: str) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise exits.CommandError(f"nobody is there to ask. Say it with: {command}", exits.USAGE)
    typer.confirm(f"{question}? This can't be taken back", abort=True)
