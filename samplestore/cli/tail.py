"""samplestore tail: the events of a run, as they happen."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli.common import Db, RunName, opened_run
from samplestore.cli.output import emit_json, note, say, when

if TYPE_CHECKING:
    from samplestore.queries.events import Follower
    from samplestore.run import Run


def tail(
    db: Db = None,
    run: RunName = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=1000, help="So many that have been.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="KIND", help="Only such events, e.g. abort; may be repeated.", show_default="all"
        ),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for each event.")] = False,
) -> None:
    """The run's events: aborts, resumes, failures, weight updates, batches, rewinds, and what operators did.

    With --follow it waits for more, also while the database is away. Ctrl-C ends it with exit code 130.
    """
    from samplestore.queries.events import Follower

    with opened_run(db, run) as found:
        follower = Follower(found.database, found.id, kind or ())
        _tell(found, follower.newest(lines), as_json)
        while follow:
            sys.stdout.flush()
            time.sleep(interval)
            _tell(found, _more(follower), as_json)


def _more(follower: Follower) -> list[dict[str, Any]]:
    from samplestore.errors import StoreBusy, StoreUnavailable

    away = False
    while True:
        try:
            found = follower.more()
        except (StoreBusy, StoreUnavailable) as error:
            if not away:
                note(f"waiting: {error}")
            away = True
        else:
            if away:
                note("the database is back")
            return found


def _tell(run: Run, events: list[dict[str, Any]], as_json: bool) -> None:
    """One line for each. Groups and samples are named as everywhere: by number, and GROUP/INDEX."""
    from samplestore.queries.inspect import groups_by_id, samples_by_id

    def ids(name: str) -> list[int]:
        return sorted({event[name] for event in events if event[name] is not None})

    groups = {row["id"]: row["number"] for row in groups_by_id(run.database, ids("group_id"))}
    samples = {row["id"]: row for row in samples_by_id(run.database, ids("sample_id"))}
    for event in events:
        of = samples.get(event["sample_id"])
        number = groups.get(event["group_id"], of and of["number"])
        _line(run, {**event, "group": number, "sample": of and f"{of['number']}/{of['index']}"}, as_json)


def _line(run: Run, event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json({"run": run.name, **event, "at": when(event["at"]), "at_s": event["at"]})
        return
    place = "group" if event["sample"] is None else "sample"
    names = {"worker_id": "worker", place: place, "step": "step", "version": "version", "tokens": "tokens"}
    told = [f"{shown} {event[name]}" for name, shown in names.items() if event[name] is not None]
    details = {k: v for k, v in (event["details"] or {}).items() if k != "call" and v is not None}
    parts = [", ".join(told), event["reason"], json.dumps(details, default=str) if details else None]
    say("  ".join([when(event["at"]), f"{event['kind']:<16}", *filter(None, parts)]).rstrip())
