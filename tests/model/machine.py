"""The state machine's frame: a fresh run for each example, lost acknowledgements, and the comparison after every step.
The rules stand in rules_*.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from samplestore import Store
from samplestore.run import Run
from tests.model.model import Model, ModelGroup, ModelSample, Rules
from tests.support import factory as f

T = TypeVar("T")
Read = Callable[[str], list[dict[str, Any]]]  # a query of this run, :r
WORKERS, TRAINERS = 3, 2
EXACT_EVERY = 8  # steps between two recounts

_names = itertools.count()


class Frame(RuleBasedStateMachine):
    store: ClassVar[Store]
    run: Run

    @initialize(
        on_failed=st.sampled_from(["drop", "short"]),
        stages=st.sampled_from([(), ("reward",), ("reward", "format")]),
        stale=st.sampled_from(["expire", "regenerate", "mask", "skip"]),
        staleness_mode=st.sampled_from(["oldest", "oldest", "newest", "mean"]),
        on_straggler=st.sampled_from(["wait", "drop", "short"]),
    )
    def open(self, on_failed: str, stages: tuple[str, ...], stale: str, staleness_mode: str, on_straggler: str) -> None:
        rules = Rules(on_failed, stages, stale, staleness_mode, on_straggler)
        self.m, self.steps_done, self.repeats, self.losing = Model(rules), 0, 0, False
        # In a database with the runs of earlier examples: whatever touches another run is found.
        self.run = f.make_run(
            self.store, f"run {next(_names)}", prompts=8, admit=False, on_failed=on_failed, stages=stages, stale=stale,
            staleness_mode=staleness_mode, max_attempts=rules.max_attempts, max_staleness=rules.max_staleness,
            on_straggler=on_straggler, group_deadline_s=1e5, progress_deadline_s=1e5, heartbeat_ttl_s=1e5,
            max_deaths=1000,
        )  # fmt: skip
        self.m.prompts = 8
        self.original_write = self.run.database.write
        self.run.database.write = self.write  # type: ignore[method-assign]
        self.workers = [f.register(self.run) for _ in range(WORKERS)]
        self.trainers = [f.register(self.run, "trainer") for _ in range(TRAINERS)]
        self.dead: list[int] = []
        self.rids: dict[str, dict[str, Any]] = {}
        self.begin()

    def begin(self) -> None:
        """Hypothesis leaves some rules out of each example: without a start nothing would happen in most of them."""

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.database.write = self.original_write  # type: ignore[method-assign]
            f.sound(self.run)

    # -- lost acknowledgements

    def write(self, work: Callable[[Any], Any], **how: Any) -> Any:
        """Database.write; after lose_an_acknowledgement the next one is committed and then done again, as by a caller
        whose connection broke in the middle of COMMIT."""
        if self.losing:
            self.losing = False
            self.original_write(work, **how)
            self.repeats += 1
        return self.original_write(work, **how)

    def did(self, verb: Callable[[], T]) -> tuple[T, bool]:
        """(result, whether the verb was done twice)."""
        before = self.repeats
        result = verb()
        if repeated := self.repeats > before:
            event("a verb was repeated")
        return result, repeated

    def register(self, kind: str = "rollout") -> int:
        losing, self.losing = self.losing, False  # a repetition leaves a worker that nobody is: reaped in the end
        made = self.run.register(kind)
        self.losing = losing
        return made

    # -- helpers for rules

    def new_groups(self) -> None:
        """Learn the ids of groups that were admitted."""
        rows = f.rows(
            self.run, 'SELECT id, group_id, "index" FROM sample WHERE run_id = :r AND group_id > :g ORDER BY id',
            r=self.run.id, g=max((g.id for g in self.m.groups), default=0),
        )  # fmt: skip
        for row in rows:
            if not self.m.groups or self.m.groups[-1].id != row["group_id"]:
                self.m.groups.append(ModelGroup(row["group_id"], len(self.m.groups)))
            g = self.m.groups[-1]
            g.samples.append(ModelSample(row["id"], g, row["index"]))

    def held(self, pick: int) -> ModelSample:
        held = self.m.held()
        return held[pick % len(held)]

    # -- the comparison

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "run"):
            return
        with self.run.database.reading() as connection:  # one for all: each has its price on PostgreSQL
            read = functools.partial(f.rows_of, connection, r=self.run.id)
            self.agree_on_samples(read)
            self.agree_on_stages(read)
            self.agree_on_training(read)
            self.agree_on_engines(read)
        self.steps_done += 1
        if self.steps_done % EXACT_EVERY == 0:
            f.sound(self.run)

    def agree_on_samples(self, read: Read) -> None:
        rows = read("SELECT * FROM sample WHERE run_id = :r ORDER BY id")
        told = [
            (r["id"], r["status"], r["owner"], r["n_tokens"], r["n_segments"], r["incarnation"], r["failures"],
             r["finish_reason"], r["reward"], r["n_aborts"], r["n_resumes"], r["closed"], bool(r["version_unknown"]))
            for r in rows
        ]  # fmt: skip
        expected = [
            (s.id, s.status, s.owner, s.tokens, len(s.pieces), s.incarnation, s.failures, s.reason, s.reward,
             s.aborts, s.resumes, int(s.group.closed), any(p.trained and p.low is None for p in s.pieces))
            for s in self.m.samples
        ]  # fmt: skip
        assert told == expected
        groups = read("SELECT state FROM sample_group WHERE run_id = :r ORDER BY number")
        assert [r["state"] for r in groups] == [g.state for g in self.m.groups]
        kept = read("SELECT fate, sum(amount) AS n FROM ledger_total WHERE run_id = :r GROUP BY fate")
        assert {r["fate"]: int(r["n"]) for r in kept if r["n"]} == self.m.fates()
        requests = read("SELECT rid, stored_tokens, generated_tokens FROM request WHERE run_id = :r")
        assert {r["rid"]: (r["stored_tokens"], r["generated_tokens"]) for r in requests} == {
            rid: (r["stored"], r["generated"]) for rid, r in self.rids.items()
        }

    def agree_on_stages(self, read: Read) -> None:
        rows = read("SELECT * FROM stage WHERE run_id = :r ORDER BY id")
        shown = {"cancelled": "failed", "superseded": "failed"}
        assert [(r["sample_id"], r["name"], r["status"], r["owner"], r["failures"]) for r in rows] == [
            (s.sample.id, s.name, shown.get(s.status, s.status), s.owner, s.failures) for s in self.m.stages
        ]

    def agree_on_training(self, read: Read) -> None:
        rows = read("SELECT id, step, state, owner FROM batch WHERE run_id = :r ORDER BY id")
        assert [(r["id"], r["step"], r["state"], r["owner"]) for r in rows] == [
            (b.id, b.step, b.state, b.trainer) for b in self.m.batches
        ]
        row = read("SELECT state, current_version, last_version FROM run WHERE id = :r")[0]
        assert (row["state"], row["current_version"]) == (self.m.state, self.m.current)
        assert row["last_version"] == max(self.m.node)
        if self.steps_done % EXACT_EVERY == 0:
            told = {v.version: (v.label, v.path) for v in self.run.weight_versions()}
            assert told == {v: (self.m.labels[v], self.m.paths[v]) for v in self.m.node}
        live = read("SELECT id FROM worker WHERE run_id = :r AND state = 'live'")
        assert {r["id"] for r in live} == {*self.workers, *self.trainers}

    def agree_on_engines(self, read: Read) -> None:
        rows = read("SELECT * FROM engine WHERE run_id = :r AND state <> 'gone'")
        assert {r["url"]: (r["label"], r["version"], r["owner"], r["state"], r["failures"]) for r in rows} == {
            e.url: (e.label, e.version, e.owner, "failed" if e.failed else "live", e.failures)
            for e in self.m.engines.values()
        }
