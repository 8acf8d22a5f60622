"""The run that a merge or a fork copies, as one snapshot after the other says it. Nothing here writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from samplestore.models import Run as RunRow
from samplestore.run import Run
from samplestore.states import BatchState
from samplestore.verbs import copies as verbs
from samplestore.verbs.copies import Groups, Row, Rows

table = RunRow.__table__
PAGE = 500  # ids a statement, and rows of other tables than groups a transaction


def stands_at(connection: sa.Connection, run_id: int) -> list[int]:
    """Numbers of which one rises whatever anybody does to a run's prompts, groups, samples, batches or weights."""
    of_run, sample, batch = verbs.sample.c.run_id == run_id, verbs.sample.c, verbs.batch.c
    queries = (
        *(sa.select(table.c[name]).where(table.c.id == run_id) for name in ("n_groups", "last_version")),
        *(sa.select(sa.func.sum(sample[name])).where(of_run) for name in ("n_tokens", "incarnation", "attempt")),
        sa.select(sa.func.count()).where(verbs.stage.c.run_id == run_id, verbs.stage.c.settled_at.is_not(None)),
        sa.select(sa.func.count()).where(batch.run_id == run_id),
        sa.select(sa.func.count()).where(batch.run_id == run_id, batch.state != BatchState.LEASED.value),
        sa.select(sa.func.count()).where(verbs.prompt.c.run_id == run_id),
        sa.select(table.c.retention_step + 1).where(table.c.id == run_id),
    )
    return [int(connection.execute(query).scalar_one() or 0) for query in queries]


class Source:
    """Rows of a run. step: of a fork, whose batches end there; None: all of them, with requests."""

    def __init__(self, run: Run, step: int | None) -> None:
        self.run, self.step, self.whole = run, step, step is None

    def about(self, c: sa.Connection) -> dict[str, Any]:
        id = self.run.id
        told: dict[str, Any] = {"run": self._rows(c, table, table.c.id == id)[0]}
        told["n_groups"], told["stands_at"] = told["run"]["n_groups"], stands_at(c, id)
        told["last_prompt"] = c.execute(
            sa.select(sa.func.max(verbs.prompt.c.id)).where(verbs.prompt.c.run_id == id)
        ).scalar()
        for each in (verbs.timeline, verbs.version, verbs.dataset, verbs.evaluation, verbs.worker):
            order = [each.c.id] if "id" in each.c else list(each.primary_key)
            told[each.name] = self._rows(c, each, each.c.run_id == id, *order)
        mine = verbs.batch.c.run_id == id
        if not self.whole:
            mine &= (verbs.batch.c.state == BatchState.COMMITTED.value) & (verbs.batch.c.step <= self.step)
        told["batches"] = self._rows(c, verbs.batch, mine, verbs.batch.c.id)
        held = (
            sa.select(verbs.group.c.number, verbs.batch_group.c.state)
            .select_from(verbs.batch_group.join(verbs.batch).join(verbs.group))
            .where(mine, verbs.batch_group.c.state == BatchState.COMMITTED.value)
        )
        told["held_states"] = {row.number: row.state for row in c.execute(held)}
        return told

    def line(self, c: sa.Connection) -> dict[str, Any]:
        """Where the source's training stands by now, with all its weights."""
        id = self.run.id
        told: dict[str, Any] = {each.name: self._rows(c, each, each.c.run_id == id) for each in verbs.LINE}
        told["run"] = self._rows(c, table, table.c.id == id)[0]
        told["stands_at"] = stands_at(c, id) if self.whole else None
        return told

    @staticmethod
    def _rows(c: sa.Connection, of: sa.Table, where: Any, *order: Any) -> list[Row]:
        return [dict(row._mapping) for row in c.execute(sa.select(of).where(where).order_by(*order))]

    def pages(
        self, of: sa.Table, key: Any, size: int, after: int | None = None, upto: int | None = None
    ) -> Iterator[list[Row]]:
        """Rows of the source's run in the order of a column of whole numbers, some at a time."""
        low = -(2**62) if after is None else after
        while True:
            where = (of.c.run_id == self.run.id) & (key > low) & (key <= (2**62 if upto is None else upto))
            query = sa.select(of).where(where).order_by(key).limit(size)
            rows = self.run.database.read(lambda c, q=query: [dict(r._mapping) for r in c.execute(q)])  # type: ignore[misc]
            if not rows:
                return
            yield rows
            low = rows[-1][key.name]

    def images(self, c: sa.Connection, digests: set[str]) -> list[Row]:
        image = verbs.image
        return self._rows(c, image, (image.c.run_id == self.run.id) & image.c.digest.in_(sorted(digests)))

    def groups(self, c: sa.Connection, rows: Rows) -> Groups:
        """These groups in one snapshot, read again with all that belongs to them."""
        ids = [row["id"] for row in rows]
        found: dict[str, Rows] = {
            verbs.group.name: self._rows(c, verbs.group, verbs.group.c.id.in_(ids), verbs.group.c.number)
        }
        found[verbs.sample.name] = self._rows(c, verbs.sample, verbs.sample.c.group_id.in_(ids), verbs.sample.c.id)
        found[verbs.stage.name] = self._rows(c, verbs.stage, verbs.stage.c.group_id.in_(ids), verbs.stage.c.id)
        of = [row["id"] for row in found[verbs.sample.name]]
        for each in (verbs.segment, verbs.array, verbs.step, verbs.request):
            wanted = each is not verbs.request or self.whole
            found[each.name] = [
                row
                for at in range(0, len(of) if wanted else 0, PAGE)
                for row in self._rows(c, each, each.c.sample_id.in_(of[at : at + PAGE]), *each.primary_key)
            ]
        wanted_prompts = {row["prompt_id"] for row in found[verbs.group.name]}
        keys = c.execute(
            sa.select(verbs.prompt.c.id, verbs.prompt.c.content_key).where(verbs.prompt.c.id.in_(wanted_prompts))
        )
        return Groups(found, {row.id: row.content_key for row in keys})

    def held(self, c: sa.Connection, rows: Rows) -> tuple[list[Row], dict[int, int]]:
        of = verbs.batch_group
        held = self._rows(c, of, of.c.batch_id.in_([row["id"] for row in rows]), of.c.batch_id, of.c.position)
        return held, self.numbers(c, {row["group_id"] for row in held})

    def numbers(self, c: sa.Connection, ids: set[int]) -> dict[int, int]:
        listed, found = sorted(ids), dict[int, int]()
        for at in range(0, len(listed), PAGE):
            query = sa.select(verbs.group.c.id, verbs.group.c.number).where(
                verbs.group.c.id.in_(listed[at : at + PAGE])
            )
            found |= {row.id: row.number for row in c.execute(query)}
        return found

    def event_after(self, done: int) -> int | None:
        """The last event of the source that is there: they were written in its order, and nobody else wrote any."""
        if not done:
            return None
        ids = sa.select(verbs.event.c.id).where(verbs.event.c.run_id == self.run.id).order_by(verbs.event.c.id)
        return self.run.database.read(lambda c: int(c.execute(ids.offset(done - 1).limit(1)).scalar_one()))

    def places(self, c: sa.Connection, ids: Sequence[int]) -> dict[int, tuple[int, int]]:
        query = (
            sa.select(verbs.sample.c.id, verbs.group.c.number, verbs.sample.c.index.label("place"))
            .join(verbs.group, verbs.group.c.id == verbs.sample.c.group_id)
            .where(verbs.sample.c.id.in_(ids))
        )
        return {row.id: (row.number, row.place) for row in c.execute(query)}

    def array(self, row: Row) -> bytes:
        return bytes(row["data"]) if row["sidecar"] is None else self.run.array_files().get(row["sidecar"])
