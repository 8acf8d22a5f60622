"""Rules for trainers: batches, weights, going back."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from samplestore.batch import Batch, row_of
from samplestore.errors import (
    InvalidSetting,
    LeaseLost,
    RewindTooFar,
    SampleStoreError,
    StepAlreadyCommitted,
    StepHeld,
    TokensPruned,
)
from samplestore.states import StalenessMode, StalePolicy
from samplestore.types import WeightVersion
from tests.model.machine import TRAINERS, Frame
from tests.model.model import ACTS, ModelBatch, ModelGroup
from tests.support import factory as f

PICK = st.integers(0, 99)
TRAINER = st.integers(0, TRAINERS - 1)


class TrainingRules(Frame):
    def next_step(self) -> int:
        return max([*self.m.steps(), *(b.step for b in self.m.leases())], default=-1) + 1

    # -- batches

    @rule(
        trainer=TRAINER, n=st.integers(1, 2), mode=st.sampled_from(["oldest", *StalenessMode]),
        max_staleness=st.sampled_from([1, 1, 0, 2]), stale=st.sampled_from(list(StalePolicy)),
    )  # fmt: skip
    def lease(self, trainer: int, n: int, mode: str, max_staleness: int, stale: str) -> None:
        me, step = self.trainers[trainer], self.next_step()
        if stale in ACTS:
            self.m.settle_beyond(max_staleness, mode, stale, ("ready",))
        inside = self.m.deliverable(max_staleness, mode, stale)
        made = f.lease(self.run, me, step, n, max_staleness=max_staleness, staleness=mode, stale=stale)
        assert (made is None) == (len(inside) < n), "all that are asked for, or nothing"
        if made is None:
            return
        asked = (n, str(mode), max_staleness, str(stale))
        first = self.again(step, asked, inside) or inside[:n]
        taken, told = [g for g, _ in first], [math.ceil(lag) for _, lag in first]
        read = self.as_read(taken, max_staleness if stale == "mask" else None)
        batch = ModelBatch(made, step, me, taken, told, read, self.m.timeline, asked)
        self.m.fork = None
        self.m.batches.append(batch)
        for g in taken:
            g.state = "leased"
        self.same(Batch(self.run, row_of(self.run, made), me), batch)

    def again(
        self, step: int, asked: tuple[int, str, int, str], inside: list[tuple[ModelGroup, float]]
    ) -> list[tuple[ModelGroup, float]]:
        """The groups of this step's newest batch, if it was given back, asked the same, and may have all of them."""
        before = [b for b in self.m.batches if (b.step, b.timeline) == (step, self.m.timeline)][-1:]
        lags = {g.id: lag for g, lag in inside}
        if not before or before[0].asked != asked or any(g.id not in lags for g in before[0].groups):
            return []
        return [(g, lags[g.id]) for g in before[0].groups]

    def as_read(
        self, groups: list[ModelGroup], window: int | None
    ) -> list[tuple[int, list[int], list[int], list[int]]]:
        """What a trainer reads; `window`: tokens beyond it are masked. A sample without a reward, in a run that gives
        them, is not one of reward 0: none of it is trained."""
        read = []
        for s in (s for g in groups for s in g.delivered()):
            mask, versions = [], []
            scored = s.reward is not None or not self.m.rules.stages
            for p in s.pieces:
                beyond = window is not None and (p.low is None or self.m.lag(p.low) > window)
                mask += [int(p.loss == 1 and scored and not beyond)] * p.n
                versions += [-1 if p.low is None else p.low] * p.n
            read.append((s.id, [t for p in s.pieces for t in p.ids], mask, versions))
        return read

    def same(self, told: Batch, batch: ModelBatch) -> None:
        assert [g.group_id for g in told.groups] == [g.id for g in batch.groups]
        assert [g.staleness for g in told.groups] == batch.lags
        assert [
            (s.sample_id, s.response_ids.tolist(), s.loss_mask.tolist(), s.versions.tolist()) for s in told.samples
        ] == batch.read

    @precondition(lambda self: self.m.leases())
    @rule(pick=PICK)
    def lease_a_held_step(self, pick: int) -> None:
        batch = self.m.leases()[pick % len(self.m.leases())]
        for trainer in self.trainers:
            if trainer == batch.trainer:
                assert f.lease(self.run, trainer, batch.step, 1) == batch.id
            else:
                with pytest.raises(StepHeld):
                    f.lease(self.run, trainer, batch.step, 1)

    @precondition(lambda self: self.m.steps())
    @rule(pick=PICK)
    def lease_a_committed_step(self, pick: int) -> None:
        step = self.m.steps()[pick % len(self.m.steps())]
        with pytest.raises(StepAlreadyCommitted):
            f.lease(self.run, self.trainers[0], step, 1)

    @precondition(lambda self: self.m.leases())
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        batch = self.m.leases()[pick % len(self.m.leases())]
        for _ in range(2):
            f.commit(self.run, batch.id, batch.trainer)
        batch.state = "committed"
        for g in batch.groups:
            g.state = "consumed"

    @precondition(lambda self: self.m.leases())
    @rule(pick=PICK)
    def release_batch(self, pick: int) -> None:
        batch = self.m.leases()[pick % len(self.m.leases())]
        for _ in range(2):
            f.release(self.run, batch.id, batch.trainer)
        self.m.give_back(batch, "released")

    @precondition(lambda self: [b for b in self.m.batches if b.state != "leased"])
    @rule(pick=PICK)
    def settle_too_late(self, pick: int) -> None:
        """Of a batch that is settled: the same again passes, anything else is refused."""
        settled = [b for b in self.m.batches if b.state != "leased"]
        batch = settled[pick % len(settled)]
        for verb, passes in ((f.commit, "committed"), (f.release, "released")):
            if batch.state == passes:
                verb(self.run, batch.id, batch.trainer)
            else:
                with pytest.raises(LeaseLost):
                    verb(self.run, batch.id, batch.trainer)
        other = next(t for t in self.trainers if t != batch.trainer)
        with pytest.raises(LeaseLost):
            f.commit(self.run, batch.id, other)

    @precondition(lambda self: self.m.batches)
    @rule(pick=PICK)
    def replay(self, pick: int) -> None:
        """What was committed is read again as it was leased, whatever has happened since."""
        step = self.m.batches[pick % len(self.m.batches)].step
        committed = [b for b in self.m.batches if b.step == step and b.state == "committed"]
        if committed and step <= self.m.retention:
            with pytest.raises(TokensPruned):
                self.run.replay(step)
        elif committed:
            self.same(self.run.replay(step), committed[0])
        else:
            with pytest.raises(SampleStoreError, match="no committed batch"):
                self.run.replay(step)

    # -- weights

    @rule(with_path=st.booleans())
    def publish(self, with_path: bool) -> None:
        step = max(self.m.steps(), default=None)
        path = f"/w/{len(self.m.node)}" if with_path else None
        if step is not None and any(at == step for _, at in self.m.tree.values()):
            path = path or f"/w/{len(self.m.node)}"  # of one step and path there is one version
        made = self.run.publish_weights(path=path, step=step)
        self.m.tree[len(self.m.tree)] = (self.m.node[self.m.current], step)
        self.published(made, len(self.m.tree) - 1)
        if step is not None:
            assert self.run.publish_weights(path=path, step=step) == made, "said again"

    @precondition(lambda self: self.m.tree[self.m.node[self.m.current]][1] is not None)
    @rule()
    def name_again(self) -> None:
        """Under another label the current weights are the same ones, and no update."""
        step, label = self.m.tree[self.m.node[self.m.current]][1], f"again {len(self.m.node)}"
        for _ in range(2):
            made = self.run.publish_weights(self.m.paths[self.m.current], step, label)
        self.published(made, self.m.node[self.m.current])

    def published(self, made: WeightVersion, node: int) -> None:
        assert made.version == len(self.m.node), "versions are never reused"
        self.m.fork = None
        self.m.node[made.version], self.m.current = node, made.version
        self.m.labels[made.version], self.m.paths[made.version] = made.label, made.path
        for e in self.m.engines.values():
            if e.backed_off:
                e.failures, e.backing_off, e.backed_off = 0, False, False
        self.m.sweep()

    @rule(label=st.booleans())
    def describe_first_weights(self, label: bool) -> None:
        self.m.labels[0], self.m.paths[0] = "first" if label else "default", "/w/first"
        self.run.describe_first_weights("/w/first", self.m.labels[0])

    @precondition(lambda self: self.m.steps())
    @rule(back=st.integers(0, 3))
    def rewind(self, back: int) -> None:
        step = max(-1, max(self.m.steps()) - back)
        if step < self.m.retention:
            with pytest.raises(RewindTooFar):
                self.run.rewind(step)
            return
        restored = self.run.rewind(step)
        if self.m.fork == (step, restored.version):
            return  # it is there already
        source = self.m.restored(step)
        path = self.m.paths[max(v for v, node in self.m.node.items() if node == source) if source else 0]
        assert (restored.version, restored.path) == (len(self.m.node), path)
        self.m.node[restored.version], self.m.current = source, restored.version
        self.m.fork, self.m.timeline = (step, restored.version), restored.timeline
        self.m.labels[restored.version], self.m.paths[restored.version] = restored.label, path
        for batch in self.m.batches:
            if batch.state == "committed" and batch.step > step:
                self.m.give_back(batch, "rewound")
            elif batch.state == "leased":
                self.m.give_back(batch, "released")
        for g in self.m.groups:
            if g.state == "stale" and g.pruned:
                self.m.reopen(g)
                known = self.m.beyond(g, self.m.rules.max_staleness, self.m.rules.staleness_mode)
                assert known or self.m.staleness(g, "oldest") is None, "what a rewind needs was pruned"
                self.m.close(g, "stale")
            elif g.state == "stale":
                self.m.reopen(g)
        self.m.sweep()

    @rule()
    def rewind_too_far_ahead(self) -> None:
        with pytest.raises(InvalidSetting):
            self.run.rewind(1000)

    @precondition(lambda self: self.m.steps())
    @rule(keep=st.integers(0, 2))
    def prune(self, keep: int) -> None:
        """Tokens go of what no later rewind can ask for. When a group was given up is the clock's business: of those
        the store says which are pruned, and the next rewind whether one of them was needed."""
        told = self.run.prune(keep)
        self.m.retention = max(self.m.retention, max(self.m.steps()) - keep)
        assert told.retention_step == self.m.retention
        trained = {g.id for b in self.m.batches if b.state == "committed" and b.step <= told.retention_step
                   for g in b.groups}  # fmt: skip
        rows = f.rows(
            self.run, "SELECT id FROM sample_group WHERE run_id = :r AND pruned_at IS NOT NULL", r=self.run.id
        )
        for g in self.m.groups:
            g.pruned = g.id in {r["id"] for r in rows}
            assert g.pruned or g.id not in trained
            assert not g.pruned or g.id in trained or g.state in ("dropped", "stale")

    # -- questions

    @rule(n=st.integers(1, 3))
    def why(self, n: int) -> None:
        told = self.run.why(n)
        rules = self.m.rules
        inside = self.m.deliverable(rules.max_staleness, rules.staleness_mode, rules.stale)
        assert told.ready_in_window == len(inside)
        assert told.reasons or told.ready_in_window >= n, "an empty wait has a reason"
