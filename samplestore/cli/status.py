"""samplestore status, why, runs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli.common import AsJson, Db, RunName, existing, opened, opened_run
from samplestore.cli.output import counts, duration, emit_json, fancy, framed, pairs, say, table, when
from samplestore.cli.typed import to_type
from samplestore.states import StalenessMode, StalePolicy
from samplestore.words import amount, which

if TYPE_CHECKING:
    from samplestore.run import Run


def status(
    db: Db = None,
    run: RunName = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C (exit code 130).")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")] = 2.0,
) -> None:
    """What a run looks like now: samples, groups, staleness, workers, engines, batches, aborts."""
    with opened(db) as store:
        if run is None and not store.run_names():  # a new database is in order: nothing is wrong with it
            if as_json:
                emit_json({"run": None})
            else:
                say(f"no runs yet. Create one with: {to_type('add-prompts', 'FILE', '--run', 'NAME')}")
            return
        found = existing(store, run)
        if watch and fancy() and not as_json:
            _watch(found, interval)
            return
        _show(found, as_json)
        while watch:
            time.sleep(interval)
            if not as_json:
                say()
            _show(found, as_json)


def _watch(run: Run, interval: float) -> None:
    """On a terminal: a screen that stands still, and at the end what was last seen, in the scroll-back."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    seen = Text()
    try:
        with Live(screen=True, auto_refresh=False, console=Console(file=sys.stdout)) as live:
            while True:
                seen = framed(lambda: _show(run, False))
                foot = Text(f"every {interval:g} s; Ctrl-C ends it", style="dim")
                live.update(Text.assemble(seen, "\n", foot), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        Console(file=sys.stdout).print(seen)
        raise


def _show(run: Run, as_json: bool) -> None:
    from samplestore.queries.status import status as read

    told = read(run.database, run.id)
    told["why"] = run.why().as_json()
    told["tokens"] = run.ledger()["by_fate"]
    if as_json:
        emit_json(told)
    else:
        _print(told)
        sys.stdout.flush()


def _print(told: dict[str, Any]) -> None:
    last = told["batches"].pop("last")
    batches = counts(told["batches"])
    if last is not None:
        batches += (
            f"; last: step {last['step']} {last['state']}, "
            f"{amount(last['n_groups'], 'group')}, {amount(last['n_tokens'], 'token')}"
        )
    samples = counts(told["samples"])
    pairs(
        [
            ("run", f"{told['run']} ({told['state']})"),
            ("uuid", told["uuid"]),
            ("as of", when(told["as_of"])),
            ("weights", f"version {told['current_version']}, timeline {told['timeline']}"),
            *_mode(told),
            ("prompts", f"{told['prompts']:,}, epoch {told['epoch']}"),
            *_datasets(told["datasets"]),
            ("groups", counts(told["groups"])),
            ("samples", f"{samples}; in flight {told['in_flight']:,}, resumed {told['resumed_samples']:,}"),
            ("tokens", counts(told["tokens"])),
            ("staleness", f"of ready groups: {_staleness(told['staleness'])}"),
            ("batches", batches),
            ("next batch", _why(told["why"])),
            *([("starving", "; ".join(told["starving"]))] if told["starving"] else []),
            ("engines", _engines(told["engines"])),
            *([("stages", f"waiting or with a worker: {counts(told['stages'])}")] if told["stages"] else []),
            *([("arrays", _arrays(told["arrays"]))] if told["arrays"] else []),
            *([("failures", _failures(told["failures"]))] if told["failures"] else []),
        ]
    )
    _parts(told)


def _mode(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Of a run that goes in steps."""
    if told["mode"] == "async":
        return []
    step = "the step has its groups, and waits for new weights" if told["step_over"] else "a step is generated"
    return [("mode", f"{told['mode']}: {step}")]


def _failures(told: dict[str, Any]) -> str:
    return f"{told['count']:,}; the newest, {when(told['newest_at'])}: {told['newest_error'][:200]}"


def _arrays(sizes: list[dict[str, Any]]) -> str:
    return "; ".join(f"{a['name']} {a['arrays']:,} with {amount(a['bytes'], 'byte')}" for a in sizes)


def _parts(told: dict[str, Any]) -> None:
    if told["workers"]:
        say()
        table(
            ("worker", "kind", "name", "state", "heartbeat", "holds", "host", "pid", "error"),
            [
                (
                    str(w["id"]), w["kind"], w["name"], _worker_state(w), duration(w["heartbeat_age_s"]), w["samples"],
                    w["host"], str(w["pid"]), w["error"],
                )
                for w in told["workers"]
            ],
        )  # fmt: skip
    if told["engines"]:
        say()
        table(
            ("engine", "state", "version", "label", "running", "queued", "generated", "error"),
            [
                (
                    e["url"], e["state"], _or_unknown(e["version"]), e["label"], e["running"], e["queued"],
                    e["generated_tokens"], e["error"],
                )
                for e in told["engines"]
            ],
        )  # fmt: skip
    if told["dropped"]:
        say()
        table(("groups dropped for", "groups"), told["dropped"].items())
    if told["aborts"]:
        say()
        table(("stopped in the middle", "times"), told["aborts"].items())


def _datasets(listed: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The data sets of a run that has more than one."""
    if len(listed) < 2:
        return []
    said = [
        f"{d['name']}: {amount(d['prompts'], 'prompt')} "
        + ("to evaluate on" if d["purpose"] == "eval" else f"({amount(d['served'], 'group')} served)")
        for d in listed
    ]
    return [("data sets", "; ".join(said))]


def _engines(listed: list[dict[str, Any]]) -> str:
    """live 2, failed 1 (url: error); version 3 (2), unknown (1)"""
    if not listed:
        return "none"
    failed = [e for e in listed if e["state"] == "failed"]
    why = f" ({failed[0]['url']}: {str(failed[0]['error'])[:120]})" if failed else ""
    states = counts({"live": len(listed) - len(failed), "failed": len(failed)})
    serves = Counter(_or_unknown(e["version"]) for e in listed)
    return f"{states}{why}; version " + ", ".join(f"{version} ({n:,})" for version, n in sorted(serves.items()))


def _worker_state(worker: dict[str, Any]) -> str:
    silent = worker["state"] == "live" and worker["heartbeat_age_s"] > worker["ttl_s"]
    return "silent" if silent else str(worker["state"])


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _staleness(histogram: dict[str, int]) -> str:
    return ", ".join(f"{n:,} at {lag}" for lag, n in histogram.items()) or "none are ready"


def _why(told: dict[str, Any]) -> str:
    reasons = "; ".join(reason["text"] for reason in told["reasons"])
    n = told["ready_in_window"]
    ready = f"{n:,} of {amount(told['needed'], 'group')} {which(n, 'is', 'are')} ready"
    return f"{ready}: {reasons}" if reasons else f"{ready}"


def why(
    db: Db = None,
    run: RunName = None,
    groups: Annotated[
        int | None,
        typer.Option("--groups", min=1, help="Groups of the batch.", show_default="the run's"),
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option("--max-staleness", min=0, help="Versions that they may lie behind.", show_default="the run's"),
    ] = None,
    staleness_mode: Annotated[
        StalenessMode | None,
        typer.Option("--staleness-mode", help="By which of its tokens a sample is judged.", show_default="the run's"),
    ] = None,
    stale: Annotated[
        StalePolicy | None,
        typer.Option("--stale", help="What the batch does with groups beyond that.", show_default="the run's"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Why is no batch ready? The reasons, most useful first, for a batch with these options."""
    with opened_run(db, run) as found:
        told = found.why(groups, max_staleness, staleness_mode, stale)
        if as_json:
            emit_json({"run": found.name, **told.as_json()})
            return
        say(f"{told.ready_in_window:,} of {amount(told.needed, 'group')} {told.are} ready inside the window")
        for _, text in told.reasons:
            say(f"- {text}")


def runs(db: Db = None, as_json: AsJson = False) -> None:
    """The runs of a database, newest first."""
    from samplestore.queries.inspect import runs as read

    with opened(db) as store:
        found = read(store.database)
    if as_json:
        emit_json({"runs": found})
        return
    table(
        ("run", "state", "prompts", "groups", "version", "timeline", "epoch", "live workers", "created"),
        [
            (
                r["name"], r["state"], r["prompts"], r["groups"], r["current_version"], r["timeline"], r["epoch"],
                r["live_workers"], when(r["created_at"]),
            )
            for r in found
        ],
    )  # fmt: skip
