"""Rules for stages: rewards that are claimed, scored, failed, given back, and come too late."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from samplestore.errors import LeaseLost
from tests.model.machine import WORKERS, Frame
from tests.model.model import ModelStage

PICK = st.integers(0, 99)


class StageRules(Frame):
    def disown(self, worker: int) -> None:
        raise NotImplementedError  # of SampleRules

    def held_stages(self) -> list[ModelStage]:
        return [s for s in self.m.stages if s.open() and s.claim is not None]

    @precondition(lambda self: self.m.claimable_stages())
    @rule(worker=st.integers(0, WORKERS - 1), limit=st.integers(1, 3))
    def claim_stages(self, worker: int, limit: int) -> None:
        me, free = self.workers[worker], self.m.claimable_stages()
        claims, repeated = self.did(lambda: self.run.claim_stages(me, limit))
        unknown, free = (free[:limit], free[limit:]) if repeated else ([], free)
        taken = free[:limit]
        assert [(c.sample_id, c.name) for c in claims] == [(s.sample.id, s.name) for s in taken]
        for stage in unknown:
            stage.owner = me
        for stage, claim in zip(taken, claims, strict=True):
            assert claim.response_ids.tolist() == [t for p in stage.sample.pieces for t in p.ids]
            stage.claim, stage.owner = claim, me
        if repeated:
            self.disown(worker)

    @precondition(lambda self: self.held_stages())
    @rule(pick=PICK, value=st.sampled_from([0.0, 1.0, -0.5]))
    def score(self, pick: int, value: float) -> None:
        stage = self.held_stages()[pick % len(self.held_stages())]
        claim = stage.claim
        assert claim is not None
        for _ in range(2):
            self.run.score(claim, value)
        with pytest.raises(LeaseLost):
            self.run.score(claim, value + 1)  # another score of the same owner is no repetition
        stage.claim, stage.owner, stage.status, stage.value = None, None, "done", value
        self.m.settle(stage.sample.group)

    @precondition(lambda self: self.held_stages())
    @rule(pick=PICK, unparsed=st.booleans())
    def settle_without_a_number(self, pick: int, unparsed: bool) -> None:
        stage = self.held_stages()[pick % len(self.held_stages())]
        claim = stage.claim
        assert claim is not None
        for _ in range(2):
            if unparsed:
                self.run.unparsed(claim, "well, perhaps")
            else:
                self.run.complete_stage(claim)
        with pytest.raises(LeaseLost):
            self.run.score(claim, 1.0)
        stage.claim, stage.owner, stage.status, stage.unparsed = None, None, "done", unparsed
        self.m.settle(stage.sample.group)

    @precondition(lambda self: self.held_stages())
    @rule(pick=PICK)
    def fail_stage(self, pick: int) -> None:
        stage = self.held_stages()[pick % len(self.held_stages())]
        claim = stage.claim
        assert claim is not None
        stage.failures += 1
        told = [self.run.fail_stage(claim, "boom", backoff_s=0.0) for _ in range(2)]
        self.m.lose_stage(stage)
        if stage.failures >= self.m.rules.max_attempts:
            stage.status = "failed"
            stage.sample.failures = self.m.rules.max_attempts
            self.m.give_up(stage.sample)
        assert told == ["failed" if stage.status == "failed" else "pending"] * 2

    @precondition(lambda self: self.held_stages())
    @rule(pick=PICK)
    def release_stage(self, pick: int) -> None:
        stage = self.held_stages()[pick % len(self.held_stages())]
        claim = stage.claim
        assert claim is not None
        for _ in range(2):
            self.run.release_stage(claim)
        self.m.lose_stage(stage)

    @precondition(lambda self: self.m.stage_zombies)
    @rule(pick=PICK)
    def stage_zombie(self, pick: int) -> None:
        with pytest.raises(LeaseLost):
            self.run.score(self.m.stage_zombies[pick % len(self.m.stage_zombies)], 9.0)
