"""What a run looks like now: the numbers behind `samplestore status` and the dashboard's overview."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import BatchRow, DatasetRow, EngineRow, Event, Request, Run, Sample, SampleGroup, Worker
from samplestore.queries import arrays, stages
from samplestore.queries.fleet import OWN
from samplestore.queries.starving import starving
from samplestore.runsettings import RunSettings
from samplestore.statements import staleness, totals
from samplestore.states import BatchState, GroupState, SampleStatus

run, group, sample, worker, engine, batch, event, request, dataset = (
    t.__table__ for t in (Run, SampleGroup, Sample, Worker, EngineRow, BatchRow, Event, Request, DatasetRow)
)

STOPS = ("abort", "release", "reap", "fail")
RESUMED = sample.c.n_resumes > sa.literal_column("0")  # written out: a planner must see that a partial index holds them


def status(database: Database, run_id: int) -> dict[str, Any]:
    """Counts of samples and groups, staleness of ready groups, workers, engines, last batches, aborts."""
    with database.reading() as connection:
        return {
            **_totals(connection, run_id),
            "staleness": staleness_histogram(connection, run_id, GroupState.READY),
            "workers": _workers(connection, run_id),
            "engines": _engines(connection, run_id),
        }


def totals_of(database: Database, run_id: int) -> dict[str, Any]:
    """The part of a status that counts over the whole run."""
    with database.reading() as connection:
        return _totals(connection, run_id)


def _totals(connection: sa.Connection, run_id: int) -> dict[str, Any]:
    row = connection.execute(sa.select(run, db_now().label("as_of")).where(run.c.id == run_id)).one()
    return {
        "run": row.name,
        "uuid": row.uuid,
        "state": row.state,
        "as_of": float(row.as_of),
        "current_version": row.current_version,
        "mode": RunSettings.parse(row.settings).mode,
        "step_over": row.step_over == row.current_version,
        "timeline": row.timeline,
        "epoch": row.epoch,
        "prompts": row.n_prompts,
        "datasets": _datasets(connection, run_id),
        "groups": _groups(connection, run_id),
        "samples": _counts(connection, sample.c.status, sample.c.run_id == run_id, [s.value for s in SampleStatus]),
        "dropped": drop_reasons(connection, run_id),
        "in_flight": _scalar(connection, sample.c.run_id == run_id, sample.c.owner.is_not(None)),
        "resumed_samples": _scalar(connection, sample.c.run_id == run_id, RESUMED),
        "starving": starving(connection, run_id, RunSettings.parse(row.settings)),
        "aborts": abort_reasons(connection, run_id),
        "failures": failures(connection, run_id),
        "batches": _batches(connection, run_id),
        "stages": stages.pending(connection, run_id),
        "arrays": arrays.sizes(connection, run_id),
    }


def _scalar(connection: sa.Connection, *where: Any) -> int:
    return int(connection.execute(sa.select(sa.func.count()).where(*where)).scalar_one())


def _counts(connection: sa.Connection, column: Any, where: Any, names: list[str]) -> dict[str, int]:
    found: dict[str, int] = dict(
        (name, n) for name, n in connection.execute(sa.select(column, sa.func.count()).where(where).group_by(column))
    )
    return {name: int(found.get(name, 0)) for name in names}


def _groups(connection: sa.Connection, run_id: int) -> dict[str, int]:
    """Groups by state, those of evaluations left out. Most of a long run's are consumed: by the batches that were
    committed, which hold them. The others are counted in an index, and evaluations taken off by theirs."""
    mine, names = group.c.run_id == run_id, [s.value for s in GroupState]
    others = group.c.state.in_([name for name in names if name != GroupState.CONSUMED])
    of_all = _counts(connection, group.c.state, mine & others, names)
    evaluated = _counts(connection, group.c.state, mine & others & group.c.evaluation_id.is_not(None), names)
    committed = (batch.c.run_id == run_id) & (batch.c.state == BatchState.COMMITTED.value)
    consumed = connection.execute(sa.select(sa.func.coalesce(sa.func.sum(batch.c.n_groups), 0)).where(committed))
    left = {name: of_all[name] - evaluated[name] for name in names}
    return {**left, GroupState.CONSUMED.value: int(consumed.scalar_one())}


def staleness_histogram(connection: sa.Connection, run_id: int, state: GroupState) -> dict[str, int]:
    """Groups of a state by staleness now ("unknown" where a version is not known)."""
    lag = staleness.group_lag(run_id).label("lag")
    rows = connection.execute(
        sa.select(lag, sa.func.count())
        .where(group.c.run_id == run_id, group.c.state == state.value)
        .group_by(lag)
        .order_by(lag)
    )
    return {"unknown" if r[0] is None else str(int(r[0])): int(r[1]) for r in rows}


def drop_reasons(connection: sa.Connection, run_id: int) -> dict[str, int]:
    """How many groups were dropped, by reason: filters, failed samples, operators."""
    rows = connection.execute(
        sa.select(group.c.reason, sa.func.count())
        .where(group.c.run_id == run_id, group.c.state == GroupState.DROPPED.value, group.c.evaluation_id.is_(None))
        .group_by(group.c.reason)
        .order_by(sa.func.count().desc(), group.c.reason)
        .limit(20)
    )
    return {str(r[0])[:200]: int(r[1]) for r in rows}


def abort_reasons(connection: sa.Connection, run_id: int) -> dict[str, int]:
    """How often samples were stopped in the middle, by reason: aborts, releases, reaps. Failures are one: their reasons
    are messages, no two alike."""
    kinds = totals.of_events.c.kind.in_(STOPS)
    rows = [r for r in connection.execute(totals.kept_events(run_id, kinds)) if r.n]
    often = sorted(rows, key=lambda r: (-int(r.n), r.kind, r.reason))[:20]
    return {r.kind if r.kind == "fail" else f"{r.kind}: {r.reason}": int(r.n) for r in often}


def failures(connection: sa.Connection, run_id: int) -> dict[str, Any] | None:
    """Attempts that failed: how many, and the newest one's error. None where there are none."""
    mine = (event.c.run_id == run_id) & (event.c.kind == "fail")
    newest = sa.select(event.c.at, event.c.reason).where(mine).order_by(event.c.at.desc(), event.c.id.desc()).limit(1)
    last = connection.execute(newest).one_or_none()
    if last is None:
        return None
    n = sum(int(r.n) for r in connection.execute(totals.kept_events(run_id, totals.of_events.c.kind == "fail")))
    return {"count": n, "newest_error": str(last.reason)[:500], "newest_at": last.at}


def _datasets(connection: sa.Connection, run_id: int) -> list[dict[str, Any]]:
    """Data sets: what they are for, prompts, groups admitted from them, and the pass of those with their own order."""
    columns = (dataset.c.name, dataset.c.purpose, dataset.c.n_prompts.label("prompts"))
    rows = connection.execute(
        sa.select(*columns, dataset.c.n_served.label("served"), dataset.c.epoch)
        .where(dataset.c.run_id == run_id)
        .order_by(dataset.c.name)
        .limit(200)
    )
    return [dict(r._mapping) for r in rows]


def _workers(connection: sa.Connection, run_id: int) -> list[dict[str, Any]]:
    held = sa.select(sa.func.count()).where(sample.c.owner == worker.c.id).correlate(worker).scalar_subquery()
    rows = connection.execute(
        sa.select(
            worker.c.id, worker.c.kind, worker.c.name, worker.c.state, worker.c.pid, worker.c.host,
            (db_now() - worker.c.heartbeat).label("heartbeat_age_s"), worker.c.ttl_s,
            held.label("samples"), worker.c.error,
        )
        .where(worker.c.run_id == run_id, OWN)
        .order_by(worker.c.id.desc())
        .limit(50)
    )  # fmt: skip
    return [dict(r._mapping) for r in rows]


def _engines(connection: sa.Connection, run_id: int) -> list[dict[str, Any]]:
    counted = sa.case((engine.c.counter_at.is_not(None), engine.c.generated_tokens)).label("generated_tokens")
    rows = connection.execute(
        sa.select(
            engine.c.url, engine.c.state, engine.c.version, engine.c.label, engine.c.error, engine.c.release,
            engine.c.running, engine.c.queued, counted,
        )
        .where(engine.c.run_id == run_id, engine.c.state != "gone")
        .order_by(engine.c.url)
    )  # fmt: skip
    return [dict(r._mapping) for r in rows]


def _batches(connection: sa.Connection, run_id: int) -> dict[str, Any]:
    counts = _counts(connection, batch.c.state, batch.c.run_id == run_id, [s.value for s in BatchState])
    last = connection.execute(
        sa.select(batch.c.step, batch.c.timeline, batch.c.state, batch.c.n_groups, batch.c.n_tokens)
        .where(batch.c.run_id == run_id)
        .order_by(batch.c.id.desc())
        .limit(1)
    ).one_or_none()
    return {**counts, "last": None if last is None else dict(last._mapping)}
