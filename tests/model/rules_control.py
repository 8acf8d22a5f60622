"""Rules for those who live, those who die, the run's switches, and the engines."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from samplestore.errors import LeaseLost, WorkerDead
from samplestore.verbs import groups, weights
from tests.model.machine import TRAINERS, WORKERS, Frame
from tests.model.model import UNFINISHED, ModelEngine
from tests.support import factory as f

PICK = st.integers(0, 99)
ANYBODY = st.integers(0, WORKERS + TRAINERS - 1)
PAST = 1e6  # seconds: beyond every deadline of these runs


class ControlRules(Frame):
    @rule()
    def lose_an_acknowledgement(self) -> None:
        """The next write is committed, its answer is lost, and the caller repeats it."""
        self.losing = True

    # -- liveness

    def replace(self, gone: int) -> None:
        """The model forgets a worker; a new process takes its place."""
        self.m.gone(gone)
        self.dead.append(gone)
        for team, kind in ((self.workers, "rollout"), (self.trainers, "trainer")):
            if gone in team:
                team[team.index(gone)] = self.register(kind)

    @rule(who=ANYBODY)
    def fall_silent(self, who: int) -> None:
        worker = [*self.workers, *self.trainers][who]
        f.execute(self.run, "UPDATE worker SET heartbeat = heartbeat - :s WHERE id = :w", s=PAST, w=worker)
        self.m.silent.add(worker)

    @rule(who=ANYBODY)
    def heartbeat(self, who: int) -> None:
        """A heartbeat that comes before the reap keeps its worker alive, however late."""
        worker = [*self.workers, *self.trainers][who]
        told, repeated = self.did(lambda: self.run.heartbeat(worker))
        assert told.late == (worker in self.m.silent and not repeated)
        assert (told.run_state, told.current_version) == (self.m.state, self.m.current)
        self.m.silent.discard(worker)

    @rule(who=st.none() | ANYBODY)
    def reap(self, who: int | None) -> None:
        team = [*self.workers, *self.trainers]
        reaper = None if who is None else team[who]
        told, repeated = self.did(lambda: self.run.reap(reaper))
        if reaper in self.m.silent:  # it was away itself: it must not judge others
            assert told.workers == []
            return
        late = [] if repeated else sorted(self.m.silent)
        assert sorted(told.workers) == late  # RETURNING has no order
        for worker in sorted(self.m.silent):
            self.replace(worker)
        for s in self.m.samples:
            if s.stuck:
                self.m.lose(s, stopped=True)

    @rule(who=ANYBODY, error=st.sampled_from([None, "out of memory"]))
    def goodbye(self, who: int, error: str | None) -> None:
        worker = [*self.workers, *self.trainers][who]
        self.run.goodbye(worker, error)
        self.replace(worker)

    @precondition(lambda self: self.dead)
    @rule(pick=PICK)
    def dead_is_final(self, pick: int) -> None:
        worker = self.dead[pick % len(self.dead)]
        for verb in (
            lambda: self.run.heartbeat(worker),
            lambda: self.run.claim(worker, 1),
            lambda: self.run.claim_stages(worker, 1),
            lambda: f.lease(self.run, worker, 500, 1),
        ):
            with pytest.raises(WorkerDead):
                verb()
        assert self.run.reap(worker).workers == []

    @precondition(lambda self: self.m.held())
    @rule(pick=PICK)
    def make_no_progress(self, pick: int) -> None:
        s = self.held(pick)
        f.execute(self.run, "UPDATE sample SET progress_at = progress_at - :s WHERE id = :i", s=PAST, i=s.id)
        s.stuck = True

    @precondition(lambda self: [g for g in self.m.groups if g.state == "open" and not g.straggling])
    @rule(pick=PICK)
    def pass_the_deadline(self, pick: int) -> None:
        """A group gets old; if some of it is finished and some is not, the run's rule for stragglers holds."""
        able = [g for g in self.m.groups if g.state == "open" and not g.straggling]
        g = able[pick % len(able)]
        begun = any(s.status not in UNFINISHED for s in g.samples)
        aged = "UPDATE sample_group SET created_at = created_at + :s WHERE id = :g"
        f.execute(self.run, aged, s=-PAST, g=g.id)
        found, repeated = self.did(lambda: self.run.transact(groups.settle_stragglers))  # a part of every reap
        f.execute(self.run, aged, s=PAST, g=g.id)
        assert found == (begun and not repeated)
        if begun:
            self.m.straggle(g)

    # -- switches

    @rule(state=st.sampled_from(["running", "running", "running", "paused", "draining"]))
    def control(self, state: str) -> None:
        {"running": self.run.resume, "paused": self.run.pause, "draining": self.run.drain}[state]("because")
        self.m.state = state

    # -- engines

    def engine(self, pick: int) -> ModelEngine:
        return list(self.m.engines.values())[pick % len(self.m.engines)]

    def version_of(self, label: str | None) -> int | None:
        return next((v for v, known in self.m.labels.items() if known == label), None)

    @rule(which=st.integers(0, 1), pick=PICK, label=st.sampled_from(["known", "known", "strange", "none"]))
    def see_engine(self, which: int, pick: int, label: str) -> None:
        url = f"http://{self.run.name}/{which}"
        told = {"known": list(self.m.labels.values())[pick % len(self.m.labels)], "strange": "strange"}.get(label)
        self.run.transact(lambda tx: weights.see_engine(tx, url, told))
        e = self.m.engines.setdefault(url, ModelEngine(url))
        if (e.label, e.version) != (told, self.version_of(told)):
            if e.failed and e.label and told:
                e.failures, e.backing_off, e.backed_off = 0, False, False
            e.label, e.version = told, self.version_of(told)

    @precondition(lambda self: self.m.engines)
    @rule(pick=PICK, worker=st.integers(0, WORKERS - 1))
    def claim_engine(self, pick: int, worker: int) -> None:
        e, me = self.engine(pick), self.workers[worker]
        free = e.owner in (None, me) and not e.backing_off and e.version != self.m.current
        held = self.run.transact(lambda tx: weights.claim_engine(tx, me, e.url))
        assert (held is not None) == (free and self.m.paths[self.m.current] is not None)
        if held is not None:
            assert held["version"] == self.m.current
            e.held, e.owner = held, me

    @precondition(lambda self: [e for e in self.m.engines.values() if e.held])
    @rule(pick=PICK, error=st.sampled_from([None, None, "no such path"]))
    def engine_updated(self, pick: int, error: str | None) -> None:
        able = [e for e in self.m.engines.values() if e.held]
        e = able[pick % len(able)]
        held = e.held
        assert held is not None
        e.held = None
        label = None if error else held["label"]
        if e.owner is None:  # it died meanwhile
            with pytest.raises(LeaseLost):
                self.run.transact(lambda tx: weights.engine_updated(tx, held, label, error))
            return
        for _ in range(2):
            self.run.transact(lambda tx: weights.engine_updated(tx, held, label, error))
        e.owner, e.label, e.version, e.failed = None, label, self.version_of(label), error is not None
        e.failures = e.failures + 1 if error else 0
        e.backing_off = e.backed_off = error is not None

    @precondition(lambda self: self.m.engines)
    @rule(pick=PICK)
    def engine_broken(self, pick: int) -> None:
        e = self.engine(pick)
        told, repeated = self.did(
            lambda: self.run.transact(lambda tx: weights.engine_broken(tx, self.workers[0], e.url, "NaN"))
        )
        new = not e.failed or e.failures == 0
        assert told == (new and not repeated)
        if new:
            e.failed, e.failures, e.backing_off, e.backed_off = True, e.failures + 1, True, True

    @precondition(lambda self: self.m.engines)
    @rule(pick=PICK)
    def engine_recovered(self, pick: int) -> None:
        e = self.engine(pick)
        told, repeated = self.did(lambda: self.run.transact(lambda tx: weights.engine_recovered(tx, e.url)))
        able = e.failed and e.owner is None
        assert told == (able and not repeated)
        if able:
            e.failed = False

    @precondition(lambda self: self.m.engines)
    @rule(pick=PICK)
    def forget_engine(self, pick: int) -> None:
        e = self.engine(pick)
        self.run.transact(lambda tx: weights.forget_engine(tx, e.url))
        del self.m.engines[e.url]
        if e.held is not None:
            held = e.held
            with pytest.raises(LeaseLost):
                self.run.transact(lambda tx: weights.engine_updated(tx, held, "default"))

    @rule()
    def wait_for_engines(self) -> None:
        f.execute(
            self.run, "UPDATE engine SET not_before = not_before - 100 WHERE run_id = :r AND not_before > 0",
            r=self.run.id,
        )  # fmt: skip
        for e in self.m.engines.values():
            e.backing_off = False
