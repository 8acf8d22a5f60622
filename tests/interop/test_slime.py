"""slime's order of calls against a store: what is trained on is consumed once, whoever dies when."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import BatchTimeout, InvalidSetting, RunNotFound, StepAlreadyCommitted
from samplestore.run import Run
from samplestore.slime import NotConfigured, StoreDataSource, generate_rollout, observe, observe_all, publish_weights

from ..support import factory as f
from .standin import Manager, args_of, close_all, process_died, signature_matches


@pytest.fixture(autouse=True)
def closed(store: Store) -> Iterator[None]:
    yield
    close_all()


def finished(store: Store, groups: int = 8, **settings: Any) -> Run:
    """A run with that many groups, generated."""
    rules = {"max_staleness": 50, "groups_per_step": 2, "stages": ["reward"], **settings}
    run = f.make_run(store, prompts=groups, **rules)
    f.finish_all(run, f.register(run), reward=0.5)
    return run


def seen(manager: Manager, rollout_id: int) -> list[int]:
    """The groups of a rollout."""
    manager.generate(rollout_id)
    return sorted({s.group_index for s in manager.samples})


def test_signatures_are_those_that_slime_compares() -> None:
    signature_matches(generate_rollout, "args", "rollout_id", "data_source", "evaluation", evaluation=False)
    assert tuple(inspect.signature(StoreDataSource.__init__).parameters)[:2] == ("self", "args")
    assert tuple(inspect.signature(observe_all).parameters)[:3] == ("args", "all_groups", "data_source")
    hook = inspect.signature(observe).parameters
    assert [(p.name, p.kind) for p in hook.values()] == [
        ("args", inspect.Parameter.POSITIONAL_OR_KEYWORD), ("sample", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        ("rollout_id", inspect.Parameter.KEYWORD_ONLY), ("evaluation", inspect.Parameter.KEYWORD_ONLY),
    ]  # fmt: skip
    for method in ("get_samples", "add_samples", "save", "load", "__len__"):
        assert callable(getattr(StoreDataSource, method))
    assert inspect.signature(StoreDataSource.load).parameters["rollout_id"].default is None


def test_the_synchronous_loop(store: Store, db_url: str) -> None:
    run = finished(store, 6)
    manager = Manager(args_of(db_url))
    assert len(manager.data_source) == 6
    manager.load(-1)
    trained = []
    for rollout_id in range(3):
        trained.append(seen(manager, rollout_id))
        manager.save(rollout_id)
        assert f.states(run).count("consumed") == 2 * (rollout_id + 1)
    assert trained == [[0, 1], [2, 3], [4, 5]]
    assert [r["step"] for r in f.rows(run, "SELECT step FROM batch WHERE state = 'committed' ORDER BY id")] == [0, 1, 2]
    with pytest.raises(StepAlreadyCommitted):
        manager.generate(1)
    f.sound(run)


def test_fields_of_a_sample(store: Store, db_url: str) -> None:
    run = f.make_run(store, prompts=1, groups_per_step=1, samples_per_prompt=3)
    worker = f.register(run)
    claims = run.claim(worker, 9)
    f.add(run, claims[0], 3, 0)
    run.append(claims[0], [90, 91], None, None, kind="environment")
    f.add(run, claims[0], 2, 0, "length")
    run.finish(claims[0])
    for claim in claims[1:]:
        f.answer(run, claim, 6)
    manager = Manager(args_of(db_url, rollout_batch_size=1))
    manager.generate(0)
    one = manager.samples[0]
    assert (one.group_index, one.index, one.rollout_id) == (0, 0, 0)
    assert one.tokens == [1, 2, 0, *f.ids_of(3), 90, 91, *f.ids_of(2)] and one.response_length == 7
    assert one.loss_mask == [1, 1, 1, 0, 0, 1, 1]
    assert one.rollout_log_probs == [*f.logprobs_of(3), 0.0, 0.0, *f.logprobs_of(2)]
    assert (one.status.value, one.weight_versions, one.label) == ("truncated", ["0"], "0")
    assert one.samplestore_id == f"{run.uuid}/0/0"
    assert [s.index for s in manager.samples] == [0, 1, 2]


def test_the_next_rollout_is_asked_for_before_this_one_is_saved(store: Store, db_url: str) -> None:
    """train_async's order, and a crash after save(0): rollout 1 was handed out already, and has to come again."""
    run = finished(store)
    first = Manager(args_of(db_url))
    first.load(-1)
    zero, one = seen(first, 0), seen(first, 1)
    first.save(0)
    assert f.states(run).count("consumed") == 2, "save(0) is about rollout 0, whatever was asked for since"
    process_died()
    again = Manager(args_of(db_url))
    again.load(0)
    assert seen(again, 1) == one, "none skipped"
    trained = [*zero, *one]
    for rollout_id in (2, 3):
        trained += seen(again, rollout_id)
        again.save(rollout_id - 1)
    again.save(3)
    assert sorted(trained) == list(range(8)), "and none doubled"
    assert f.states(run) == ["consumed"] * 8
    f.sound(run)


@pytest.mark.parametrize("reaped", [False, True], ids=["lease is there", "lease was reaped"])
def test_killed_between_the_checkpoint_and_its_save(store: Store, db_url: str, reaped: bool) -> None:
    """Checkpoint 1 is on the disk, and slime was killed before it said so: what that has seen is not trained again."""
    run = finished(store)
    first = Manager(args_of(db_url))
    zero, one, two = (seen(first, r) for r in range(3))
    process_died()
    if reaped:
        (trainer,) = f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer'")
        f.kill(run, trainer["id"])
        assert f.states(run) == ["ready"] * 8
    again = Manager(args_of(db_url))
    again.load(1)
    assert f.states(run) == ["consumed"] * 4 + ["ready"] * 4
    assert (seen(again, 2), sorted([*zero, *one, *two])) == (two, [0, 1, 2, 3, 4, 5])
    f.sound(run)


def test_a_process_that_was_away_saves_what_it_trained(store: Store, db_url: str) -> None:
    run = finished(store, 4)
    manager = Manager(args_of(db_url))
    seen(manager, 0)
    (trainer,) = f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer'")
    f.kill(run, trainer["id"])
    manager.save(0)
    assert f.states(run) == ["consumed"] * 2 + ["ready"] * 2
    assert seen(manager, 1) == [2, 3]
    f.sound(run)


def test_checkpoints_are_rarer_than_rollouts(store: Store, db_url: str) -> None:
    run = finished(store)
    first = Manager(args_of(db_url))
    first.load(-1)
    steps = [seen(first, r) for r in range(3)]
    first.save(1)
    assert f.states(run) == ["consumed"] * 4 + ["leased"] * 2 + ["ready"] * 2
    process_died()
    again = Manager(args_of(db_url))
    again.load(1)
    assert seen(again, 2) == steps[2]
    f.sound(run)


def test_an_older_checkpoint_starts_a_timeline(store: Store, db_url: str) -> None:
    run = finished(store)
    first = Manager(args_of(db_url))
    steps = []
    for rollout_id in range(3):
        steps.append(seen(first, rollout_id))
        first.save(rollout_id)
        publish_weights(first.args, rollout_id, label=str(rollout_id + 1))
    process_died()
    again = Manager(args_of(db_url))
    again.load(0)
    assert f.states(run) == ["consumed"] * 2 + ["ready"] * 6
    restored = next(v for v in run.weight_versions() if v.version == run.current_version)
    assert (restored.step, restored.timeline) == (0, 1)
    assert [seen(again, 1), seen(again, 2)] == steps[1:]
    f.sound(run)


def test_what_a_life_before_was_handed_out_is_not_saved(store: Store, db_url: str) -> None:
    """The first life asked for rollouts 0 to 2 and died. The second begins again, and never asks for rollout 1."""
    run = finished(store)
    first = Manager(args_of(db_url))
    first.load(-1)
    zero, _, two = (seen(first, r) for r in range(3))
    process_died()
    again = Manager(args_of(db_url))
    again.load(-1)
    assert f.states(run) == ["ready"] * 8
    assert [seen(again, 0), seen(again, 2)] == [zero, two]
    again.save(3)
    assert [n for n, state in enumerate(f.states(run)) if state == "consumed"] == sorted([*zero, *two])
    f.sound(run)


def test_begun_without_its_checkpoint_by_mistake(store: Store, db_url: str) -> None:
    """Checkpoint 1 is there and was never said to be; then training begins with none, and then with that one."""
    run = finished(store)
    first = Manager(args_of(db_url))
    first.load(-1)
    steps = [seen(first, r) for r in range(3)]
    again = Manager(args_of(db_url))
    again.load(-1)
    assert seen(again, 0) == steps[0]
    again.load(1)
    assert f.states(run) == ["consumed"] * 4 + ["ready"] * 4
    assert seen(again, 2) == steps[2]
    f.sound(run)


def test_a_checkpoint_of_a_timeline_that_was_left(store: Store, db_url: str) -> None:
    run = finished(store)
    manager = Manager(args_of(db_url))
    manager.load(-1)
    steps = []
    for rollout_id in range(4):
        steps.append(seen(manager, rollout_id))
        manager.save(rollout_id)
    for _ in range(2):
        manager.load(1)
    states = f.states(run)
    with pytest.raises(InvalidSetting, match=r"step=3 .* -1 to 1, .*timeline that was left"):
        manager.load(3)
    assert f.states(run) == states == ["consumed"] * 4 + ["ready"] * 4
    assert [seen(manager, r) for r in (2, 3)] == steps[2:]
    manager.save(3)
    manager.load(3)
    assert f.states(run) == ["consumed"] * 8, "the new timeline came to it"
    f.sound(run)


def test_a_first_start_changes_nothing(store: Store, db_url: str) -> None:
    run = finished(store)
    manager = Manager(args_of(db_url))
    for said in (-1, None, 7):  # 7: a checkpoint from before there was a store
        manager.load(said)
    assert f.value(run, "SELECT count(*) AS n FROM timeline") == 1 and f.rows(run, "SELECT * FROM batch") == []
    assert seen(manager, 8) == [0, 1]
    manager.save(8)
    assert f.states(run).count("consumed") == 2


def test_groups_that_are_gone_are_told(store: Store, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
    run = finished(store)
    first = Manager(args_of(db_url))
    seen(first, 0)
    process_died()
    (trainer,) = f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer'")
    f.kill(run, trainer["id"])
    run.drop([f.group_id(run, 0)], "bad prompt")
    Manager(args_of(db_url)).load(0)
    assert "steps 0 were trained on" in caplog.text
    assert [e["step"] for e in f.events(run, "not_settled")] == [0]
    assert f.states(run)[:2] == ["dropped", "ready"]
    f.sound(run)


def test_a_reward_that_could_not_be_read_moves_nothing(store: Store, db_url: str) -> None:
    run = f.make_run(store, prompts=1, groups_per_step=1, samples_per_prompt=3, stages=["reward"])
    worker = f.register(run)
    for claim in run.claim(worker, 9):
        f.answer(run, claim)
    for stage, value in zip(run.claim_stages(worker, 9), [1.0, 0.0, None], strict=True):
        run.unparsed(stage, "no number") if value is None else run.score(stage, value)
    manager = Manager(args_of(db_url, rollout_batch_size=1))
    data = manager.generate(0)
    assert data["rewards"] == [1.0, 0.0, 0.5] and data["loss_masks"][2] == [0, 0, 0]


def test_filters_of_slime_see_the_groups(store: Store, db_url: str) -> None:
    finished(store)
    data = Manager(args_of(db_url, rollout_sample_filter_path=f"{__name__}.remove_last")).generate(0)
    assert data["loss_masks"] == [[1, 1, 1], [0, 0, 0]] * 2


def remove_last(args: Any, groups: list[list[Any]]) -> None:
    for group in groups:
        group[-1].remove_sample = True


def test_evaluation(store: Store, db_url: str) -> None:
    run = f.make_run(store, prompts=0, stages=["reward"])
    run.add_prompts([{"prompt_ids": [5, i]} for i in range(2)], dataset="aime", evaluation=True)
    worker = f.register(run)
    args = args_of(db_url, n_samples_per_eval_prompt=2, eval_temperature=0.0, eval_max_response_len=9)
    run.start_evaluation("aime", 2, sampling={"temperature": 0.0}, max_new_tokens=9)
    f.finish_all(run, worker, reward=1.0)
    found = Manager(args).eval(0)
    assert found["aime"]["rewards"] == [1.0] * 4 and found["aime"]["truncated"] == [False] * 4
    assert [s.tokens for s in found["aime"]["samples"]] == [[5, i, *f.ids_of(3)] for i in (0, 0, 1, 1)]
    with pytest.raises(InvalidSetting, match="--eval"):
        Manager(args_of(db_url, eval_datasets=["none"])).eval(1)


def test_it_says_what_is_missing(store: Store, db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMPLESTORE_DATABASE_URL", raising=False)
    with pytest.raises(NotConfigured, match="SAMPLESTORE_DATABASE_URL"):
        StoreDataSource(args_of(db_url, samplestore_db=None))
    with pytest.raises(RunNotFound, match="samplestore add-prompts"):
        StoreDataSource(args_of(db_url))
    run = f.make_run(store)
    with pytest.raises(InvalidSetting, match="samplestore_timeout_s"):
        StoreDataSource(args_of(db_url, samplestore_timeout_s="soon"))
    with pytest.raises(BatchTimeout, match=r"groups|samples"):
        Manager(args_of(db_url, samplestore_timeout_s=0)).generate(0)
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", db_url)
    monkeypatch.setenv("SAMPLESTORE_RUN", "r")
    assert StoreDataSource(None).run.uuid == run.uuid


def test_slime_contract_tests_call_without_args(store: Store, db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fn(None, 2, a source of their own, evaluation=...), as tests/plugin_contracts of slime does."""
    monkeypatch.setenv("SAMPLESTORE_DATABASE_URL", db_url)
    monkeypatch.setenv("SAMPLESTORE_RUN", "r")
    run = f.make_run(store, prompts=2, stages=["reward"])
    run.add_prompts([{"prompt_ids": [2, 2]}], dataset="held-out", evaluation=True)
    run.start_evaluation("held-out")
    f.finish_all(run, f.register(run), reward=0.75)
    train = generate_rollout(None, 2, object(), evaluation=False)
    assert [s.reward for group in train.samples for s in group] == [0.75] * 4
    held = generate_rollout(None, 2, object(), evaluation=True).data["held-out"]
    assert len(held["rewards"]) == len(held["truncated"]) == len(held["samples"]) == 1
    args = SimpleNamespace()
    observe_all(args, [[SimpleNamespace(status="pending", response_length=0, tokens=[])]], object())
    assert args.processed_group_count == 1
