"""mask_offpolicy: tokens from before a resume under other weights carry no loss. Derived when read, never written."""

from __future__ import annotations

from typing import Any

from samplestore import Store
from samplestore.batch import Batch
from samplestore.run import Run
from samplestore.types import Claim

from ..support import factory as f


def made(store: Store, **settings: Any) -> tuple[Run, int, Claim]:
    """A run with one sample, which a worker holds; versions 0, 1 and 2 are known."""
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=5, **settings)
    worker = f.register(run)
    [claim] = run.claim(worker, 9)
    return run, worker, claim


def resumed(run: Run, claim: Claim, worker: int) -> Claim:
    run.release(claim, "step over")
    [again] = run.claim(worker, 9)
    return again


def read(run: Run, step: int = 0, **options: Any) -> Batch:
    return run.batch(step, **options)


def mask(batch: Batch) -> list[int]:
    [sample] = batch.samples
    return [int(m) for m in sample.loss_mask]


def test_tokens_from_before_the_resume_are_masked_and_keep_their_versions(store: Store) -> None:
    run, worker, claim = made(store)
    f.add(run, claim, 2, 0)
    run.publish_weights()
    claim = resumed(run, claim, worker)
    f.answer(run, claim, 3, 1)
    with read(run, mask_offpolicy=True) as batch:
        [sample] = batch.samples
        assert mask(batch) == [0, 0, 1, 1, 1]
        assert sample.versions.tolist() == [0, 0, 1, 1, 1]
        assert [float(p) for p in sample.logprobs] == f.logprobs_of(2) + f.logprobs_of(3)
    assert mask(run.replay(0)) == [0, 0, 1, 1, 1], "a batch that is read again is the same"
    assert [s["loss"] for s in f.segments(run, claim.sample_id)] == [1, 1], "nothing was written"
    f.sound(run)


def test_off_unless_the_run_or_the_batch_says_so(store: Store) -> None:
    run, worker, claim = made(store, mask_offpolicy=True)
    f.add(run, claim, 2, 0)
    run.publish_weights()
    claim = resumed(run, claim, worker)
    f.answer(run, claim, 1, 1)
    first = read(run, mask_offpolicy=False)
    assert mask(first) == [1, 1, 1]
    first.release("again")
    assert mask(read(run)) == [0, 0, 1]


def test_a_resume_under_the_same_weights_masks_nothing(store: Store) -> None:
    """A worker that died, an engine that was lost: the tokens are those of the policy of now."""
    run, worker, claim = made(store, mask_offpolicy=True)
    f.add(run, claim, 2, 0, rid="a" * 32)
    claim = resumed(run, claim, worker)
    f.answer(run, claim, 2, 0)
    assert mask(read(run)) == [1, 1, 1, 1]


def test_the_last_change_counts(store: Store) -> None:
    """0, then 1, then 1 again: what was made under 1 is kept, with both of its requests."""
    run, worker, claim = made(store, mask_offpolicy=True)
    f.add(run, claim, 2, 0)
    run.publish_weights()
    for n in (1, 2):
        claim = resumed(run, claim, worker)
        f.add(run, claim, n, 1)
    run.finish(claim)
    assert mask(read(run)) == [0, 0, 1, 1, 1]


def test_weights_that_change_under_a_running_request_are_no_resume(store: Store) -> None:
    run, _, claim = made(store, mask_offpolicy=True, weight_update="keep")
    run.publish_weights()
    rid = "b" * 32
    run.begin_request(claim, rid)
    f.add(run, claim, 2, 0, rid=rid)
    f.add(run, claim, 1, (0, 1), rid=rid)
    f.add(run, claim, 2, 1, rid=rid)
    run.finish(claim)
    assert mask(read(run)) == [1] * 5


def test_tool_output_stays_as_it_is(store: Store) -> None:
    run, worker, claim = made(store, mask_offpolicy=True)
    f.add(run, claim, 2, 0)
    run.append(claim, [7, 8], None, None, kind="environment")
    run.publish_weights()
    claim = resumed(run, claim, worker)
    f.answer(run, claim, 1, 1)
    assert mask(read(run)) == [0, 0, 0, 0, 1]
