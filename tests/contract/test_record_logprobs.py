"""A trainer's log-probs come back to their tokens, and tell how far trainer and engines are apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplestore import Store
from samplestore.batch import Batch
from samplestore.errors import ArrayNotStored, BatchReleased, InvalidSegment, NotInRun, SampleStoreError
from samplestore.run import Run

from ..support import factory as f
from .test_ranks import forked

NAME = "trainer_log_probs"
LN2 = math.log(2)


def leased(store: Store, n: int = 12) -> tuple[Run, Batch]:
    """Two groups of two samples of n tokens, leased for step 1; samples of the second were resumed under version 1."""
    run = f.make_run(store, prompts=2, max_staleness=3)
    worker = f.register(run)
    claims = run.claim(worker, 100)
    run.publish_weights(step=0)
    for number, claim in enumerate(claims):
        f.add(run, claim, n - 4, 0, "abort")
        if number >= 2:
            run.append(claim, [7, 8], None, None, kind="environment")
        f.add(run, claim, 4, 1, "stop")
        run.finish(claim)
    return run, run.batch(1, 2, timeout=0)


def shifted(values: Any, by: int) -> Any:
    return np.roll(values, by)


def test_packed_padded_and_lists_are_one(store: Store) -> None:
    run, batch = leased(store)
    packed = batch.arrays()["rollout_log_probs"] - 0.5
    padded = batch.arrays(layout="padded")["rollout_log_probs"] - 0.5
    lists = [sample.logprobs - 0.5 for sample in batch.samples]
    told = [batch.record_logprobs(each) for each in (packed, padded, lists, [v.tolist() for v in lists])]
    assert all(each == told[0] for each in told[1:])
    for sample in batch.samples:
        rows, present = run.array(sample.sample_id, NAME)
        assert rows.dtype == np.float32 and present.all()
        assert rows.tobytes() == (sample.logprobs - np.float32(0.5)).tobytes()
    made = batch.arrays(named=[NAME])
    assert made[NAME].shape == made["tokens"].shape
    trained = made["loss_mask"] > 0
    assert (made[NAME][trained] == (made["rollout_log_probs"] - np.float32(0.5))[trained]).all()
    batch.commit()
    assert run.mismatch() == run.mismatch(1) == run.replay(1).mismatch() == told[0]
    f.sound(run)


def test_mismatch_by_hand(store: Store) -> None:
    """Half as likely in the first sample, twice in the second, the same in the others."""
    run, batch = leased(store)
    values = [sample.logprobs.copy() for sample in batch.samples]
    values[0] -= np.float32(LN2)
    values[1] += np.float32(LN2)
    told = batch.record_logprobs(values)
    assert told.n_tokens == 4 * 12
    assert told.kl_k1 == pytest.approx(0, abs=1e-6) and told.abs_diff == pytest.approx(LN2 / 2, rel=1e-5)
    # r = 1/2: -1/2 + ln 2; r = 2: 1 - ln 2; a quarter of the tokens each
    assert told.kl_k3 == pytest.approx(0.5 / 4, rel=1e-5)
    assert told.ratio[1] == pytest.approx(0.5, rel=1e-5) and told.ratio[99] == pytest.approx(2, rel=1e-5)
    assert told.ratio[50] == pytest.approx(1)
    first = told.samples[0]
    assert (first.n_tokens, first.sample_id) == (12, batch.samples[0].sample_id)
    assert first.kl_k1 == pytest.approx(LN2, rel=1e-5) and first.log_ratio == pytest.approx([-LN2] * 12, rel=1e-5)
    # the last four tokens of each are of the version that was current at the lease
    assert {lag: distance.n_tokens for lag, distance in told.by_lag.items()} == {0: 16, 1: 32}
    assert told.by_lag[1].abs_diff == pytest.approx(LN2 / 2, rel=1e-5)
    third = told.samples[2]
    assert np.isnan(third.log_ratio[8:10]).all() and third.log_ratio.size == 14, "tools have no log-prob"
    assert told.best_lag == 0 and not told.shifted and told.lags[0] == pytest.approx(told.abs_diff)
    assert run.mismatch(1) == told


def test_a_shift_is_noticed(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    _, batch = leased(store, 24)
    for by in (-2, -1, 1, 2):
        caplog.clear()
        told = batch.record_logprobs(shifted(batch.arrays()["rollout_log_probs"], by))
        assert (told.best_lag, told.shifted) == (by, True)
        assert told.lags[by] < 0.1 < told.lags[0]
        side = "after" if by > 0 else "before"
        assert f"{abs(by)} place{'s' * (abs(by) > 1)} {side} their tokens" in caplog.text


def test_too_few_tokens_tell_of_no_shift(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    run = f.make_run(store, prompts=1, groups_per_step=1)
    f.finish_all(run, f.register(run), 4)
    with run.batch(1, timeout=0) as batch:
        told = batch.record_logprobs(shifted(batch.arrays()["rollout_log_probs"], 1))
        assert (told.best_lag, told.lags, told.shifted, told.warning) == (0, {}, False, "")
    assert caplog.text == ""


def test_the_last_call_counts_until_the_commit(store: Store) -> None:
    run, batch = leased(store)
    values = batch.arrays()["rollout_log_probs"]
    batch.record_logprobs(values - 1)
    batch.record_logprobs(values)
    assert run.mismatch().abs_diff == 0
    assert f.value(run, "SELECT count(*) FROM segment_array") == 4
    one = batch.samples[1:2]
    batch.record_logprobs([one[0].logprobs - 1], samples=one)
    assert [s.abs_diff for s in run.mismatch().samples] == pytest.approx([0, 1, 0, 0])
    before = f.snapshot(run)
    batch.commit()
    with pytest.raises(SampleStoreError, match="committed"):
        batch.record_logprobs(values)
    assert f.snapshot(run)["segment_array"] == before["segment_array"]


def test_a_lost_lease_records_nothing(store: Store) -> None:
    run, batch = leased(store)
    values = batch.arrays()["rollout_log_probs"]
    batch.release("end")
    with pytest.raises(BatchReleased):
        batch.record_logprobs(values)
    assert f.value(run, "SELECT count(*) FROM segment_array") == 0
    with pytest.raises(SampleStoreError, match="no batch with recorded log-probs"):
        run.mismatch()


def test_what_does_not_fit_is_refused_whole(store: Store) -> None:
    run, batch = leased(store)
    good = batch.arrays()["rollout_log_probs"]
    lists = [sample.logprobs for sample in batch.samples]
    for bad, match in (
        (good[:-1], r"expected \[64\] \(packed\) or \[4, 17\] \(padded\)"),
        (good[None], "expected"),
        (lists[:-1], "3 rows for 4 samples"),
        ([*lists[:-1], lists[-1][1:]], r"shape \[13\] for sample \d+, expected \[14\]"),
        (["x"] * 4, "no array of numbers"),
        ([*lists[:-1], np.full(14, np.nan)], "response token 0 of sample .* trained"),
        ([*lists[:-1], np.full(14, -np.inf)], "trained"),
    ):
        with pytest.raises(InvalidSegment, match=match):
            batch.record_logprobs(bad)
    other = f.make_run(store, "other", prompts=1, groups_per_step=1)
    f.finish_all(other, f.register(other))
    strangers = other.batch(1, timeout=0).samples
    with pytest.raises(NotInRun):
        batch.record_logprobs([s.logprobs for s in strangers], samples=strangers)
    assert f.value(run, "SELECT count(*) FROM segment_array") == 0
    with pytest.raises(ArrayNotStored):
        run.mismatch(1)


def test_what_is_not_trained_may_be_missing(store: Store) -> None:
    """Prompts and padding are passed over; so is what a mask leaves out."""
    run, batch = leased(store)
    made = batch.arrays()
    values = np.where(made["loss_mask"] > 0, made["rollout_log_probs"], np.nan)
    assert batch.record_logprobs(values).abs_diff == 0
    rows, present = run.array(batch.samples[2].sample_id, NAME)
    assert present.all() and np.flatnonzero(np.isnan(rows)).tolist() == [8, 9]
    f.sound(run)


def test_each_rank_records_its_own_and_forks_their_own_tokens(store: Store) -> None:
    run, claims = forked(store)
    read = [run.batch(0, 1, rank=rank, world=2, timeout=0) for rank in range(2)]
    for batch in read:
        batch.record_logprobs(batch.arrays()["rollout_log_probs"] - 0.25)
    assert run.mismatch().abs_diff == pytest.approx(0.25) and run.mismatch().n_tokens == 5 + 2 + 1 + 3
    root, _, branch, agent = (claim.sample_id for claim in claims)
    assert [int(run.array(id, NAME)[1].sum()) for id in (root, branch, agent)] == [5, 2, 1]
    shared = next(s for s in run.mismatch().samples if s.sample_id == branch)
    assert np.isnan(shared.log_ratio).tolist() == [True] * 3 + [False] * 2
    read[0].commit()
    f.sound(run)


def test_large_ones_are_files(store: Store, tmp_path: Path) -> None:
    run = f.make_run(
        store, prompts=1, groups_per_step=1, array_url=str(tmp_path / "arrays"), array_file_bytes=4 * 20
    )  # fmt: skip
    for n, claim in zip((19, 20), run.claim(f.register(run), 2), strict=True):
        f.answer(run, claim, n)
    with run.batch(1, timeout=0) as batch:
        told = batch.record_logprobs(batch.arrays()["rollout_log_probs"] - 1)
    files = [row["sidecar"] for row in f.rows(run, "SELECT sidecar FROM segment_array ORDER BY sample_id")]
    assert files[0] is None and files[1] is not None
    assert run.mismatch() == told and told.abs_diff == pytest.approx(1)
    f.sound(run)


def test_a_part_without_a_named_array_gets_an_empty_one(store: Store) -> None:
    """Else the micro-batches of a step had different tensors."""
    _, batch = leased(store)
    batch.record_logprobs([batch.samples[0].logprobs], samples=batch.samples[:1])
    for layout in ("packed", "padded"):
        one, other = (batch.arrays(layout=layout, named=[NAME], samples=[s]) for s in batch.samples[:2])
        assert one[f"{NAME}_present"].sum() == 12 and other[f"{NAME}_present"].sum() == 0
        assert other[NAME].shape == other["tokens"].shape and other[NAME].dtype == one[NAME].dtype == np.float32
        assert batch.arrays(layout=layout, named=[NAME], samples=[])[NAME].size == 0
    with pytest.raises(ArrayNotStored, match="trainer_log_probs"):
        batch.arrays(named=["values"], samples=batch.samples[1:])
