"""What is recorded of an episode: the calls of its function, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from samplestore.models import EpisodeStep, PromptRow, Sample, SampleGroup

step, sample, group, prompt = (t.__table__ for t in (EpisodeStep, Sample, SampleGroup, PromptRow))

STARTED, DONE, FAILED = "started", "done", "failed"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call. start, stop: response positions, stop is None while it is only started."""

    number: int
    kind: str
    name: str
    state: str
    asked: Any
    result: Any
    start: int | None
    stop: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Record:
    """The calls of a sample's present incarnation, and what its function is given beside its claim.

    children   samples that were forked from it, in that order
    """

    calls: list[RecordedCall]
    n_aborts: int
    tools: list[dict[str, Any]] | None
    template_args: dict[str, Any] | None
    children: list[int]


def has_calls(connection: sa.Connection, sample_id: int, incarnation: int) -> bool:
    """Whether an episode has begun this life of a sample."""
    mine = (step.c.sample_id == sample_id) & (step.c.incarnation == incarnation)
    return connection.execute(sa.select(step.c.number).where(mine).limit(1)).scalar() is not None


def record(connection: sa.Connection, sample_id: int, incarnation: int) -> Record:
    row = connection.execute(
        sa.select(sample.c.n_aborts, prompt.c.tools, prompt.c.template_args)
        .select_from(sample.join(group, group.c.id == sample.c.group_id).join(prompt, prompt.c.id == group.c.prompt_id))
        .where(sample.c.id == sample_id)
    ).one()
    rows = connection.execute(
        sa.select(
            step.c.number, step.c.kind, step.c.name, step.c.state, step.c.asked, step.c.result, step.c.start,
            step.c.stop, step.c.error,
        )
        .where(step.c.sample_id == sample_id, step.c.incarnation == incarnation)
        .order_by(step.c.number)
    )  # fmt: skip
    children = connection.execute(
        sa.select(sample.c.id).where(sample.c.parent_id == sample_id).order_by(sample.c.index)
    ).scalars()
    calls = [RecordedCall(**call._mapping) for call in rows]
    return Record(calls, int(row.n_aborts), row.tools, row.template_args, list(children))
