"""Prompts come in; admission turns them into groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import sqlalchemy as sa

from samplestore import codec
from samplestore.clock import db_now
from samplestore.models import DatasetRow, PromptImage, PromptRow, Run, Sample, SampleGroup
from samplestore.states import Purpose, RunState
from samplestore.types import Added
from samplestore.verbs import serve, stale, steps
from samplestore.verbs.serve import Served
from samplestore.verbs.tx import Tx

run, prompt, group, sample, dataset, image = (
    t.__table__ for t in (Run, PromptRow, SampleGroup, Sample, DatasetRow, PromptImage)
)

CHUNK = 500  # rows a statement: far below SQLite's 32,766 and PostgreSQL's 65,535 bound values


def add(tx: Tx, prompts: Iterable[Any], purpose: Purpose = Purpose.TRAIN) -> Added:
    """Store prompts (samplestore.prompts.Prompt); those whose content key is there already are left alone.

    Prompts to train on are numbered from 0 up, those to evaluate on and imported ones from -1 down, so that no serving
    order meets them. Raises InvalidSetting for a data set that is there for another purpose, or that the run never
    serves.
    """
    row = tx.lock_run()
    known, added, existing, waiting = serve.rows_of(tx), 0, 0, iter(prompts)
    sizes = Counter({name: there.n_prompts for name, there in known.items()})
    evaluated = sum(there.n_prompts for there in known.values() if there.purpose != Purpose.TRAIN)
    while part := list(islice(waiting, CHUNK)):
        keys = {p.content_key for p in part}
        there = {r.content_key for r in tx.rows(
            sa.select(prompt.c.content_key).where(prompt.c.run_id == tx.run_id, prompt.c.content_key.in_(keys))
        )}  # fmt: skip
        known |= serve.place(tx, {p.dataset for p in part}, purpose)
        new = []
        for item in part:
            if item.content_key in there:
                existing += 1
                continue
            there.add(item.content_key)
            position = row.n_prompts + added if purpose == Purpose.TRAIN else -1 - evaluated - added
            new.append(_row(tx, item, position, sizes[item.dataset]))
            sizes[item.dataset] += 1
            added += 1
        if new:
            _keep_images(tx, [image for item in part for image in item.images])
            tx.execute(sa.insert(prompt).values(created_at=db_now()), new)
    if added:
        for name in sorted(name for name, there in known.items() if sizes[name] != there.n_prompts):
            mine = (dataset.c.run_id == tx.run_id) & (dataset.c.name == name)
            tx.execute(sa.update(dataset).where(mine).values(n_prompts=sizes[name]))
        if purpose == Purpose.TRAIN:
            tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(n_prompts=row.n_prompts + added))
        tx.event("add_prompts", None, details={"added": added, "existing": existing, "purpose": purpose.value})
    return Added(added, existing)


def _row(tx: Tx, item: Any, position: int, within: int) -> dict[str, Any]:
    return {
        "run_id": tx.run_id, "position": position, "content_key": item.content_key, "dataset": item.dataset,
        "dataset_position": within, "n_tokens": int(item.prompt_ids.size), "prompt": item.prompt, "label": item.label,
        "metadata": item.metadata, "tools": item.tools, "template_args": item.template_args,
        "prompt_ids": codec.ids_bytes(item.prompt_ids), "images": [i.digest for i in item.images] or None,
    }  # fmt: skip


def _keep_images(tx: Tx, given: Iterable[Any]) -> None:
    """Each once, one a statement: a chunk of prompts may have gigabytes. The run is locked, so nobody else adds the
    same one meanwhile."""
    found = {one.digest: one for one in given}
    if not found:
        return
    here = (image.c.run_id == tx.run_id) & image.c.digest.in_(list(found))
    there = {r.digest for r in tx.rows(sa.select(image.c.digest).where(here))}
    for digest in sorted(found.keys() - there):
        one = found[digest]
        row = {"digest": digest, "media_type": one.media_type, "n_bytes": len(one.data), "data": one.data}
        tx.execute(sa.insert(image).values(run_id=tx.run_id, **row))


def admit(tx: Tx, wanted: int = 0) -> int:
    """Create groups, in the serving order, until open + scoring + ready-inside-the-window reaches the window. Returns
    how many. Raises InvalidSetting where the run's curriculum does not run.

    wanted   so many at least, in mode async: somebody who holds what is under way asks for more

    The run's lock keeps several workers from overshooting. Costs with the window, never with history; with
    stale="skip" also with the ready groups that are kept beyond it.
    """
    row = tx.lock_run()
    if row.state != RunState.RUNNING or row.n_prompts == 0:
        return 0
    stale.sweep(tx)
    room = steps.room(tx, row, stale.occupied(tx), wanted)
    served = serve.next_prompts(tx, row, room) if room > 0 else []
    create_groups(tx, row, served, tx.settings.samples_per_prompt)
    return len(served)


def create_groups(tx: Tx, row: Any, served: list[Served], n: int, evaluation_id: int | None = None) -> list[int]:
    """Groups of n samples of these prompts, in this order; their ids. row: the run's, locked."""
    made: list[int] = []
    for start in range(0, len(served), CHUNK):
        part = served[start : start + CHUNK]
        made += tx.execute(
            sa.insert(group).values(created_at=db_now()).returning(group.c.id, sort_by_parameter_order=True),
            [
                {
                    "run_id": tx.run_id, "prompt_id": s.prompt_id, "number": row.n_groups + start + i,
                    "epoch": s.epoch, "timeline": row.timeline, "n_samples": n, "n_open": n,
                    "evaluation_id": evaluation_id,
                }
                for i, s in enumerate(part)
            ],
        ).scalars().all()  # fmt: skip
        rows = [
            {"run_id": tx.run_id, "group_id": id, "index": i, "priority": s.priority}
            for id, s in zip(made[start:], part, strict=True)
            for i in range(n)
        ]
        for first in range(0, len(rows), CHUNK):
            tx.execute(sa.insert(sample).values(created_at=db_now()), rows[first : first + CHUNK])
    if served:
        tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(n_groups=row.n_groups + len(served)))
    return made
