"""Telling many engines at once, for the command line: who they are, what each said, what is recorded of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from samplestore.cli import exits
from samplestore.cli.common import existing, opened
from samplestore.cli.output import emit_json, note, table
from samplestore.words import amount, which
from samplestore.workers.engine_calls import Call, Told, Unsure, named, one_first

if TYPE_CHECKING:
    from samplestore.run import Run
    from samplestore.store import Store

UPDATE = "update"


def tell(
    what: str, call: Call, db: str | None, run: str | None, engine: list[str] | None, router: str | None,
    timeout_s: float, as_json: bool, details: dict[str, Any] | None = None, unsure: Unsure | None = None,
) -> list[Told]:  # fmt: skip
    """Do it at all engines at once, or at one first where some are `unsure`; show what each said, and record it where a
    run is known: one was named, or its engines were taken from the database."""
    urls = named(engine, router) if engine or router else None
    if urls is not None and run is None:
        told = asyncio.run(one_first(urls, call, timeout_s, unsure))
    else:
        with opened(db) as store:
            told = tell_run(what, call, _run_of(store, run), urls, timeout_s, details or {}, unsure)
    if as_json:
        emit_json({"engines": [{"url": t.url, "ok": not t.failed, "said": t.said} for t in told]})
    else:
        table(("engine", "", "said"), [(t.url, "FAILED" if t.failed else "ok", t.said) for t in told])
    return told


def _run_of(store: Store, run: str | None) -> Run:
    names = store.run_names()
    if run is None and len(names) > 1:
        raise exits.CommandError(
            f"the database has several runs ({', '.join(names[:20])}): name one with --run NAME, or name engines "
            "with --engine URL. List the runs with: samplestore runs",
            exits.USAGE,
        )
    return existing(store, run)


def tell_run(
    what: str, call: Call, owner: Run, urls: list[str] | None, timeout_s: float, details: dict[str, Any],
    unsure: Unsure | None = None,
) -> list[Told]:  # fmt: skip
    from samplestore.queries.inspect import engines
    from samplestore.verbs.tx import Tx

    if urls is None:
        urls = [e["url"] for e in engines(owner.database, owner.name)]
    if not urls:
        raise exits.CommandError(f"run {owner.name} has no engines. Name some with: --engine URL or --router URL")
    if what == UPDATE:
        with _driving(owner, urls) as held:
            told = asyncio.run(one_first(urls, call, timeout_s, unsure))
            _record_updates(owner, held, told, details["label"])
    else:
        told = asyncio.run(one_first(urls, call, timeout_s, unsure))

    def record(tx: Tx) -> None:
        for one in (one for one in told if not one.held_back):
            tx.event(
                f"engine_{what.replace('-', '_')}", one.said if one.failed else None,
                details={**details, "url": one.url, "ok": not one.failed},
            )  # fmt: skip

    owner.transact(record)
    if what == UPDATE and not all(one.failed for one in told):
        _warn_of_workers(owner, details)
    return told


# -- updates by hand


@contextmanager
def _driving(owner: Run, urls: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The updates of these engines are this process's, as those of a worker are: nobody else begins one meanwhile, and
    if this process dies they are free again. Raises EngineUpdating, before any engine was told."""
    from samplestore.heart import Heart
    from samplestore.states import WorkerKind
    from samplestore.verbs.weights import claim_engines

    worker_id = owner.register(WorkerKind.TOOL.value, "engines update")
    heart = Heart(owner, worker_id)
    try:
        yield owner.transact(lambda tx: claim_engines(tx, worker_id, urls))
    finally:
        heart.leave()


def _record_updates(owner: Run, held: list[dict[str, Any]], told: list[Told], label: str) -> None:
    """What the engines serve now. One that failed is out, as after a worker's update, until a worker finds it well. One
    that was not told is as it was, and free again when this process has left."""
    from samplestore.verbs.tx import Tx
    from samplestore.verbs.weights import engine_updated

    said = {one.url: one for one in told}

    def record(tx: Tx) -> None:
        for one in held:
            answer = said[one["url"]]
            if answer.held_back:
                continue
            engine_updated(tx, one, answer.serves if answer.failed else label, answer.said if answer.failed else None)

    owner.transact(record)


def _warn_of_workers(owner: Run, details: dict[str, Any]) -> None:
    current = next(v.label for v in owner.weight_versions() if v.version == owner.current_version)
    if current != details["label"]:
        note(
            f"warning: run {owner.name} is at {current}, and its workers bring engines back to that. To change "
            f"it: run.publish_weights({details['path']!r})"
        )


# -- before and after


def confirm(yes: bool, command: str, question: str) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise exits.CommandError(
            f"nobody is there to ask. {question}? Say so with: samplestore engines {command} --yes", exits.USAGE
        )
    typer.confirm(question, abort=True)


def finish(told: list[Told]) -> None:
    """Exit 4 where one has failed."""
    failed = [one for one in told if one.failed]
    if held := [one for one in failed if one.held_back]:
        note(
            f"error: {failed[0].url} did not take it: {failed[0].said}. {amount(len(held), 'other')} "
            f"{which(len(held), 'was not told, and serves what it did', 'were not told, and serve what they did')}. "
            "Look with: samplestore engines list --live"
        )
        raise typer.Exit(exits.ENGINE)
    if failed:
        note(
            f"error: {len(failed)} of {amount(len(told), 'engine')} did not do it; {failed[0].url}: {failed[0].said}. "
            "Look with: samplestore engines list --live"
        )
        raise typer.Exit(exits.ENGINE)
