"""Staleness, defined once. API, SQL views, command line and dashboard all build on these expressions.

Weight versions form a tree: a rewind restores an older version and training branches off there. Staleness of a
version is the number of weight updates between it and the current version: the length of the path in that tree.
With `depth` (updates since the first weights) and `common_depth` (depth of the last ancestor that it shares with the
current timeline; its own depth while it lies on that timeline) the path is

    (current.depth - common_depth) + (depth - common_depth) = current.depth - (2 * common_depth - depth)

so `2 * common_depth - depth` orders all versions from stale to fresh, and a rewind only has to lower common_depth.
A restored version has the depth of the version that it restores: same weights, same staleness.

Of a sample: `oldest` is the staleness of its stalest token with loss=1, before any policy mask; `newest` that of
its freshest, `mean` weighted by tokens. Of a group: the max over its samples that did not fail. A version that is
not known makes the result NULL: unknown stays unknown, and is never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from samplestore.arguments import choice
from samplestore.models import BatchGroup, BatchRow, Run, Sample, SampleGroup, Segment, WeightVersionRow, one_of
from samplestore.statements.lists import among
from samplestore.statements.prepared import Prepared
from samplestore.states import FINISHED, LIVE_BATCH, TAKEN, GroupState, SampleStatus, SegmentKind, StalenessMode

run, group, sample, segment, version, batch, batch_group = (
    t.__table__ for t in (Run, SampleGroup, Sample, Segment, WeightVersionRow, BatchRow, BatchGroup)
)

MODES = tuple(StalenessMode)
LIVE = sa.text(one_of("batch_group.state", LIVE_BATCH))  # as uq_batch_group_live says it: at most one row of a group
UNKNOWN = "unknown weight version"  # reason of a group that no batch can ever take


def freshness(v: Any = version) -> Any:
    """Rises with freshness: depth along the current timeline, lowered for branches that were left."""
    return 2 * v.c.common_depth - v.c.depth


def freshness_of(run_id: Any, version_column: Any) -> sa.ScalarSelect[Any]:
    """Freshness of the version in `version_column`, as a scalar subquery; NULL if it is unknown."""
    v = version.alias()
    return sa.select(freshness(v)).where(v.c.run_id == run_id, v.c.version == version_column).scalar_subquery()


def current_depth(run_id: Any) -> sa.ScalarSelect[Any]:
    v = version.alias()
    return (
        sa.select(v.c.depth)
        .select_from(v.join(run, (run.c.id == v.c.run_id) & (run.c.current_version == v.c.version)))
        .where(run.c.id == run_id)
        .scalar_subquery()
    )


UNFINISHED = "+"  # begins the import key of a group that came with something left to generate: this run's weights do
# No weights of the run made its tokens, and none ever will: they are behind none, and in no window. A group that is
# started afresh loses its key.
IMPORTED = group.c.import_key.is_not(None) & (sa.func.substr(group.c.import_key, 1, 1) != UNFINISHED)


def group_lag(run_id: Any) -> sa.ColumnElement[int]:
    """Staleness of a group by the oldest version in its row; NULL if it is unknown, 0 of an imported one."""
    return sa.case((IMPORTED, 0), else_=behind(run_id, group.c.oldest_version))


_TAKEN = group.c.state.in_([state.value for state in TAKEN])


def shown_lag(run_id: Any) -> sa.ColumnElement[int]:
    """group_lag for people: of a group that a trainer holds or has consumed what it was at the lease, by the measure of
    its batch. It was trained on as that, however many versions came since."""
    at_lease = sa.select(batch_group.c.staleness).where(batch_group.c.group_id == group.c.id, LIVE).scalar_subquery()
    return sa.case((_TAKEN, at_lease), else_=group_lag(run_id))


def shown_sample_lag(run_id: Any) -> sa.ColumnElement[int]:
    """The same of a sample: by its oldest trained token. NULL where a version is unknown."""
    at_lease, now = _behind_at_lease(run_id, sample.c.oldest_version), behind(run_id, sample.c.oldest_version)
    return sa.case((sample.c.version_unknown != 0, None), (_TAKEN, at_lease), else_=now)


def _behind_at_lease(run_id: Any, version_column: Any) -> sa.ScalarSelect[Any]:
    """Staleness of the version in `version_column` as it was when the live batch of the group was leased. That batch's
    current version is an ancestor of today's: a rewind ends the batches that it leaves."""
    v, current = version.alias(), version.alias()
    path = current.c.depth + v.c.depth - 2 * sa.case((v.c.common_depth < current.c.depth, v.c.common_depth),
                                                     else_=current.c.depth)  # fmt: skip
    return (
        sa.select(path)
        .select_from(
            batch_group.join(batch, batch.c.id == batch_group.c.batch_id)
            .join(current, (current.c.run_id == batch.c.run_id) & (current.c.version == batch.c.current_version))
            .join(v, v.c.run_id == batch.c.run_id)
        )
        .where(batch_group.c.group_id == group.c.id, LIVE, v.c.run_id == run_id, v.c.version == version_column)
        .scalar_subquery()
    )


def behind(run_id: Any, version_column: Any) -> sa.ColumnElement[int]:
    """Staleness of the version in `version_column`; NULL if it is unknown."""
    return current_depth(run_id) - freshness_of(run_id, version_column)


def sample_staleness(run_id: int, mode: str) -> sa.Select[Any]:
    """Rows (sample_id, group_id, staleness) of a run's samples that have trained tokens, from their segments.
    Raises InvalidSetting for another mode."""
    return of_samples(current_depth(run_id), mode).where(sample.c.run_id == run_id)


def of_samples(depth: Any, mode: str) -> sa.Select[Any]:
    """The same of samples that the caller chooses. depth: that of the current version of their run."""
    v = version.alias("v")
    lag = depth - freshness(v)
    value = {
        StalenessMode.OLDEST: sa.func.max(lag),
        StalenessMode.NEWEST: sa.func.min(lag),
        StalenessMode.MEAN: sa.cast(sa.func.sum(segment.c.n_tokens * lag), sa.Double) / sa.func.sum(segment.c.n_tokens),
    }[choice("staleness", mode, StalenessMode)]
    unknown = sa.func.sum(sa.case((v.c.version.is_(None), 1), else_=0))
    return (
        sa.select(
            sample.c.id.label("sample_id"),
            sample.c.group_id,
            sa.case((unknown > 0, None), else_=value).label("staleness"),
        )
        .select_from(
            sample.join(
                segment, (segment.c.sample_id == sample.c.id) & (segment.c.incarnation == sample.c.incarnation)
            ).outerjoin(v, (v.c.run_id == sample.c.run_id) & (v.c.version == segment.c.version_min))
        )
        .where(
            segment.c.loss == 1,
            segment.c.kind == SegmentKind.GENERATED.value,  # no weights made the others, whatever their loss
            sample.c.status != SampleStatus.FAILED.value,
        )
        .group_by(sample.c.id, sample.c.group_id)
    )


def of_group(per_sample: sa.Subquery) -> sa.ColumnElement[Any]:
    """The max over the samples of a group, NULL when one is unknown: an aggregate over rows of `of_samples`."""
    unknown = sa.func.sum(sa.case((per_sample.c.staleness.is_(None), 1), else_=0))
    return sa.case((unknown > 0, None), else_=sa.func.max(per_sample.c.staleness))


def group_staleness(run_id: int, mode: str, group_ids: sa.Select[Any] | None = None) -> sa.Subquery:
    """Rows (group_id, staleness) of a run's groups that have trained tokens."""
    rows = sample_staleness(run_id, mode)
    if group_ids is not None:
        rows = rows.where(sample.c.group_id.in_(group_ids))
    per_sample = rows.subquery()
    value = of_group(per_sample).label("staleness")
    return sa.select(per_sample.c.group_id, value).group_by(per_sample.c.group_id).subquery()


def ready_groups(run_id: int, mode: str) -> tuple[Any, Any, sa.ColumnElement[bool]]:
    """(what to select from, staleness, condition) of a run's ready groups; staleness is NULL where it is unknown.

    Of a ready group the oldest version stands in its row; `newest` and `mean` are measured from the segments.
    """
    ready = (group.c.run_id == run_id) & (group.c.state == GroupState.READY.value)
    if choice("staleness", mode, StalenessMode) is StalenessMode.OLDEST:
        return group, group_lag(run_id), ready
    measured = group_staleness(run_id, mode, sa.select(group.c.id).where(ready))
    lag = sa.case((IMPORTED, 0), else_=measured.c.staleness)
    return group.outerjoin(measured, measured.c.group_id == group.c.id), lag, ready


def beyond(run_id: int, mode: str, window: int, of_groups: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Ids of groups (those that `of_groups` names) with a sample beyond the window, for good: staleness only grows.

    By `oldest` that is certain in the middle of a sample too; by `newest` and `mean` the tokens to come may make it
    fresher, so that only finished samples are judged.
    """
    chosen = sa.select(group.c.id).where(group.c.run_id == run_id, of_groups)
    if choice("staleness", mode, StalenessMode) is StalenessMode.OLDEST:
        return (
            sa.select(sample.c.group_id)
            .where(
                sample.c.group_id.in_(chosen),
                sample.c.status != SampleStatus.FAILED.value,
                behind(run_id, sample.c.oldest_version) > window,
            )
            .distinct()
        )
    done = sample.c.status.in_([s.value for s in FINISHED])
    measured = sample_staleness(run_id, mode).where(sample.c.group_id.in_(chosen), done).subquery()
    return sa.select(measured.c.group_id).where(measured.c.staleness > window).distinct()


def _freshness(*where: Any) -> Any:
    """Rows (sample_id, version_min, freshness) of the trained tokens of groups `ids`, each version once."""
    return (
        sa.select(segment.c.sample_id, segment.c.version_min, freshness(version).label("freshness"))
        .select_from(
            segment.join(
                sample, (sample.c.id == segment.c.sample_id) & (sample.c.incarnation == segment.c.incarnation)
            ).join(version, (version.c.run_id == sample.c.run_id) & (version.c.version == segment.c.version_min))
        )
        .where(
            among(sample.c.group_id, "ids"),
            version.c.run_id == sa.bindparam("b_run"),
            segment.c.loss == 1,
            *where,
        )
        .distinct()
    )


FRESHNESS = Prepared(_freshness())
FRESHNESS_REWOUND = Prepared(_freshness(sa.exists().where(run.c.id == sa.bindparam("b_run"), run.c.timeline > 0)))


def seen_from(current: int, versions: Iterable[Any]) -> dict[int, int]:
    """Staleness of each version as seen from the version `current`, by the tree itself.

    versions   rows (version, parent, depth) of all versions of a run, in any order
    common_depth would tell it from the version that is current today; the tree never changes, so a batch that is read
    again gets the numbers that it had.
    """
    parent, depth = {v.version: v.parent for v in versions}, {v.version: v.depth for v in versions}
    line, at = set(), current
    while at is not None:
        line.add(at)
        at = parent[at]
    shared: dict[int, int] = {}  # the last ancestor that lies on the line of `current`
    for number in sorted(parent):  # parents before children
        shared[number] = number if number in line else shared[parent[number]]
    return {number: depth[current] + depth[number] - 2 * depth[at] for number, at in shared.items()}
