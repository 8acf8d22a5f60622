"""What keeps a run from getting on although everybody is at work: engines that nobody brings to the current weights,
and work that fails again and again. Texts for queries/why.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.clock import db_now
from samplestore.logs import mask
from samplestore.models import BatchRow, EngineRow, Event, SampleGroup, Timeline, WeightVersionRow, one_of
from samplestore.states import LIVE_BATCH, PROMPT_REFUSED, GroupState
from samplestore.words import amount, which

batch, engine, event, group, timeline, version = (
    t.__table__ for t in (BatchRow, EngineRow, Event, SampleGroup, Timeline, WeightVersionRow)
)

SHOWN = 400  # characters of an error
MOST = 1000  # failures that are counted, and dropped groups whose reasons are


def left_behind(connection: sa.Connection, run_row: Any) -> str | None:
    """Live engines that serve an older version than the run's current one, which has no path to load it from, while
    nobody drives an update of them: what they write may be too old from its birth, and it would go on without end."""
    at = connection.execute(
        sa.select(version.c.label, version.c.path, (db_now() - version.c.created_at).label("age"))
        .where(version.c.run_id == run_row.id, version.c.version == run_row.current_version)
    ).one()  # fmt: skip
    if at.path is not None:
        return None
    of_run = (engine.c.run_id == run_row.id) & (engine.c.state == "live")
    rows = connection.execute(
        sa.select(engine.c.url, engine.c.version)
        .where(of_run, engine.c.version.is_not(None), engine.c.version != run_row.current_version)
        .where(engine.c.owner.is_(None))
        .order_by(engine.c.version, engine.c.url)
    ).fetchall()
    if not rows:
        return None
    live = int(connection.execute(sa.select(sa.func.count()).where(of_run)).scalar_one())
    return (
        f"{len(rows)} of {amount(live, 'engine')} {which(len(rows), 'does', 'do')} not serve the run's version "
        f"{run_row.current_version} ({rows[0].url} serves {rows[0].version}), which was published "
        f"{max(0.0, at.age):.0f} s ago without a path: workers bring no engine to it, and groups of older weights fall "
        "out of the window without end. Who publishes so has to load the weights himself: samplestore engines update "
        f"--path MODEL --label {at.label}"
    )


def last_batch_at(connection: sa.Connection, run_row: Any) -> float:
    """When the batch of the timeline's highest step was leased; when the timeline began, where there is none. States
    are written out so that uq_batch_step finds it among all batches."""
    last = (
        sa.select(batch.c.created_at)
        .where(batch.c.run_id == run_row.id, batch.c.timeline == run_row.timeline)
        .where(sa.text(one_of("batch.state", LIVE_BATCH)))
        .order_by(batch.c.step.desc())
        .limit(1)
    )
    began = sa.select(timeline.c.created_at).where(
        timeline.c.run_id == run_row.id, timeline.c.number == run_row.timeline
    )
    found = connection.execute(last).scalar()
    return float(connection.execute(began).scalar_one() if found is None else found)


def failing(connection: sa.Connection, run_id: int, kind: str, since: float) -> str | None:
    """How often events of this kind ("fail": an attempt at a sample, "stage_failed": one at a stage) came since the
    last batch was leased, and the newest error. None where none came."""
    of_kind = (event.c.run_id == run_id) & (event.c.kind == kind) & (event.c.at >= since)
    some = sa.select(event.c.id).where(of_kind).limit(MOST).subquery()
    n = int(connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())
    if n == 0:
        return None
    row = connection.execute(
        sa.select(event.c.sample_id, group.c.number, event.c.reason, event.c.details)
        .select_from(event.outerjoin(group, group.c.id == event.c.group_id))
        .where(of_kind)
        .order_by(event.c.at.desc(), event.c.id.desc())
        .limit(1)
    ).one()
    stage = (row.details or {}).get("stage")
    what = f"group {row.number}" if row.sample_id is None else f"sample {row.sample_id}"
    times = f"{n:,} or more times" if n == MOST else amount(n, "time")
    return f"{times} since the last batch; the newest, {what}{f', {stage}' if stage else ''}: {shown(row.reason)}"


def dropped(connection: sa.Connection, run_row: Any) -> tuple[str, str | None]:
    """Of the groups that were dropped last: their commonest reasons with how many each, and the prompts among them that
    no engine can take with the newest reason (None where there are none)."""
    last = (
        sa.select(group.c.prompt_id, group.c.number, group.c.reason)
        .where(
            group.c.run_id == run_row.id, group.c.state == GroupState.DROPPED.value, group.c.evaluation_id.is_(None)
        )
        .order_by(group.c.number.desc())
        .limit(MOST)
        .subquery()
    )  # fmt: skip
    refused = sa.case((last.c.reason.startswith(PROMPT_REFUSED), last.c.prompt_id)).label("refused")
    rows = connection.execute(
        sa.select(last.c.reason, refused, sa.func.count().label("n"), sa.func.max(last.c.number).label("newest"))
        .group_by(last.c.reason, refused)
    ).fetchall()  # fmt: skip
    times: Counter[str] = Counter()
    for row in rows:
        times[str(row.reason)] += row.n
    commonest = sorted(times.items(), key=lambda reason: (-reason[1], reason[0]))[:3]
    told = "; ".join(f"{shown(reason)} ({n})" for reason, n in commonest)
    return told, _refused([row for row in rows if row.refused is not None], run_row.n_prompts)


def _refused(rows: Sequence[Any], n_prompts: int) -> str | None:
    n = len({row.refused for row in rows})
    if n == 0:
        return None
    newest = max(rows, key=lambda row: row.newest)
    return (
        f"{amount(n, 'prompt')} of {n_prompts:,} {which(n, 'was', 'were')} refused, and "
        f"{which(n, 'is', 'are')} not served again: no engine can take {which(n, 'it', 'them')}. The newest, of group "
        f"{newest.newest}: {shown(newest.reason.removeprefix(PROMPT_REFUSED))}. Once one can: samplestore requeue "
        f"{newest.newest}/0 --reason TEXT"
    )


def shown(text: Any) -> str:
    """An error for one line of a message: bounded, without passwords or what would act on a terminal. Of a long one
    begin and end, where a traceback has its exception."""
    line = " ".join(mask(str(text)).split())
    if len(line) > SHOWN:
        line = f"{line[: SHOWN // 3]} ... {line[-2 * SHOWN // 3 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
