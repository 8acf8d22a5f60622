"""samplestore engines: list, pause, continue, update, abort, release-memory, resume-memory, flush-cache, unlist,
forget."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, RunName, TheRun, opened
from samplestore.cli.output import emit_json, note, printable, say, table, when
from samplestore.states import WeightUpdateMode
from samplestore.words import amount, which
from samplestore.workers import control, routers
from samplestore.workers.checkpoints import require_complete
from samplestore.workers.engine_calls import HEALTH_S, LOOK_S, PATIENT_S, look, looks_alive, named
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.engine_telling import confirm, finish, tell

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Engines: look at them, tell them what to do.")

Engines: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="URL", help="This engine, instead of those of the run; may be repeated."),
]
RouterUrl: TypeAlias = Annotated[
    str | None, typer.Option("--router", metavar="URL", help="The engines that this router lists, instead.")
]
Timeout: TypeAlias = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that each engine is given.")]


# -- the commands


@app.command("list")
def list_engines(
    db: Db = None,
    run: RunName = None,
    live: Annotated[bool, typer.Option("--live", help="Ask each engine now (exit 4 if one does not answer).")] = False,
    engine: Engines = None,
    router: RouterUrl = None,
    as_json: AsJson = False,
) -> None:
    """Engines of all runs (or one), and whether they serve their run's current weights. With --router or --engine:
    those, asked now, without a database."""
    if engine or router:
        _show_live([], named(engine, router), router, as_json)
        return
    from samplestore.queries.inspect import engines

    with opened(db) as store:
        name = None if run is None else store.existing_run(run).name
        found = engines(store.database, name)
    if live:
        _show_live(found, [e["url"] for e in found], None, as_json)
        return
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
def pause(
    mode: Annotated[
        str, typer.Option("--mode", help="abort: hand back what runs; retract: compute it again; in_place: freeze it.")
    ] = "abort",
    db: Db = None,
    run: TheRun = None,
    engine: Engines = None,
    router: RouterUrl = None,
    timeout: Timeout = control.PAUSE_S,
    as_json: AsJson = False,
) -> None:
    """Engines generate nothing until they are told to continue; new requests wait."""
    if mode not in control.PAUSE_MODES:
        raise exits.CommandError(
            f"{mode!r} is no way to pause: {', '.join(control.PAUSE_MODES)}. See: samplestore engines pause --help",
            exits.USAGE,
        )

    async def call(client: EngineClient, url: str) -> str:
        await control.pause(client, url, mode, timeout)
        return "paused" if await looks_alive(client, url) else "paused; its health check fails meanwhile"

    told = tell("pause", call, db, run, engine, router, timeout + HEALTH_S, as_json, {"mode": mode})
    if any("health" in one.said for one in told if not one.failed):
        note(
            "warning: these engines generate a token to answer /health, so paused they look dead, and a router takes "
            "them out after some minutes. Start them with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0, or go on soon: "
            "samplestore engines continue"
        )
    finish(told)


@app.command("continue")
def continue_(
    db: Db = None,
    run: TheRun = None,
    engine: Engines = None,
    router: RouterUrl = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """End a pause; harmless where there is none."""

    async def call(client: EngineClient, url: str) -> str:
        await control.proceed(client, url, timeout)
        return "generates"

    finish(tell("continue", call, db, run, engine, router, timeout, as_json))


@app.command()
def update(
    path: Annotated[Path, typer.Option("--path", help="Model folder: config.json and complete *.safetensors.")],
    label: Annotated[str, typer.Option("--label", help="Weight version that engines report from then on.")],
    mode: Annotated[
        WeightUpdateMode,
        typer.Option("--mode", help="What becomes of requests that run: handed back, frozen and kept, or waited for."),
    ] = WeightUpdateMode.ABORT,
    db: Db = None,
    run: TheRun = None,
    engine: Engines = None,
    router: RouterUrl = None,
    timeout: Timeout = control.UPDATE_S,
    as_json: AsJson = False,
) -> None:
    """Load weights from disk. For engines without a worker: a run's workers do this by themselves when weights are
    published, and bring engines back to the run's current version. Refused while somebody else updates one of them.
    Where this machine can't see whether the checkpoint fits, one engine is told first, and the others when it serves
    it."""
    if not 0 < len(label) <= 200:
        raise exits.CommandError("a label has 1 to 200 characters. See: samplestore engines update --help", exits.USAGE)
    if path.is_absolute() and not os.path.isdir(path):
        note(f"warning: {path} can't be seen from this machine: one engine is told first, to find out what it is")
    else:
        require_complete(path)

    async def call(client: EngineClient, url: str) -> str:
        await control.change_weights(client, url, str(path.absolute()), label, mode, timeout)
        return f"serves {label}"

    async def unsure(client: EngineClient, url: str) -> bool:
        return await control.may_not_fit(client, url, str(path.absolute()), PATIENT_S)

    details = {"path": str(path.absolute()), "label": label, "mode": mode.value}
    finish(tell("update", call, db, run, engine, router, 2 * timeout, as_json, details, unsure))


@app.command()
def abort(
    rid: Annotated[str | None, typer.Option("--rid", help="This request.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything that runs there, whoever asked for it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    db: Db = None,
    run: TheRun = None,
    engine: Engines = None,
    router: RouterUrl = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Abort requests at engines. Samples that a worker generates stay resumable; for those of a run: samplestore
    abort."""
    if bool(rid) == all_:
        raise exits.CommandError("say either --rid or --all. See: samplestore engines abort --help", exits.USAGE)
    if all_:
        confirm(yes, "abort --all", "Abort everything that these engines run, of other clients too")

    async def call(client: EngineClient, url: str) -> str:
        if rid:
            await control.abort(client, url, rid, timeout)
            return "told; whether it knew the request it does not say"
        await control.abort_all(client, url, timeout)
        return "told to abort everything"

    finish(tell("abort", call, db, run, engine, router, timeout, as_json, {"rid": rid, "all": all_}))


Tags: TypeAlias = Annotated[
    list[str] | None, typer.Option("--tag", help="kv_cache, weights or cuda_graph; may be repeated. All if left out.")
]


@app.command("release-memory")
def release_memory(
    tag: Tags = None,
    db: Db = None,
    run: TheRun = None,
    engine: Engines = None,
    router: RouterUrl = None,
    timeout: Timeout = control.MEMORY_S,
    as_json: AsJson = False,
) -> None:
    """Give GPU memory to a trainer on the same GPU. Pause the engines before (--mode abort); they need
    --enable-memory-saver."""

    async def call(client: EngineClient, url: str) -> str:
        await control.release_memory(client, url, tag or (), timeout)
        return "released"

    finish(tell("release-memory", call, db, run, engine, router, timeout + 20.0, as_json, {"tags": tag}))


@app.command("resume-memory")
def resume_memory(
    tag: Tags = None,
    yes: Annotated[bool, typer.Option("--yes", help="They have released these tags: do not ask.")] = False,
    db: Db = None,
    run: TheRun = None,
    engine: Engines = None,
    router: RouterUrl = None,
    timeout: Timeout = control.MEMORY_S,
    as_json: AsJson = False,
) -> None:
    """Take the memory back, with the tags that were released. An engine that has released nothing dies of it. Then
    update the weights, then continue."""
    confirm(yes, "resume-memory", "An engine that has not released these tags dies of this. Have all of them")

    async def call(client: EngineClient, url: str) -> str:
        await control.resume_memory(client, url, tag or (), timeout)
        return "resumed"

    finish(tell("resume-memory", call, db, run, engine, router, timeout + 20.0, as_json, {"tags": tag}))


@app.command("flush-cache")
def flush_cache(
    db: Db = None,
    run: TheRun = None,
    engine: Engines = None,
    router: RouterUrl = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Empty the prefix cache; an engine refuses while it has requests."""

    async def call(client: EngineClient, url: str) -> str:
        await control.flush_cache(client, url, timeout)
        return "flushed"

    finish(tell("flush-cache", call, db, run, engine, router, timeout, as_json))


@app.command()
def unlist(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine, as the router lists it.")],
    router: Annotated[str, typer.Option("--router", metavar="URL", help="The router that is to leave it out.")],
) -> None:
    """Take an engine out of a router's list: it gets no new requests there, and what runs goes on. For an engine of
    another model."""
    [base, engine] = named([router], None) + named([url], None)

    async def call() -> bool:
        async with EngineClient(LOOK_S) as client:
            known = engine in await routers.listed(client, base)
            await routers.unregister(client, base, engine)
            return known

    if not asyncio.run(call()):
        raise exits.CommandError(f"router {base} does not list {engine}. See: samplestore engines list --router {base}")
    say(f"router {base} sends no new requests to {engine}")


@app.command()
def forget(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine, as `samplestore engines list` shows it.")],
    db: Db = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Although live workers of the run may use it; those register it again.")
    ] = False,
) -> None:
    """An engine is no longer its run's: another run may take it. Refused while workers of its run that may use it are
    alive: they are named."""
    from samplestore.queries.inspect import engines
    from samplestore.verbs.tx import Tx
    from samplestore.verbs.weights import forget_engine

    with opened(db) as store:
        owner = next((e["run"] for e in engines(store.database) if e["url"] == url), None)
        if owner is None:
            raise exits.CommandError(f"no run has an engine {printable(url)}. List them with: samplestore engines list")

        def work(tx: Tx) -> None:
            if forget_engine(tx, url, anyway):
                tx.event("engine_forgotten", None, details={"url": url})

        store.existing_run(owner).transact(work)
        say(f"run {owner} has forgotten engine {url}")


# -- list --live


def _show_live(known: list[dict[str, Any]], urls: list[str], router: str | None, as_json: bool) -> None:
    """What engines say now, beside what the database knows of them."""
    stored = {e["url"]: e for e in known}
    found, through = asyncio.run(look(urls, router))
    rows = [
        {**{k: stored[url][k] for k in ("run", "state", "current_version") if url in stored}, "url": url, **seen}
        for url, seen in found.items()
    ]
    if as_json:
        told = None if through is None else {
            "url": through.url, "kind": through.kind, "version": through.version,
            "drops": sorted(through.drops), "drops_sampling": sorted(through.drops_sampling),
        }  # fmt: skip
        emit_json({"router": told, "engines": rows})
    else:
        if through is not None:
            lost = [*sorted(through.drops), *(f"sampling_params.{name}" for name in sorted(through.drops_sampling))]
            say(f"{through}; drops from requests: {', '.join(lost)}")
        columns = ("run", "state", "health", "label", "release", "running", "queued", "tokens", "generated", "error")
        table(("engine", *columns), [(row["url"], *(row.get(name) for name in columns)) for row in rows])
    away = [row for row in rows if row["health"] != "ok"]
    if away:
        note(
            f"error: {len(away)} of {amount(len(rows), 'engine')} {which(len(away), 'is', 'are')} not well; "
            f"{away[0]['url']}: {away[0]['error']}. "
            "Paused ones go on with: samplestore engines continue"
        )
        raise typer.Exit(exits.ENGINE)
