"""Episodes' records and forks in the store: fenced, repeatable, counted, read back by reference."""

from __future__ import annotations

import numpy as np
import pytest

from samplestore import Store, migrations
from samplestore.advantages import advantages
from samplestore.errors import DowngradeRefused, InvalidSetting, LeaseLost, SequenceConflict
from samplestore.queries import episodes as queries
from samplestore.run import advance
from samplestore.verbs import episodes, fanout

from ..support import factory as f
from .forking import PROMPT, end, fork, opened


def test_a_record_is_fenced_and_repeatable(store: Store) -> None:
    run, claim = opened(store)
    for _ in range(2):
        run.transact(lambda tx: episodes.begin(tx, claim, 0, "step", "tool", "key", {"args": [1]}, 5))
    for _ in range(2):
        run.transact(lambda tx: episodes.settle(tx, claim, 0, {"value": None}, None, 5))
    for _ in range(2):
        run.transact(lambda tx: episodes.note(tx, claim, 1, "append", "", "key1", None, {"cut": 0}, 5, 5))
    with pytest.raises(SequenceConflict):
        run.transact(lambda tx: episodes.settle(tx, claim, 7, {}))
    told = run.database.read(lambda c: queries.record(c, claim.sample_id, 0)).calls
    assert [(c.number, c.kind, c.state, c.asked, c.result, c.stop) for c in told] == [
        (0, "step", "done", {"args": [1]}, {"value": None}, 5), (1, "append", "done", None, {"cut": 0}, 5),
    ]  # fmt: skip
    run.requeue([claim.sample_id], "again")
    before = f.snapshot(run)
    for write in (
        lambda tx: episodes.begin(tx, claim, 2, "step", "tool", "key", None, 5),
        lambda tx: episodes.settle(tx, claim, 0, {}),
        lambda tx: episodes.note(tx, claim, 2, "append", "", "key", None, {}, 5, 5),
        lambda tx: fanout.fork(tx, claim, 2, "key", None, 0, 0, None),
    ):
        with pytest.raises(LeaseLost):
            run.transact(write)
    assert f.snapshot(run) == before
    assert run.database.read(lambda c: queries.record(c, claim.sample_id, 1)).calls == []


@pytest.mark.parametrize("stages", [(), ("reward",), ("format", "reward")])
def test_a_reward_of_the_episode(store: Store, stages: tuple[str, ...]) -> None:
    run, claim = opened(store, stages=stages)
    for _ in range(2):
        run.transact(lambda tx: episodes.finish(tx, claim, "completed", "stop", False, 0.75))
    if "format" in stages:
        (other,) = run.claim_stages(claim.owner, 10)
        assert other.name == "format"
        run.score(other, 0.0)
    assert f.sample(run, claim.sample_id)["reward"] == 0.75
    assert f.group(run, claim.group_id)["state"] == "ready" and f.group(run, claim.group_id)["reward_mean"] == 0.75
    f.sound(run)


@pytest.mark.parametrize("stages", [(), ("reward",)])
def test_no_reward_can_be_told(store: Store, stages: tuple[str, ...]) -> None:
    """Left out of what shapes the others' advantages; never a 0."""
    run, claim = opened(store, stages=stages)
    judge = fork(run, claim, 0, 0, prompt=PROMPT)
    f.add(run, judge, 2)
    end(run, judge, float("nan"))
    end(run, claim, 1.0)
    assert f.sample(run, judge.sample_id)["reward"] is None
    with run.batch(step=0, groups=1) as batch:
        made = batch.arrays()
        assert made["rewards"][0] == 1.0 and np.isnan([made["rewards"][1], made["advantages"][1]]).all()
        assert batch.samples[1].loss_mask.sum() == 0
    with pytest.raises(InvalidSetting):
        run.transact(lambda tx: episodes.finish(tx, claim, "completed", "stop", False, float("inf")))
    f.sound(run)


def test_forks_share_group_and_prefix(store: Store) -> None:
    """One branches off after three tokens, one has a prompt of its own. No token is stored twice."""
    run, root = opened(store)
    branch = fork(run, root, 0, 0, upto=3)
    assert branch.prompt_ids.tolist() == [1, 2, 0, *f.ids_of(3)] and branch.n_tokens == 0
    agent = fork(run, root, 1, 1, prompt=PROMPT)
    assert (agent.prompt_ids.size, agent.seq, agent.n_tokens) == (0, 1, 4)
    group = f.group(run, root.group_id)
    assert (group["n_samples"], group["n_open"], group["state"]) == (3, 3, "open")
    assert run.claim(root.owner, 10) == [], "forks are their parent's"
    run.append(branch, [30, 31], [-1.0, -2.0], 0, "stop")
    run.append(agent, [35], [-3.0], 0, "stop")
    for claim, reward in ((branch, 1.0), (agent, 0.0), (root, 0.5)):
        for _ in range(2):
            end(run, claim, reward)
    f.sound(run)
    group = f.group(run, root.group_id)
    assert (group["state"], group["n_tokens"]) == ("ready", 5 + 2 + 5)
    with run.batch(step=0, groups=1) as batch:
        one, two, three = batch.samples
        assert [s.rollout_id for s in batch.samples] == [root.sample_id] * 3
        assert one.response_ids.tolist() == f.ids_of(5) and one.loss_mask.tolist() == [1] * 5
        assert two.prompt_ids.tolist() == [1, 2, 0] and two.response_ids.tolist() == [*f.ids_of(3), 30, 31]
        assert two.loss_mask.tolist() == [0, 0, 0, 1, 1]
        assert two.logprobs.tolist() == [*f.logprobs_of(3), -1.0, -2.0] and two.versions.tolist() == [0] * 5
        assert three.prompt_ids.tolist() == PROMPT.tolist() and three.response_ids.tolist() == [35]
        made = batch.arrays()
        assert made["rollout_ids"].tolist() == [root.sample_id] * 3
        assert made["rollout_mask_sums"].tolist() == [8.0] * 3
        assert made["prompt_lengths"].tolist() == [3, 3, 4] and made["response_lengths"].tolist() == [5, 5, 1]
    f.sound(run)


@pytest.mark.parametrize("upto", [0, 3])
def test_a_fork_of_a_sample_that_failed(store: Store, upto: int) -> None:
    """No batch delivers its parent. One that shares no token of it needs none."""
    run, root = opened(store, on_failed="short", max_attempts=1)
    branch = fork(run, root, 0, 0, upto=upto)
    run.append(branch, [30, 31], [-1.0, -2.0], 0, "stop")
    end(run, branch)
    assert run.fail(root, "it fails") == "failed"
    with run.batch(step=0, groups=1) as batch:
        (one,) = batch.samples
        assert one.response_ids.tolist() == [*f.ids_of(upto), 30, 31]
        assert one.loss_mask.tolist() == [0] * upto + [1, 1]
    f.sound(run)


def test_what_scores_a_fork_sees_what_it_was_given(store: Store) -> None:
    """And its named arrays stand at its own tokens."""
    run, root = opened(store, stages=("reward",))
    branch, agent = fork(run, root, 0, 0, upto=3), fork(run, root, 1, 1, prompt=PROMPT)
    for claim in (branch, agent, root):
        f.add(run, claim, 2, finish_reason="stop")
        run.attach(claim, "values", np.ones(2, np.float32))
        end(run, claim)
    before = {root.sample_id: [1, 2, 0], branch.sample_id: [1, 2, 0, *f.ids_of(3)], agent.sample_id: PROMPT.tolist()}
    for stage in run.claim_stages(root.owner, 10):
        assert stage.prompt_ids.tolist() == before[stage.sample_id]
        assert stage.response_ids.tolist() == (f.ids_of(5) if stage.sample_id == root.sample_id else []) + f.ids_of(2)
        run.score(stage, 1.0)
    with run.batch(step=0, groups=1) as batch:
        made = batch.arrays(named=["values"])
        ends = made["cu_seqlens"][1:]
        assert [made["values"][end - 2 : end].tolist() for end in ends] == [[1.0, 1.0]] * 3
        assert made["values_present"].sum() == 6
    f.sound(run)


def test_a_fork_is_made_once(store: Store) -> None:
    run, root = opened(store)
    first, again = fork(run, root, 0, 0, prompt=PROMPT), fork(run, root, 0, 0, prompt=PROMPT)
    assert first.sample_id == again.sample_id and again.attempt > first.attempt
    assert again.response_ids.tolist() == PROMPT.tolist() and again.seq == 1
    with pytest.raises(LeaseLost):
        f.add(run, first, 2)
    for wrong in ({"upto": 6}, {"upto": 1, "prompt": PROMPT}, {}):
        with pytest.raises(InvalidSetting):
            fork(run, root, 1, 1, **wrong)
    with pytest.raises(InvalidSetting):
        fork(run, again, 0, 0, upto=0)
    assert f.group(run, root.group_id)["n_samples"] == 2
    f.sound(run)


def test_forks_go_to_the_next_owner_with_their_parent(store: Store) -> None:
    run, root = opened(store)
    child = fork(run, root, 0, 0, upto=5)
    f.add(run, child, 2)
    f.kill(run, root.owner)
    (after,) = run.claim(f.register(run), 10)
    taken = run.transact(lambda tx: fanout.take(tx, after, child.sample_id))
    assert (after.sample_id, taken.owner, taken.n_tokens, taken.seq) == (root.sample_id, after.owner, 2, 1)
    assert taken.prompt_ids.tolist() == [1, 2, 0, *f.ids_of(5)]
    with pytest.raises(LeaseLost):
        run.transact(lambda tx: fanout.take(tx, root, child.sample_id))
    f.add(run, taken, 1, finish_reason="stop")
    end(run, taken)
    end(run, after)
    assert f.group(run, root.group_id)["state"] == "ready"
    f.sound(run)


@pytest.mark.parametrize("whom", ["root", "fork"])
def test_a_new_life_forks_anew(store: Store, whom: str) -> None:
    """A requeue of either begins the whole rollout afresh. What is not forked again is emptied, and not delivered."""
    run, root = opened(store)
    forks = [fork(run, root, i, i, upto=i) for i in range(2)]
    for claim in (*forks, root):
        f.add(run, claim, 2, finish_reason="stop")
        end(run, claim, 1.0)
    assert f.group(run, root.group_id)["state"] == "ready"
    run.requeue([root.sample_id if whom == "root" else forks[1].sample_id], "again")
    group = f.group(run, root.group_id)
    assert (group["state"], group["n_open"]) == ("open", 3)
    f.sound(run)
    (again,) = run.claim(f.register(run), 10)
    assert (again.sample_id, again.incarnation, again.n_tokens) == (root.sample_id, 1, 0)
    f.add(run, again, 4, finish_reason="stop")
    made = fork(run, again, 0, 0, upto=2)
    assert made.sample_id == forks[0].sample_id and made.incarnation > forks[0].incarnation
    f.add(run, made, 1, finish_reason="stop")
    for claim in (made, again):
        end(run, claim, 0.0)
    group = f.group(run, root.group_id)
    assert (group["state"], group["n_samples"], group["n_tokens"]) == ("ready", 3, 5)
    with run.batch(step=0, groups=1) as batch:
        assert [s.sample_id for s in batch.samples] == [root.sample_id, made.sample_id]
        assert batch.samples[1].response_ids.size == 3
    assert f.fates(run) == {"consumed": 5, "superseded": 11}
    f.sound(run)


def test_what_is_given_up_takes_its_forks_along(store: Store) -> None:
    run, root = opened(store, max_attempts=1, on_failed="short")
    done, still = fork(run, root, 0, 0, upto=2), fork(run, root, 1, 1, upto=5)
    f.add(run, done, 2, finish_reason="stop")
    end(run, done, 1.0)
    f.add(run, still, 3)
    assert run.fail(root, "its tool is gone") == "failed"
    assert [s["status"] for s in f.rows(run, "SELECT status FROM sample ORDER BY id")] == [
        "failed",
        "completed",
        "failed",
    ]
    group = f.group(run, root.group_id)
    assert (group["state"], group["n_open"], group["n_failed"]) == ("ready", 0, 2)
    with run.batch(step=0, groups=1) as batch:
        (only,) = batch.samples
        assert only.response_ids.tolist() == [*f.ids_of(2), *f.ids_of(2)] and only.loss_mask.tolist() == [0, 0, 1, 1]
    f.sound(run)


def test_a_fork_whose_worker_dies_for_good(store: Store) -> None:
    run, root = opened(store, max_deaths=1)
    child = fork(run, root, 0, 0, upto=0)
    assert child.n_tokens == 0
    f.kill(run, root.owner)
    assert f.sample(run, child.sample_id)["status"] == "pending", "its parent got tokens in this life"
    (root,) = run.claim(f.register(run), 10)
    run.transact(lambda tx: fanout.take(tx, root, child.sample_id))
    f.kill(run, root.owner)
    assert f.sample(run, child.sample_id)["status"] == "failed"
    assert f.group(run, root.group_id)["state"] == "dropped"
    f.sound(run)


def test_regenerate_begins_rollouts_afresh_as_a_whole(store: Store) -> None:
    """Also one whose own tokens are still to come, while a fork of it has some."""
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=0, stale="regenerate")
    (root,) = run.claim(f.register(run), 1)
    child = fork(run, root, 0, 0, prompt=PROMPT)
    run.append(child, [5, 6], [-1.0, -1.0], 0)
    run.publish_weights()
    run.publish_weights()
    run.admit()
    rows = f.rows(run, "SELECT * FROM sample ORDER BY id")
    assert [(r["incarnation"], r["n_tokens"], r["owner"]) for r in rows] == [(1, 0, None)] * 2
    f.sound(run)


def test_prune_takes_forks_with_their_group(store: Store) -> None:
    run, root = opened(store)
    child = fork(run, root, 0, 0, upto=5)
    f.add(run, child, 2, finish_reason="stop")
    for claim in (child, root):
        end(run, claim, 1.0)
    with run.batch(step=0, groups=1):
        pass
    assert run.prune(keep_steps=0).groups == 1
    f.sound(run)


def test_advance_is_the_workers(store: Store) -> None:
    """A claim follows what it stores, a fork's as any other."""
    run, root = opened(store)
    child = fork(run, root, 0, 0, prompt=PROMPT)
    advance(child, 1, 3, None)
    assert (child.seq, child.n_tokens) == (2, 7)


def test_a_rollout_counts_once_in_its_group() -> None:
    """By hand: rollouts 1 (rewards 1, 0, 0.5), 2 (1) and 3 (0): means 0.5, 1, 0, so the group's is 0.5."""
    rewards, groups, rollouts = [1.0, 0.0, 0.5, 1.0, 0.0], [9] * 5, [1, 1, 1, 2, 3]
    assert advantages(rewards, groups, "dr_grpo", rollouts).tolist() == [0.5, -0.5, 0.0, 0.5, -0.5]
    # variance: (0.25 + 0.25 + 0) / 3 / 3 + 0.25 / 3 + 0.25 / 3 = 0.2222
    expected = np.array([0.5, -0.5, 0.0, 0.5, -0.5]) / np.sqrt(2 / 9)
    assert np.allclose(advantages(rewards, groups, "grpo", rollouts), expected, atol=1e-5)
    # the others' means: 0.5, 0.25, 0.75
    assert np.allclose(advantages(rewards, groups, "rloo", rollouts), [0.5, -0.5, 0.0, 0.75, -0.75])
    assert advantages(rewards, groups, "none", rollouts).tolist() == rewards
    alone = advantages(rewards, groups, "grpo", [1, 2, 3, 4, 5])
    assert alone.tobytes() == advantages(rewards, groups, "grpo").tobytes()
    unknown = advantages([1.0, float("nan"), 0.0], [9] * 3, "rloo", [1, 1, 2])
    assert unknown[0] == 1.0 and np.isnan(unknown[1]) and unknown[2] == -1.0


def test_an_evaluation_counts_tries_not_forks(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1)
    run.add_prompts([{"prompt_ids": [5, 1]}], dataset="test", evaluation=True)
    run.start_evaluation("test", 2)
    claims = [c for c in run.claim(f.register(run), 10) if c.prompt_ids.tolist() == [5, 1]]
    for claim, reward in zip(claims, (1.0, 0.0), strict=True):
        child = fork(run, claim, 0, 0, prompt=PROMPT)
        for one in (child, claim):
            f.add(run, one, 2, finish_reason="stop")
            end(run, one, reward)
    (told,) = run.evaluations()
    assert (told.n_scored, told.mean_reward, told.pass_at[1]) == (2, 0.5, 0.5)
    f.sound(run)


def test_older_code_would_not_know_what_this_is(store: Store) -> None:
    run, root = opened(store)
    fork(run, root, 0, 0, upto=1)
    with pytest.raises(DowngradeRefused, match="1 calls of episodes"):
        migrations.downgrade(store.database, "0003")
    f.execute(run, "DELETE FROM episode_step")
    with pytest.raises(DowngradeRefused, match="1 samples that share the prefix"):
        migrations.downgrade(store.database, "0003")
    f.sound(run)


def test_a_rollout_ends_as_a_whole_or_not_at_all(store: Store) -> None:
    """A fork that was finished, and its parent not: its kept stages would belong to a worker that does not score."""
    run, root = opened(store, stages=("reward",))
    child, empty = fork(run, root, 0, 0, prompt=PROMPT), fork(run, root, 1, 1, upto=5)
    f.add(run, child, 2, finish_reason="stop")
    ends = [(child, "completed", "stop", None), (root, "completed", "stop", float("inf"))]
    before = f.snapshot(run)
    with pytest.raises(InvalidSetting):
        run.transact(lambda tx: fanout.end_all(tx, root, ends, True))
    assert f.snapshot(run) == before
    ends[1] = (root, "completed", "stop", 1.0)
    for _ in range(2):
        kept = run.transact(lambda tx: fanout.end_all(tx, root, ends, True))
    assert [stage.sample_id for stage in kept] == [child.sample_id]
    row = f.sample(run, empty.sample_id)
    assert (row["status"], row["n_tokens"], row["owner"]) == ("completed", 0, None), "a fork without tokens is emptied"
    f.sound(run)


def test_without_resume_a_rollout_starts_again_as_a_whole(store: Store) -> None:
    """Also where its last turn was complete: its steps are done again, under new keys, and it forks anew."""
    run, root = opened(store, resume=False)
    run.transact(lambda tx: episodes.begin(tx, root, 0, "generate", "", "key", {}, 0))
    child = fork(run, root, 1, 0, upto=3)
    f.add(run, child, 2)
    run.append(root, [9], [-1.0], 0, "stop")
    run.release(child, "weights")
    run.release(root, "weights")
    (again,) = run.claim(f.register(run), 10)
    assert (again.sample_id, again.incarnation, again.n_tokens, again.seq) == (root.sample_id, 1, 0, 0)
    assert run.database.read(lambda c: queries.record(c, root.sample_id, 1)).calls == []
    f.add(run, again, 2, finish_reason="stop")
    made = fork(run, again, 0, 0, upto=1)
    assert (made.sample_id, made.n_tokens, made.seq) == (child.sample_id, 0, 0)
    f.add(run, made, 1, finish_reason="stop")
    run.transact(lambda tx: fanout.end_all(tx, again, [(c, "completed", "stop", 1.0) for c in (made, again)], False))
    assert f.group(run, root.group_id)["state"] == "ready"
    f.sound(run)


def test_a_fork_that_waits_is_no_death(store: Store) -> None:
    """Its parent gets tokens in every life; nor is the parent's wait one, while a fork gets them."""
    run, root = opened(store, max_deaths=2)
    child = fork(run, root, 0, 0, upto=0)
    for who in ("root", "fork", "root", "fork"):
        f.add(run, root if who == "root" else child, 1)
        f.kill(run, root.owner)
        assert {s["status"] for s in f.rows(run, "SELECT status FROM sample")} <= {"aborted", "pending"}
        (root,) = run.claim(f.register(run), 10)
        child = run.transact(lambda tx, root=root, id=child.sample_id: fanout.take(tx, root, id))
    f.sound(run)
