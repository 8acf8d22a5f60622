"""What the page of a sample shows beside its trajectory: evidence of its reward, engine calls, the calls of its
episode, and per token what queries/trajectory.py does not read: staleness, stored arrays, the least likely token, a
text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from samplestore.arrayfiles import ArrayFiles
from samplestore.engine import Database
from samplestore.models import SegmentArray, WeightVersionRow
from samplestore.queries import arrays, episodes, group_page, inspect, trajectory
from samplestore.statements import staleness
from samplestore.types import Floats, Ids

array, version = SegmentArray.__table__, WeightVersionRow.__table__

MAX_REQUESTS = 200
MAX_CALLS = 500
MAX_SCAN = 200_000  # tokens of a response that are looked through for one of them
MAX_DIMENSIONS = 1  # arrays with more have no one number for a token


@dataclass(frozen=True, slots=True)
class Evidence:
    """stages: see group_page.stages_of; requests: see inspect.requests; calls of the episode, an empty list where the
    sample was not made by one; batches: see group_page.batches_of. `arrays`: names of the 1-dimensional ones."""

    stages: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    calls: list[episodes.RecordedCall]
    batches: list[dict[str, Any]]
    arrays: list[str]


def evidence(database: Database, sample_id: int, group_id: int, incarnation: int) -> Evidence:
    with database.reading() as c:
        stages = group_page.stages_of(c, sample_id, incarnation)
        calls = (
            episodes.record(c, sample_id, incarnation).calls if episodes.has_calls(c, sample_id, incarnation) else []
        )
        batches = group_page.batches_of(c, group_id)
        shapes = c.execute(
            sa.select(array.c.name, array.c.shape)
            .where(array.c.sample_id == sample_id, array.c.incarnation == incarnation)
            .limit(trajectory.MAX_SEGMENTS)
        ).fetchall()
    requests = inspect.requests(database, sample_id, incarnation, MAX_REQUESTS)
    flat = {r.name for r in shapes if len(r.shape) == 1} - {r.name for r in shapes if len(r.shape) > 1}
    return Evidence(stages, requests, calls[:MAX_CALLS], batches, sorted(flat))


def array_window(
    database: Database, run_id: int, found: trajectory.Trajectory, name: str, files: Callable[[], ArrayFiles]
) -> Floats:
    """A 1-dimensional named array as float32 for each token of the trajectory's window, NaN where it has none (prompt,
    tokens that nobody gave one). Only of the present incarnation. Raises ArrayFileError."""
    window = found.tokens
    values = np.full(window.ids.size, np.nan, np.float32)
    if found.incarnation != found.sample["incarnation"]:
        return values
    rows, present = arrays.one(database, run_id, found.sample["id"], name, files)
    if rows.ndim != MAX_DIMENSIONS or not rows.size:
        return values
    whole = np.where(present, rows.astype(np.float32), np.float32(np.nan))
    # Rows end with the last response token, wherever they begin.
    begin = found.n_tokens - whole.size
    low, high = max(window.start, begin), min(window.start + window.ids.size, found.n_tokens)
    if low < high:
        values[low - window.start : high - window.start] = whole[low - begin : high - begin]
    return values


def staleness_of(database: Database, run_id: int, versions: Sequence[int]) -> dict[int, int]:
    """How many weight updates each of these versions lies behind the current one."""
    wanted = sorted(set(versions))[:1000]
    if not wanted:
        return {}
    lag = (staleness.current_depth(run_id) - staleness.freshness()).label("lag")
    query = sa.select(version.c.version, lag).where(version.c.run_id == run_id, version.c.version.in_(wanted))
    with database.reading() as c:
        return {int(r.version): int(r.lag) for r in c.execute(query) if r.lag is not None}


def least_likely(
    database: Database, run_id: int, group_number: int, index: int, incarnation: int | None
) -> tuple[int, float] | None:
    """(position, log-prob) of the response token with the lowest log-prob, among the first MAX_SCAN; None: none has
    one."""
    best: tuple[int, float] | None = None
    for part in _windows(database, run_id, group_number, index, incarnation):
        known = np.isfinite(part.logprobs)
        if known.any():
            at = int(np.argmin(np.where(known, part.logprobs, np.inf)))
            if best is None or float(part.logprobs[at]) < best[1]:
                best = (part.start + at, float(part.logprobs[at]))
    return best


def response_ids(
    database: Database, run_id: int, group_number: int, index: int, incarnation: int | None
) -> tuple[int, Ids]:
    """(position of the first, ids [n] int32) of prompt and response together, at most MAX_SCAN."""
    parts = list(_windows(database, run_id, group_number, index, incarnation))
    ids: list[npt.NDArray[np.int32]] = [p.ids for p in parts]
    return (parts[0].start if parts else 0), np.concatenate(ids) if ids else np.empty(0, np.int32)


def _windows(database: Database, run_id: int, group_number: int, index: int, incarnation: int | None) -> Any:
    at = 0
    while at < MAX_SCAN:
        found = trajectory.read(
            database, run_id, group_number, index, incarnation=incarnation, start=at, limit=trajectory.MAX_WINDOW
        )
        if found is None or not found.tokens.ids.size or found.tokens.start < at:
            return
        yield found.tokens
        at = found.tokens.start + found.tokens.ids.size
        if at >= (found.n_prompt if found.pruned else found.n_tokens):
            return
