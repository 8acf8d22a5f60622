"""append: what is stored is right, what is wrong is refused with the reason, and nothing changes then."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from samplestore import Store, codec
from samplestore.errors import InvalidSegment, InvalidSetting, LeaseLost, SequenceConflict, UnknownVersion
from samplestore.run import Run
from samplestore.types import Claim

from ..support import factory as f


@pytest.fixture
def run(store: Store) -> Run:
    return f.make_run(store, prompts=1, max_new_tokens=100)


@pytest.fixture
def claim(run: Run) -> Claim:
    return run.claim(f.register(run), 1)[0]


def test_a_segment_is_stored_bit_for_bit(run: Run, claim: Claim) -> None:
    tokens, probs = [0, 7, 2**31 - 1], np.array([-0.0, -1e-30, -87.5], np.float32)
    assert run.append(claim, tokens, probs, 0) == 3
    (row,) = f.segments(run, claim.sample_id)
    ids, stored = codec.decode(bytes(row["payload"]))
    assert ids.tolist() == tokens
    assert stored is not None and stored.tobytes() == probs.tobytes()
    assert (row["seq"], row["start"], row["n_tokens"], row["kind"], row["loss"]) == (0, 0, 3, "generated", 1)
    f.sound(run)


def test_the_sample_follows_its_segments(run: Run, claim: Claim) -> None:
    run.publish_weights(step=1)
    run.publish_weights(step=2)
    f.add(run, claim, 3, 1)
    f.add(run, claim, 2, 0, "abort")
    run.append(claim, [4, 5], None, None, kind="environment")
    f.add(run, claim, 4, (0, 2))
    row = f.sample(run, claim.sample_id)
    assert (row["n_tokens"], row["n_segments"], row["n_loss_tokens"], row["n_aborts"]) == (11, 4, 9, 1)
    assert (row["version_min"], row["version_max"], row["oldest_version"]) == (0, 2, 0)
    expected = 2 * sum(f.logprobs_of(3)) - f.logprobs_of(3)[2] + sum(f.logprobs_of(4))
    assert row["logprob_sum"] == pytest.approx(expected)
    assert [s["start"] for s in f.segments(run, claim.sample_id)] == [0, 3, 5, 7]
    assert (claim.seq, claim.n_tokens, claim.budget(100)) == (4, 11, 89)
    assert run.ledger()["generated"] == 9, "the environment's tokens were not generated"
    f.sound(run)


def test_environment_tokens_need_no_logprobs_and_have_no_version(run: Run, claim: Claim) -> None:
    run.append(claim, [1, 2], None, 0, kind="environment")
    (row,) = f.segments(run, claim.sample_id)
    assert (row["loss"], row["version_min"], bytes(row["payload"])[0]) == (0, None, codec.IDS_ONLY)


def test_generated_tokens_without_loss_may_lack_logprobs(run: Run, claim: Claim) -> None:
    run.append(claim, [1, 2], None, 0, loss=0)
    assert f.sample(run, claim.sample_id)["n_loss_tokens"] == 0
    assert f.sample(run, claim.sample_id)["oldest_version"] is None
    f.sound(run)


REFUSED: dict[str, tuple[Any, Any, str, int | None]] = {
    "nothing": ([], [], "no tokens", None),
    "no log-probs": ([1, 2], None, "output_token_logprobs is missing for 2 generated tokens", None),
    "too few log-probs": ([1, 2], [-0.1], "2 tokens but 1 log-prob", None),
    "too many log-probs": ([1], [-0.1, -0.2], "1 token but 2 log-probs", None),
    "null log-prob": ([5, 6, 7], [-0.1, None, -0.2], "log-prob at position 1 is None, not finite", 1),
    "NaN": ([5, 6], [-0.1, math.nan], "log-prob at position 1 is nan, not finite", 1),
    "NaN as text": ([5, 6], [-0.1, "NaN"], "log-prob at position 1 is 'NaN', not finite", 1),
    "minus infinity": ([5, 6], [-math.inf, -0.1], "position 0", 0),
    "beyond float32": ([5], [-1e39], "position 0", 0),
    "a boolean": ([5], [True], "position 0", 0),
    "log-probs that are a number": ([5], 0.5, "not a list", None),
    "objects in an array": ([5, 6], np.array([-0.1, None], dtype=object), "position 1", 1),
    "negative id": ([1, -1], [-0.1, -0.1], "-1 at position 1", 1),
    "id beyond int32": ([1, 2**31], [-0.1, -0.1], "at position 1", 1),
    "id beyond int64": ([2**70], [-0.1], "whole numbers", None),
    "fractions": ([1.5], [-0.1], "whole numbers", None),
    "text": ("ab", [-0.1, -0.1], "one dimension", None),
    "lists in lists": ([[1], [2]], [-0.1, -0.1], "one dimension", None),
    "ragged lists": ([1, [2]], [-0.1, -0.1], "flat list", None),
}


def test_what_breaks_a_promise_is_refused(run: Run, claim: Claim) -> None:
    f.add(run, claim, 2)
    before = f.snapshot(run)
    for name, (tokens, probs, said, position) in REFUSED.items():
        with pytest.raises(InvalidSegment) as caught:
            run.append(claim, tokens, probs, 0)
        assert said in str(caught.value), name
        assert caught.value.position == position, name
    assert f.snapshot(run) == before
    assert (claim.seq, claim.n_tokens) == (1, 2)
    f.add(run, claim, 2)
    f.sound(run)


@pytest.mark.parametrize("version", ["1", 1.0, True, (2, 1), 2**70, (0, 2**70), -(2**70)])
def test_versions_are_whole_numbers_in_order(run: Run, claim: Claim, version: Any) -> None:
    for step in (1, 2):
        run.publish_weights(step=step)
    with pytest.raises(InvalidSegment):
        f.add(run, claim, 1, version)


@pytest.mark.parametrize("version", [1, -1, (0, 1)])
def test_a_version_that_was_never_announced_is_refused(run: Run, claim: Claim, version: Any) -> None:
    before = f.snapshot(run)
    with pytest.raises(UnknownVersion, match="publish_weights"):
        f.add(run, claim, 1, version)
    assert f.snapshot(run) == before


def test_an_unknown_version_stays_unknown(run: Run, claim: Claim) -> None:
    f.add(run, claim, 2, 0)
    f.add(run, claim, 2, None, "stop")
    run.finish(claim)
    f.finish_all(run, claim.owner)
    group = f.group(run, claim.group_id)
    assert (group["state"], group["oldest_version"]) == ("ready", None)
    assert f.lease(run, f.register(run, "trainer"), 0, 1) is None
    assert "unknown_version" in {code for code, _ in run.why(1).reasons}
    f.sound(run)


def test_other_arguments_are_checked(run: Run, claim: Claim) -> None:
    with pytest.raises(InvalidSegment, match="loss"):
        f.add(run, claim, loss=2)
    with pytest.raises(InvalidSetting, match="thought"):
        f.add(run, claim, kind="thought")
    for name in ("rid", "engine"):
        for value in (2**70, ["x"], "\ud800", "a\0b", b"x", ""):
            with pytest.raises(InvalidSetting, match=name):
                f.add(run, claim, **{name: value})
    assert f.sample(run, claim.sample_id)["n_segments"] == 0


def test_a_finish_reason_of_untrusted_origin_is_kept_small(run: Run, claim: Claim) -> None:
    f.add(run, claim, 1, 0, "st\x00op" * 1000)
    assert len(f.sample(run, claim.sample_id)["finish_reason"]) <= 100


def test_a_repeated_append_is_the_same_append(run: Run, claim: Claim) -> None:
    f.add(run, claim, 3)
    f.add(run, claim, 2)
    before = f.snapshot(run)
    assert run.append(claim, f.ids_of(3), f.logprobs_of(3), 0, seq=0) == 3
    assert run.append(claim, f.ids_of(2), f.logprobs_of(2), 0, seq=1) == 2
    assert (claim.seq, claim.n_tokens) == (2, 5)
    assert f.snapshot(run) == before


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": f.ids_of(2)},
        {"logprobs": [-9.0, -9.0, -9.0]},
        {"version": None},
        {"finish_reason": "length"},
        {"kind": "environment"},
        {"loss": 0},
    ],
)
def test_other_content_under_a_stored_seq_is_a_conflict(run: Run, claim: Claim, other: dict[str, Any]) -> None:
    f.add(run, claim, 3)
    before = f.snapshot(run)
    call = {"tokens": f.ids_of(3), "logprobs": f.logprobs_of(3), "version": 0, **other}
    call["logprobs"] = call["logprobs"][: len(call["tokens"])]
    with pytest.raises(SequenceConflict, match="another segment"):
        run.append(claim, seq=0, **call)
    assert f.snapshot(run) == before


@pytest.mark.parametrize("seq", [2, 5])
def test_a_seq_with_a_gap_is_refused(run: Run, claim: Claim, seq: int) -> None:
    f.add(run, claim, 3)
    with pytest.raises(SequenceConflict, match="the next is 1"):
        f.add(run, claim, 3, seq=seq)
    f.sound(run)


def test_a_repetition_at_another_attempt_is_not_one(run: Run, claim: Claim) -> None:
    f.add(run, claim, 3)
    run.release(claim, "over")
    again = run.claim(claim.owner, 1)[0]
    with pytest.raises(SequenceConflict, match="the next is 1"):
        run.append(again, f.ids_of(3), f.logprobs_of(3), 0, seq=0)


def test_arrays_beside_a_segment(run: Run, claim: Claim) -> None:
    with pytest.raises(InvalidSegment, match="segment to stand beside"):
        run.attach(claim, "values", [0.5])
    f.add(run, claim, 2)
    experts = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    with pytest.raises(InvalidSegment, match="n_experts"):
        run.attach(claim, "routed_experts", experts)
    with pytest.raises(InvalidSegment, match="dtype"):
        run.attach(claim, "values", np.array(["a"]))
    run.attach(claim, "routed_experts", experts, n_experts=128)
    run.attach(claim, "routed_experts", experts, n_experts=128)
    (row,) = f.rows(run, "SELECT * FROM segment_array")
    shape = row["shape"] if isinstance(row["shape"], list) else json.loads(row["shape"])
    assert row["dtype"] == "uint8"
    assert np.array_equal(codec.decode_array(row["dtype"], shape, bytes(row["data"])), experts)


def test_nothing_is_stored_by_an_append_to_a_finished_sample(run: Run, claim: Claim) -> None:
    f.answer(run, claim)
    before = f.snapshot(run)
    with pytest.raises((SequenceConflict, LeaseLost)):
        f.add(run, claim)
    assert f.snapshot(run) == before


def test_finish_needs_tokens_and_a_known_status(run: Run, claim: Claim) -> None:
    with pytest.raises(InvalidSegment, match="without tokens"):
        run.finish(claim)
    f.add(run, claim)
    with pytest.raises(InvalidSetting):
        run.finish(claim, "failed")
