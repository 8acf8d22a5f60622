"""Why is no batch ready? One answer for the batch timeout, `samplestore status` and the dashboard."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore import filters
from samplestore.arguments import choice
from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.errors import InvalidSetting
from samplestore.models import EngineRow, LedgerTotal, Run, Sample, SampleGroup, Worker
from samplestore.queries import obstacles, serving, stages
from samplestore.queries.starving import AGAIN, regenerated
from samplestore.runsettings import RunSettings
from samplestore.statements import staleness
from samplestore.states import (
    CLAIMABLE,
    UNFINISHED_GROUP,
    GroupState,
    RolloutMode,
    RunState,
    StalePolicy,
    WorkerKind,
    WorkerState,
)
from samplestore.types import Why
from samplestore.words import amount, amount_is, which

run, group, sample, worker, engine, ledger = (
    t.__table__ for t in (Run, SampleGroup, Sample, Worker, EngineRow, LedgerTotal)
)


def why(
    database: Database,
    run_id: int,
    settings: RunSettings,
    groups: int | None = None,
    max_staleness: int | None = None,
    staleness_mode: str | None = None,
    stale: str | None = None,
) -> Why:
    """Of a batch with these options; the run's settings where left out."""
    needed = settings.groups_per_step if groups is None else groups
    window = settings.max_staleness if max_staleness is None else max_staleness
    policy = choice("stale", stale or settings.stale, StalePolicy)
    mode = staleness_mode or settings.staleness_mode
    facts = database.read(lambda c: _facts(c, run_id, settings) | _ready(c, run_id, settings, window, mode, policy))
    return Why(needed, facts["inside"], list(_reasons(facts, settings, needed, window)))


def unfinished(database: Database, run_id: int, settings: RunSettings) -> list[tuple[str, str]]:
    """What an evaluation may wait for, as the reasons of a Why: the run, workers, engines, the work itself. Ready
    groups and the window say nothing about it."""
    facts = database.read(lambda c: _facts(c, run_id, settings))
    return [*_of_run(facts), *_of_service(facts), *_of_work(facts, settings)]


def _ready(
    connection: sa.Connection, run_id: int, settings: RunSettings, window: int, mode: str, policy: StalePolicy
) -> dict[str, Any]:
    """Ready groups: those that the batch would take, those it would not, and those of the latter that nevertheless
    fill the window (verbs/stale.py: occupied), so that nothing is admitted in their place."""

    source, lag, ready = staleness.ready_groups(run_id, mode)
    run_source, run_lag, _ = staleness.ready_groups(run_id, settings.staleness_mode)

    masked = policy is StalePolicy.MASK
    found = _tally(
        connection, source, ready,
        inside=lag.is_not(None) if masked else lag <= window, outside=lag > window, unknown=lag.is_(None),
    )  # fmt: skip
    fills = run_lag <= settings.max_staleness if settings.stale == StalePolicy.SKIP else run_lag.is_not(None)
    counted = _tally(connection, run_source, ready, counted=fills)["counted"]
    stays = policy in (StalePolicy.SKIP, StalePolicy.MASK)
    return {
        "inside": found["inside"],
        "outside": 0 if masked else found["outside"],
        "unknown": found["unknown"],
        "counted": counted,
        "held": max(0, counted - found["inside"]) if stays else 0,
    }


def _tally(connection: sa.Connection, among: Any, where: Any, **parts: Any) -> dict[str, int]:
    """How many rows `among` a table meet each condition, by the name given to it: one pass, one round trip."""
    counts = (sa.func.count().filter(condition).label(name) for name, condition in parts.items())
    row = connection.execute(sa.select(*counts).select_from(among).where(where)).one()
    return {name: int(n) for name, n in row._mapping.items()}


def _facts(connection: sa.Connection, run_id: int, settings: RunSettings) -> dict[str, Any]:
    row = connection.execute(sa.select(run).where(run.c.id == run_id)).one()
    since = obstacles.last_batch_at(connection, row)
    drop_reasons, refused_prompts = obstacles.dropped(connection, row)
    served, fails = False, None
    try:
        served = serving.exhausted(connection, row, settings)
    except InvalidSetting as broke:  # whoever asks what is wrong is told this too, and the rest
        fails = broke.allowed
    return {
        "run": row,
        **_of_groups(connection, run_id),
        **_of_samples(connection, run_id),
        **_of_workers(connection, run_id),
        **_of_engines(connection, run_id),
        "again": regenerated(connection, run_id),
        "served": served and bool(row.n_groups),
        "curriculum_fails": fails,
        "stages": stages.pending(connection, run_id),
        "serves": stages.served(connection, run_id),
        "generated": bool(
            connection.execute(sa.select(sa.exists().where(ledger.c.run_id == run_id, ledger.c.amount > 0))).scalar()
        ),
        "drop_reasons": drop_reasons,
        "refused_prompts": refused_prompts,
        "left_behind": obstacles.left_behind(connection, row),
        "failing_samples": obstacles.failing(connection, run_id, "fail", since),
        "failing_stages": obstacles.failing(connection, run_id, "stage_failed", since),
    }


def _of_groups(connection: sa.Connection, run_id: int) -> dict[str, int]:
    state, reason, mine = group.c.state, group.c.reason, group.c.evaluation_id.is_(None)
    unfinished = state.in_([s.value for s in UNFINISHED_GROUP])
    stale = state == GroupState.STALE.value
    not_consumed = state.in_([s.value for s in GroupState if s is not GroupState.CONSUMED])  # those are the most
    return _tally(
        connection, group, (group.c.run_id == run_id) & not_consumed,
        unfinished=unfinished & mine, evaluating=unfinished & ~mine,
        expired=stale & (reason != staleness.UNKNOWN), closed_unknown=stale & (reason == staleness.UNKNOWN),
        leased=state == GroupState.LEASED.value, dropped=(state == GroupState.DROPPED.value) & mine,
    )  # fmt: skip


def _of_samples(connection: sa.Connection, run_id: int) -> dict[str, int]:
    owned, due = sample.c.owner.is_not(None), sample.c.not_before <= db_now()
    n, groups = sa.func.count(), sa.func.count(sa.distinct(sample.c.group_id))
    row = connection.execute(
        sa.select(
            n.filter(owned).label("owned"), groups.filter(owned).label("owned_groups"),
            n.filter(~owned, due).label("waiting"), n.filter(~owned, ~due).label("backing_off"),
        ).where(
            sample.c.run_id == run_id, sample.c.status.in_([s.value for s in CLAIMABLE]), sample.c.closed == 0
        )
    ).one()  # fmt: skip
    return dict(row._mapping)


def _of_workers(connection: sa.Connection, run_id: int) -> dict[str, Any]:
    of_run = worker.c.run_id == run_id
    newest = sa.select(worker.c.name, worker.c.error).where(of_run, worker.c.error.is_not(None))
    return {
        **_tally(
            connection, worker, of_run & (worker.c.state == WorkerState.LIVE.value),
            rollout_workers=worker.c.kind == WorkerKind.ROLLOUT.value,
            silent=worker.c.heartbeat < db_now() - worker.c.ttl_s,
        ),
        "worker_error": connection.execute(newest.order_by(worker.c.id.desc()).limit(1)).one_or_none(),
    }  # fmt: skip


def _of_engines(connection: sa.Connection, run_id: int) -> dict[str, Any]:
    of_run, failed = engine.c.run_id == run_id, engine.c.state == "failed"
    newest = sa.select(engine.c.url, engine.c.error).where(of_run, failed)
    return {
        **_tally(
            connection, engine, of_run & (engine.c.state != "gone"),
            engines=sa.true(), failed_engines=failed,
            strange_engines=(engine.c.state == "live") & engine.c.version.is_(None) & engine.c.label.is_not(None),
        ),
        "engine_error": connection.execute(newest.order_by(engine.c.updated_at.desc()).limit(1)).one_or_none(),
    }  # fmt: skip


def _unscored(waiting: dict[str, int], serves: set[str]) -> str:
    told = ", ".join(f"{name} {n}" for name, n in waiting.items())
    nobody = [name for name in waiting if name not in serves]
    cure = f"; nobody serves {', '.join(nobody)} (samplestore reward --reward {nobody[0]}=...)" if nobody else ""
    n = sum(waiting.values())
    return f"{amount(n, 'stage')} ({which(n, 'a reward', 'rewards')}) {which(n, 'is', 'are')} not done: {told}{cure}"


def _of_run(f: dict[str, Any]) -> Any:
    if f["failed_engines"] and f["failed_engines"] == f["engines"]:  # nothing else will help
        yield "failed_engines", _failed_engines(f)
    if f["run"].state != RunState.RUNNING:
        yield "run_not_running", f"the run is {f['run'].state} (samplestore resume)"


def _of_service(f: dict[str, Any]) -> Any:
    if f["rollout_workers"] == 0 and (f["run"].n_prompts or f["evaluating"]):  # imports need none
        yield "no_workers", "no rollout worker is connected (samplestore worker)"
    elif f["rollout_workers"] and f["engines"] == 0 and not f["generated"]:  # else they do without
        yield (
            "no_engine",
            f"no engine has answered the {amount(f['rollout_workers'], 'rollout worker')} yet: look at the --engine or "
            "--router given there, and at the logs",
        )
    if f["silent"]:
        yield (
            "silent_workers",
            f"{amount(f['silent'], 'worker')} {which(f['silent'], 'has', 'have')} stopped sending heartbeats",
        )
    if f["worker_error"] is not None:
        yield "worker_error", f"worker {f['worker_error'].name} failed: {obstacles.shown(f['worker_error'].error)}"
    if 0 < f["failed_engines"] < f["engines"]:
        yield "failed_engines", _failed_engines(f)
    if f["strange_engines"]:
        yield (
            "strange_engines",
            f"{f['strange_engines']} of {amount(f['engines'], 'engine')} "
            f"{which(f['strange_engines'], 'serves', 'serve')} weights that this run has not published "
            "(samplestore engines update --path MODEL --label default)",
        )
    if f["left_behind"] is not None:
        yield "left_behind", f["left_behind"]


def _of_work(f: dict[str, Any], settings: RunSettings) -> Any:
    unscored = {name: n for name, n in f["stages"].items() if name != filters.STAGE}
    if unscored:
        yield "unscored", _unscored(unscored, f["serves"])
    if unfiltered := f["stages"].get(filters.STAGE):
        custom = filters.CUSTOM in (*settings.group_filters, *settings.sample_filters)
        how = " (the run has its own: samplestore worker --group-filter, --sample-filter)" if custom else ""
        yield (
            "unfiltered",
            f"{amount(unfiltered, 'group')} {which(unfiltered, 'waits for its', 'wait for their')} filter{how}",
        )
    if f["owned"]:
        yield "in_flight", f"{amount_is(f['owned'], 'sample')} in flight"
    if f["waiting"] and (limit := _reached(f, settings)):
        yield "in_flight_limit", f"what is in flight is all that the run allows: {limit}"
    if f["waiting"]:
        yield "waiting", f"{amount(f['waiting'], 'sample')} {which(f['waiting'], 'waits', 'wait')} for a worker"
    if f["failing_samples"] is not None:
        yield "failing_samples", f"attempts at samples failed {f['failing_samples']}"
    if f["failing_stages"] is not None:
        yield "failing_stages", f"rewards or filters failed {f['failing_stages']}"
    if f["backing_off"]:
        again = which(f["backing_off"], "waits before it is", "wait before they are")
        yield "backing_off", f"{amount(f['backing_off'], 'sample')} {again} tried again"


def _of_window(f: dict[str, Any], settings: RunSettings, needed: int, window: int) -> Any:
    if f["outside"]:
        are = which(f["outside"], "is", "are")
        yield "too_stale", f"{amount(f['outside'], 'ready group')} {are} more than {amount(window, 'version')} behind"
    if (
        f["held"]
        and f["unfinished"] + f["counted"] >= settings.window_groups
        and f["inside"] + f["unfinished"] < needed
    ):
        yield (
            "window_held",
            f"{amount(f['held'], 'ready group')} that this batch passes over {which(f['held'], 'fills', 'fill')} the "
            f"run's window of {settings.window_groups}: nothing is admitted in their place. Ask with "
            f"max_staleness={settings.max_staleness}, or stale='expire' or 'regenerate'",
        )
    if n := f["unknown"] + f["closed_unknown"]:
        yield (
            "unknown_version",
            f"{amount(n, 'group')} {which(n, 'has', 'have')} tokens of an unknown weight version: "
            f"{which(n, 'it is', 'they are')} never delivered (samplestore engines list)",
        )
    if f["again"][0]:
        yield (
            "regenerated",
            f"{amount(f['again'][0], 'group')} in the window {which(f['again'][0], 'was', 'were')} started afresh "
            f"{AGAIN} times or more (at most {f['again'][1]}): what takes that long may never arrive. A larger "
            "max_staleness or stale='mask' lets it through",
        )


def _of_admission(f: dict[str, Any], settings: RunSettings, needed: int, step_over: bool) -> Any:
    if f["curriculum_fails"] is not None:
        yield "curriculum_fails", f"the run's curriculum must be {f['curriculum_fails']}; no prompt is served"
    elif f["served"]:
        yield "prompts_used_up", _used_up(f["run"], settings)
    elif needed > settings.window_groups:
        yield (
            "window_too_small",
            f"{amount_is(needed, 'group')} asked for, but the window admits {settings.window_groups} "
            f"({'(max_staleness + 1) x groups_per_step' if settings.mode == RolloutMode.ASYNC else 'one step'})",
        )
    elif f["unfinished"] == 0 and not step_over and (room := settings.window_groups - f["counted"]) > 0:
        yield (
            "nothing_admitted",
            f"no group is under way and {room:,} more may be; workers and waiting trainers admit them",
        )


def _reasons(f: dict[str, Any], settings: RunSettings, needed: int, window: int) -> Any:
    row = f["run"]
    if f["inside"] >= needed:
        return
    yield from _of_run(f)
    step_over = settings.mode != RolloutMode.ASYNC and row.step_over == row.current_version
    if step_over:
        yield (
            "step_over",
            f"the step of weights version {row.current_version} has its {amount(settings.groups_per_step, 'group')} "
            f"(mode {settings.mode}): the next begins when weights are published (run.publish_weights)",
        )
    if row.n_prompts == 0 and not f["unfinished"]:  # else they were imported
        yield "no_prompts", "the run has no prompts (samplestore add-prompts FILE)"
        return
    yield from _of_service(f)
    yield from _of_window(f, settings, needed, window)
    yield from _of_work(f, settings)
    if f["evaluating"]:
        are = which(f["evaluating"], "is", "are")
        yield (
            "evaluating",
            f"{amount(f['evaluating'], 'group')} of evaluations {are} under way (samplestore eval --list)",
        )
    if f["leased"]:
        held = f"{amount_is(f['leased'], 'group')} held by a trainer's batch"
        yield "leased", f"{held}, which is neither committed nor given back"
    if f["refused_prompts"] is not None:
        yield "refused_prompts", f["refused_prompts"]
    yield from _of_admission(f, settings, needed, step_over)
    if f["dropped"]:
        yield (
            "dropped",
            f"{amount(f['dropped'], 'group')} {which(f['dropped'], 'was', 'were')} dropped so far; the last ones for: "
            f"{f['drop_reasons']}",
        )
    if f["expired"]:
        them = which(f["expired"], "it", "them")
        yield "expired", f"{amount(f['expired'], 'group')} fell out of the window so far, before a batch took {them}"


def _used_up(row: Any, settings: RunSettings) -> str:
    if settings.curriculum is not None:
        return "the run's curriculum gives no prompt to serve next"
    if settings.datasets:
        return f"all epochs of the data sets {', '.join(settings.datasets)} are served"
    served = "the one epoch" if settings.epochs == 1 else f"all {settings.epochs} epochs"
    return f"{served} of {amount(row.n_prompts, 'prompt')} {which(settings.epochs or 0, 'is', 'are')} served"


def _reached(f: dict[str, Any], settings: RunSettings) -> str:
    """The run's limits on what is in flight that hold claims back (verbs/flow.py)."""
    engines = max(1, f["engines"] - f["failed_engines"])
    told = []
    for name, held, times in (
        ("max_inflight_samples", f["owned"], 1), ("max_inflight_groups", f["owned_groups"], 1),
        ("max_samples_per_engine", f["owned"], engines), ("max_groups_per_engine", f["owned_groups"], engines),
    ):  # fmt: skip
        if (limit := getattr(settings, name)) is not None and held >= limit * times:
            told.append(f"{name}={limit}")
    return ", ".join(told)


def _failed_engines(f: dict[str, Any]) -> str:
    last = f["engine_error"]
    return (
        f"{f['failed_engines']} of {amount(f['engines'], 'engine')} failed; the last, {last.url}: "
        f"{obstacles.shown(last.error)}"
    )
