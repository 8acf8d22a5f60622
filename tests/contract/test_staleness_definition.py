"""Staleness, and what every policy does with groups that are too old when a batch is leased, against a plain Python
definition; and the batch that came of it, read again bit for bit after whatever happened since."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from samplestore import Store
from samplestore.run import Run

from ..support import factory as f

MODES, POLICIES = ("oldest", "newest", "mean"), ("skip", "mask", "expire", "regenerate")

# -- the definition


@dataclass
class Tree:
    """Weights as nodes of a tree. A restored version is the node that it restores."""

    node: dict[int, int] = field(default_factory=lambda: {0: 0})  # version -> node
    parent: dict[int, int | None] = field(default_factory=lambda: {0: None})
    step: dict[int, int | None] = field(default_factory=lambda: {0: None})
    current: int = 0

    def line(self, node: int | None) -> list[int]:
        path = []
        while node is not None:
            path.append(node)
            node = self.parent[node]
        return path

    def lag(self, version: int, seen_from: int) -> int:
        """Weight updates on the path between two versions."""
        a, b = self.line(self.node[version]), self.line(self.node[seen_from])
        return len(a) + len(b) - 2 * len(set(a) & set(b))

    def publish(self, run: Run, step: int | None) -> None:
        made = run.publish_weights(path=f"/w/{len(self.node)}", step=step).version
        self.node[made] = len(self.parent)
        self.parent[len(self.parent)] = self.node[self.current]
        self.step[self.node[made]], self.current = step, made

    def rewind(self, run: Run, step: int) -> None:
        reached = [s for n in self.line(self.node[self.current]) if (s := self.step[n]) is not None and s <= step]
        if reached:
            source = next(n for n in self.line(self.node[self.current]) if n == 0 or self.step[n] in reached)
            self.current = run.rewind(step).version
            self.node[self.current] = source


Piece = tuple[int | None, int, int]  # version (None: unknown), tokens, loss


def sample_lag(pieces: Iterable[Piece], mode: str, tree: Tree, seen_from: int) -> float | None:
    """Of the tokens with loss=1; None: there are none, or one is of an unknown version."""
    trained = [(v, n) for v, n, loss in pieces if loss]
    if not trained or any(v is None for v, _ in trained):
        return None
    lags = [(tree.lag(v, seen_from), n) for v, n in trained if v is not None]
    if mode == "mean":
        return sum(lag * n for lag, n in lags) / sum(n for _, n in lags)
    return (max if mode == "oldest" else min)(lag for lag, _ in lags)


def group_lag(samples: Iterable[list[Piece]], mode: str, tree: Tree, seen_from: int) -> float | None:
    """The max over the samples; None where one is unknown. Samples without trained tokens do not count."""
    lags = [sample_lag(s, mode, tree, seen_from) for s in samples if any(loss for _, _, loss in s)]
    return None if not lags or any(lag is None for lag in lags) else max(lag for lag in lags if lag is not None)


# -- the store beside it

updates = st.lists(
    st.one_of(st.sampled_from(["publish", "publish", "unnamed"]), st.integers(0, 3)), max_size=5
)  # a number: rewind by so many steps
pieces = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.none()),
        st.integers(1, 3),
        st.sampled_from([1, 1, 1, 0]),
    ),
    min_size=1,
    max_size=3,
)
CASES = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None,
    phases=[Phase.generate],
)  # fmt: skip


def update(run: Run, tree: Tree, what: Iterable[str | int]) -> None:
    for op in what:
        newest = max((s for n in tree.line(tree.node[tree.current]) if (s := tree.step[n]) is not None), default=-1)
        if isinstance(op, int):
            if newest >= 0:
                tree.rewind(run, max(-1, newest - op))
        else:
            tree.publish(run, newest + 1 if op == "publish" else None)


@pytest.mark.parametrize("mode", MODES)
def test_every_policy_does_what_it_says(store: Store, mode: str) -> None:
    counter = iter(range(10**6))

    @CASES
    @given(
        before=updates,
        contents=st.lists(st.lists(pieces, min_size=2, max_size=2), min_size=1, max_size=4),
        waiting=updates,
        after=st.lists(st.sampled_from(["publish", "unnamed", "rewind"]), max_size=4),
        window=st.integers(0, 3),
        policy=st.sampled_from(POLICIES),
        n=st.integers(1, 2),
    )
    def check(
        before: list[Any], contents: list[Any], waiting: list[Any], after: list[Any], window: int, policy: str, n: int
    ) -> None:
        # a run that never acts by itself: whatever happens here is the batch's policy
        run = f.make_run(
            store, f"r{next(counter)}", prompts=len(contents), groups_per_step=9, max_staleness=50, stale="mask"
        )
        worker, trainer, tree = f.register(run), f.register(run, "trainer"), Tree()
        update(run, tree, before)
        told: list[list[list[Piece]]] = []
        claims = run.claim(worker, 100)
        for number, group in enumerate(contents):
            told.append([])
            for index, wanted in enumerate(group):
                claim = next(c for c in claims if (c.group_number, c.index) == (number, index))
                written: list[Piece] = [
                    (None if v is None else v % (max(tree.node) + 1), tokens, loss) for v, tokens, loss in wanted
                ]
                for version, tokens, loss in written:
                    f.add(run, claim, tokens, version, loss=loss)
                run.finish(claim)
                told[-1].append(written)
        update(run, tree, waiting)  # the time in the queue counts
        ready = [i for i, s in enumerate(f.states(run)) if s == "ready"]
        seen = tree.current
        oldest = [group_lag(group, "oldest", tree, seen) for group in told]
        assert [i for i, lag in enumerate(oldest) if lag is not None or i in ready] == ready, (
            "what is known stays ready; what is unknown is closed by the next publish, and never taken for 0"
        )
        lags = {i: group_lag(told[i], mode, tree, seen) for i in ready}
        beyond = [i for i in ready if (lag := lags[i]) is not None and lag > window]
        inside = [i for i in ready if (lag := lags[i]) is not None and (policy == "mask" or lag <= window)]
        made = f.lease(run, trainer, 1000, n, max_staleness=window, staleness=mode, stale=policy)
        assert (made is not None) == (len(inside) >= n)
        taken = inside[:n] if made is not None else []
        becomes = {"expire": "stale", "regenerate": "open"}.get(policy, "ready")
        states = f.states(run)
        for i in ready:
            assert states[i] == ("leased" if i in taken else becomes if i in beyond else "ready"), (i, lags)
        lives = f.rows(
            run,
            "SELECT g.number, min(s.incarnation) AS low, max(s.incarnation) AS high FROM sample s "
            "JOIN sample_group g ON g.id = s.group_id WHERE g.run_id = :r GROUP BY g.number ORDER BY g.number",
            r=run.id,
        )
        for row in lives:
            afresh = int(policy == "regenerate" and row["number"] in beyond)
            assert (row["low"], row["high"]) == (afresh, afresh)
        f.sound(run)
        if made is None:
            return
        batch = f.batch_of(run, made, trainer)
        assert [g.number for g in batch.groups] == taken
        assert [g.staleness for g in batch.groups] == [math.ceil(lags[i] or 0) for i in taken]
        for i, group in zip(taken, batch.groups, strict=True):
            for written, sample in zip(told[i], group.samples, strict=True):
                trains = [
                    loss and not (policy == "mask" and (v is None or tree.lag(v, seen) > window))
                    for v, _, loss in written
                ]
                assert sample.loss_mask.tolist() == [
                    int(keep) for keep, (_, t, _) in zip(trains, written, strict=True) for _ in range(t)
                ]
        was = batch.arrays()
        f.commit(run, made, trainer)
        for step, what in enumerate([*after, "rewind", "publish"], 1001):
            run.rewind(1000) if what == "rewind" else run.publish_weights(
                path=f"/w/late/{step}", step=step if what == "publish" else None
            )
        again = run.replay(1000)
        assert (again.policy, again.current_version) == (batch.policy, seen)
        f.same_arrays(again.arrays(), was)
        f.sound(run)

    check()
