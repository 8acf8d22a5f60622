"""The queries that are views (samplestore/views.py). None reads a payload."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.models import (
    BatchGroup,
    BatchRow,
    Event,
    LedgerTotal,
    PromptRow,
    Request,
    Run,
    Sample,
    SampleGroup,
    Segment,
    WeightVersionRow,
)
from samplestore.runsettings import RunSettings
from samplestore.statements import staleness
from samplestore.statements.rewards import countable
from samplestore.states import FINISHED, GroupState, SampleStatus, StalenessMode
from samplestore.types import UNKNOWN_VERSION

run, prompt, group, sample, segment, request, batch, batch_group, total, event, version = (
    t.__table__
    for t in (
        Run, PromptRow, SampleGroup, Sample, Segment, Request, BatchRow, BatchGroup, LedgerTotal, Event,
        WeightVersionRow,
    )
)  # fmt: skip

ENDED = sample.c.status.in_([s.value for s in FINISHED])
STOPS = ("abort", "reap", "fail")  # events that end what a worker does with a sample, before the sample is finished


def _whole(value: Any) -> sa.Cast[int]:
    """PostgreSQL sums whole numbers as numeric, which drivers give as Decimal."""
    return sa.cast(value, sa.BigInteger)


def _mean(value: Any) -> Any:
    return sa.func.avg(sa.cast(value, sa.Double), type_=sa.Double())


def _deviation(value: Any) -> sa.ColumnElement[float]:
    """The population standard deviation, as of the rewards in a group. SQLite has no aggregate of the name."""
    variance = _mean(value * value) - _mean(value) * _mean(value)
    return sa.func.sqrt(sa.case((variance < 0, sa.cast(0, sa.Double)), else_=variance), type_=sa.Double())


def _share(condition: Any) -> Any:
    return sa.func.avg(sa.case((condition, sa.cast(1, sa.Double)), else_=sa.cast(0, sa.Double)), type_=sa.Double())


def ready_groups() -> sa.Select[Any]:
    defaults = RunSettings()
    now = version.alias("now")

    def measured(mode: StalenessMode) -> sa.ColumnElement[Any]:
        # Of one group at a time: its samples and their segments are found by their keys, its payloads are not read.
        of_samples = staleness.of_samples(now.c.depth, mode).where(sample.c.group_id == group.c.id)
        per_sample = of_samples.correlate(group, now).subquery("per_sample")
        value = sa.select(staleness.of_group(per_sample)).scalar_subquery()
        lag = sa.case((staleness.IMPORTED, 0), else_=value)
        return sa.type_coerce(lag, sa.Double() if mode is StalenessMode.MEAN else sa.BigInteger())

    rows = (
        sa.select(
            run.c.id.label("run_id"), run.c.name.label("run"), group.c.id.label("group_id"), group.c.number,
            group.c.prompt_id, prompt.c.dataset, group.c.epoch, group.c.n_samples, group.c.n_failed, group.c.n_tokens,
            group.c.reward_mean, group.c.reward_std, group.c.oldest_version,
            staleness.group_lag(group.c.run_id).label("staleness_oldest"),
            measured(StalenessMode.NEWEST).label("staleness_newest"),
            measured(StalenessMode.MEAN).label("staleness_mean"),
            # Runs that are older than a setting have its default.
            sa.func.coalesce(run.c.settings["staleness_mode"].as_string(), defaults.staleness_mode).label("mode"),
            sa.func.coalesce(run.c.settings["max_staleness"].as_integer(), defaults.max_staleness)
            .label("max_staleness"),
            group.c.ready_at,
        )
        .select_from(
            group.join(run, run.c.id == group.c.run_id)
            .join(prompt, prompt.c.id == group.c.prompt_id)
            .join(now, (now.c.run_id == run.c.id) & (now.c.version == run.c.current_version))
        )
        .where(group.c.state == GroupState.READY.value)
        .subquery("ready")
    )  # fmt: skip
    by_mode = sa.case(
        (rows.c.mode == StalenessMode.NEWEST.value, rows.c.staleness_newest),
        (rows.c.mode == StalenessMode.MEAN.value, rows.c.staleness_mean),
        else_=rows.c.staleness_oldest,
    )
    lag = sa.cast(by_mode, sa.Double)  # of the mean it is one; one type for all
    told = [c for c in rows.c if c.name not in ("mode", "ready_at")]
    return sa.select(
        *told, lag.label("staleness"), sa.case((lag <= rows.c.max_staleness, 1), else_=0).label("in_window"),
        rows.c.ready_at, (db_now() - rows.c.ready_at).label("waited_s"),
    )  # fmt: skip


def token_fate() -> sa.Select[Any]:
    known = sa.func.nullif(total.c.version, UNKNOWN_VERSION, type_=sa.BigInteger())
    return (
        sa.select(
            run.c.id.label("run_id"), run.c.name.label("run"), known.label("version"), total.c.fate, total.c.reason,
            _whole(sa.func.sum(total.c.amount)).label("tokens"),
        )
        .select_from(total.join(run, run.c.id == total.c.run_id))
        .group_by(run.c.id, run.c.name, total.c.version, total.c.fate, total.c.reason)
        .having(sa.func.sum(total.c.amount) != 0)
    )  # fmt: skip


def abort_causes() -> sa.Select[Any]:
    call, later = request.alias("call"), request.alias("later")
    # The call that was under way: the worker's last one for that sample.
    at_work = (
        sa.select(request.c.id)
        .where(
            request.c.sample_id == event.c.sample_id,
            request.c.worker_id == event.c.worker_id,
            request.c.started_at <= event.c.at,
        )
        .order_by(request.c.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    stops = (
        sa.select(
            event.c.run_id, event.c.kind, event.c.reason, event.c.worker_id, event.c.tokens, at_work.label("call_id")
        )
        .where(event.c.kind.in_(STOPS))
        .subquery("stop")
    )
    of_call = (call.c.sample_id, call.c.incarnation)
    wrote = (
        sa.select(sa.func.max(segment.c.version_max))
        .where(
            segment.c.sample_id == of_call[0],
            segment.c.incarnation == of_call[1],
            segment.c.request_rid == call.c.rid,
        )
        .scalar_subquery()
    )
    again = (
        sa.select(
            sa.case((later.c.resumed_tokens > 0, later.c.prompt_tokens - sa.func.coalesce(later.c.cached_tokens, 0)))
        )
        .where(later.c.sample_id == of_call[0], later.c.incarnation == of_call[1], later.c.id > call.c.id)
        .order_by(later.c.id)
        .limit(1)
        .scalar_subquery()
    )
    stopped = (
        sa.select(
            run.c.id.label("run_id"), run.c.name.label("run"), stops.c.kind, stops.c.reason, call.c.engine,
            stops.c.worker_id, wrote.label("version"), stops.c.tokens, call.c.lost_tokens,
            again.label("prefilled_again"),
        )
        .select_from(stops.join(run, run.c.id == stops.c.run_id).outerjoin(call, call.c.id == stops.c.call_id))
        .subquery("stopped")
    )  # fmt: skip
    by = [stopped.c[name] for name in ("run_id", "run", "kind", "reason", "engine", "worker_id", "version")]
    return sa.select(
        *by,
        sa.func.count().label("times"),
        _whole(sa.func.sum(sa.func.coalesce(stopped.c.tokens, 0))).label("tokens_kept"),
        _whole(sa.func.sum(sa.func.coalesce(stopped.c.lost_tokens, 0))).label("tokens_lost"),
        _whole(sa.func.sum(sa.func.coalesce(stopped.c.prefilled_again, 0))).label("prefilled_again"),
    ).group_by(*by)


def version_rewards() -> sa.Select[Any]:
    ended = (
        sa.select(
            run.c.id.label("run_id"), run.c.name.label("run"), sample.c.version_max.label("version"), version.c.step,
            sample.c.status, sample.c.n_tokens, countable(sample.c.reward).label("reward"),
        )
        .select_from(
            sample.join(run, run.c.id == sample.c.run_id)
            .join(group, group.c.id == sample.c.group_id)
            .outerjoin(version, (version.c.run_id == sample.c.run_id) & (version.c.version == sample.c.version_max))
        )
        .where(ENDED, group.c.evaluation_id.is_(None))
        .subquery("ended")
    )  # fmt: skip
    by = [ended.c[name] for name in ("run_id", "run", "version", "step")]
    return sa.select(
        *by,
        sa.func.count().label("samples"), sa.func.count(ended.c.reward).label("scored"),
        _mean(ended.c.reward).label("reward_mean"), _deviation(ended.c.reward).label("reward_std"),
        _share(ended.c.status == SampleStatus.TRUNCATED.value).label("truncated_ratio"),
        _mean(ended.c.n_tokens).label("mean_tokens"),
    ).group_by(*by)  # fmt: skip


def batch_steps() -> sa.Select[Any]:
    def of_groups(value: Any) -> Any:
        return sa.select(value).where(batch_group.c.batch_id == batch.c.id).scalar_subquery()

    def of_samples(value: Any) -> Any:
        taken = batch_group.join(sample, sample.c.group_id == batch_group.c.group_id)
        return sa.select(value).select_from(taken).where(batch_group.c.batch_id == batch.c.id, ENDED).scalar_subquery()

    return sa.select(
        run.c.id.label("run_id"), run.c.name.label("run"), batch.c.id.label("batch_id"), batch.c.timeline,
        batch.c.step, batch.c.state, batch.c.current_version, batch.c.n_groups, batch.c.n_samples, batch.c.n_tokens,
        of_groups(sa.func.max(batch_group.c.staleness)).label("staleness_max"),
        of_groups(_mean(batch_group.c.staleness)).label("staleness_mean"),
        of_samples(_mean(countable(sample.c.reward))).label("reward_mean"),
        of_samples(_share(sample.c.status == SampleStatus.TRUNCATED.value)).label("truncated_ratio"),
        batch.c.created_at, batch.c.settled_at,
    ).select_from(batch.join(run, run.c.id == batch.c.run_id))  # fmt: skip
