"""A counterfactual on a recorded run: what would another staleness window have kept from the trainer, or masked?

Everything that was delivered is measured as it was at its lease: by the weight versions of its tokens, and the version
that was current then, along the tree of versions (statements/staleness.py). What the window of the run itself has
closed was never delivered, so a wider window can't be simulated for it; it is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from samplestore.arguments import choice, whole
from samplestore.engine import Database
from samplestore.models import BatchGroup, BatchRow, Sample, SampleGroup, Segment, WeightVersionRow
from samplestore.runsettings import RunSettings
from samplestore.statements import staleness
from samplestore.states import BatchState, GroupState, SampleStatus, SegmentKind, StalenessMode, StalePolicy

batch, batch_group, group, sample, segment, version = (
    t.__table__ for t in (BatchRow, BatchGroup, SampleGroup, Sample, Segment, WeightVersionRow)
)

Lags = dict[int, dict[int | None, int]]  # sample id -> versions behind (None: unknown) -> trained tokens


def simulate(
    database: Database,
    run_id: int,
    settings: RunSettings,
    max_staleness: int,
    staleness_mode: str | None = None,
    stale: str | None = None,
) -> dict[str, Any]:
    """What batches with these options would have left out of the committed steps, or masked in them. One snapshot.

    staleness_mode, stale   the run's settings where left out
    Returns plain values: "steps" has one entry for each committed step, "total" their sums. Of each: groups and tokens
    (with loss=1, before any mask) that were delivered, groups beyond the window, their tokens, tokens that a mask would
    take out of the loss, groups that would have no token left with it, and the groups by staleness.
    Raises InvalidSetting.
    """
    window = whole("max_staleness", max_staleness)
    mode = choice("staleness_mode", staleness_mode or settings.staleness_mode, StalenessMode)
    policy = choice("stale", stale or settings.stale, StalePolicy)

    def snapshot(connection: sa.Connection) -> dict[str, Any]:
        steps = list(_steps(connection, run_id, window, mode))
        closed = sa.select(sa.func.count()).where(
            group.c.run_id == run_id, group.c.state == GroupState.STALE.value, group.c.reason != staleness.UNKNOWN
        )
        return {
            "max_staleness": window,
            "staleness_mode": mode.value,
            "stale": policy.value,
            "recorded": {"max_staleness": settings.max_staleness, "stale": settings.stale},
            "closed_by_the_run": int(connection.execute(closed).scalar_one()),
            "steps": steps,
            "total": _sum(steps),
        }

    return database.read(snapshot)


def _steps(connection: sa.Connection, run_id: int, window: int, mode: StalenessMode) -> Iterator[dict[str, Any]]:
    tree = connection.execute(
        sa.select(version.c.version, version.c.parent, version.c.depth).where(version.c.run_id == run_id)
    ).fetchall()
    committed = connection.execute(
        sa.select(batch.c.id, batch.c.step, batch.c.current_version)
        .where(batch.c.run_id == run_id, batch.c.state == BatchState.COMMITTED.value)
        .order_by(batch.c.step, batch.c.id)
    ).fetchall()
    for row in committed:
        behind = staleness.seen_from(row.current_version, tree)
        yield {"step": row.step, **_judged(_delivered(connection, row.id, behind), window, mode)}


@dataclass(slots=True)
class _Delivered:
    """The trained tokens of a group. free: those that no weights of the run made (imports, environments): they are
    behind none."""

    lags: Lags = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    free: int = 0


def _delivered(connection: sa.Connection, batch_id: int, behind: dict[int, int]) -> list[_Delivered]:
    """The groups of a batch, those without a trained token too. A batch at a time: memory goes with a batch."""
    groups = connection.execute(sa.select(batch_group.c.group_id).where(batch_group.c.batch_id == batch_id)).scalars()
    found = {id: _Delivered() for id in groups}
    rows = connection.execute(
        sa.select(
            sample.c.group_id, sample.c.id, segment.c.kind, segment.c.version_min,
            sa.func.sum(segment.c.n_tokens).label("n"),
        )
        .select_from(
            batch_group.join(sample, sample.c.group_id == batch_group.c.group_id).join(
                segment, (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation)
            )
        )
        .where(
            batch_group.c.batch_id == batch_id, sample.c.status != SampleStatus.FAILED.value, segment.c.loss == 1
        )
        .group_by(sample.c.group_id, sample.c.id, segment.c.kind, segment.c.version_min)
    )  # fmt: skip
    for row in rows:
        if row.kind == SegmentKind.GENERATED:
            # added up: after a rewind two versions may be equally far behind, and all unknown ones are alike
            found[row.group_id].lags[row.id][behind.get(row.version_min)] += int(row.n)
        else:
            found[row.group_id].free += int(row.n)
    return list(found.values())


def _judged(groups: Sequence[_Delivered], window: int, mode: StalenessMode) -> dict[str, Any]:
    told = {name: 0 for name in COUNTS}
    by_staleness: dict[str, int] = defaultdict(int)
    for one in groups:
        lag = _of_group(one.lags, mode)
        tokens = one.free + sum(sum(lags.values()) for lags in one.lags.values())
        masked = sum(n for lags in one.lags.values() for behind, n in lags.items() if behind is None or behind > window)
        outside = lag is None or lag > window
        told["groups"] += 1
        told["tokens"] += tokens
        told["groups_beyond"] += outside
        told["tokens_beyond"] += tokens if outside else 0
        told["tokens_masked"] += masked
        told["groups_all_masked"] += 0 < masked == tokens
        by_staleness["unknown" if lag is None else f"{lag:g}"] += 1
    return {**told, "by_staleness": dict(sorted(by_staleness.items(), key=_order))}


COUNTS = ("groups", "tokens", "groups_beyond", "tokens_beyond", "tokens_masked", "groups_all_masked")


def _order(item: tuple[str, int]) -> float:
    return float("inf") if item[0] == "unknown" else float(item[0])


def _of_group(samples: Lags, mode: StalenessMode) -> float | None:
    """The max over its samples; None where a version of any is unknown. As in statements/staleness.py, over values
    that were read."""
    if any(None in lags for lags in samples.values()):
        return None
    return max((_of_sample(lags, mode) for lags in samples.values() if lags), default=0)


def _of_sample(lags: dict[int | None, int], mode: StalenessMode) -> float:
    known = [(lag, n) for lag, n in lags.items() if lag is not None]
    if mode is StalenessMode.MEAN:
        return sum(lag * n for lag, n in known) / sum(n for _, n in known)
    return (min if mode is StalenessMode.NEWEST else max)(lag for lag, _ in known)


def _sum(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_staleness: dict[str, int] = defaultdict(int)
    for step in steps:
        for lag, n in step["by_staleness"].items():
            by_staleness[lag] += n
    short = sum(bool(step["groups_beyond"]) for step in steps)
    sums = {name: sum(step[name] for step in steps) for name in COUNTS}
    return {
        "steps": len(steps),
        "steps_short": short,
        **sums,
        "by_staleness": dict(sorted(by_staleness.items(), key=_order)),
    }
