"""A requeue is known again by its call, however many samples it and others began afresh."""

from __future__ import annotations

import pytest

from samplestore import Store
from samplestore.verbs import groups

from ..support import factory as f


@pytest.mark.parametrize("n", [1, 10, 105])
def test_a_repetition_is_known_after_another_call_of_many_samples(store: Store, n: int) -> None:
    """Each sample leaves an event. A repetition that was not found among them started samples once more, and threw away
    what was generated meanwhile."""
    run = f.make_run(store, prompts=110, groups_per_step=110)
    ids = [r["id"] for r in f.rows(run, "SELECT id FROM sample ORDER BY id")]
    mine, others = ids[:n], ids[n : n + 105]
    first = lambda: run.transact(lambda tx: groups.requeue(tx, mine, "mine", "call A"))  # noqa: E731
    assert first() == n
    run.transact(lambda tx: groups.requeue(tx, others, "theirs", "call B"))
    before = f.snapshot(run)
    assert first() == n
    assert f.snapshot(run) == before
    run.transact(lambda tx: groups.requeue(tx, mine, "mine", "call C"))
    assert f.sample(run, mine[0])["incarnation"] == 2, "another call"
    assert f.value(run, "SELECT count(*) FROM event WHERE kind = 'requeue'") == n + 105 + n
    f.sound(run)
