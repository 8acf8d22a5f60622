"""Prompts come in; admission turns them into groups."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.models import PromptRow, Run, Sample, SampleGroup
from samplestore.order import Cursor
from samplestore.states import IN_WINDOW, RunState
from samplestore.types import Added
from samplestore.verbs import groups
from samplestore.verbs.tx import Tx

run, prompt, group, sample = (t.__table__ for t in (Run, PromptRow, SampleGroup, Sample))

CHUNK = 500  # rows a statement: far below SQLite's 32,766 and PostgreSQL's 65,535 bound values


def add(tx: Tx, prompts: Iterable[Any]) -> Added:
    """Store prompts (samplestore.prompts.Prompt); those whose content key is there already are left alone."""
    row = tx.lock_run()
    position, existing, waiting = row.n_prompts, 0, iter(prompts)
    while part := list(islice(waiting, CHUNK)):
        keys = {p.content_key for p in part}
        there = {r.content_key for r in tx.rows(
            sa.select(prompt.c.content_key).where(prompt.c.run_id == tx.run_id, prompt.c.content_key.in_(keys))
        )}  # fmt: skip
        new = []
        for item in part:
            if item.content_key in there:
                existing += 1
                continue
            there.add(item.content_key)
            new.append(_row(tx, item, position))
            position += 1
        if new:
            tx.execute(sa.insert(prompt).values(created_at=db_now()), new)
    added = position - row.n_prompts
    if added:
        tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(n_prompts=position))
        tx.event("add_prompts", None, details={"added": added, "existing": existing})
    return Added(added, existing)


def _row(tx: Tx, item: Any, position: int) -> dict[str, Any]:
    return {
        "run_id": tx.run_id, "position": position, "content_key": item.content_key, "dataset": item.dataset,
        "n_tokens": int(item.prompt_ids.size), "prompt": item.prompt, "label": item.label, "metadata": item.metadata,
        "tools": item.tools, "template_args": item.template_args, "prompt_ids": codec.ids_bytes(item.prompt_ids),
    }  # fmt: skip


def admit(tx: Tx) -> int:
    """Create groups, in the seeded order, until open + scoring + ready reaches the window. Returns how many.

    The run's lock keeps several workers from overshooting. Costs with the window, never with history.
    """
    row = tx.lock_run()
    if row.state != RunState.RUNNING or row.n_prompts == 0:
        return 0
    groups.expire(tx)
    live = tx.execute(
        sa.select(sa.func.count()).where(group.c.run_id == tx.run_id, group.c.state.in_([s.value for s in IN_WINDOW]))
    ).scalar_one()
    cursor = Cursor(row.epoch, row.chunk_start, row.chunk_stop, row.chunk_next)
    served: list[tuple[int, int]] = []
    while len(served) < tx.settings.window_groups - live:
        step = cursor.advance(row.n_prompts, tx.settings.epochs, tx.settings.seed)
        if step is None:
            break
        served.append(step)
    if not served:
        return 0
    tx.execute(
        sa.update(run)
        .where(run.c.id == tx.run_id)
        .values(
            epoch=cursor.epoch, chunk_start=cursor.start, chunk_stop=cursor.stop, chunk_next=cursor.next,
            n_groups=row.n_groups + len(served),
        )
    )  # fmt: skip
    for start in range(0, len(served), CHUNK):
        _create(tx, served[start : start + CHUNK], row.n_groups + start, row.timeline)
    return len(served)


def _create(tx: Tx, served: list[tuple[int, int]], first_number: int, timeline: int) -> None:
    n = tx.settings.samples_per_prompt
    ids = {r.position: r.id for r in tx.rows(
        sa.select(prompt.c.id, prompt.c.position).where(
            prompt.c.run_id == tx.run_id, prompt.c.position.in_({position for _, position in served})
        )
    )}  # fmt: skip
    made = tx.execute(
        sa.insert(group).values(created_at=db_now()).returning(group.c.id, sort_by_parameter_order=True),
        [
            {
                "run_id": tx.run_id, "prompt_id": ids[position], "number": first_number + i, "epoch": epoch,
                "timeline": timeline, "n_samples": n, "n_open": n,
            }
            for i, (epoch, position) in enumerate(served)
        ],
    ).scalars().all()  # fmt: skip
    rows = [{"run_id": tx.run_id, "group_id": id, "index": i} for id in made for i in range(n)]
    tx.execute(sa.insert(sample).values(created_at=db_now()), rows)
