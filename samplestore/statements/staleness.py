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

from typing import Any

import sqlalchemy as sa

from samplestore.models import Run, Sample, Segment, WeightVersionRow
from samplestore.states import SampleStatus

MODES = ("oldest", "newest", "mean")

run, sample, segment, version = Run.__table__, Sample.__table__, Segment.__table__, WeightVersionRow.__table__


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


def behind(run_id: Any, version_column: Any) -> sa.ColumnElement[int]:
    """Staleness of the version in `version_column`; NULL if it is unknown."""
    return current_depth(run_id) - freshness_of(run_id, version_column)


def sample_staleness(run_id: int, mode: str) -> sa.Select[Any]:
    """Rows (sample_id, group_id, staleness) of a run's samples that have trained tokens, from their segments."""
    if mode not in MODES:
        raise ValueError(f"staleness={mode!r} is not one of {MODES}")
    v = version.alias()
    lag = current_depth(run_id) - freshness(v)
    value = {
        "oldest": sa.func.max(lag),
        "newest": sa.func.min(lag),
        "mean": sa.cast(sa.func.sum(segment.c.n_tokens * lag), sa.Double) / sa.func.sum(segment.c.n_tokens),
    }[mode]
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
        .where(sample.c.run_id == run_id, segment.c.loss == 1, sample.c.status != SampleStatus.FAILED)
        .group_by(sample.c.id, sample.c.group_id)
    )


def group_staleness(run_id: int, mode: str, group_ids: sa.Select[Any] | None = None) -> sa.Subquery:
    """Rows (group_id, staleness): the max over samples, NULL when one is unknown."""
    rows = sample_staleness(run_id, mode)
    if group_ids is not None:
        rows = rows.where(sample.c.group_id.in_(group_ids))
    per_sample = rows.subquery()
    unknown = sa.func.sum(sa.case((per_sample.c.staleness.is_(None), 1), else_=0))
    value = sa.case((unknown > 0, None), else_=sa.func.max(per_sample.c.staleness))
    return sa.select(per_sample.c.group_id, value.label("staleness")).group_by(per_sample.c.group_id).subquery()
