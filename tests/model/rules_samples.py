"""Rules for samples: admission, claims, segments, requests, and every way in which a sample ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from samplestore.errors import InvalidSegment, LeaseLost, SequenceConflict, TokensPruned, UnknownVersion
from samplestore.types import Claim, RequestInfo
from samplestore.verbs import appends
from tests.model.machine import WORKERS, Frame
from tests.model.model import Piece
from tests.support import factory as f

PICK = st.integers(0, 99)
KINDS = ("generated", "generated", "generated", "unmasked", "environment", "unknown", "straddling")


class SampleRules(Frame):
    @rule()
    def admit(self) -> None:
        want = 0
        if self.m.state == "running":
            self.m.sweep()
            want = max(0, min(self.m.rules.window - self.m.occupied(), self.m.prompts - len(self.m.groups)))
        made, repeated = self.did(self.run.admit)
        assert made == (0 if repeated else want), "the window is filled, and never overfilled"
        before = len(self.m.groups)
        self.new_groups()
        assert len(self.m.groups) == before + want

    @rule(n=st.integers(1, 3))
    def add_prompts(self, n: int) -> None:
        total = min(16, self.m.prompts + n)
        told = self.run.add_prompts([{"prompt_ids": [1, 2, i], "label": str(i)} for i in range(total)])
        assert told.added + told.existing == total
        self.m.prompts = total

    @precondition(lambda self: self.m.groups)
    @rule(worker=st.integers(0, WORKERS - 1), limit=st.integers(1, 5))
    def claim(self, worker: int, limit: int) -> None:
        me, free = self.workers[worker], self.m.claimable()
        claims, repeated = self.did(lambda: self.run.claim(me, limit))
        unknown, free = (free[:limit], free[limit:]) if repeated else ([], free)
        taken = free[:limit]
        assert [c.sample_id for c in claims] == [s.id for s in taken]
        for s in unknown:
            s.owner = me  # its claim was committed and its answer lost: the worker does not know
        for s, claim in zip(taken, claims, strict=True):
            assert (claim.n_tokens, claim.seq, claim.incarnation) == (s.tokens, len(s.pieces), s.incarnation)
            assert f.tokens_of(claim) == [t for p in s.pieces for t in p.ids]
            s.claim, s.owner = claim, me
        if repeated:
            self.disown(worker)

    @rule(worker=st.integers(0, WORKERS - 1))
    def disown(self, worker: int) -> None:
        me = self.workers[worker]
        strays = [s for s in self.m.samples if s.owner == me and s.claim is None]
        stages = [s for s in self.m.stages if s.open() and s.owner == me and s.claim is None]
        known = [s.id for s in self.m.samples if s.owner == me and s.claim is not None]
        known_stages = [s.claim.stage_id for s in self.m.stages if s.owner == me and s.open() and s.claim is not None]
        freed, repeated = self.did(lambda: self.run.disown(me, known, known_stages))
        assert freed == (0 if repeated else len(strays) + len(stages))
        for s in strays:
            self.m.lose(s)
        for stage in stages:
            self.m.lose_stage(stage)

    # -- segments

    def piece(self, n: int, back: int, kind: str) -> Piece:
        """The next segment: of the version `back` updates ago, of an unknown one, or not the model's words."""
        self.words = getattr(self, "words", 0) + 1
        ids = f.ids_of(n, first=self.words)
        at = sorted(self.m.node)[max(0, len(self.m.node) - 1 - back)]
        if kind == "environment":
            return Piece(ids, None, None, "environment", 0)
        if kind == "unknown":
            return Piece(ids, None, None)
        if kind == "straddling":
            return Piece(ids, at, max(self.m.node))
        return Piece(ids, at, at, loss=0 if kind == "unmasked" else 1)

    def send(self, claim: Claim, piece: Piece, reason: str | None, **more: Any) -> None:
        probs = None if piece.kind == "environment" else f.logprobs_of(piece.n)
        version: Any = piece.low if piece.low == piece.high else (piece.low, piece.high)
        self.run.append(claim, piece.ids, probs, version, reason, piece.kind, loss=piece.loss, **more)

    @precondition(lambda self: self.m.held())
    @rule(
        pick=PICK, n=st.integers(1, 4), back=st.integers(0, 1), kind=st.sampled_from(KINDS),
        reason=st.sampled_from([None, None, "abort", "length"]),
    )  # fmt: skip
    def append(self, pick: int, n: int, back: int, kind: str, reason: str | None) -> None:
        s = self.held(pick)
        assert s.claim is not None
        rid = next((r for r, told in self.rids.items() if told["claim"] is s.claim and not told["ended"]), None)
        piece = self.piece(n, back, kind)
        self.send(s.claim, piece, reason, rid=rid)
        self.send(s.claim, piece, reason, rid=rid, seq=s.claim.seq - 1)  # repeated: harmless
        if rid is not None:
            self.rids[rid]["stored"] += n
        s.pieces.append(piece)
        s.reason, s.stuck = reason, False
        s.aborts += reason == "abort"

    @precondition(lambda self: self.m.held())
    @rule(pick=PICK, how=st.sampled_from(["gap", "other bytes", "no version", "nan", "nothing"]))
    def append_wrongly(self, pick: int, how: str) -> None:
        """Refused with its reason; the comparison sees that nothing was stored."""
        claim = self.held(pick).claim
        assert claim is not None
        if how == "other bytes" and claim.seq == 0:
            return
        tokens, probs, version, seq = {
            "gap": ([1], [-0.5], 0, claim.seq + 1),
            "other bytes": ([7, 7, 7, 7, 7], [-0.5] * 5, 0, claim.seq - 1),
            "no version": ([1], [-0.5], 999, claim.seq),
            "nan": ([1], [float("nan")], 0, claim.seq),
            "nothing": ([], [], 0, claim.seq),
        }[how]
        error = {"gap": SequenceConflict, "other bytes": SequenceConflict, "no version": UnknownVersion}
        with pytest.raises(error.get(how, InvalidSegment)):
            self.run.append(claim, tokens, probs, version, seq=seq)  # type: ignore[arg-type]

    @precondition(lambda self: [s for s in self.m.held() if s.tokens])
    @rule(pick=PICK)
    def attach(self, pick: int) -> None:
        able = [s for s in self.m.held() if s.tokens]
        s = able[pick % len(able)]
        assert s.claim is not None
        self.run.attach(s.claim, "values", [0.5, 0.25][: s.tokens])

    @precondition(lambda self: self.m.held())
    @rule(pick=PICK)
    def note_abort(self, pick: int) -> None:
        s = self.held(pick)
        claim = s.claim
        assert claim is not None
        _, repeated = self.did(lambda: self.run.transact(lambda tx: appends.note_abort(tx, claim, "late")))
        s.reason, s.aborts = "abort", s.aborts + 1 + repeated  # an abort that nobody is sure of counts twice

    # -- requests

    @precondition(lambda self: self.m.held())
    @rule(pick=PICK, resumes=st.booleans())
    def begin_request(self, pick: int, resumes: bool) -> None:
        s = self.held(pick)
        assert s.claim is not None
        rid = f"{self.run.name}/{len(self.rids)}"
        for _ in range(2):
            self.run.begin_request(s.claim, rid, resumes=resumes)
        s.resumes += resumes
        self.rids[rid] = {"claim": s.claim, "stored": 0, "generated": None, "ended": False}

    @precondition(lambda self: [r for r in self.rids.values() if not r["ended"]])
    @rule(pick=PICK, lost=st.integers(0, 3))
    def end_request(self, pick: int, lost: int) -> None:
        """Also of a sample that was taken away meanwhile: what an engine did is a fact."""
        open_ = [rid for rid, r in self.rids.items() if not r["ended"]]
        rid = open_[pick % len(open_)]
        told = self.rids[rid]
        told["ended"], told["generated"] = True, told["stored"] + lost
        for _ in range(2):
            self.run.end_request(
                RequestInfo(rid, generated_tokens=told["generated"], lost_reason="late" if lost else None)
            )

    # -- ends

    @precondition(lambda self: self.m.held())
    @rule(pick=PICK, keep=st.booleans(), reason=st.sampled_from([None, None, "length"]))
    def finish(self, pick: int, keep: bool, reason: str | None) -> None:
        s = self.held(pick)
        claim, me = s.claim, s.owner
        assert claim is not None
        if not s.tokens:
            with pytest.raises(InvalidSegment):
                self.run.finish(claim)
            return
        for _ in range(2):
            kept = self.run.finish(claim, finish_reason=reason, keep_stages=keep)
        s.reason = reason or s.reason
        made = self.m.finished(s, "truncated" if s.reason == "length" else "completed")
        if keep:
            assert [k.name for k in kept] == list(self.m.rules.stages)
            for stage, its in zip(made, kept, strict=True):
                stage.owner, stage.claim = me, its
        else:
            assert kept == []

    @precondition(lambda self: self.m.held())
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        s = self.held(pick)
        assert s.claim is not None
        for _ in range(2):
            self.run.release(s.claim, "weights")
        self.m.lose(s, stopped=True)

    @precondition(lambda self: self.m.held())
    @rule(pick=PICK)
    def fail(self, pick: int) -> None:
        s = self.held(pick)
        claim = s.claim
        assert claim is not None
        s.failures += 1
        told = [self.run.fail(claim, "broken", backoff_s=0.0) for _ in range(2)]
        self.m.lose(s)
        if s.failures >= self.m.rules.max_attempts:
            self.m.give_up(s)
        assert told == [s.status] * 2

    @precondition(lambda self: self.m.zombies)
    @rule(pick=PICK)
    def zombie(self, pick: int) -> None:
        """Who lost a sample changes nothing: the comparison after this step sees to it."""
        claim = self.m.zombies[pick % len(self.m.zombies)]
        seq = 1000 + claim.seq
        for write in (
            lambda: f.add(self.run, claim, 2, 0, seq=seq),
            lambda: self.run.finish(claim),
            lambda: self.run.attach(claim, "values", [1.0]),
            lambda: self.run.begin_request(claim, f"{self.run.name} zombie"),
            lambda: self.run.transact(lambda tx: appends.note_abort(tx, claim, "late")),
        ):
            with pytest.raises(LeaseLost):
                write()

    # -- by an operator

    @precondition(lambda self: [s for s in self.m.samples if s.group.state in ("open", "scoring", "ready", "dropped")])
    @rule(pick=PICK)
    def requeue(self, pick: int) -> None:
        able = [s for s in self.m.samples if s.group.state in ("open", "scoring", "ready", "dropped")]
        s = able[pick % len(able)]
        if s.group.pruned:  # its other samples could not be delivered
            with pytest.raises(TokensPruned):
                self.run.requeue([s.id], "again")
            return
        assert self.run.requeue([s.id], "again") == 1
        self.m.requeue(s)

    @precondition(lambda self: self.m.in_window())
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        able = self.m.in_window()
        g = able[pick % len(able)]
        assert self.run.drop([g.id], "unwanted") == 1
        self.m.close(g, "dropped")

    @precondition(lambda self: self.m.in_window())
    @rule(pick=PICK)
    def expire(self, pick: int) -> None:
        able = self.m.in_window()
        g = able[pick % len(able)]
        assert self.run.expire([g.id], reason="too old") == 1
        self.m.close(g, "stale")

    @precondition(lambda self: self.m.samples)
    @rule(pick=PICK, named=st.sampled_from(["all", "sample", "group"]))
    def abort_inflight(self, pick: int, named: str) -> None:
        """It asks, and changes no sample: workers store what they have and let go."""
        s = self.m.samples[pick % len(self.m.samples)]
        before = f.value(self.run, "SELECT abort_seq FROM run WHERE id = :r", r=self.run.id)
        which = {"all": {}, "sample": {"samples": [s.id]}, "group": {"groups": [s.group.id]}}[named]
        number, repeated = self.did(lambda: self.run.abort_inflight("enough", **which))
        assert number == before + 1 + repeated
