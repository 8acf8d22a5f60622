"""Small inputs distilled from public bug reports (tests/data/cases.json): each must end as its `expect` says, on both
databases. Every case is claimed in CLAIMED, so that a new one can't be forgotten."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplestore import Store, codec
from samplestore.advantages import advantages
from samplestore.errors import InvalidSegment, LeaseLost

from ..support import factory as f

CASES: dict[str, dict[str, Any]] = {
    c["id"]: c for c in json.loads((Path(__file__).parents[1] / "data" / "cases.json").read_text())["cases"]
}

CLAIMED = {
    # case: where it is tested
    "mixed-versions": "here",
    "surplus-kept": "here",
    "uneven-groups": "here",
    "null-logprob": "here",
    "nan-logprob": "here",
    "routed-experts-width": "here",
    "routed-experts-rows": "here",
    "retry-clears-fields": "here",
    "one-aborted-of-eight": "here",
    "poison": "here",
    "straggler": "here",
    "resume-budget": "here",
    "network-file-system": "tests/contract/test_filesystem.py",
    "resume-budget-exhausted": "worker",
    "abort-while-queued": "worker",
    "tokens-without-logprobs": "worker",
    "utf8-boundary": "tokenizer",
    "publish-does-not-abort": "worker",
}


def test_every_case_is_claimed_by_somebody() -> None:
    assert set(CASES) == set(CLAIMED)
    here = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert {case for case, where in CLAIMED.items() if where == "here"} <= here


def expect(case: str) -> Any:
    return CASES[case]["expect"]


def given(case: str) -> Any:
    return CASES[case]["given"]


def test_resume_budget(store: Store) -> None:
    told = given("resume-budget")
    run = f.make_run(store, prompts=1, max_new_tokens=told["max_new_tokens"])
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    for segment in told["segments"]:
        f.add(run, claim, segment["n_tokens"], 0, segment["finish_reason"])
    run.release(claim, "abort")
    again = run.claim(worker, 1)[0]
    assert again.budget(run.settings.max_new_tokens) == expect("resume-budget")["next_request_max_new_tokens"]


def test_mixed_versions(store: Store) -> None:
    case, wanted = given("mixed-versions"), expect("mixed-versions")
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_staleness=10, groups_per_step=1)
    worker, trainer = f.register(run), f.register(run, "trainer")
    (claim,) = run.claim(worker, 1)
    for segment in case["segments"]:
        while run.current_version < segment["weight_version"]:
            run.publish_weights(step=run.current_version)
        f.add(run, claim, segment["n_tokens"], segment["weight_version"])
    run.finish(claim)
    assert run.current_version == case["current_version"]
    from samplestore.statements import staleness

    with run.database.reading() as connection:
        for mode in staleness.MODES:
            row = connection.execute(staleness.sample_staleness(run.id, mode)).one()
            assert row.staleness == pytest.approx(wanted[f"staleness_{mode}"]), mode
    before = f.snapshot(run)
    assert f.lease(run, trainer, 0, 1, max_staleness=2, stale="skip") is None
    for mode, window in (("newest", 0), ("mean", 1)):  # what another measure lets in is let in
        batch = f.lease(run, trainer, 0, 1, max_staleness=window, staleness=mode, stale="skip")
        assert batch is not None
        f.release(run, batch, trainer)
    with run.batch(step=0, groups=1, max_staleness=2, stale="mask", timeout=0) as leased:
        assert leased.samples[0].loss_mask.tolist() == wanted["max_staleness=2 stale=mask"]["loss_mask"]
    after = f.snapshot(run)
    assert after["segment"] == before["segment"] and after["sample"] == before["sample"], "nothing stored changes"
    f.sound(run)


def test_surplus_kept(store: Store) -> None:
    told, wanted = given("surplus-kept"), expect("surplus-kept")
    n = told["ready_groups"]
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=n, max_staleness=0, epochs=None)
    assert len(f.states(run)) == n
    # 1,536 answers of one token, as the verbs would have left them; the checks at the end would see a slip
    payload = codec.encode_many([(codec.as_ids([5]), codec.as_logprobs([-0.5], 1, required=True))], [[-0.5]])[0][0]
    f.execute(
        run,
        "INSERT INTO segment (sample_id, incarnation, seq, start, n_tokens, kind, loss, version_min, version_max, "
        "owner, attempt, logprob_sum, created_at, payload) "
        "SELECT id, 0, 0, 0, 1, 'generated', 1, 0, 0, 1, 1, -0.5, 0, :p FROM sample",
        p=payload,
    )
    f.execute(
        run,
        "UPDATE sample SET status = 'completed', n_tokens = 1, n_segments = 1, n_loss_tokens = 1, version_min = 0, "
        "version_max = 0, oldest_version = 0, logprob_sum = -0.5",
    )
    f.execute(
        run, "UPDATE sample_group SET state = 'ready', n_open = 0, n_tokens = 1, oldest_version = 0, ready_at = 0"
    )
    f.execute(run, "INSERT INTO ledger_total VALUES (:r, 0, 'ready', '', 0, :n)", r=run.id, n=n)
    with run.batch(step=0, groups=told["batch_groups"], timeout=0) as batch:
        assert len(batch.groups) == wanted["delivered"]
    assert f.states(run).count("ready") == wanted["ready_after"]
    f.sound(run)


def test_uneven_groups(store: Store) -> None:
    rewards = given("uneven-groups")["rewards_by_group"]
    run = f.make_run(
        store,
        prompts=3,
        samples_per_prompt=4,
        groups_per_step=3,
        max_staleness=0,
        stages=["reward"],
        on_failed="short",
        max_attempts=1,
    )
    worker = f.register(run)
    for claim in run.claim(worker, 12):
        if claim.index < len(rewards[claim.group_number]):
            f.answer(run, claim)
        else:
            run.fail(claim, "broken")
    for stage in run.claim_stages(worker, 12):
        run.score(stage, rewards[stage.group_number][stage.index])
    with run.batch(step=0, groups=3, timeout=0) as batch:
        assert [[s.reward for s in g.samples] for g in batch.groups] == rewards
        told = batch.arrays()["advantages"]
        assert told[4:7].tolist() == expect("uneven-groups")["advantage_of_group_2"]
        alone = [advantages(r, [0] * len(r)) for r in rewards]
        assert np.allclose(told, np.concatenate(alone)), "each group by itself"
    f.sound(run)


def refused(store: Store, case: str) -> None:
    triples = given(case)["output_token_logprobs"]
    probs = [math.nan if p == "NaN" else p for p, _, _ in triples]
    run = f.make_run(store, prompts=1)
    claim = run.claim(f.register(run), 1)[0]
    with pytest.raises(InvalidSegment) as caught:
        run.append(claim, [token for _, token, _ in triples], probs, 0)
    assert expect(case)["error"] == f"refused with a reason naming position {caught.value.position}"
    assert f"position {caught.value.position}" in str(caught.value)
    assert len(f.segments(run, claim.sample_id)) == expect(case)["segments_added"]


def test_null_logprob(store: Store) -> None:
    refused(store, "null-logprob")


def test_nan_logprob(store: Store) -> None:
    refused(store, "nan-logprob")


def test_routed_experts_width(store: Store) -> None:
    run = f.make_run(store, prompts=1)
    claim = run.claim(f.register(run), 1)[0]
    f.add(run, claim, 3)
    for n, dtype in zip(
        given("routed-experts-width")["n_experts"], expect("routed-experts-width")["stored_dtype"], strict=True
    ):
        experts = np.linspace(0, n - 1, 5 * 2 * 3).astype(np.int64).reshape(5, 2, 3)
        run.attach(claim, "routed_experts", experts, n_experts=n)
        (row,) = f.rows(run, "SELECT dtype, shape, data FROM segment_array")
        shape = row["shape"] if isinstance(row["shape"], list) else json.loads(row["shape"])
        assert row["dtype"] == dtype
        assert np.array_equal(codec.decode_array(row["dtype"], shape, bytes(row["data"])), experts), (
            "round trip is exact"
        )


def test_routed_experts_rows(store: Store) -> None:
    told = given("routed-experts-rows")
    run = store.run("r", samples_per_prompt=1, groups_per_step=1, max_staleness=0)
    run.add_prompts([{"prompt_ids": list(range(told["prompt_tokens"]))}])
    run.admit()
    claim = run.claim(f.register(run), 1)[0]
    f.add(run, claim, told["response_tokens"])
    shape = (told["layers"], told["topk"])
    for wrong in (told["response_tokens"], 12, 0):
        with pytest.raises(InvalidSegment, match=rf"\b{wrong}\b.*\b{expect('routed-experts-rows')['rows']}\b"):
            run.attach(claim, "routed_experts", np.zeros((wrong, *shape), np.int32), n_experts=8)
    run.attach(
        claim, "routed_experts", np.zeros((expect("routed-experts-rows")["rows"], *shape), np.int32), n_experts=8
    )


def test_retry_clears_fields(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_attempts=2, stages=["reward", "teacher"])
    worker = f.register(run)
    claim = run.claim(worker, 1)[0]
    f.add(run, claim, 7, 0, "stop")
    run.attach(claim, "teacher_logprobs", np.zeros(7, np.float32))
    run.finish(claim)
    reward, teacher = run.claim_stages(worker, 2)
    run.score(reward, 1.0)
    run.fail_stage(teacher, "no", backoff_s=0.0)
    run.fail_stage(run.claim_stages(worker, 1)[0], "no", backoff_s=0.0)
    assert f.sample(run, claim.sample_id)["status"] == "failed"
    run.requeue([claim.sample_id], "fresh attempt")
    again = run.claim(worker, 1)[0]
    assert (again.n_tokens, again.seq, again.response_ids.size, again.finish_reason, again.failures) == (
        0,
        0,
        0,
        None,
        0,
    )
    row = f.sample(run, claim.sample_id)
    kept = [
        k
        for k in ("reward", "error", "version_min", "version_max", "oldest_version", "finished_at", "finish_reason")
        if row[k] is not None
    ]
    assert kept == [], "nothing generated is carried over"
    assert f.fates(run) == {expect("retry-clears-fields")["old_tokens_fate"]: 7}
    f.answer(run, again, 4)
    for stage in run.claim_stages(worker, 9):
        run.score(stage, 0.25)
    assert f.sample(run, claim.sample_id)["reward"] == 0.5
    with run.batch(step=0, groups=1, timeout=0) as batch:
        assert batch.samples[0].response_ids.tolist() == f.ids_of(4)
    assert run.ledger(exact=True)["closed"] is expect("retry-clears-fields")["ledger_closes"]
    f.sound(run)


def test_one_aborted_of_eight(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=8)
    worker = f.register(run)
    claims = run.claim(worker, 8)
    for claim in claims[:7]:
        f.answer(run, claim, 20)
    f.add(run, claims[7], 30, 0, "abort")
    run.release(claims[7], "abort")
    (only,) = run.claim(worker, 100)
    assert (only.sample_id, only.n_tokens) == (claims[7].sample_id, 30)
    f.answer(run, only, 10)
    assert run.ledger()["generated"] == 7 * 20 + 40, (
        f"{expect('one-aborted-of-eight')['regenerated_tokens']} tokens twice"
    )
    assert f.states(run) == ["ready"]
    f.sound(run)


@pytest.mark.parametrize("short", [False, True])
def test_poison(store: Store, short: bool) -> None:
    n = given("poison")["max_attempts"]
    run = f.make_run(store, prompts=1, max_attempts=n, stages=["reward"], on_failed="short" if short else "drop")
    worker = f.register(run)
    poison, good = run.claim(worker, 2)
    f.answer(run, poison), f.answer(run, good)
    for attempt in range(n):
        for stage in run.claim_stages(worker, 9):
            if stage.sample_id == poison.sample_id:
                assert f.sample(run, poison.sample_id)["status"] == "completed", attempt
                run.fail_stage(stage, "ZeroDivisionError in reward()", backoff_s=0.0)
            else:
                run.score(stage, 1.0)
    row = f.sample(run, poison.sample_id)
    assert (row["status"], row["error"], row["reward"]) == ("failed", "ZeroDivisionError in reward()", None)
    assert f.states(run) == ["ready" if short else "dropped"]
    assert short or f.group(run, poison.group_id)["reason"] == "sample failed"
    assert run.claim_stages(worker, 9) == []
    f.sound(run)


@pytest.mark.parametrize(("policy", "ends"), [("wait", "open"), ("drop", "dropped"), ("short", "ready")])
def test_straggler(store: Store, policy: str, ends: str) -> None:
    run = f.make_run(
        store,
        prompts=1,
        samples_per_prompt=8,
        group_deadline_s=given("straggler")["group_deadline_s"],
        on_straggler=policy,
    )
    *done, slow = run.claim(f.register(run), 8)
    for claim in done:
        f.answer(run, claim)
    f.add(run, slow, 5)
    f.execute(run, "UPDATE sample_group SET created_at = created_at - 2")
    run.reap()
    assert f.states(run) == [ends]
    assert len(f.events(run, "straggler")) == 1, "never stuck silently"
    if policy != "wait":
        with pytest.raises(LeaseLost):
            f.add(run, slow)
    f.sound(run)
