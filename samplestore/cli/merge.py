"""samplestore merge and fork: whole runs, copied."""

from __future__ import annotations

from typing import Annotated

import typer

from samplestore.cli.common import AsJson, Db, RunName, RunPlace, existing, existing_url, one_name, opened
from samplestore.cli.output import emit_json, say
from samplestore.cli.progress import bar
from samplestore.words import amount


def merge(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="The database that takes them; a SQLite file is made.", show_default=False
        ),
    ],
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="SQLite files, or postgresql://...", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Merge the runs of several databases into one.

    Runs are known by their uuids and groups by their numbers, so repeating the command is harmless, and after a kill it
    goes on where it was, or begins anew if the source went on since then. Nobody may be at work on a source. What was
    in flight there is free here, and leased batches are given back. The sources are not changed.
    """
    import samplestore
    from samplestore.copies.hidden import drop_unfinished
    from samplestore.copies.runs import merge as copy
    from samplestore.logs import mask

    urls = [existing_url(source) for source in sources]  # before the target is made
    told = []
    with samplestore.open(target) as store:
        for url in urls:
            with bar("merge") as progress:
                done = copy(store, url, progress)
            url = mask(url)
            told += [{"source": url, **one.as_json()} for one in done]
            for one in done if not as_json else ():
                say(
                    f"{url}: run {one.run}: {amount(one.groups, 'group')} merged, {one.existing:,} already there; "
                    f"{amount(one.in_flight, 'sample')} in flight and {amount(one.released, 'leased batch')} given back"
                )
        drop_unfinished(store)
        shown = store.database.shown_url
    if as_json:
        emit_json({"target": shown, "runs": told})


def fork(
    at_step: Annotated[
        int,
        typer.Option("--at-step", metavar="N", min=-1, help="The step of its checkpoint; -1 is before the first."),
    ],
    as_: Annotated[str, typer.Option("--as", metavar="NAME", help="The new run's name.")],
    place: RunPlace = None,
    db: Db = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Fork a run: a new run in the same database that stands where the run's checkpoint of step N stood.

    As after a rewind to N: groups that the checkpoint has not seen are there to be trained on or to be finished, the
    prompts and their order go on, and the restored weights are the current version. The run is not changed, and may be
    at work meanwhile. After a kill the same command goes on where it was, or begins anew if the run went on since.
    """
    from samplestore.copies.runs import fork as copy

    named = one_name(place, run, "fork")
    with opened(db) as store:
        source = existing(store, named).name
        with bar(f"fork {source}") as progress:
            done = copy(store, source, at_step, as_, progress)
    if as_json:
        emit_json({"forked_run": source, "step": at_step, **done.as_json()})
    else:
        say(
            f"run {done.run}: {amount(done.groups + done.existing, 'group')} of {source}, as of step {at_step}; "
            f"current weights: version {done.version}"
        )
