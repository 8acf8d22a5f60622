"""samplestore engines list, samplestore engines forget URL."""

from __future__ import annotations

from typing import Annotated

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, RunName, opened
from samplestore.cli.output import emit_json, printable, say, table, when

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Engines and the weights they serve.")


@app.command("list")
def list_engines(db: Db = None, run: RunName = None, as_json: AsJson = False) -> None:
    """Engines of all runs (or one), and whether they serve their run's current weights."""
    from samplestore.queries.inspect import engines

    with opened(db) as store:
        name = None if run is None else store.existing_run(run).name
        found = engines(store.database, name)
    if as_json:
        emit_json({"engines": [{**e, "up_to_date": e["version"] == e["current_version"]} for e in found]})
        return
    table(
        ("engine", "run", "state", "serves", "should serve", "label", "failures", "updated", "error"),
        [
            (
                e["url"], e["run"], e["state"], "unknown" if e["version"] is None else str(e["version"]),
                str(e["current_version"]), e["label"], e["failures"], when(e["updated_at"]), e["error"],
            )
            for e in found
        ],
    )  # fmt: skip


@app.command()
def forget(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine, as `samplestore engines list` shows it.")],
    db: Db = None,
) -> None:
    """An engine is no longer its run's: another run may take it. A worker that still uses it registers it again."""
    from samplestore.queries.inspect import engines
    from samplestore.verbs.tx import Tx
    from samplestore.verbs.weights import forget_engine

    with opened(db) as store:
        owner = next((e["run"] for e in engines(store.database) if e["url"] == url), None)
        if owner is None:
            raise exits.CommandError(f"no run has an engine {printable(url)}. List them with: samplestore engines list")

        def work(tx: Tx) -> None:
            if forget_engine(tx, url):
                tx.event("engine_forgotten", None, details={"url": url})

        store.existing_run(owner).transact(work)
        say(f"run {owner} has forgotten engine {url}")
