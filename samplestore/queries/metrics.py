"""A run as numbers: for wandb, trackio and TensorBoard (`run.metrics()`), and as gauges for Prometheus.

Read from kept counters, partial indexes, the window, the last two batches and the newest finished groups: no sample,
segment, request or event of history is read. The kept totals of the ledger have a row for each weight version.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import BatchGroup, BatchRow, EngineRow, Event, Request, Run, Sample, SampleGroup, Worker
from samplestore.queries import stages
from samplestore.queries.metric_names import HAPPENED, LOST, PREFIX, RECENT_GROUPS, UNDER_WAY
from samplestore.runsettings import RunSettings
from samplestore.statements import ledger, staleness
from samplestore.statements.rewards import countable
from samplestore.states import (
    CLAIMABLE,
    LIVE_BATCH,
    Fate,
    GroupState,
    SampleStatus,
    WorkerKind,
)

run, group, sample, worker, engine, batch, batch_group, event, request = (
    t.__table__ for t in (Run, SampleGroup, Sample, Worker, EngineRow, BatchRow, BatchGroup, Event, Request)
)

LOOK_BACK = 1024  # numbers below the window that are looked through for them
EVENTS_S = 600.0
DONE = (GroupState.READY, GroupState.LEASED, GroupState.CONSUMED, GroupState.DROPPED, GroupState.STALE)
# Of the fates that only tokens of the window can have.
OPEN_FATES = (Fate.IN_FLIGHT, Fate.RESUMABLE, Fate.AWAITING_STAGE, Fate.READY, Fate.LEASED)


def read(database: Database, run_id: int, settings: RunSettings) -> dict[str, float]:
    """Numbers of a run by name, each with PREFIX; metric_names.NAMES explains them. One snapshot. What is not known is
    left out, so nothing is NaN."""
    told = database.read(lambda c: dict(_all(c, run_id, settings)))
    return {
        PREFIX + name: float(value) for name, value in told.items() if value is not None and math.isfinite(float(value))
    }


Told = Iterator[tuple[str, Any]]


def _all(c: sa.Connection, run_id: int, settings: RunSettings) -> Told:
    row = c.execute(sa.select(run, db_now().label("now")).where(run.c.id == run_id)).one()
    now = float(row.now)
    yield "weights/version", row.current_version
    yield "weights/timeline", row.timeline
    yield from _tokens(c, run_id)
    yield from _groups(c, row, settings)
    yield from _samples(c, run_id)
    yield "stages/pending", sum(stages.pending(c, run_id).values())
    yield from _batch(c, row)
    yield from _recent(c, row, settings)
    yield from _events(c, run_id, now)
    yield from _workers(c, run_id, now)
    yield from _engines(c, row)


def _tokens(c: sa.Connection, run_id: int) -> Told:
    total = ledger.total.c
    sums = sa.select(total.fate, sa.func.sum(total.amount)).where(total.run_id == run_id).group_by(total.fate)
    by_fate = {fate: 0 for fate in Fate} | {Fate(fate): int(n) for fate, n in c.execute(sums)}
    yield "tokens/generated", sum(by_fate.values())
    yield from ((f"tokens/{fate}", n) for fate, n in by_fate.items())
    # The window, counted again. What is settled is not: `samplestore ledger` counts everything, and costs with it.
    under_way = sa.select(group.c.id).where(group.c.run_id == run_id, group.c.state.in_([s.value for s in UNDER_WAY]))
    counted = ledger.OF_GROUPS.rows(c, {"ids": list(c.execute(under_way).scalars())})
    kept = c.execute(ledger.kept(run_id).where(total.fate.in_([f.value for f in OPEN_FATES])))
    recounted, expected = (
        {(r.fate, r.reason, r.version): int(r.amount) for r in rows if r.fate in OPEN_FATES} for rows in (counted, kept)
    )
    yield "ledger/imbalance", int(recounted != expected or any(n < 0 for n in by_fate.values()))


def _groups(c: sa.Connection, row: Any, settings: RunSettings) -> Told:
    of_run = group.c.run_id == row.id
    under_way = of_run & group.c.state.in_([s.value for s in UNDER_WAY])
    mine = sa.func.count().filter(group.c.evaluation_id.is_(None))
    rows = c.execute(sa.select(group.c.state, mine, sa.func.count()).where(under_way).group_by(group.c.state)).all()
    counts = {state: (n, everything) for state, n, everything in rows}
    yield "groups/created", row.n_groups
    yield from ((f"groups/{s}", counts.get(s.value, (0, 0))[0]) for s in UNDER_WAY)
    yield "groups/settled", row.n_groups - sum(everything for _, everything in counts.values())
    yield "groups/window", settings.window_groups
    yield "groups/per_step", settings.groups_per_step
    source, lag, ready = staleness.ready_groups(row.id, settings.staleness_mode)
    delivered = lag.is_not(None) if settings.stale == "mask" else lag <= settings.max_staleness
    told = c.execute(
        sa.select(sa.func.avg(lag), sa.func.max(lag), sa.func.count().filter(delivered))
        .select_from(source)
        .where(ready)
    ).one()
    yield "staleness/ready_mean", told[0]
    yield "staleness/ready_max", told[1]
    yield "groups/ready_in_window", told[2]


# Written out: with bound values no planner sees that a partial index holds the rows.
LIVE = worker.c.state == sa.literal_column("'live'")
CLAIMABLE_NOW = (
    sample.c.owner.is_(None)
    & (sample.c.closed == sa.literal_column("0"))
    & sample.c.status.in_([sa.literal_column(repr(s.value)) for s in CLAIMABLE])
)


def _samples(c: sa.Connection, run_id: int) -> Told:
    # by their owners: an index leads from a worker to what it holds, none from a run to all that is held
    owners = sa.select(worker.c.id).where(LIVE, worker.c.run_id == run_id)
    yield "samples/in_flight", c.execute(sa.select(sa.func.count()).where(sample.c.owner.in_(owners))).scalar_one()
    waiting = sa.select(sample.c.status, sa.func.count()).where(sample.c.run_id == run_id, CLAIMABLE_NOW)
    # by priority too: the order of the index that holds only these
    rows = c.execute(waiting.group_by(sample.c.priority, sample.c.status)).all()
    yield "samples/waiting", sum(n for _, n in rows)
    yield "samples/resumable", sum(n for status, n in rows if status == SampleStatus.ABORTED)


def _batch(c: sa.Connection, row: Any) -> Told:
    """The newest batch on the current timeline, and the one before."""
    live = batch.c.state.in_([sa.literal_column(repr(s.value)) for s in LIVE_BATCH])
    found = c.execute(
        sa.select(batch.c.id, batch.c.step, batch.c.n_groups, batch.c.n_samples, batch.c.n_tokens,
                  batch.c.created_at, batch.c.settled_at)
        .where(batch.c.run_id == row.id, batch.c.timeline == row.timeline, live)
        .order_by(batch.c.step.desc())
        .limit(2)
    ).all()  # fmt: skip
    if not found:
        return
    last = found[0]
    yield "batch/step", last.step
    yield "batch/groups", last.n_groups
    yield "batch/samples", last.n_samples
    yield "batch/tokens", last.n_tokens
    mine = c.execute(
        sa.select(sa.func.avg(batch_group.c.staleness), sa.func.max(batch_group.c.staleness),
                  sa.func.avg(countable(group.c.reward_mean)), sa.func.avg(countable(group.c.reward_std)))
        .select_from(batch_group.join(group, group.c.id == batch_group.c.group_id))
        .where(batch_group.c.batch_id == last.id)
    ).one()  # fmt: skip
    yield from zip(
        ("batch/staleness_mean", "batch/staleness_max", "batch/reward_mean", "batch/reward_std"), mine, strict=True
    )
    ids = sa.select(batch_group.c.group_id).where(batch_group.c.batch_id == last.id)
    told = _of_samples(c, list(c.execute(ids).scalars()))
    yield from ((f"batch/{name}", told[name]) for name in ("response_tokens_mean", "truncated_ratio", "resumed_ratio"))
    if len(found) == 2:
        seconds = last.created_at - found[1].created_at
        if seconds > 0:  # the clock may have been set back
            yield "batch/seconds", seconds
            yield "batch/tokens_per_second", last.n_tokens / seconds
        if found[1].settled_at is not None:
            yield "batch/wait_seconds", max(0.0, last.created_at - found[1].settled_at)


def _recent(c: sa.Connection, row: Any, settings: RunSettings) -> Told:
    """The newest groups that are finished, whatever became of them."""
    since = row.n_groups - settings.window_groups - LOOK_BACK
    finished = group.c.state.in_([s.value for s in DONE])
    rows = c.execute(
        sa.select(group.c.id, group.c.state, group.c.reward_mean, group.c.reward_std)
        .where(group.c.run_id == row.id, group.c.number >= since, finished, group.c.evaluation_id.is_(None))
        .order_by(group.c.number.desc())
        .limit(RECENT_GROUPS)
    ).all()
    yield "recent/groups", len(rows)
    if not rows:
        return
    yield "recent/reward_mean", _mean([r.reward_mean for r in rows])
    yield "recent/reward_std", _mean([r.reward_std for r in rows])
    yield "recent/zero_std_ratio", _mean([None if r.reward_std is None else r.reward_std == 0 for r in rows])
    yield "recent/dropped_ratio", _mean([r.state == GroupState.DROPPED for r in rows])
    yield "recent/stale_ratio", _mean([r.state == GroupState.STALE for r in rows])
    ids = [r.id for r in rows]
    yield from ((f"recent/{name}", value) for name, value in _of_samples(c, ids).items())
    yield from _of_requests(c, ids)


def _mean(values: list[Any]) -> float | None:
    known = [float(v) for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _of_samples(c: sa.Connection, group_ids: list[int]) -> dict[str, float | None]:
    done = sample.c.status.in_([SampleStatus.COMPLETED.value, SampleStatus.TRUNCATED.value])
    n = sa.func.count()
    r = c.execute(
        sa.select(
            n.label("all"), n.filter(done).label("done"), sa.func.avg(sample.c.n_tokens).filter(done).label("tokens"),
            n.filter(sample.c.status == SampleStatus.TRUNCATED.value).label("truncated"),
            n.filter(sample.c.n_resumes > 0).label("resumed"),
            n.filter(sample.c.status == SampleStatus.FAILED.value).label("failed"),
            sa.func.sum(sample.c.n_aborts).label("aborts"),
        ).where(sample.c.group_id.in_(group_ids))
    ).mappings().one()  # fmt: skip

    def share(part: str, of: str) -> float | None:
        return float(r[part]) / float(r[of]) if r[of] else None

    return {
        "response_tokens_mean": r["tokens"],
        "truncated_ratio": share("truncated", "done"),
        "resumed_ratio": share("resumed", "all"),
        "failed_ratio": share("failed", "all"),
        "aborts_per_sample": share("aborts", "all"),
    }


def _of_requests(c: sa.Connection, group_ids: list[int]) -> Told:
    r = request.c
    told, total = r.prompt_tokens.is_not(None), sa.func.sum
    rows = c.execute(
        sa.select(
            r.lost_reason, total(r.lost_tokens).label("lost"), total(r.prompt_tokens).label("prompt"),
            total(r.cached_tokens).filter(told).label("cached"),
        )
        .select_from(sample.join(request, r.sample_id == sample.c.id))
        .where(sample.c.group_id.in_(group_ids))
        .group_by(r.lost_reason)
    ).all()  # fmt: skip
    lost = Counter({reason: 0 for reason in LOST})
    for row in rows:
        lost[why_lost(row.lost_reason)] += int(row.lost or 0)
    prompt = sum(int(row.prompt or 0) for row in rows)
    if rows:
        yield from ((f"recent/lost_tokens/{reason}", n) for reason, n in lost.items())
    if prompt:
        yield "recent/cached_ratio", sum(int(row.cached or 0) for row in rows) / prompt


def why_lost(reason: str | None) -> str:
    """One of LOST: the reasons of requests carry messages, and a metric's name must not."""
    word = (reason or "").partition(" ")[0].rstrip(":")
    found = {"abort": "aborted", "aborted": "aborted", "engine": "engine", "stale": "engine", "lease": "lease"}
    return found.get(word, word if word in LOST else "other")


def _events(c: sa.Connection, run_id: int, now: float) -> Told:
    rows = c.execute(
        sa.select(event.c.kind, sa.func.count())
        .where(event.c.run_id == run_id, event.c.kind.in_(list(HAPPENED)), event.c.at > now - EVENTS_S)
        .group_by(event.c.kind)
    )
    counts = {kind: n for kind, n in rows}
    yield from ((f"last_10_min/{name}", counts.get(kind, 0)) for kind, name in HAPPENED.items())


def _workers(c: sa.Connection, run_id: int, now: float) -> Told:
    silent = sa.func.count().filter(worker.c.heartbeat < now - worker.c.ttl_s)
    rows = c.execute(
        sa.select(worker.c.kind, sa.func.count(), silent).where(LIVE, worker.c.run_id == run_id).group_by(worker.c.kind)
    )
    counts = {kind: (n, quiet) for kind, n, quiet in rows}
    yield from ((f"workers/{kind}", counts.get(kind.value, (0, 0))[0]) for kind in WorkerKind)
    yield "workers/silent", sum(quiet for _, quiet in counts.values())


def _engines(c: sa.Connection, row: Any) -> Told:
    n, e = sa.func.count(), engine.c
    served = sa.func.coalesce(e.version, -1)
    told = c.execute(
        sa.select(
            n.filter(e.state == "live").label("live"), n.filter(e.state == "failed").label("failed"),
            n.filter(served != row.current_version).label("behind"),
            sa.func.sum(e.running).label("running"), sa.func.sum(e.queued).label("queued"),
        ).where(e.run_id == row.id, e.state != sa.literal_column("'gone'"))
    ).one()  # fmt: skip
    yield from ((f"engines/{name}", value) for name, value in told._mapping.items())
