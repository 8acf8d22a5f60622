"""One group, to be read by a person: its row, its prompt, the batches that took it, what its stages said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.engine import Database
from samplestore.models import BatchGroup, BatchRow, PromptRow, Run, Sample, SampleGroup, Stage
from samplestore.queries import browse
from samplestore.statements import staleness

run, group, sample, prompt, stage, batch, batch_group = (
    t.__table__ for t in (Run, SampleGroup, Sample, PromptRow, Stage, BatchRow, BatchGroup)
)

PROMPT_TEXT = 20_000  # characters of a prompt's JSON
TEXT = 400  # of an error
MAX_STAGES, MAX_BATCHES = 500, 20


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as it was in one snapshot. `group`: columns of its row, `staleness` (of now; at the lease of what
    a trainer holds or has consumed), `dataset`, `label`, `images` (digests), the
    prompt (`prompt`, JSON as text, cut at PROMPT_TEXT). `stages` are those of the whole group; samples have their
    own. `newest` is the highest number of a group of the run."""

    group: dict[str, Any]
    samples: list[dict[str, Any]]
    stages: list[dict[str, Any]]
    batches: list[dict[str, Any]]
    as_of: float
    newest: int


_STAGE = (
    stage.c.name, stage.c.status, stage.c.outcome, stage.c.value, stage.c.elapsed_s, stage.c.failures,
    sa.func.substr(stage.c.error, 1, TEXT).label("error"), stage.c.created_at, stage.c.claimed_at, stage.c.settled_at,
    stage.c.details,
)  # fmt: skip


def read(database: Database, run_id: int, number: int) -> GroupView | None:
    """The group of that number; None where the run has none."""
    with database.reading() as c:
        row = c.execute(
            sa.select(
                *group.c, prompt.c.dataset, prompt.c.images, prompt.c.label, prompt.c.n_tokens.label("prompt_tokens"),
                sa.func.substr(sa.cast(prompt.c.prompt, sa.Text), 1, PROMPT_TEXT).label("prompt"),
                staleness.shown_lag(run_id).label("staleness"),
            )
            .select_from(group.join(prompt, prompt.c.id == group.c.prompt_id))
            .where(group.c.run_id == run_id, group.c.number == number)
        ).one_or_none()  # fmt: skip
        if row is None:
            return None
        of_group = c.execute(
            sa.select(*_STAGE)
            .where(stage.c.group_id == row.id, stage.c.sample_id.is_(None))
            .order_by(stage.c.id.desc())
            .limit(MAX_STAGES)
        ).fetchall()
        taken = batches_of(c, row.id)
        as_of = float(c.execute(sa.select(db_now())).scalar_one())
        newest = int(c.execute(sa.select(run.c.n_groups).where(run.c.id == run_id)).scalar_one()) - 1
    return GroupView(
        dict(row._mapping),
        browse.samples(database, run_id, number),
        [dict(r._mapping) for r in of_group],
        taken,
        as_of,
        newest,
    )


def batches_of(c: sa.Connection, group_id: int) -> list[dict[str, Any]]:
    """The batches that a group has been in, the newest first: more than one where a trainer gave it back, or a
    rewind."""
    rows = c.execute(
        sa.select(
            batch.c.id, batch.c.timeline, batch.c.step, batch_group.c.state, batch_group.c.staleness,
            batch.c.current_version, batch.c.created_at, batch.c.settled_at,
        )
        .select_from(batch_group.join(batch, batch.c.id == batch_group.c.batch_id))
        .where(batch_group.c.group_id == group_id)
        .order_by(batch.c.id.desc())
        .limit(MAX_BATCHES)
    )  # fmt: skip
    return [dict(r._mapping) for r in rows]


def stages_of(c: sa.Connection, sample_id: int, incarnation: int) -> list[dict[str, Any]]:
    """What was done to a finished sample, in order: name, status, outcome, value, seconds, error, details."""
    rows = c.execute(
        sa.select(*_STAGE)
        .where(stage.c.sample_id == sample_id, stage.c.incarnation == incarnation)
        .order_by(stage.c.id)
        .limit(MAX_STAGES)
    )
    return [dict(r._mapping) for r in rows]
