"""All verbs in any order, against a plain model in memory. After every step statuses, owners, tokens, group states and
the ledger must be what the model says; every few steps check() and the exact ledger too.

SAMPLESTORE_MODEL_EXAMPLES=500 SAMPLESTORE_MODEL_STEPS=200 pytest tests/model      runs (much) longer."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import samplestore
from samplestore import states
from samplestore.errors import InvalidSegment, LeaseLost, StepAlreadyCommitted
from samplestore.types import Claim, StageClaim
from tests.support import factory as f

EXAMPLES = int(os.environ.get("SAMPLESTORE_MODEL_EXAMPLES", "10"))
STEPS = int(os.environ.get("SAMPLESTORE_MODEL_STEPS", "40"))
WINDOW, MAX_ATTEMPTS, MAX_STALENESS, PROMPTS = 4, 2, 1, 14
IN_WINDOW = {"open", "scoring", "ready"}


@dataclass
class ModelStage:
    incarnation: int
    status: str = "pending"  # pending, done, failed, cancelled, superseded
    claim: StageClaim | None = None
    failures: int = 0


@dataclass
class ModelSample:
    id: int
    group: ModelGroup
    index: int
    status: str = "pending"
    claim: Claim | None = None
    worker: int | None = None
    incarnation: int = 0
    failures: int = 0
    lives: list[list[tuple[int, int]]] = field(default_factory=lambda: [[]])  # (version, tokens) of each incarnation
    stages: list[ModelStage] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.lives[-1])

    def pending(self) -> list[ModelStage]:
        return [s for s in self.stages if s.status == "pending"]


@dataclass
class ModelGroup:
    id: int
    number: int
    state: str = "open"
    closed: bool = False
    samples: list[ModelSample] = field(default_factory=list)


@dataclass
class ModelBatch:
    id: int
    step: int
    groups: list[ModelGroup]
    state: str = "leased"


class StoreMachine(RuleBasedStateMachine):
    template: ClassVar[Path]

    @initialize(on_failed=st.sampled_from(["drop", "short"]), stages=st.sampled_from([(), ("reward",)]))
    def open(self, on_failed: str, stages: tuple[str, ...]) -> None:
        self.folder = tempfile.mkdtemp(prefix="model")
        shutil.copyfile(self.template, f"{self.folder}/x.db")
        self.store = samplestore.open(f"{self.folder}/x.db")
        self.on_failed, self.with_stage, self.counter = on_failed, bool(stages), 0
        self.run = f.make_run(
            self.store, prompts=PROMPTS, admit=False, on_failed=on_failed, stages=stages, max_attempts=MAX_ATTEMPTS,
            max_staleness=MAX_STALENESS,
        )  # fmt: skip
        self.workers = [f.register(self.run), f.register(self.run)]
        self.trainers = [f.register(self.run, "trainer"), f.register(self.run, "trainer")]
        self.groups: list[ModelGroup] = []
        self.batches: list[tuple[ModelBatch, int]] = []
        self.zombies: list[Claim] = []
        self.stage_zombies: list[StageClaim] = []
        # version -> node of the tree of weights; node -> (parent, step). A restored version is its source's node.
        self.node, self.tree = {0: 0}, {0: (None, None)}
        self.current, self.state = 0, "running"
        # hypothesis leaves some rules out of each example: without these nothing would happen in most of them
        self.admit()
        self.claim(0, 5)
        for pick in (0, 1, 2):
            self.append(pick, 2, 0, None)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            f.sound(self.run)
            self.store.close()
            shutil.rmtree(self.folder)

    # -- the model

    @property
    def samples(self) -> list[ModelSample]:
        return [s for g in self.groups for s in g.samples]

    def held(self) -> list[ModelSample]:
        return [s for s in self.samples if s.claim is not None]

    def lineage(self, node: int | None) -> list[int]:
        path = []
        while node is not None:
            path.append(node)
            node = self.tree[node][0]
        return path

    def lag(self, version: int) -> int:
        """Weight updates between a version and the current one: the path in the tree."""
        mine, there = self.lineage(self.node[self.current]), self.lineage(self.node[version])
        shared = len(set(mine) & set(there))
        return len(mine) + len(there) - 2 * shared

    def stale(self, group: ModelGroup) -> bool:
        return any(self.lag(v) > MAX_STALENESS for s in group.samples if s.status != "failed" for v, _ in s.lives[-1])

    def lose(self, s: ModelSample) -> None:
        """The owner of `s` has lost it."""
        if s.claim is not None:
            self.zombies.append(s.claim)
        s.claim = s.worker = None
        if s.status in ("pending", "aborted"):
            s.status = "aborted" if s.tokens else "pending"

    def lose_stage(self, stage: ModelStage) -> None:
        if stage.claim is not None:
            self.stage_zombies.append(stage.claim)
        stage.claim = None

    def close(self, g: ModelGroup, state: str) -> None:
        g.state, g.closed = state, True
        for s in g.samples:
            if s.claim is not None:
                self.lose(s)
            for stage in s.pending():
                self.lose_stage(stage)
                stage.status = "cancelled"

    def reopen(self, g: ModelGroup) -> None:
        g.closed = False
        for s in g.samples:
            for stage in s.stages:
                if stage.status == "cancelled" and stage.incarnation == s.incarnation:
                    stage.status = "pending"
        g.state = self.derived(g)

    def derived(self, g: ModelGroup) -> str:
        if any(s.status in ("pending", "aborted") for s in g.samples):
            return "open"
        return "scoring" if any(s.pending() for s in g.samples) else "ready"

    def settle(self, g: ModelGroup) -> None:
        """What a finished, scored or failed sample does to its group."""
        if g.state not in ("open", "scoring"):
            return
        failed = sum(s.status == "failed" for s in g.samples)
        g.state = self.derived(g)
        if g.state == "ready" and (failed == len(g.samples) or (failed and self.on_failed == "drop")):
            self.close(g, "dropped")

    def give_up(self, s: ModelSample) -> None:
        s.status = "failed"
        self.settle(s.group)
        if self.on_failed == "drop" and s.group.state in IN_WINDOW:
            self.close(s.group, "dropped")

    def expire(self) -> None:
        for g in self.groups:
            if g.state in IN_WINDOW and self.stale(g):
                self.close(g, "stale")

    def fates(self) -> dict[str, int]:
        told: Counter[str] = Counter()
        for s in self.samples:
            for life, segments in enumerate(s.lives):
                fate = states.fate(s.group.state, s.status, s.claim is not None, life < s.incarnation)
                told[fate.value] += sum(n for _, n in segments)
        return {k: v for k, v in told.items() if v}

    # -- samples

    @rule()
    def admit(self) -> None:
        self.expire()
        want = WINDOW - sum(g.state in IN_WINDOW for g in self.groups)
        expected = max(0, min(want, PROMPTS - len(self.groups))) if self.state == "running" else 0
        assert self.run.admit() == expected
        found = f.rows(self.run, "SELECT id, group_id, \"index\" FROM sample WHERE group_id > :g ORDER BY id",
                       g=max((g.id for g in self.groups), default=0))  # fmt: skip
        for row in found:
            if not self.groups or self.groups[-1].id != row["group_id"]:
                self.groups.append(ModelGroup(row["group_id"], len(self.groups)))
            g = self.groups[-1]
            g.samples.append(ModelSample(row["id"], g, row["index"]))

    @precondition(lambda self: self.groups)
    @rule(worker=st.integers(0, 1), limit=st.integers(1, 5))
    def claim(self, worker: int, limit: int) -> None:
        free = [
            s for s in self.samples if s.claim is None and not s.group.closed and s.status in ("pending", "aborted")
        ]
        free = [s for s in free if s.group.state in IN_WINDOW] if self.state == "running" else []
        expected = sorted(free, key=lambda s: (s.status, s.group.id, s.index))[:limit]
        claims = self.run.claim(self.workers[worker], limit)
        assert [c.sample_id for c in claims] == [s.id for s in expected]
        for s, claim in zip(expected, claims, strict=True):
            assert (claim.n_tokens, claim.response_ids.size, claim.seq) == (s.tokens, s.tokens, len(s.lives[-1]))
            s.claim, s.worker = claim, self.workers[worker]

    @precondition(lambda self: self.held())
    @rule(
        pick=st.integers(0, 99),
        n=st.integers(1, 4),
        version=st.integers(0, 1),
        reason=st.sampled_from([None, "abort", "length"]),
    )
    def append(self, pick: int, n: int, version: int, reason: str | None) -> None:
        s = self.held()[pick % len(self.held())]
        at = max(v for v in self.node if v <= max(0, self.current - version))
        assert s.claim is not None
        f.add(self.run, s.claim, n, at, reason)
        f.add(self.run, s.claim, n, at, reason, seq=s.claim.seq - 1)  # repeated: harmless
        s.lives[-1].append((at, n))

    @precondition(lambda self: self.held())
    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        s = self.held()[pick % len(self.held())]
        claim = s.claim
        assert claim is not None
        if not s.tokens:
            with pytest.raises(InvalidSegment):
                self.run.finish(claim)
            return
        self.run.finish(claim)
        self.run.finish(claim)
        s.status = "truncated" if claim.finish_reason == "length" else "completed"
        s.claim = s.worker = None
        if self.with_stage:
            s.stages.append(ModelStage(s.incarnation))
        self.settle(s.group)

    @precondition(lambda self: self.held())
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        s = self.held()[pick % len(self.held())]
        assert s.claim is not None
        self.run.release(s.claim, "weights")
        self.run.release(s.claim, "weights")
        self.lose(s)

    @precondition(lambda self: self.held())
    @rule(pick=st.integers(0, 99))
    def fail(self, pick: int) -> None:
        s = self.held()[pick % len(self.held())]
        assert s.claim is not None
        s.failures += 1
        told = self.run.fail(s.claim, "broken", backoff_s=0.0)
        self.lose(s)
        if s.failures >= MAX_ATTEMPTS:
            self.give_up(s)
        assert told == s.status

    @precondition(lambda self: self.zombies)
    @rule(pick=st.integers(0, 99))
    def zombie(self, pick: int) -> None:
        """Who lost a sample changes nothing: the comparison after this step sees to it."""
        claim = self.zombies[pick % len(self.zombies)]
        for write in (lambda: f.add(self.run, claim, 2, 0, seq=1000 + claim.seq), lambda: self.run.finish(claim)):
            with pytest.raises(LeaseLost):
                write()

    @precondition(lambda self: [s for s in self.samples if s.group.state in (*IN_WINDOW, "dropped")])
    @rule(pick=st.integers(0, 99))
    def requeue(self, pick: int) -> None:
        able = [s for s in self.samples if s.group.state in (*IN_WINDOW, "dropped")]
        s = able[pick % len(able)]
        self.run.requeue([s.id], "again")
        for stage in s.pending():
            self.lose_stage(stage)
            stage.status = "superseded"
        self.lose(s)
        s.status, s.failures, s.incarnation = "pending", 0, s.incarnation + 1
        s.lives.append([])
        self.reopen(s.group)

    @precondition(lambda self: [g for g in self.groups if g.state in IN_WINDOW])
    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        able = [g for g in self.groups if g.state in IN_WINDOW]
        g = able[pick % len(able)]
        self.run.drop([g.id], "unwanted")
        self.close(g, "dropped")

    @rule(n=st.integers(1, 6))
    def work(self, n: int) -> None:
        """Progress, whatever rules are left out: up to n samples are answered, all stages scored."""
        self.admit()
        self.claim(0, n)
        for s in self.held()[:n]:
            if s.claim is not None:
                self.append(self.held().index(s), 2, 0, None)
                self.finish(self.held().index(s))
        self.stages(1, 10, "score")

    @rule()
    def train(self) -> None:
        """One step of training, if there is a group for it."""
        self.lease(0, 1)
        for batch, _ in self.live():
            self.settle_batch(self.live().index((batch, _)), "commit")
        self.publish()

    # -- stages

    def open_stages(self) -> list[tuple[ModelSample, ModelStage]]:
        return [(s, stage) for s in self.samples for stage in s.pending()]

    @precondition(lambda self: self.open_stages())
    @rule(worker=st.integers(0, 1), limit=st.integers(1, 3), kind=st.sampled_from(["score", "fail", "keep"]))
    def stages(self, worker: int, limit: int, kind: str) -> None:
        for claim in self.run.claim_stages(self.workers[worker], limit):
            s = next(s for s in self.samples if s.id == claim.sample_id)
            (stage,) = s.pending()
            assert stage.claim is None
            stage.claim = claim
        if kind == "keep":
            return
        for s, stage in self.open_stages():
            if stage.claim is None or stage.status != "pending":
                continue
            if kind == "score":
                self.run.score(stage.claim, 1.0)
                stage.claim, stage.status = None, "done"
                self.settle(s.group)
            else:
                stage.failures += 1
                self.run.fail_stage(stage.claim, "boom", backoff_s=0.0)
                stage.claim = None
                if stage.failures >= MAX_ATTEMPTS:
                    stage.status = "failed"
                    self.give_up(s)

    @precondition(lambda self: self.stage_zombies)
    @rule(pick=st.integers(0, 99))
    def stage_zombie(self, pick: int) -> None:
        with pytest.raises(LeaseLost):
            self.run.score(self.stage_zombies[pick % len(self.stage_zombies)], 9.0)

    # -- liveness and control

    @rule(worker=st.integers(0, 1), politely=st.booleans())
    def die(self, worker: int, politely: bool) -> None:
        gone = self.workers[worker]
        if politely:
            self.run.goodbye(gone)
        else:
            f.silence(self.run, gone)
            assert self.run.reap().workers == [gone]
        for s in self.samples:
            if s.worker == gone:
                self.lose(s)
            for stage in s.pending():
                if stage.claim is not None and stage.claim.owner == gone:
                    self.lose_stage(stage)
        self.workers[worker] = f.register(self.run)

    @rule(state=st.sampled_from(["running", "running", "paused"]))
    def control(self, state: str) -> None:
        (self.run.pause if state == "paused" else self.run.resume)()
        self.state = state

    # -- training

    def steps(self) -> list[int]:
        return [b.step for b, _ in self.batches if b.state == "committed"]

    def live(self) -> list[tuple[ModelBatch, int]]:
        return [(b, t) for b, t in self.batches if b.state == "leased"]

    @rule(trainer=st.integers(0, 1), n=st.integers(1, 2))
    def lease(self, trainer: int, n: int) -> None:
        step = max([*self.steps(), *(b.step for b, _ in self.live())], default=-1) + 1
        ready = [g for g in self.groups if g.state == "ready"][:n]
        made = f.lease(self.run, self.trainers[trainer], step, n)
        assert (made is None) == (len(ready) < n)
        if made is not None:
            self.batches.append((ModelBatch(made, step, ready), trainer))
            for g in ready:
                g.state = "leased"
        if committed := self.steps():
            with pytest.raises(StepAlreadyCommitted):
                f.lease(self.run, self.trainers[trainer], committed[-1], n)

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 9), how=st.sampled_from(["commit", "commit", "release", "die"]))
    def settle_batch(self, pick: int, how: str) -> None:
        batch, trainer = self.live()[pick % len(self.live())]
        me = self.trainers[trainer]
        if how == "commit":
            for _ in range(2):
                f.commit(self.run, batch.id, me)
            batch.state = "committed"
            for g in batch.groups:
                g.state = "consumed"
            return
        if how == "release":
            f.release(self.run, batch.id, me)
            lost = [batch]
        else:
            f.kill(self.run, me)
            self.trainers[trainer] = f.register(self.run, "trainer")
            lost = [b for b, t in self.live() if t == trainer]
        for b in lost:
            self.give_back(b, "released")
            with pytest.raises(LeaseLost):
                f.commit(self.run, b.id, me)

    def give_back(self, batch: ModelBatch, state: str) -> None:
        batch.state = state
        for g in batch.groups:
            g.state = "ready"

    @rule()
    def publish(self) -> None:
        step = max(self.steps(), default=None)
        made = self.run.publish_weights(path=f"/w/{len(self.node)}", step=step)
        assert made.version == len(self.node), "versions are never reused"
        self.tree[len(self.tree)] = (self.node[self.current], step)
        self.node[made.version], self.current = len(self.tree) - 1, made.version
        self.expire()

    @precondition(lambda self: self.steps())
    @rule(back=st.integers(0, 3))
    def rewind(self, back: int) -> None:
        step = max(-1, max(self.steps()) - back)
        restored = self.run.rewind(step)
        source = next(
            n
            for n in self.lineage(self.node[self.current])
            if n == 0 or (self.tree[n][1] is not None and self.tree[n][1] <= step)
        )
        self.node[restored.version], self.current = source, restored.version
        for batch, _ in self.batches:
            if batch.state == "committed" and batch.step > step:
                self.give_back(batch, "rewound")
            elif batch.state == "leased":
                self.give_back(batch, "released")
        for g in self.groups:
            if g.state == "stale":
                self.reopen(g)
        self.expire()

    # -- the comparison

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "run"):
            return
        found = f.rows(self.run, "SELECT id, status, owner, n_tokens, incarnation, failures FROM sample ORDER BY id")
        told = [(r["id"], r["status"], r["owner"], r["n_tokens"], r["incarnation"]) for r in found]
        assert told == [(s.id, s.status, s.worker, s.tokens, s.incarnation) for s in self.samples]
        assert f.states(self.run) == [g.state for g in self.groups]
        assert f.fates(self.run) == self.fates()
        batches = f.rows(self.run, "SELECT id, state FROM batch ORDER BY id")
        assert [(r["id"], r["state"]) for r in batches] == [(b.id, b.state) for b, _ in self.batches]
        self.counter += 1
        if self.counter % 8 == 0:
            note(str(self.run.ledger(exact=True)))
            f.sound(self.run)


def test_the_store_does_what_the_model_says(sqlite_template: Path) -> None:
    StoreMachine.template = sqlite_template
    small = os.environ.get("SAMPLESTORE_MODEL_EXAMPLES") is None
    profile: dict[str, Any] = {"derandomize": True} if small else {}
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, database=None, print_blob=True,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink], **profile,
        ),
    )  # fmt: skip
