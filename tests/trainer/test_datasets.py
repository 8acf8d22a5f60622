"""Steps one after the other, read ahead: what is leased when, and who settles it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from samplestore import Store, datasets
from samplestore.batch import Batch
from samplestore.datasets import Steps, torch_dataset
from samplestore.errors import BatchTimeout, InvalidSetting, SampleStoreError
from samplestore.run import Run
from samplestore.tensors import as_torch
from tests.support import factory as f
from tests.support.processes import wait_until

WAIT_S = 60.0
STATES = "SELECT step, state FROM batch ORDER BY id"


def ready(store: Store, prompts: int = 4) -> Run:
    """A group a step, two samples a group, of 3 to 9 tokens and a prompt of three."""
    run = f.make_run(store, prompts=prompts, groups_per_step=1, max_staleness=9)
    for number, claim in enumerate(run.claim(f.register(run), 100)):
        f.answer(run, claim, 3 + number % 7)
    return run


def leases(run: Run) -> list[tuple[int, str]]:
    return [(row["step"], row["state"]) for row in f.rows(run, STATES)]


def read_ahead(run: Run, *steps: int) -> None:
    """Wait until exactly these are leased."""
    wait_until(lambda: [s for s, state in leases(run) if state == "leased"] == [*steps], what=f"{steps} are leased")


def test_asking_for_the_next_commits(store: Store) -> None:
    run = ready(store)
    seen = []
    for batch in Steps(run, range(1, 4), timeout=WAIT_S):
        seen.append(batch.step)
        read_ahead(run, *range(batch.step, min(batch.step + 2, 4)))
        assert [s for s, state in leases(run) if state == "committed"] == seen[:-1]
        assert batch.groups is batch._delivery.groups, "read already"
    assert seen == [1, 2, 3] and leases(run) == [(1, "committed"), (2, "committed"), (3, "committed")]
    f.sound(run)


def test_nothing_is_leased_ahead_of_prefetch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ready(store, 6)
    asked: list[int] = []
    take = datasets.take
    monkeypatch.setattr(datasets, "take", lambda run, step, *a, **k: (asked.append(step), take(run, step, *a, **k))[1])
    for prefetch, first in ((0, 1), (2, 3)):
        with Steps(run, range(first, 99), prefetch=prefetch, timeout=WAIT_S) as steps:
            loop = iter(steps)
            assert next(loop).step == first
            read_ahead(run, *range(first, first + 1 + prefetch))
            assert next(loop).step == first + 1
            read_ahead(run, *range(first + 1, first + 2 + prefetch))
            assert max(asked) == first + 1 + prefetch
            steps.commit()
        assert "leased" not in [state for _, state in leases(run)]
    assert f.states(run).count("consumed") == 4
    f.sound(run)


def test_a_loop_that_is_left_gives_back_what_is_not_committed(store: Store) -> None:
    run = ready(store)
    with pytest.raises(RuntimeError, match="mine"), Steps(run, range(1, 5), timeout=WAIT_S) as steps:
        for batch in steps:
            read_ahead(run, batch.step, batch.step + 1)
            if batch.step == 2:
                raise RuntimeError("mine")
    assert f.states(run) == ["consumed", "ready", "ready", "ready"]
    f.sound(run)


def test_commit_before_a_break(store: Store) -> None:
    run = ready(store)
    steps = Steps(run, range(1, 5), timeout=WAIT_S)
    for batch in steps:
        steps.commit()
        assert steps.batch is None and batch.settled
        steps.commit()
        break
    steps.close()
    assert f.states(run) == ["consumed", "ready", "ready", "ready"]
    f.sound(run)


def test_one_loop_at_a_time(store: Store) -> None:
    steps = Steps(ready(store), range(1, 5), timeout=WAIT_S)
    with steps:
        assert next(iter(steps)).step == 1, "an iterator that is dropped ends its loop"
        loop = iter(steps)
        assert next(loop).step == 1
        with pytest.raises(SampleStoreError, match="loop already"):
            next(iter(steps))
        assert next(loop).step == 2


def test_close_in_the_loop_ends_it(store: Store) -> None:
    run = ready(store)
    steps, seen = Steps(run, range(1, 5), timeout=WAIT_S), []
    for batch in steps:
        seen.append(batch.step)
        if batch.step == 2:
            read_ahead(run, 2, 3)
            steps.close()
            steps._steps = range(2, 5)
            again = iter(steps)
            assert next(again).step == 2
    assert seen == [1, 2]
    assert steps.batch is not None, "another loop, which the end of this one does not end"
    again.close()  # type: ignore[attr-defined]
    assert f.states(run) == ["consumed", "ready", "ready", "ready"]
    f.sound(run)


def test_a_commit_that_failed_is_made_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ready(store, 2)
    commit, tried = Batch.commit, []

    def away(self: Batch) -> None:
        tried.append(self.step)
        if len(tried) == 1:
            raise ConnectionError("the database is away")
        commit(self)

    monkeypatch.setattr(Batch, "commit", away)
    with Steps(run, (1,), timeout=WAIT_S) as steps:
        for _ in steps:
            with pytest.raises(ConnectionError):
                steps.commit()
            assert steps.batch is not None, "it is still in hand"
            steps.commit()
    assert leases(run) == [(1, "committed")] and tried == [1, 1]


def test_what_goes_wrong_ahead_is_raised_at_its_step(store: Store) -> None:
    run = ready(store, 2)
    seen = []
    with pytest.raises(BatchTimeout), Steps(run, range(1, 9), timeout=0.2) as steps:
        for batch in steps:
            seen.append(batch.step)
    assert seen == [1, 2] and leases(run) == [(1, "committed"), (2, "committed")]


def test_time_in_which_nobody_waits_is_no_timeout(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of step 2 come while step 1 is trained, long after its timeout has run out twice."""
    run = ready(store, 1)
    take, tried, twice = datasets.take, [0], threading.Event()

    def counted(run: Run, step: int, groups: Any, **options: Any) -> Any:
        tried[0] += step == 2
        if tried[0] == 3:
            twice.set()
        return take(run, step, groups, **options)

    monkeypatch.setattr(datasets, "take", counted)
    seen = []
    for batch in Steps(run, (1, 2), timeout=0.2):
        seen.append(batch.step)
        if batch.step == 1:
            assert twice.wait(WAIT_S)
            run.add_prompts([{"prompt_ids": [5]}])
            run.admit()
            f.finish_all(run, f.register(run))
            read_ahead(run, 1, 2)
    assert seen == [1, 2]


def test_ranks_loop_side_by_side(store: Store) -> None:
    run = ready(store)
    barrier = threading.Barrier(2)

    def rank(number: int) -> list[list[int]]:
        read = []
        for batch in Steps(run, range(1, 4), rank=number, world=2, timeout=WAIT_S):
            read.append([sample.sample_id for sample in batch.samples])
            barrier.wait(WAIT_S)
        return read

    with ThreadPoolExecutor(2) as pool:
        zero, one = (pool.submit(rank, number) for number in range(2))
        parts = list(zip(zero.result(2 * WAIT_S), one.result(2 * WAIT_S), strict=True))
    assert [sorted(a + b) for a, b in parts] == [
        sorted(s.sample_id for s in run.replay(step).samples) for step in (1, 2, 3)
    ]
    f.sound(run)


# -- torch


def items(run: Run, **options: Any) -> Iterator[dict[str, Any]]:
    yield from DataLoader(torch_dataset(run, range(1, 4), timeout=WAIT_S, **options), batch_size=None)


def test_a_dataset_gives_steps(store: Store) -> None:
    run = ready(store)
    for item in items(run):
        assert (item["micro_batch"], item["micro_batches"]) == (0, 1)
        assert item["tokens"].dtype == torch.int64 and item["cu_seqlens"].tolist()[-1] == len(item["tokens"])
        step = item["step"]
    assert step == 3 and [s for s, _ in leases(run)] == [1, 2, 3]
    for step in (1, 2, 3):
        assert run.replay(step).step == step


def test_micro_batches_are_one_step(store: Store) -> None:
    run = ready(store)
    got: dict[int, list[dict[str, Any]]] = {}
    for item in items(run, max_tokens=12, groups=1, layout="padded"):
        got.setdefault(item["step"], []).append(item)
        assert item["attention_mask"].sum() <= 12
        assert (item["step"], "committed") not in leases(run), "not before its last micro-batch"
    for step, parts in got.items():
        assert [part["micro_batch"] for part in parts] == list(range(parts[0]["micro_batches"]))
        whole = run.replay(step).arrays()
        assert np.concatenate([part["advantages"] for part in parts]).tolist() == whole["advantages"].tolist()
        assert {int(part["n_trained_tokens"]) for part in parts} == {int(whole["loss_mask"].sum())}
    assert len(got[3]) == 2


def test_a_dataset_commits_and_closes(store: Store) -> None:
    run = ready(store)
    with torch_dataset(run, range(1, 4), timeout=WAIT_S) as dataset:
        for item in dataset:
            assert dataset.batch is not None and dataset.batch.step == item["step"]
            if item["step"] == 2:
                break
            dataset.commit()
            run.publish_weights(step=item["step"])
    assert f.states(run) == ["consumed", "ready", "ready", "ready"]
    f.sound(run)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_are_refused(store: Store, start: str) -> None:
    run = ready(store, 1)
    loader = DataLoader(torch_dataset(run, [1]), batch_size=None, num_workers=1, multiprocessing_context=start)
    with pytest.raises((InvalidSetting, RuntimeError), match="belong to one process"):
        next(iter(loader))
    assert leases(run) == []


def test_what_a_model_gives_is_recorded(store: Store) -> None:
    """Tensors with a gradient, in bfloat16, packed, padded or one a sample."""
    run = ready(store)
    with run.batch(1, timeout=0) as batch:
        packed, padded = (batch.tensors(layout=layout)["rollout_log_probs"] for layout in ("packed", "padded"))
        lists = [torch.tensor(sample.logprobs) for sample in batch.samples]
        given = [packed, padded, padded.bfloat16(), packed.clone().requires_grad_(), lists]
        # -0.25, -0.375, ... are exact in bfloat16
        assert [batch.record_logprobs(values).abs_diff for values in given] == [0] * 5


# -- memory


def test_tensors_share_the_arrays_memory(store: Store) -> None:
    run = ready(store)
    with run.batch(1, timeout=0) as batch:
        made = batch.arrays()
        for name, tensor in as_torch(made, None).items():
            assert np.shares_memory(tensor.numpy(), made[name]), name
        for name, tensor in as_torch(made, "cpu").items():
            assert np.shares_memory(tensor.numpy(), made[name]), name


def test_without_a_gpu_nothing_is_pinned(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = ready(store)
    with run.batch(1, timeout=0) as batch:
        with pytest.raises(InvalidSetting, match="pin_memory"):
            batch.tensors(pin_memory=True)
        with pytest.raises(InvalidSetting, match="device"):
            batch.tensors("cuda")
