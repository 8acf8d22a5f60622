"""Why is no batch ready? One answer for the batch timeout, `samplestore status` and the dashboard."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import EngineRow, Run, Sample, SampleGroup, Stage, Worker
from samplestore.order import Cursor
from samplestore.statements import staleness
from samplestore.states import CLAIMABLE, IN_WINDOW, GroupState, RunState, StageStatus, WorkerKind, WorkerState
from samplestore.types import RunSettings, Why

run, group, sample, stage, worker, engine = (t.__table__ for t in (Run, SampleGroup, Sample, Stage, Worker, EngineRow))


def why(
    database: Database, run_id: int, settings: RunSettings, groups: int | None = None, max_staleness: int | None = None
) -> Why:
    needed = settings.groups_per_step if groups is None else groups
    window = settings.max_staleness if max_staleness is None else max_staleness
    with database.reading() as connection:
        facts = _facts(connection, run_id, window)
    return Why(needed, facts["inside"], list(_reasons(facts, settings, needed, window)))


def _facts(connection: sa.Connection, run_id: int, window: int) -> dict[str, Any]:
    def count(*where: Any) -> int:
        return int(connection.execute(sa.select(sa.func.count()).where(*where)).scalar_one())

    ready = sa.and_(group.c.run_id == run_id, group.c.state == GroupState.READY.value)
    lag = staleness.behind(run_id, group.c.oldest_version)
    unfinished = sa.and_(
        sample.c.run_id == run_id, sample.c.status.in_([s.value for s in CLAIMABLE]), sample.c.closed == 0
    )
    row = connection.execute(sa.select(run).where(run.c.id == run_id)).one()
    live = sa.and_(worker.c.run_id == run_id, worker.c.state == WorkerState.LIVE.value)
    error = connection.execute(
        sa.select(worker.c.name, worker.c.error)
        .where(worker.c.run_id == run_id, worker.c.error.is_not(None))
        .order_by(worker.c.id.desc())
        .limit(1)
    ).one_or_none()
    return {
        "run": row,
        "inside": count(ready, lag <= window),
        "outside": count(ready, lag > window),
        "unknown": count(ready, lag.is_(None)),
        "live_groups": count(group.c.run_id == run_id, group.c.state.in_([s.value for s in IN_WINDOW])),
        "leased": count(group.c.run_id == run_id, group.c.state == GroupState.LEASED.value),
        "owned": count(unfinished, sample.c.owner.is_not(None)),
        "waiting": count(unfinished, sample.c.owner.is_(None), sample.c.not_before <= db_now()),
        "backing_off": count(unfinished, sample.c.owner.is_(None), sample.c.not_before > db_now()),
        "unscored": count(stage.c.run_id == run_id, stage.c.status == StageStatus.PENDING.value),
        "rollout_workers": count(live, worker.c.kind == WorkerKind.ROLLOUT.value),
        "silent": count(live, worker.c.heartbeat < db_now() - worker.c.ttl_s),
        "engines": count(engine.c.run_id == run_id, engine.c.state != "gone"),
        "failed_engines": count(engine.c.run_id == run_id, engine.c.state == "failed"),
        "dropped": count(group.c.run_id == run_id, group.c.state == GroupState.DROPPED.value),
        "worker_error": error,
    }


def _reasons(f: dict[str, Any], settings: RunSettings, needed: int, window: int) -> Any:
    row = f["run"]
    if f["inside"] >= needed:
        return
    if row.state != RunState.RUNNING:
        yield "run_not_running", f"the run is {row.state} (samplestore resume)"
    if row.n_prompts == 0:
        yield "no_prompts", "the run has no prompts (samplestore add-prompts FILE)"
        return
    if f["rollout_workers"] == 0:
        yield "no_workers", "no rollout worker is connected (samplestore worker)"
    if f["silent"]:
        yield "silent_workers", f"{f['silent']} workers have stopped sending heartbeats"
    if f["worker_error"] is not None:
        yield "worker_error", f"worker {f['worker_error'].name} failed: {f['worker_error'].error}"
    if f["failed_engines"]:
        yield "failed_engines", f"{f['failed_engines']} of {f['engines']} engines failed their last update"
    if f["outside"]:
        yield "too_stale", f"{f['outside']} ready groups are more than {window} versions behind"
    if f["unknown"]:
        yield "unknown_version", f"{f['unknown']} ready groups have tokens of an unknown weight version"
    if f["unscored"]:
        yield "unscored", f"{f['unscored']} stages (rewards) are not done"
    if f["owned"]:
        yield "in_flight", f"{f['owned']} samples are in flight"
    if f["waiting"]:
        yield "waiting", f"{f['waiting']} samples wait for a worker"
    if f["backing_off"]:
        yield "backing_off", f"{f['backing_off']} samples wait before they are tried again"
    if f["leased"]:
        yield "leased", f"{f['leased']} groups are held by a trainer's batch"
    cursor = Cursor(row.epoch, row.chunk_start, row.chunk_stop, row.chunk_next)
    if cursor.exhausted(row.n_prompts, settings.epochs) and row.n_groups:
        yield "prompts_used_up", f"all {settings.epochs} epochs of {row.n_prompts} prompts are served"
    elif needed > settings.window_groups:
        yield (
            "window_too_small",
            (
                f"{needed} groups are asked for, but the window admits {settings.window_groups} "
                "((max_staleness + 1) x groups_per_step)"
            ),
        )
    elif f["live_groups"] == 0:
        yield "nothing_admitted", "no groups are admitted yet; workers and waiting trainers do that"
    if f["dropped"]:
        yield "dropped", f"{f['dropped']} groups were dropped so far"
