"""A rollout that forks, and everybody who may come between."""

from __future__ import annotations

import contextlib
import random

import pytest

from samplestore import Store
from samplestore.errors import LeaseLost
from samplestore.queries import episodes as queries
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import fanout

from ..support import factory as f
from .forking import PROMPT, end, fork


class Walk:
    """An episode's owner and everybody who may come between, in any order; after each step all promises hold."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.worker = f.register(run)
        self.root: Claim | None = None
        self.forks: list[Claim] = []
        self.calls = 0

    def step(self) -> str:
        acts = [self.claim] if self.root is None else [
            *[self.fork] * 4, *[self.append] * 6, self.end_fork, self.end_fork, self.end, self.release, self.fail,
            self.die, self.requeue, self.drop_nothing,
        ]  # fmt: skip
        act = self.random.choice(acts)
        with contextlib.suppress(LeaseLost):
            act()
        return act.__name__

    def claim(self) -> None:
        claims = self.run.claim(self.worker, 1)
        if not claims:  # all has ended: somebody wants it afresh
            ids = [row["id"] for row in f.rows(self.run, "SELECT id FROM sample ORDER BY id")]
            self.run.requeue([self.random.choice(ids)], "once more")
        if claims:
            self.root, self.forks = claims[0], []
            record = self.run.database.read(
                lambda c: queries.record(c, claims[0].sample_id, claims[0].incarnation)
            )  # fmt: skip
            self.calls = len(record.calls)
            for call in record.calls:
                taken = self.run.transact(lambda tx, id=call.result["child"]: fanout.take(tx, claims[0], id))
                self.forks.append(taken)

    def fork(self) -> None:
        assert self.root is not None
        upto = self.random.choice([None, self.root.n_tokens])
        prompt = PROMPT if upto is None else None
        self.forks.append(fork(self.run, self.root, self.calls, len(self.forks), upto, prompt))
        self.calls += 1

    def append(self) -> None:
        assert self.root is not None
        claim = self.random.choice([self.root, *self.forks])
        if claim.status in ("pending", "aborted"):
            f.add(self.run, claim, self.random.randint(1, 3))

    def end_fork(self) -> None:
        able = [c for c in self.forks if c.status in ("pending", "aborted") and c.n_tokens]
        if able:
            end(self.run, able[0], 1.0)
            able[0].status = "completed"

    def end(self) -> None:
        """As a worker does it: the forks first."""
        assert self.root is not None
        for claim in [*self.forks, self.root]:
            if claim.status in ("pending", "aborted"):
                f.add(self.run, claim, 1, finish_reason="stop")
                end(self.run, claim, 0.5)
        self.root = None

    def release(self) -> None:
        assert self.root is not None
        for claim in [*self.forks, self.root]:
            with contextlib.suppress(LeaseLost):
                self.run.release(claim, "let go")
        self.root = None

    def fail(self) -> None:
        assert self.root is not None
        self.run.fail(self.root, "broken", backoff_s=0.0)
        self.root = None

    def die(self) -> None:
        f.kill(self.run, self.worker)
        self.worker, self.root = f.register(self.run), None

    def requeue(self) -> None:
        assert self.root is not None
        ids = [self.root.sample_id, *(c.sample_id for c in self.forks)]
        self.run.requeue([self.random.choice(ids)], "again")
        self.root = None

    def drop_nothing(self) -> None:
        self.run.reap()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))])
def test_whatever_comes_between_all_promises_hold(store: Store, seed: int) -> None:
    run = f.make_run(
        store, prompts=2, samples_per_prompt=1, groups_per_step=2, max_attempts=6, on_failed="short", max_deaths=100
    )
    walk, steps = Walk(run, seed), []
    for _ in range(40):
        steps.append(walk.step())
        found = run.check()
        assert found == [], (steps, found)
    f.sound(run)
    for sample in f.rows(run, "SELECT * FROM sample"):
        assert sample["owner"] is None or sample["status"] in ("pending", "aborted")
