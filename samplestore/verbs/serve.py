"""Which prompts are served next: all in one seeded order, data sets mixed by weight, or what a curriculum chooses.

Each way is told by the run's row, its data sets and its settings alone, so every process goes on where the last one
was. The caller holds the run's lock: what is chosen here is served once.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import sqlalchemy as sa

from samplestore import serving
from samplestore.errors import InvalidSetting
from samplestore.models import DatasetRow, PromptRow, Run, SampleGroup
from samplestore.order import Cursor
from samplestore.queries import serving as queries
from samplestore.states import PROMPT_REFUSED, GroupState, Purpose
from samplestore.verbs.tx import Tx, in_parts

run, dataset, prompt, group = (t.__table__ for t in (Run, DatasetRow, PromptRow, SampleGroup))

MOST_PASSED_OVER = 1000  # prompts, before a call comes back with what it has: it holds the run's lock


class Served(NamedTuple):
    """A prompt whose turn it is. epoch: which pass over its data set, or of the prompt; priority: of its samples."""

    prompt_id: int
    epoch: int
    priority: int = 0


def next_prompts(tx: Tx, row: Any, n: int) -> list[Served]:
    """The next prompts, at most n, and move the serving order on. Those that no engine can take are passed over, a
    bounded number of them in one call. row: the run's, locked. Raises InvalidSetting where a curriculum does not run.
    """
    served = _able_by_curriculum(tx, n) if tx.settings.curriculum is not None else _able_in_turn(tx, row, n)
    if not tx.settings.datasets:  # which count as they are drawn
        _count(tx, served)
    return served


def _able_in_turn(tx: Tx, row: Any, n: int) -> list[Served]:
    served: list[Served] = []
    passed_over = 0
    while len(served) < n and passed_over < MOST_PASSED_OVER:
        wanted = n - len(served)
        drawn_now = _by_weight(tx, wanted) if tx.settings.datasets else _in_order(tx, row, wanted)
        refused = _refused(tx, drawn_now)
        served += [s for s in drawn_now if s.prompt_id not in refused]
        if not refused:
            break
        passed_over += len(refused)
        row = tx.lock_run()  # where the order stands now
    return served


def _able_by_curriculum(tx: Tx, n: int) -> list[Served]:
    """It may put them first for ever, since it knows nothing of them: it is asked for as many more."""
    wanted = n
    while True:
        chosen = _by_curriculum(tx, wanted)
        refused = _refused(tx, chosen)
        able = [s for s in chosen if s.prompt_id not in refused]
        if len(able) >= n or len(chosen) < wanted or wanted > n + MOST_PASSED_OVER:
            return able[:n]
        wanted = n + len(chosen) - len(able)


def _refused(tx: Tx, served: list[Served]) -> set[int]:
    """Those of these prompts that no engine can take, as an earlier group of them has shown. A group that was requeued
    is open again, and says so no more."""
    return {
        id
        for part in in_parts(s.prompt_id for s in served)
        for id in tx.execute(
            sa.select(group.c.prompt_id).where(
                group.c.prompt_id.in_(part), group.c.state == GroupState.DROPPED.value,
                group.c.reason.startswith(PROMPT_REFUSED),
            )
        ).scalars()
    }  # fmt: skip


def _in_order(tx: Tx, row: Any, n: int) -> list[Served]:
    cursor = Cursor(row.epoch, row.chunk_start, row.chunk_stop, row.chunk_next)
    steps = _advance(cursor, row.n_prompts, tx.settings.epochs, tx.settings.seed, n)
    if steps:
        tx.execute(sa.update(run).where(run.c.id == tx.run_id).values(**_columns(cursor)))
    ids = _ids(tx, prompt.c.position, (position for _, position in steps))
    return [Served(ids[position], epoch) for epoch, position in steps]


def _advance(cursor: Cursor, n_prompts: int, epochs: int | None, seed: int | str, n: int) -> list[tuple[int, int]]:
    steps: list[tuple[int, int]] = []
    while len(steps) < n and (step := cursor.advance(n_prompts, epochs, seed)) is not None:
        steps.append(step)
    return steps


def _columns(cursor: Cursor) -> dict[str, int]:
    return {"epoch": cursor.epoch, "chunk_start": cursor.start, "chunk_stop": cursor.stop, "chunk_next": cursor.next}


def _ids(tx: Tx, column: Any, places: Iterable[int], *where: Any) -> dict[int, int]:
    """Ids of prompts by their place."""
    return {
        row.place: row.id
        for part in in_parts(places)
        for row in tx.rows(
            sa.select(prompt.c.id, column.label("place")).where(prompt.c.run_id == tx.run_id, column.in_(part), *where)
        )
    }


def rows_of(tx: Tx) -> dict[str, Any]:
    """The run's data sets, by name."""
    return {row.name: row for row in tx.rows(sa.select(dataset).where(dataset.c.run_id == tx.run_id))}


def _by_weight(tx: Tx, n: int) -> list[Served]:
    """Which data set comes next is a seeded draw by the weights, among those of the lowest priority that have prompts
    left; each is served in its own seeded order. The draw depends on how many were served before, not on the clock."""
    rules, known = serving.shares(tx.settings.datasets), rows_of(tx)
    cursors = {name: _cursor(known[name]) for name in sorted(rules.keys() & known.keys())}
    seed, total = tx.settings.seed, sum(row.n_served for row in known.values())
    passes = {name: rules[name].epochs or tx.settings.epochs for name in cursors}
    steps: list[tuple[str, int, int]] = []
    while len(steps) < n:
        left = [name for name, c in cursors.items() if not c.exhausted(known[name].n_prompts, passes[name])]
        if not left:
            break
        lowest = min(rules[name].priority for name in left)
        name = drawn(seed, total + len(steps), {m: rules[m].weight for m in left if rules[m].priority == lowest})
        step = cursors[name].advance(known[name].n_prompts, passes[name], f"{seed}/{name}")
        assert step is not None, "one that is not exhausted has a next prompt"
        steps.append((name, *step))
    places: dict[str, list[int]] = defaultdict(list)
    for name, _, position in steps:
        places[name].append(position)
    ids = {name: _ids(tx, prompt.c.dataset_position, there, prompt.c.dataset == name) for name, there in places.items()}
    for name, there in sorted(places.items()):
        values = {**_columns(cursors[name]), "n_served": dataset.c.n_served + len(there)}
        tx.execute(sa.update(dataset).where(dataset.c.run_id == tx.run_id, dataset.c.name == name).values(**values))
    return [Served(ids[name][position], epoch, rules[name].priority) for name, epoch, position in steps]


def _cursor(row: Any) -> Cursor:
    return Cursor(row.epoch, row.chunk_start, row.chunk_stop, row.chunk_next)


def drawn(seed: int, number: int, weights: dict[str, float]) -> str:
    """The name that draw `number` of a run falls on: by the weights, the same in every process."""
    digest = hashlib.blake2b(f"{seed}/draw/{number}".encode(), digest_size=8).digest()
    at = int.from_bytes(digest, "little") / 2**64 * sum(weights.values())
    for name, weight in sorted(weights.items()):
        at -= weight
        if at < 0:
            return name
    return max(weights)  # at was the sum itself, by rounding


def _by_curriculum(tx: Tx, n: int) -> list[Served]:
    """What the run's own SELECT gives. A prompt may come again; its epoch is how often it was served before."""
    said = str(tx.settings.curriculum)
    total = sum(row.n_served for row in rows_of(tx).values())
    wanted = queries.chosen(tx.connection, said, tx.run_id, n, total, tx.settings.seed)
    if any(isinstance(id, bool) or not isinstance(id, int) for id in wanted):
        raise InvalidSetting("curriculum", said, "a SELECT whose first column are ids of prompts")
    there: set[int] = set()
    before: dict[int, int] = {}
    for part in in_parts(wanted):
        mine = sa.select(prompt.c.id).where(prompt.c.run_id == tx.run_id, prompt.c.id.in_(part), prompt.c.position >= 0)
        there |= {row.id for row in tx.rows(mine)}
        served = (
            sa.select(group.c.prompt_id, sa.func.count().label("n"))
            .where(group.c.prompt_id.in_(part), group.c.run_id == tx.run_id, group.c.evaluation_id.is_(None))
            .group_by(group.c.prompt_id)
        )
        before |= {row.prompt_id: int(row.n) for row in tx.rows(served)}
    if wrong := [id for id in wanted if id not in there]:
        raise InvalidSetting("curriculum", said, f"ids of this run's training prompts; {wrong[0]} is none")
    found = []
    for id in wanted:
        found.append(Served(id, before.get(id, 0)))
        before[id] = before.get(id, 0) + 1
    return found


def _count(tx: Tx, served: list[Served]) -> None:
    """Count what was served from each data set."""
    for part in in_parts(s.prompt_id for s in served):
        names = dict(tx.connection.execute(sa.select(prompt.c.id, prompt.c.dataset).where(prompt.c.id.in_(part))).all())
        counted: dict[str, int] = defaultdict(int)
        for s in served:
            if s.prompt_id in names:
                counted[names[s.prompt_id]] += 1
        for name, n in sorted(counted.items()):
            tx.execute(
                sa.update(dataset)
                .where(dataset.c.run_id == tx.run_id, dataset.c.name == name)
                .values(n_served=dataset.c.n_served + n)
            )


def place(tx: Tx, names: Iterable[str], purpose: Purpose) -> dict[str, Any]:
    """The rows of these data sets, made where they are not there. Raises InvalidSetting for one that is there for
    something else, or that the run would never serve."""
    known = rows_of(tx)
    for name in dict.fromkeys(names):
        if name in known:
            if known[name].purpose != purpose:
                raise InvalidSetting(
                    "dataset", name, f"another name: prompts of this one are there for {known[name].purpose}"
                )
            continue
        if purpose == Purpose.TRAIN and tx.settings.datasets and name not in tx.settings.datasets:
            raise InvalidSetting("dataset", name, "one that the run serves: " + ", ".join(tx.settings.datasets))
        made = {"run_id": tx.run_id, "name": name, "purpose": purpose.value}
        known[name] = tx.execute(sa.insert(dataset).values(**made).returning(dataset)).one()
    return known
