"""What must hold after every death, and at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from samplestore import Store, codec
from samplestore.errors import StoreBusy
from samplestore.models import BatchGroup, BatchRow, PromptRow, Sample, SampleGroup, Segment
from samplestore.run import Run
from tests.crash.journal import Reader, checksum
from tests.crash.reward import expected
from tests.crash.trainer import load
from tests.support.processes import wait_until

Key = tuple[int, int, int]  # sample, incarnation, seq


class Broken(AssertionError):
    """A promise did not hold."""


def require(holds: Any, what: str) -> None:
    if not holds:
        raise Broken(what)


class Proof:
    """Holds a store against the journals of the processes that wrote to it."""

    def __init__(
        self, store: Store, run: Run, journals: Path, checkpoints: Path, meanwhile: Callable[[], None]
    ) -> None:
        self.store, self.run, self.reader, self.checkpoints = store, run, Reader(journals), checkpoints
        self.appends: dict[Key, dict[str, Any]] = {}
        self.commits: list[dict[str, Any]] = []
        self.rewinds = 0
        self.meanwhile = meanwhile  # called while this waits for others

    def after_a_death(self) -> None:
        findings = self.run.check()
        if findings and all("samplestore reap" in finding.message for finding in findings):
            # A reap passes over rows that a last write of the dead has locked: the next one has them.
            wait_until(self._clean_after_a_reap, what="a reap frees what one passed over", timeout=90)
            findings = []
        require(not findings, f"check: {findings}")
        told = self.run.ledger(exact=True)
        require(told["closed"], f"the ledger does not close: {told['differences']}")
        self._acknowledged(self._hear())

    def _clean_after_a_reap(self) -> bool:
        self.meanwhile()
        try:
            self.run.reap()
        except StoreBusy:  # somebody was stopped with the writer gate in its hand
            return False
        return not self.run.check()

    def _hear(self) -> dict[Key, dict[str, Any]]:
        """The appends that the journals have told since the last look."""
        news: dict[Key, dict[str, Any]] = {}
        for line in self.reader.new():
            if told := line.get("append"):
                key = (told["sample"], told["incarnation"], told["seq"])
                require(key not in self.appends, f"segment {key} was acknowledged to two owners")
                news[key] = self.appends[key] = told
            elif told := line.get("commit"):
                self.commits.append(told)
            else:
                self.rewinds += 1
        return news

    def _acknowledged(self, appends: dict[Key, dict[str, Any]]) -> None:
        """Every acknowledged token is there, bit for bit, and every acknowledged commit is a batch of its groups."""
        with self.store.database.reading() as connection:
            of = Segment.__table__
            found = connection.execute(
                sa.select(of.c.sample_id, of.c.incarnation, of.c.seq, of.c.payload, of.c.n_tokens).where(
                    of.c.sample_id.in_({key[0] for key in appends})
                )
            ).fetchall()
            pruned = self._pruned(connection)
            settled = {
                row.id: row.state
                for row in connection.execute(sa.select(BatchRow.__table__.c.id, BatchRow.__table__.c.state))
            }
        stored = {(r.sample_id, r.incarnation, r.seq): r for r in found}
        for key, told in appends.items():
            if key[0] in pruned:
                continue
            require(key in stored, f"acknowledged segment {key} is missing: {told}")
            ids, probs = codec.decode(stored[key].payload)
            require(checksum(ids, probs) == told["crc"], f"segment {key} has other tokens than were acknowledged")
        for told in self.commits:
            state = settled.get(told["batch"])
            require(state in ("committed", "rewound"), f"acknowledged batch {told} is {state}")

    def _pruned(self, connection: sa.Connection) -> set[int]:
        group, sample = SampleGroup.__table__, Sample.__table__
        query = (
            sa.select(sample.c.id).join(group, group.c.id == sample.c.group_id).where(group.c.pruned_at.is_not(None))
        )
        return set(connection.execute(query).scalars())

    def at_the_end(self, steps: int) -> None:
        """The run is over: every prompt was trained on once, by the checkpoint's word and by the store's."""
        self.after_a_death()
        self._acknowledged(self.appends)
        with self.store.database.reading() as connection:
            groups = connection.execute(sa.select(SampleGroup.__table__)).mappings().fetchall()
            prompts = list(connection.execute(sa.select(PromptRow.__table__.c.id)).scalars())
            samples = connection.execute(sa.select(Sample.__table__)).mappings().fetchall()
            of, batch = BatchGroup.__table__, BatchRow.__table__
            committed = list(
                connection.execute(
                    sa.select(of.c.group_id)
                    .join(batch, batch.c.id == of.c.batch_id)
                    .where(batch.c.state == "committed")
                    .order_by(batch.c.step, of.c.position)
                ).scalars()
            )
        states = Counter(g["state"] for g in groups)
        require(states == {"consumed": len(prompts)}, f"{len(prompts)} prompts, groups are {dict(states)}")
        require(sorted(g["prompt_id"] for g in groups) == sorted(prompts), "a prompt was skipped, or served twice")
        trained = load(self.checkpoints, steps)
        require(trained.step == steps, f"the checkpoint is of step {trained.step}, not {steps}")
        require(trained.groups == committed, "the store and the checkpoint disagree on what was trained")
        require(len(set(committed)) == len(committed) == len(groups), "a group was trained twice, or never")
        require(all(s["owner"] is None for s in samples), "a sample is still owned")
        wrong = [s["id"] for s in samples if s["reward"] != expected(s["n_tokens"])]
        require(not wrong, f"samples {wrong} have a wrong reward")
