"""Whether the same engine would give a sample's tokens again, by what is known of the requests that made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from samplestore.engine import Database
from samplestore.errors import NotInRun
from samplestore.models import Request, Sample

request, sample = Request.__table__, Sample.__table__


@dataclass(frozen=True, slots=True)
class Determinism:
    """Whether the same tokens come again: one set of weights, one engine, and no draw that is not fixed by a seed. A
    sample that was resumed on the same engine under the same weights still counts: its seed goes with the place of a
    token, not with the request. What the engine itself must hold to is in docs/howto/determinism.md.

    reasons   why not; empty where it holds
    resumed   requests beyond the first
    """

    holds: bool
    reasons: list[str]
    resumed: int


def of_sample(database: Database, run_id: int, sample_id: int) -> Determinism:
    """For the present incarnation of a sample. Raises NotInRun."""
    with database.reading() as connection:
        return read(connection, run_id, sample_id)


def read(connection: sa.Connection, run_id: int, sample_id: int) -> Determinism:
    row = connection.execute(sa.select(sample).where(sample.c.id == sample_id, sample.c.run_id == run_id)).one_or_none()
    if row is None:
        raise NotInRun("sample", [sample_id])
    made = connection.execute(
        sa.select(request.c.engine, request.c.sampling_seed, request.c.greedy, request.c.temperature)
        .where(request.c.sample_id == sample_id, request.c.incarnation == row.incarnation, request.c.stored_tokens > 0)
        .order_by(request.c.id)
    ).fetchall()
    reasons = list(_reasons(row, made))
    return Determinism(not reasons, reasons, max(0, len(made) - 1))


def _reasons(row: Any, made: Sequence[Any]) -> Iterator[str]:
    if not made:
        yield "no engine of this run has made its tokens"
        return
    if any(r.sampling_seed is None and not r.greedy for r in made):
        yield "an engine drew without a seed"
    if row.version_min is None or row.version_unknown:
        yield "its weight version is not known"
    elif row.version_min != row.version_max:
        yield f"weights changed from version {row.version_min} to {row.version_max}"
    engines = {r.engine for r in made}
    if None in engines:
        yield "the router did not tell which engine answered"
    elif len(engines) > 1:
        yield f"{len(engines)} engines made it"
    if len({(r.sampling_seed, r.greedy) for r in made}) > 1:
        yield "its requests drew in different ways"
    heats = sorted({r.temperature for r in made if not r.greedy}, key=lambda t: (t is not None, t or 0.0))
    if len(heats) > 1:  # one seed draws other tokens from another distribution
        yield f"its requests drew at temperatures {', '.join('unknown' if t is None else f'{t:g}' for t in heats)}"
