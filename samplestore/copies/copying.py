"""One run on its way into another database, or into another run of the same one.

Bounded transactions, a few groups each, under a name that nobody looks for, by one owner at a time
(hidden.py); the last one gives the run its name. Killed in between, the same copy goes on where it was
left: prompts are known by content, groups by number. It begins anew where the source went on meanwhile: what was copied
before would be of another time than the rest.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any

import sqlalchemy as sa

from samplestore import faults
from samplestore.arrayfiles import to_file
from samplestore.arrays import Prepared
from samplestore.clock import db_now
from samplestore.copies import hidden as hidden_runs
from samplestore.copies.hidden import Hidden, Owner
from samplestore.copies.source import PAGE, Source
from samplestore.errors import InvalidSetting, SampleStoreError
from samplestore.models import Run as RunRow
from samplestore.run import Run
from samplestore.runsettings import RunSettings
from samplestore.states import BatchState, RunState
from samplestore.store import Store, lock_names
from samplestore.verbs import copies as verbs
from samplestore.verbs import rewind
from samplestore.verbs.copies import Groups
from samplestore.verbs.tx import Tx

table = RunRow.__table__
CHUNK = 16  # groups a transaction
END = "end"  # instead of a step: all of the run
KEPT = (
    "epoch", "chunk_start", "chunk_stop", "chunk_next", "n_prompts", "retention_step", "step_filled", "step_over",
    "abort_seq", "abort_reason",
)  # fmt: skip
LINE = ("timeline", "current_version", "last_version", "retention_step")  # what a run's training moves

Progress = Callable[[int, int], None]  # groups done, of how many


class SourceMoved(SampleStoreError):
    """The source went on while it was copied, in a way that the copy can't follow. The copy is not there."""

    def __init__(self, run: str, how: str) -> None:
        self.run, self.how = run, how
        super().__init__(f"run {run!r} {how} while it was copied. Repeat the command: it begins anew")


@dataclass(frozen=True, slots=True)
class Copied:
    """A run that was copied. groups: written by this call; existing: there already; in_flight: samples that were
    owned, and are free here; released: batches that were leased, and are given back here; version: the weights that a
    fork begins with."""

    run: str
    uuid: str
    groups: int
    existing: int
    in_flight: int
    released: int
    version: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Copy:
    """One run on its way. whole: with requests and events; else for a fork, with batches up to `step` only."""

    def __init__(
        self, source: Run, target: Store, uuid: str, name: str, *, progress: Progress | None, whole: bool,
        step: int | None = None,
    ) -> None:  # fmt: skip
        self.source, self.target, self.uuid, self.name = source, target, uuid, name
        self.progress, self.whole, self.step = progress, whole, step
        self.rows_of = Source(source, step)
        self.token = f"copy {uuids.uuid4()}"
        self.hidden = Hidden(uuid, source.uuid, END if step is None else str(step), name)
        self.groups = self.existing = self.in_flight = self.passed = 0

    def run(self, details: dict[str, Any]) -> Copied | None:
        """Copy it. None: somebody else has done so by now. Raises CopyBusy, CopyLost, SourceMoved, InvalidSetting."""
        about = self.source.database.read(self.rows_of.about)
        self.about = about
        owner = self._begin()
        if owner is None:
            return None
        self.owner, self.made = owner, owner.run
        try:
            return self._all(about, details)
        except hidden_runs.CopyLost:
            raise
        except BaseException:
            owner.let_go()
            raise

    def _all(self, about: dict[str, Any], details: dict[str, Any]) -> Copied:
        self.workers = self._map(verbs.worker, skip=1)  # the first is the owner
        self.evaluations = self._map(verbs.evaluation)
        self.consumed = {n for n, state in about["held_states"].items() if state == BatchState.COMMITTED}
        self._prompts()
        self._groups()
        self._batches()
        if self.whole:
            self._events()
            details = {**details, "stood_at": about["stands_at"]}
        row = about["run"]
        released = sum(b["state"] == BatchState.LEASED for b in about["batches"])
        values = {
            **{name: row[name] for name in KEPT}, "n_groups": about["n_groups"],
            "state": row["state"] if self.whole else RunState.RUNNING.value,
        }  # fmt: skip
        name, version = self._end(values, details)
        return Copied(name, self.uuid, self.groups, self.existing, self.in_flight, released, version)

    def _end(self, values: dict[str, Any], details: dict[str, Any]) -> tuple[str, int | None]:
        line = self.source.database.read(self.rows_of.line)
        if self.whole and line["stands_at"] != self.about["stands_at"]:
            raise SourceMoved(self.source.name, "went on")
        if line["run"]["timeline"] != self.about["run"]["timeline"]:
            raise SourceMoved(self.source.name, "was rewound")
        values |= {name: line["run"][name] for name in LINE}
        last = partial(self._finish, values=values, line=line, details=details)
        try:
            return self.made.transact(last, durable=True)
        except sa.exc.IntegrityError:  # PostgreSQL: somebody made a run of this name at this moment. Now it is seen
            return self.made.transact(last, durable=True)

    def _finish(
        self, tx: Tx, values: dict[str, Any], line: dict[str, Any], details: dict[str, Any]
    ) -> tuple[str, int | None]:
        """The name and, for a fork, the way back to its step: nobody sees the one without the other. Groups are of
        later snapshots than `about`: with the source's weights of by now, no number of theirs is given out again."""
        there = tx.execute(
            sa.select(table.c.name, table.c.current_version).where(table.c.id == tx.run_id)
        ).one_or_none()
        if there is not None and Hidden.parse(there.name) is None:  # a repetition: the acknowledgement was lost
            return there.name, None if self.step is None else there.current_version
        self.owner.beat(tx)
        if not self.whole and verbs.is_taken(tx, self.name):
            raise InvalidSetting("as", self.name, "the name of a run that is not there yet. See: samplestore runs")
        behind = f"{self.name}-{self.uuid[:8]}"
        names = chain((self.name, behind), (f"{behind}-{n}" for n in count(2)))
        name = next(each for each in names if not verbs.is_taken(tx, each))
        self.owner.end(tx)
        verbs.renew_line(tx, line)
        verbs.finish(tx, {**values, "name": name}, details)
        return name, None if self.step is None else rewind.rewind(tx, self.step).version

    def _begin(self) -> Owner | None:
        """A hidden run that is this copy's alone: new, or as an earlier attempt left it."""
        while isinstance(found := self.target.database.write(self._take, durable=True), Run):
            hidden_runs.drop(found)
        return found

    def _take(self, connection: sa.Connection) -> Owner | Run | None:
        """What is there is looked up and taken in one transaction. A run: to be removed first; None: whole by now.
        Raises CopyBusy."""
        lock_names(connection)
        row = self._earlier(connection)
        if row is None:
            return self._create(connection)
        hidden = Hidden.parse(row.name)
        if hidden is None:
            return None
        owner = hidden_runs.require_free(connection, row.id, hidden.name, self.token)
        found = hidden_runs.run_of(self.target, row)
        same = (hidden.origin, hidden.at) == (self.hidden.origin, self.hidden.at)
        if not same or hidden_runs.stood_at(owner) != self.about["stands_at"]:
            hidden_runs.give_up(connection, owner)
            return found
        self.uuid, self.name = hidden.uuid, hidden.name
        return Owner.take_over(connection, found, self.token, owner)

    def _earlier(self, connection: sa.Connection) -> Any:
        """The row that this copy has made or is about to make: a merge knows its uuid, a fork its name."""
        if self.whole:
            return connection.execute(sa.select(table).where(table.c.uuid == self.uuid)).one_or_none()
        rows = connection.execute(sa.select(table).order_by(table.c.id)).all()
        named = (
            r
            for r in rows
            if r.name == self.name or ((h := Hidden.parse(r.name)) and h.name == self.name and h.at != END)
        )
        return next(named, None)

    def _create(self, connection: sa.Connection) -> Owner:
        row = self.about["run"]
        settings = RunSettings.parse(row["settings"])
        if settings.array_url is not None:
            # a folder of its own: what this copy sweeps is never what the source's rows name
            settings = replace(settings, array_folder=uuids.uuid4().hex[:16])
        values = {
            "uuid": self.uuid, "name": str(self.hidden), "state": RunState.PAUSED.value,
            "created_at": row["created_at"] if self.whole else db_now(), "settings": settings.as_json(),
            **{name: row[name] for name in LINE},
        }  # fmt: skip
        made = connection.execute(sa.insert(table).values(**values).returning(table)).one()
        run = hidden_runs.run_of(self.target, made)
        owner = Owner.begin(connection, run, self.token, self.about["stands_at"])
        tx = Tx(connection, made.id, settings)
        verbs.begin(tx, self.about, errors=self.whole)
        tx.flush()
        return owner

    def _map(self, of: sa.Table, skip: int = 0) -> dict[int, int]:
        """New ids by old ones. Workers that came to the source since then are nobody's here."""
        new = self.made.database.read(lambda c: verbs.numbers(c, of, self.made.id))[skip:]
        return dict(zip((row["id"] for row in self.about[of.name]), new, strict=False))

    def _prompts(self) -> None:
        for rows in self.rows_of.pages(verbs.prompt, verbs.prompt.c.id, PAGE, upto=self.about["last_prompt"] or 0):
            digests = {digest for row in rows for digest in row["images"] or ()}
            images = self.source.database.read(lambda c, d=digests: self.rows_of.images(c, d)) if digests else []  # type: ignore[misc]
            self.owner.transact(lambda tx, r=rows, i=images: verbs.prompts(tx, r, i))  # type: ignore[misc]
            faults.reached("copying")

    def _groups(self) -> None:
        there = self.owner.transact(lambda tx: self._last_number(tx.connection))
        total = self.about["n_groups"]
        self.existing = there + 1
        for rows in self.rows_of.pages(verbs.group, verbs.group.c.number, CHUNK, after=there, upto=total - 1):
            given = self.source.database.read(lambda c, r=rows: self.rows_of.groups(c, r))  # type: ignore[misc]
            written, owned = self.owner.transact(lambda tx, g=given: self._store(tx, g))  # type: ignore[misc]
            self.groups, self.in_flight = self.groups + written, self.in_flight + owned
            faults.reached("copying")
            if self.progress is not None:
                self.progress(rows[-1]["number"] + 1, total)

    def _last_number(self, c: sa.Connection) -> int:
        last = sa.select(sa.func.max(verbs.group.c.number)).where(verbs.group.c.run_id == self.made.id)
        found = c.execute(last).scalar()
        return -1 if found is None else int(found)

    def _store(self, tx: Tx, given: Groups) -> tuple[int, int]:
        return verbs.store(
            tx, given, consumed=self.consumed.__contains__, workers=self.workers, evaluations=self.evaluations,
            read=self.rows_of.array, keep=self._kept,
        )  # fmt: skip

    def _kept(self, made: Prepared) -> Prepared:
        settings = self.made.settings
        large = settings.array_url is not None and made.n_bytes >= settings.array_file_bytes
        return to_file(self.made.array_files(), made) if large else made

    def _batches(self) -> None:
        rows = self.about["batches"]
        for at in range(self._count(verbs.batch), len(rows), 20):
            part = rows[at : at + 20]
            held, numbers = self.source.database.read(lambda c, r=part: self.rows_of.held(c, r))  # type: ignore[misc]
            write = partial(verbs.batches, rows=part, held=held, group_numbers=numbers, workers=self.workers)
            self.owner.transact(partial(self._once, verbs.batch, at, write))
            faults.reached("copying")

    def _count(self, of: sa.Table) -> int:
        """How many rows this copy has written; asked as its owner, or another may have finished it since."""
        return self.owner.transact(lambda tx: verbs.count(tx.connection, of, tx.run_id))

    @staticmethod
    def _once(of: sa.Table, at: int, write: Callable[[Tx], None], tx: Tx) -> None:
        """Rows that mean nothing by themselves, written if `at` of them are there: a transaction whose acknowledgement
        was lost is repeated."""
        if verbs.count(tx.connection, of, tx.run_id) == at:
            write(tx)

    def _events(self) -> None:
        done = self._count(verbs.event)
        for rows in self.rows_of.pages(verbs.event, verbs.event.c.id, PAGE, after=self.rows_of.event_after(done)):
            samples = [row["sample_id"] for row in rows if row["sample_id"] is not None]
            groups = {row["group_id"] for row in rows if row["group_id"] is not None}
            places, numbers = self.source.database.read(
                lambda c, s=samples, g=groups: (self.rows_of.places(c, s), self.rows_of.numbers(c, g))  # type: ignore[misc]
            )
            write = partial(verbs.events, rows=rows, places=places, group_numbers=numbers, workers=self.workers)
            self.owner.transact(partial(self._once, verbs.event, done, write))
            done += len(rows)
            faults.reached("copying")
