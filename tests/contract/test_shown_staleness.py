"""The staleness that people are shown: of what is trained on that of its lease, of all else that of now."""

from __future__ import annotations

import pytest

from samplestore import Store
from samplestore.queries import browse, group_list, group_page, trajectory
from samplestore.run import Run

from ..support import factory as f


def shown(run: Run, number: int) -> set[int | None]:
    """Everything that says it of a group and its first sample."""
    page = group_list.page(run.database, run.id, group_list.GroupFilter()).rows
    group = group_page.read(run.database, run.id, number)
    sample = trajectory.read(run.database, run.id, number, 0)
    assert group is not None and sample is not None
    browsed = browse.groups(run.database, run.id)
    told = [*(g for g in page if g["number"] == number), *(g for g in browsed if g["number"] == number)]
    return {*(g["staleness"] for g in told), group.group["staleness"], sample.sample["staleness"]}


def fitting(run: Run, low: int | None = None, high: int | None = None) -> list[int]:
    where = group_list.GroupFilter(staleness_min=low, staleness_max=high)
    return [g["number"] for g in group_list.page(run.database, run.id, where).rows]


@pytest.fixture
def run(store: Store) -> Run:
    return f.make_run(store, prompts=4, max_staleness=9)


def test_what_was_trained_on_keeps_the_staleness_of_its_lease(run: Run) -> None:
    worker, trainer = run.register(), run.register("trainer")
    f.finish_all(run, worker)
    run.publish_weights(path="/w/0", step=0)
    first = f.lease(run, trainer, 1, 1)
    assert first is not None
    assert shown(run, 0) == shown(run, 1) == {1}
    f.commit(run, first, trainer)
    for step in (1, 2, 3):
        run.publish_weights(path=f"/w/{step}", step=step)
    second = f.lease(run, trainer, 4, 1)
    assert second is not None
    assert [shown(run, n) for n in range(3)] == [{1}, {4}, {4}], "consumed, leased, ready"
    run.publish_weights(path="/w/4", step=4)
    assert [shown(run, n) for n in range(3)] == [{1}, {4}, {5}]
    assert fitting(run, high=1) == [0] and fitting(run, low=5) == [3, 2] and fitting(run, 4, 4) == [1]
    f.release(run, second, trainer)
    assert shown(run, 1) == {5}, "given back, it grows older again"


def test_a_rewind_changes_it_only_for_what_comes_back(run: Run) -> None:
    """Two batches; training goes back to the first, whose groups are what they were."""
    worker, trainer = run.register(), run.register("trainer")
    f.finish_all(run, worker)
    for step in (1, 2):
        run.publish_weights(path=f"/w/{step}", step=step - 1)
        batch = f.lease(run, trainer, step, 1)
        assert batch is not None
        f.commit(run, batch, trainer)
    run.publish_weights(path="/w/3", step=2)
    assert [shown(run, n) for n in range(3)] == [{1}, {2}, {3}]
    run.publish_weights(path="/w/1b", step=1)
    run.rewind(1)
    assert shown(run, 0) == {1}, "the checkpoint has seen it"
    assert shown(run, 1) == shown(run, 2) == {4}, "ready again: behind the restored weights"


def test_a_token_of_a_branch_that_was_left_counts_along_the_tree(run: Run) -> None:
    worker, trainer = run.register(), run.register("trainer")
    run.publish_weights(path="/w/1", step=1)
    run.publish_weights(path="/w/2", step=2)
    f.finish_all(run, worker)  # by version 2
    run.rewind(1)  # version 3, the weights of version 1
    run.publish_weights(path="/w/2b", step=2)
    batch = f.lease(run, trainer, 3, 1)
    assert batch is not None
    assert shown(run, 0) == {2}, "2 -> 1 = 3 -> 4"
    f.commit(run, batch, trainer)
    run.publish_weights(path="/w/3b", step=3)
    run.publish_weights(path="/w/4b", step=4)
    assert shown(run, 0) == {2} and shown(run, 1) == {4}


def test_unknown_stays_unknown(run: Run) -> None:
    worker, trainer = run.register(), run.register("trainer")
    f.finish_all(run, worker)
    batch = f.lease(run, trainer, 1, 1)
    assert batch is not None
    f.execute(run, "UPDATE batch_group SET staleness = NULL")
    f.execute(run, "UPDATE sample SET version_unknown = 1")
    assert shown(run, 0) == {None}
