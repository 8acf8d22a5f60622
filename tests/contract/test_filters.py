"""Filters: whole groups are dropped with their reason and made up for, single samples are taken out of the loss."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samplestore import Store, filters
from samplestore.errors import BatchTimeout, HookFailed, InvalidSetting, LeaseLost
from samplestore.filters import Scored
from samplestore.run import Run
from samplestore.runsettings import RunSettings
from samplestore.slimehooks import SlimeStatus, hook_args, verdict
from samplestore.types import StageClaim
from samplestore.verbs import fanout

from ..support import factory as f


def scored(rewards: list[float | None], tokens: int = 3, status: str = "completed") -> list[Scored]:
    return [Scored(r, tokens, status) for r in rewards]


@pytest.mark.parametrize(
    ("spec", "rewards", "reason"),
    [
        ("reward_std", [1.0, 1.0], "zero reward std"),
        ("reward_std", [0.1 + 0.2, 0.1 + 0.2, 0.1 + 0.2], "zero reward std"),  # their mean is not one of them
        ("reward_std", [1.0, 0.0], None),
        ("reward_std:0.5", [1.0, 0.0], "reward std up to 0.5"),
        ("reward_std", [None, None], "no reward"),
        ("reward:0.2:0.8", [1.0, 0.0], None),
        ("reward:0.2:0.8", [1.0, 1.0], "mean reward outside 0.2..0.8"),
        ("length:1:2", [1.0, 0.0], "length outside 1..2"),
        ("length:3:3", [1.0, 0.0], None),
        ("custom", [1.0, 1.0], None),
    ],
)
def test_group_filters(spec: str, rewards: list[float | None], reason: str | None) -> None:
    assert filters.refusal(filters.parse(filters.GROUP, [spec]), scored(rewards)) == reason


@pytest.mark.parametrize(
    ("spec", "sample", "reason"),
    [
        ("truncated", Scored(1.0, 3, "truncated"), "truncated"),
        ("truncated", Scored(1.0, 3, "completed"), None),
        ("length:0:2", Scored(1.0, 3, "completed"), "length outside 0..2"),
        ("length:0:3", Scored(1.0, 3, "completed"), None),
    ],
)
def test_sample_filters(spec: str, sample: Scored, reason: str | None) -> None:
    assert filters.removal(filters.parse(filters.SAMPLE, [spec]), sample) == reason


@pytest.mark.parametrize(
    "bad",
    [
        {"group_filters": ["std"]}, {"group_filters": ["reward:2:1"]}, {"group_filters": ["reward:0:nan"]},
        {"group_filters": ["length:1"]}, {"group_filters": "reward_std"}, {"group_filters": ["custom", "custom"]},
        {"sample_filters": ["reward_std"]}, {"sample_filters": [1]}, {"group_stages": ["filter"]},
    ],
)  # fmt: skip
def test_a_filter_that_is_none_is_refused(store: Store, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        store.run("r", **bad)
    assert store.run_names() == []


def scored_run(store: Store, rewards: list[float], **settings: Any) -> tuple[Run, int, list[StageClaim]]:
    """A run all of whose samples are answered and have these rewards; its worker, and the filter stages claimed."""
    run = f.make_run(store, stages=["reward"], group_filters=["reward_std"], **settings)
    worker = f.register(run)
    for claim in run.claim(worker, 100):
        f.answer(run, claim)
    for stage, reward in zip(run.claim_stages(worker, 100, ["reward"]), rewards, strict=True):
        run.score(stage, reward)
    return run, worker, run.claim_stages(worker, 100, ["filter"])


def test_a_group_is_ready_when_its_filter_has_kept_it(store: Store) -> None:
    run, _, claims = scored_run(store, [1.0, 0.0, 1.0, 1.0], prompts=2)
    assert f.states(run) == ["scoring", "scoring"]
    assert [[m.reward for m in c.members] for c in claims] == [[1.0, 0.0], [1.0, 1.0]]
    assert [m.response_ids.size for m in claims[0].members] == [3, 3]
    kept, dropped = claims
    for _ in range(2):  # a repetition whose acknowledgement was lost
        run.filter_group(kept)
        run.filter_group(dropped, "zero reward std")
    assert f.states(run) == ["ready", "dropped"]
    row = f.group(run, dropped.group_id)
    assert (row["reason"], row["reward_mean"], row["reward_std"]) == ("filter: zero reward std", 1.0, 0.0)
    assert f.fates(run) == {"ready": 6, "dropped": 6}
    (event,) = f.events(run, "dropped")
    assert (event["group_id"], event["reason"]) == (dropped.group_id, "filter: zero reward std")
    f.sound(run)


def test_admission_makes_up_for_what_a_filter_drops(store: Store) -> None:
    """The batch size is kept: a dropped group leaves the window, and the next prompt takes its place."""
    run, worker, claims = scored_run(store, [1.0] * 4, prompts=5, max_staleness=0)
    assert run.admit() == 0, "groups that wait for their filter fill the window"
    for claim in claims:
        run.filter_group(claim, "zero reward std")
    assert run.admit() == 2
    for claim in run.claim(worker, 100):
        f.answer(run, claim)
    for i, stage in enumerate(run.claim_stages(worker, 100, ["reward"])):
        run.score(stage, i % 2)
    for claim in run.claim_stages(worker, 100, ["filter"]):
        run.filter_group(claim)
    batch = f.lease(run, f.register(run, "trainer"), 0)
    assert batch is not None
    assert f.states(run) == ["dropped", "dropped", "leased", "leased"]
    f.sound(run)


def test_a_sample_out_of_the_loss_stays_in_its_group(store: Store) -> None:
    run, _, claims = scored_run(store, [1.0, 0.0, 0.0, 1.0], prompts=2)
    out = claims[0].members[1].sample_id
    with pytest.raises(InvalidSetting, match="removed"):
        run.filter_group(claims[0], removed={claims[1].members[0].sample_id: "not of this group"})
    run.filter_group(claims[0], removed={out: "too\x00short"})
    run.filter_group(claims[1])
    trainer = f.register(run, "trainer")
    batch = f.lease(run, trainer, 0)
    assert batch is not None
    samples = f.batch_of(run, batch, trainer).samples
    assert [s.removed for s in samples] == [None, "too\\x00short", None, None]
    assert [s.loss_mask.tolist() for s in samples] == [[1] * 3, [0] * 3, [1] * 3, [1] * 3]
    arrays = f.batch_of(run, batch, trainer).arrays()
    assert arrays["advantages"].tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-4), "it counts in its baseline"
    assert f.rows(run, "SELECT DISTINCT loss FROM segment") == [{"loss": 1}], "derived when read, never written"
    f.sound(run)


def test_a_filter_is_fenced_and_reaped_like_any_stage(store: Store) -> None:
    run, worker, claims = scored_run(store, [1.0, 0.0, 1.0, 0.0], prompts=2)
    f.kill(run, worker)
    other = f.register(run)
    again = run.claim_stages(other, 100, ["filter"])
    assert [c.group_id for c in again] == [c.group_id for c in claims]
    with pytest.raises(LeaseLost):
        run.filter_group(claims[0], "zombie")
    run.release_stage(again[0])
    run.filter_group(again[1])
    with pytest.raises(LeaseLost):
        run.filter_group(again[1], "another word of the same owner")
    (third,) = run.claim_stages(other, 100, ["filter"])
    run.filter_group(third)
    assert f.states(run) == ["ready", "ready"]
    f.sound(run)


def test_a_filter_that_keeps_failing_drops_its_group_with_the_error_kept(store: Store) -> None:
    run, worker, claims = scored_run(store, [1.0, 0.0], prompts=1, max_attempts=2)
    assert run.fail_stage(claims[0], "boom", backoff_s=0.0) == "pending"
    (again,) = run.claim_stages(worker, 100, ["filter"])
    assert run.fail_stage(again, "boom", backoff_s=0.0) == "failed"
    assert f.group(run, again.group_id)["reason"] == "stage filter failed"
    assert f.value(run, "SELECT error FROM stage WHERE sample_id IS NULL") == "boom"
    f.sound(run)


def test_a_group_started_afresh_is_filtered_again(store: Store) -> None:
    run, worker, claims = scored_run(store, [1.0, 1.0], prompts=1)
    run.filter_group(claims[0], "zero reward std", {claims[0].members[0].sample_id: "it was marked too"})
    run.requeue([m.sample_id for m in claims[0].members], "another try")
    assert f.value(run, "SELECT count(*) FROM sample WHERE removed IS NOT NULL") == 0
    for claim in run.claim(worker, 100):
        f.answer(run, claim)
    for i, stage in enumerate(run.claim_stages(worker, 100, ["reward"])):
        run.score(stage, i)
    (again,) = run.claim_stages(worker, 100, ["filter"])
    assert [m.reward for m in again.members] == [0.0, 1.0]
    run.filter_group(again)
    assert f.states(run) == ["ready"]
    f.sound(run)


def test_only_the_stage_of_filters_is_settled_by_a_filter(store: Store) -> None:
    run = f.make_run(store, stages=["reward"], group_filters=["reward_std"], prompts=1)
    worker = f.register(run)
    for claim in run.claim(worker, 1):
        f.answer(run, claim)
    (reward,) = run.claim_stages(worker, 1)
    with pytest.raises(InvalidSetting, match="filter"):
        run.filter_group(reward)


def order_of(store: Store, name: str, order: str) -> list[int]:
    """Numbers of the groups that a batch takes, of three that are 1, 0 and 2 versions old."""
    run = f.make_run(store, name, prompts=3, groups_per_step=3, max_staleness=5, order=order, samples_per_prompt=1)
    run.publish_weights(step=0), run.publish_weights(step=1)
    worker, trainer = f.register(run), f.register(run, "trainer")
    for n, (claim, version) in enumerate(zip(run.claim(worker, 3), (1, 2, 0), strict=True)):
        f.answer(run, claim, 5 - n, version)
    batch = f.lease(run, trainer, 0, 3, order=order)
    assert batch is not None
    return [g.number for g in f.batch_of(run, batch, trainer).groups]


def test_which_ready_groups_go_first(store: Store) -> None:
    assert order_of(store, "fifo", "fifo") == [0, 1, 2]
    assert order_of(store, "oldest", "oldest") == [2, 0, 1]
    assert order_of(store, "sql", "sql:n_tokens % 100") == [2, 1, 0]


@pytest.mark.parametrize("expression", ["no_such_column", "n_tokens +", "(SELECT id FROM nothing)"])
def test_sql_that_does_not_run_is_refused_at_the_door(store: Store, expression: str) -> None:
    with pytest.raises(InvalidSetting, match="it said"):
        store.run("r", order=f"sql:{expression}")
    assert store.run_names() == []
    run = f.make_run(store)
    with pytest.raises(InvalidSetting, match="it said"):
        run.batch(0, order=f"sql:{expression}", timeout=0)


@pytest.mark.parametrize("expression", ["row_number() over (order by id)", "sum(n_tokens) over ()"])
def test_an_order_that_can_not_lock_is_refused_at_the_door(store: Store, expression: str) -> None:
    """PostgreSQL runs a window function in a SELECT, and not in one that locks its rows, as a lease does."""
    if store.database.is_sqlite:
        run = f.make_run(store, samples_per_prompt=1, order=f"sql:{expression}")
        f.finish_all(run, f.register(run))
        with run.batch(0, timeout=10) as batch:
            assert len(batch.groups) == 2
        return
    with pytest.raises(InvalidSetting, match=r"it said: .*window functions"):
        store.run("r", order=f"sql:{expression}")
    assert store.run_names() == []
    run = f.make_run(store)
    with pytest.raises(InvalidSetting, match="it said"):
        run.batch(0, order=f"sql:{expression}", timeout=0)


def test_a_status_equals_that_of_slime_itself() -> None:
    theirs = Enum("Status", {"TRUNCATED": "truncated", "FAILED": "failed"})
    ours = SlimeStatus("truncated")
    both_ways = ((ours, theirs.TRUNCATED), (theirs.TRUNCATED, ours), (ours, "truncated"))
    assert all(a == b for a, b in both_ways)
    assert ours != theirs.FAILED and ours != SlimeStatus.FAILED and ours in {SlimeStatus.TRUNCATED}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (True, None), (False, "custom filter"), (None, None), ("", None), ("too easy", "too easy"),
        (np.bool_(True), None), (np.array(False), "custom filter"),
        (SimpleNamespace(keep=np.bool_(False), reason="zero_std_1.0"), "zero_std_1.0"),
        (SimpleNamespace(keep=True, reason="kept"), None), (SimpleNamespace(keep=False), "custom filter"),
    ],
)  # fmt: skip
def test_what_a_filter_may_say(said: Any, reason: str | None) -> None:
    assert verdict(said) == reason


@pytest.mark.parametrize("said", [1, 0.0, [], object(), SimpleNamespace(keep="yes")])
def test_what_a_filter_may_not_say(said: Any) -> None:
    with pytest.raises(TypeError):
        verdict(said)


def hooked(store: Store) -> Run:
    """Three ready groups, of versions 1, 2 and 0, by prompts that differ."""
    run = f.make_run(store, prompts=3, groups_per_step=2, max_staleness=5, samples_per_prompt=1)
    run.publish_weights(step=0), run.publish_weights(step=1)
    worker = f.register(run)
    for claim, version in zip(run.claim(worker, 3), (1, 2, 0), strict=True):
        f.answer(run, claim, 3, version)
    return run


def test_a_buffer_filter_of_slime_chooses_what_is_leased(store: Store) -> None:
    """It is told what slime's never learns: the serving version, and the oldest token of each sample."""
    run, told = hooked(store), {}

    def freshest_first(args: Any, rollout_id: int, buffer: list[Any], n: int) -> list[Any]:
        told.update(args=args, rollout_id=rollout_id, n=n, size=len(buffer))
        buffer.sort(key=lambda group: args.serving_version - group[0].oldest_version)
        popped, buffer[:] = buffer[:n], buffer[n:]
        return popped

    with run.batch(7, buffer_filter=freshest_first, timeout=10) as batch:
        assert [g.number for g in batch.groups] == [1, 0]
    assert (told["rollout_id"], told["n"], told["size"]) == (7, 2, 3)
    assert told["args"].serving_version == 2 and told["args"].staleness == {0: 1, 1: 0, 2: 2}
    assert told["args"].n_samples_per_prompt == 1
    f.sound(run)


def test_a_buffer_filter_that_pops_too_few_is_asked_again(store: Store) -> None:
    run, calls = hooked(store), []

    def later(args: Any, rollout_id: int, buffer: list[Any], n: int) -> list[Any]:
        calls.append(len(buffer))
        return buffer[: n if len(calls) > 2 else 1]

    with run.batch(0, buffer_filter=later, timeout=10) as batch:
        assert len(batch.groups) == 2
    assert calls == [3, 3, 3]


def test_a_wait_for_a_buffer_filter_names_it(store: Store) -> None:
    run = hooked(store)

    def picky(args: Any, rollout_id: int, buffer: list[Any], n: int) -> list[Any]:
        return buffer[:1]

    with pytest.raises(BatchTimeout, match="the buffer filter picky returned 1 of the 2 groups") as caught:
        run.batch(0, buffer_filter=picky, timeout=0)
    assert [code for code, _ in caught.value.why.reasons] == ["buffer_filter"]
    with pytest.raises(BatchTimeout) as caught:
        run.batch(0, 9, buffer_filter=picky, timeout=0)
    assert "buffer_filter" not in dict(caught.value.why.reasons), "it was not asked: too few are ready"


def keep_all(seen: list[Any]) -> Any:
    """A buffer filter that takes the first groups, and keeps what it was shown."""

    def keep(args: Any, rollout_id: int, buffer: list[Any], n: int) -> list[Any]:
        seen.extend(buffer)
        return buffer[:n]

    return keep


def test_what_a_buffer_filter_raises_names_it(store: Store) -> None:
    run = hooked(store)

    def mistaken(args: Any, rollout_id: int, buffer: list[Any], n: int) -> list[Any]:
        raise KeyError("label")

    with pytest.raises(
        HookFailed, match=r"buffer filter .*mistaken can't be used: it raised KeyError: 'label'"
    ) as caught:
        run.batch(0, buffer_filter=mistaken, timeout=10)
    assert isinstance(caught.value.__cause__, KeyError)
    assert f.states(run) == ["ready"] * 3


def test_hooks_see_log_probs_loss_and_versions(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=2, groups_per_step=1)
    first, second = run.claim(f.register(run), 2)
    f.add(run, first, 2)
    run.append(first, [7, 8, 9], None, None, kind="environment")
    f.answer(run, first, 1)
    f.answer(run, second, 1)
    seen: list[Any] = []
    run.batch(0, buffer_filter=keep_all(seen), timeout=10).release("seen")
    one, other = seen[0]
    assert one.loss_mask == [1, 1, 0, 0, 0, 1] and one.effective_response_length == 3
    assert one.rollout_log_probs == [-0.25, -0.375, 0.0, 0.0, 0.0, -0.25]
    assert one.weight_versions == ["0"] and other.loss_mask == [1]
    one.loss_mask = [0] * 6  # a hook may set what it likes
    assert one.effective_response_length == 0


def test_trained_tokens_without_log_probs_have_none_in_hooks(store: Store) -> None:
    run = store.run("imported", samples_per_prompt=1, groups_per_step=1)
    run.import_samples([{"prompt_ids": [1, 2], "samples": [{"response_ids": [3, 4], "reward": 1.0}]}])
    seen: list[Any] = []
    run.batch(0, buffer_filter=keep_all(seen), need_logprobs=False, timeout=10).release("seen")
    assert seen[0][0].rollout_log_probs is None and seen[0][0].loss_mask == [1, 1]


class Letters:
    """Enough of a tokenizer: a token is a letter."""

    encode = apply_chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {chr(87 + i): i for i in range(36)}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(87 + int(i)) for i in ids)


def test_hooks_see_text_where_a_tokenizer_is_known(store: Store) -> None:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1)
    f.finish_all(run, f.register(run))
    seen: list[Any] = []

    def reads_text(args: Any, rollout_id: int, buffer: list[Any], n: int) -> list[Any]:
        seen.extend(sample.response for group in buffer for sample in group)
        return buffer[:n]

    with pytest.raises(HookFailed, match=r"reads_text can't be used: it asks for sample.response.*run.tokenizer = "):
        run.batch(0, buffer_filter=reads_text, timeout=10)
    run.tokenizer = Letters()
    run.batch(0, buffer_filter=reads_text, timeout=10).release("seen")
    assert seen == ["abc"]


@pytest.mark.parametrize(("first", "at"), [(0, 0), (1, 1), (100, 100)])
def test_start_rollout_id_counts_from_the_run_s_first_step(store: Store, first: int, at: int) -> None:
    """As slime's: the step whose samples were generated when the first token was. Weights of step s generate for the
    next; those that a run begins with, for its first."""
    run = f.make_run(store, prompts=4, samples_per_prompt=1, groups_per_step=1, max_staleness=9)
    worker = f.register(run)
    stopped = []
    for step in (first, first + 1):
        (claim, other) = run.claim(worker, 2)
        f.add(run, claim, 2, run.current_version)
        run.release(claim, "abort")
        stopped.append(claim.group_number)
        f.answer(run, other, 2, run.current_version)
        (resumed,) = run.claim(worker, 1)
        assert resumed.sample_id == claim.sample_id
        f.answer(run, resumed, 2, run.current_version)
        seen: list[Any] = []
        with run.batch(step, buffer_filter=keep_all(seen), timeout=10):
            pass
        told = {g[0].group_index: g[0].metadata.get("start_rollout_id") for g in seen}
        assert told[claim.group_number] == at + len(stopped) - 1 and told.get(other.group_number) is None
        run.publish_weights(step=step)
    f.sound(run)


@pytest.mark.parametrize(
    "wrong", [lambda buffer: [[]], lambda buffer: None, lambda buffer: [buffer[0], buffer[0]], lambda buffer: buffer]
)
def test_a_buffer_filter_that_returns_something_else(store: Store, wrong: Any) -> None:
    run = hooked(store)
    with pytest.raises(HookFailed):
        run.batch(0, buffer_filter=lambda args, step, buffer, n: wrong(buffer), timeout=10)
    assert f.states(run) == ["ready"] * 3


def test_the_all_samples_hook_sees_what_was_filtered_and_aborted(store: Store) -> None:
    run = f.make_run(
        store, prompts=4, stages=["reward"], group_filters=["reward_std"], groups_per_step=1, max_staleness=3
    )
    worker = f.register(run)
    claims = run.claim(worker, 8)
    run.publish_weights(step=4)
    for claim in claims[:6]:
        f.answer(run, claim)
    f.add(run, claims[6], 2)
    run.release(claims[6], "abort")
    for i, stage in enumerate(run.claim_stages(worker, 100, ["reward"])):
        run.score(stage, i % 2 if i < 4 else 0.0)
    for claim in run.claim_stages(worker, 100, ["filter"]):
        run.filter_group(claim, "zero reward std" if claim.members[0].reward == claim.members[1].reward else None)
    seen: list[Any] = []

    def look(args: Any, groups: list[list[Any]], source: Any) -> None:
        seen.append({g[0].group_index: [(s.status.value, s.reward, s.metadata) for s in g] for g in groups})
        assert source is run

    with run.batch(0, all_samples=look, timeout=10):
        pass
    aborted = [("aborted", None, {"start_rollout_id": 0}), ("pending", None, {})]
    done = [("completed", 0.0, {}), ("completed", 1.0, {})]
    assert seen == [{0: done, 2: [done[0], done[0]], 3: aborted}]
    with run.batch(1, all_samples=look, timeout=10):
        pass
    assert seen[1] == {1: done, 3: aborted}, "what ended since the last batch"

    def broken(args: Any, groups: Any, source: Any) -> None:
        raise ValueError("boom")

    f.answer(run, run.claim(worker, 1)[0])
    f.answer(run, claims[7])
    for i, stage in enumerate(run.claim_stages(worker, 100, ["reward"])):
        run.score(stage, float(i))
    run.filter_group(run.claim_stages(worker, 1, ["filter"])[0])
    with pytest.raises(
        HookFailed, match=r"all-samples hook .*broken can't be used: it raised ValueError: boom"
    ) as caught:
        run.batch(2, all_samples=broken, timeout=10)
    assert isinstance(caught.value.__cause__, ValueError)
    assert f.states(run)[3] == "ready", "given back"
    f.sound(run)


def test_a_hook_that_raised_sees_all_of_its_interval_again(store: Store) -> None:
    run = f.make_run(store, prompts=6, groups_per_step=1, samples_per_prompt=1, max_staleness=5)
    f.finish_all(run, f.register(run))
    run.drop([f.group_id(run, 0)], "unwanted")
    seen: list[list[int]] = []

    def look(args: Any, groups: list[list[Any]], source: Any) -> None:
        seen.append([g[0].group_index for g in groups])
        if len(seen) <= 2:
            raise OSError("the disk of the log is full")

    for _ in range(2):
        with pytest.raises(HookFailed, match="full"):
            run.batch(0, all_samples=look, timeout=10)
    for step in (0, 1):
        with run.batch(step, all_samples=look, timeout=10):
            pass
    assert seen == [[0, 1], [0, 1], [0, 1], [2]]


def test_hooks_see_forks_as_a_batch_delivers_them(store: Store) -> None:
    run = f.make_run(store, prompts=2, samples_per_prompt=1, groups_per_step=2)
    root, other = run.claim(f.register(run), 2)
    f.add(run, root, 5)
    prompt = np.array([40, 41, 42, 43], np.int32)
    for number, (upto, own) in enumerate(((3, None), (0, None), (None, prompt))):
        fork = run.transact(lambda tx, n=number, u=upto, o=own: fanout.fork(tx, root, n, f"k{n}", {}, n, u, o))
        run.append(fork, [30 + number, 31], [-1.0, -2.0], 0, "stop")
        run.finish(fork)
    run.finish(root, "completed")
    f.answer(run, other)
    seen: list[Any] = []
    with run.batch(
        0, buffer_filter=keep_all(seen), all_samples=lambda args, groups, source: seen.extend(groups)
    ) as batch:
        wanted = [[(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in g.samples] for g in batch.groups]
    for groups in (seen[:2], seen[2:]):
        told = [
            [(s.tokens[: -s.response_length].tolist(), s.tokens[-s.response_length :].tolist()) for s in group]
            for group in groups
        ]
        assert told == wanted
        assert [[(s.index, s.rollout_id) for s in group] for group in groups] == [[(0, 0)] * 4, [(1, 1)]]


@pytest.mark.parametrize(
    ("settings", "size", "partial"),
    [
        ({}, 8, False), ({"mode": "sync"}, 8, False), ({"mode": "partial"}, 8, True),
        ({"mode": "partial", "over_sampling_batch_size": 12}, 12, True),
    ],
)  # fmt: skip
def test_what_hooks_are_told_of_the_mode(settings: dict[str, Any], size: int, partial: bool) -> None:
    args = hook_args(RunSettings.parse(settings))
    assert (args.over_sampling_batch_size, args.partial_rollout, args.rollout_batch_size) == (size, partial, 8)


def test_a_filter_that_is_asked_again_takes_back_what_it_took_out(store: Store) -> None:
    """A sibling is generated afresh, and the group goes through its filters once more."""
    run, worker, (claim,) = scored_run(store, [1.0, 0.0], prompts=1, sample_filters=["custom"], groups_per_step=1)
    first, second = (member.sample_id for member in claim.members)
    run.filter_group(claim, removed={first: "worse than the other"})
    run.requeue([second], "again")
    (again,) = run.claim(worker, 2)
    f.answer(run, again)
    (reward,) = run.claim_stages(worker, 9, ["reward"])
    run.score(reward, 0.5)
    (claim,) = run.claim_stages(worker, 9, ["filter"])
    run.filter_group(claim, removed={second: "worse than the first"})
    told = f.rows(run, "SELECT removed FROM sample ORDER BY id")
    assert [r["removed"] for r in told] == [None, "worse than the first"]
    f.sound(run)
