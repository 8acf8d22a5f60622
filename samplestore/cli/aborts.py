"""samplestore aborts: what was interrupted, and what it cost."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, RunName, opened_run
from samplestore.cli.output import duration, emit_json, pairs, say, table, when

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def aborts(
    db: Db = None,
    run: RunName = None,
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="How far back: 90s, 30min, 6h, 7d.")] = "24h",
    as_json: AsJson = False,
) -> None:
    """What was interrupted in the middle: reasons, times, engines, workers, weight versions, and the tokens it cost.

    An abort that a worker stores is one event, the release that gives its sample back another.
    """
    from samplestore.queries.aborts import read

    seconds = _seconds(since)
    with opened_run(db, run) as found:
        told, name = read(found.database, found.id, seconds), found.name
    if as_json:
        emit_json({"run": name, **told})
        return
    if not told["by_reason"]:
        say(f"run {name}: nothing was interrupted since {when(told['since'])}. Look further back with: --since 30d")
        return
    _print(told)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?(s|min|h|d)", text.strip())
    if match is None or not float(match[1]):
        raise exits.CommandError(
            f"--since {text!r} is no time. Write it like 90s, 30min, 6h or 7d: samplestore aborts --since 6h",
            exits.USAGE,
        )
    return float(match[1]) * UNITS[match[2]]


def _print(told: dict[str, Any]) -> None:
    cost = told["cost"]
    pairs(
        [
            ("since", f"{when(told['since'])}, {duration(told['until'] - told['since'])}"),
            ("resumes", f"{cost['resumes']:,}"),
            ("tokens", f"{cost['kept']:,} kept by resuming, {cost['lost']:,} lost, "
                       f"{cost['prefilled_again']:,} prefilled again"),
        ]
    )  # fmt: skip
    say()
    table(
        ("event", "reason", "times", "tokens so far", "last"),
        [(r["kind"], r["reason"], r["times"], r["tokens_so_far"], when(r["last_at"])) for r in told["by_reason"]],
    )
    say()
    spans = told["over_time"]
    first = next((i for i, r in enumerate(spans) if any(r[k] for k in KINDS)), 0)
    spans = spans[max(0, first - 1) :]  # nothing happened in what is left out
    most = max(sum(r[k] for k in KINDS) for r in spans)
    table(
        ("from", *KINDS, ""),
        [(when(r["from"]), *(r[k] for k in KINDS), _bar(sum(r[k] for k in KINDS), most)) for r in spans],
    )
    for name, rows in (("engine", told["by_engine"]), ("worker", told["by_worker"])):
        if rows:
            say()
            table((name, "requests cut short", "generated", "stored", "lost"), [_row(name, r) for r in rows])
    if told["by_version"]:
        say()
        table(
            ("weight version", "aborted"),
            [("unknown" if r["version"] is None else str(r["version"]), r["aborted"]) for r in told["by_version"]],
        )


KINDS = ("abort", "release", "reap", "fail")
WIDTH = 20


def _bar(n: int, most: int) -> str:
    return "#" * -(-WIDTH * n // most) if most else ""


def _row(name: str, r: dict[str, Any]) -> tuple[Any, ...]:
    who = r["engine"] or "unknown" if name == "engine" else f"{r['worker']} ({r['name']}, {r['state']})"
    return who, r["cut_short"], r["generated"], r["stored"], r["lost"]
