"""Stock slime generates: a passive observer records it, or the store serves it its prompts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import BatchTimeout, InvalidSetting
from samplestore.run import Run
from samplestore.slime import StoreDataSource, objects, observe, observe_all, observer
from samplestore.slime.objects import PlainSample
from samplestore.verbs import samples as verbs

from ..support import factory as f
from .standin import Manager, args_of, close_all, process_died, train_data


@pytest.fixture(autouse=True)
def closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(observer, "_observer", observer.Observer())
    yield
    close_all()


def generated(group: int, index: int, n: int = 3, **more: Any) -> PlainSample:
    """A sample as slime's rollout function makes it."""
    return PlainSample.from_dict(
        {
            "group_index": group, "index": index, "prompt": f"p{group}", "tokens": [1, 2, group, *f.ids_of(n)],
            "response": "r", "response_length": n, "label": "4", "reward": 1.0, "loss_mask": None,
            "rollout_log_probs": f.logprobs_of(n), "weight_versions": ["1"], "status": "completed", "metadata": {},
            **more,
        }
    )  # fmt: skip


def observed(args: Any, rollout_id: int, groups: list[list[PlainSample]]) -> None:
    """slime's order: the hook for each sample as it is generated, its reward, all groups at the end."""
    for sample in (s for group in groups for s in group):
        reward, sample.reward = sample.reward, None
        before = dict(sample.__dict__)
        assert observe(args, sample, rollout_id=rollout_id, evaluation=False) is None
        assert sample.__dict__ == before, "it changes nothing"
        sample.reward = reward


def test_what_stock_slime_generates_is_recorded(store: Store, db_url: str) -> None:
    args = args_of(db_url, "watched")
    groups = [[generated(g, 2 * g + i, reward=float(i)) for i in range(2)] for g in range(2)]
    groups[1][1] = generated(1, 3, status="aborted")
    observed(args, 4, groups)
    assert store.run_names() == [], "nothing is written sample by sample"
    observe_all(args, groups, object())
    observe_all(args, groups, object())  # once more, as another hook of the same rollout would
    run = store.existing_run("watched")
    assert (run.settings.samples_per_prompt, run.settings.groups_per_step) == (2, 2)
    assert [r["n_samples"] for r in f.rows(run, "SELECT n_samples FROM sample_group ORDER BY number")] == [2, 1]
    assert [r["reward"] for r in f.rows(run, "SELECT reward FROM sample ORDER BY id")] == [0.0, 1.0, 0.0]
    assert f.states(run) == ["consumed", "consumed"]
    assert [r["version_min"] for r in f.rows(run, "SELECT version_min FROM sample")] == [1, 1, 1], "as slime counts"
    batch = run.replay(4)
    assert batch.samples[0].logprobs.tolist() == f.logprobs_of(3)
    assert batch.samples[0].prompt_ids.tolist() == [1, 2, 0]
    f.sound(run)


def test_the_hook_alone_writes_when_the_next_rollout_begins(store: Store, db_url: str) -> None:
    args = args_of(db_url, "watched")
    observed(args, 0, [[generated(0, 0), generated(0, 1)]])
    assert observe(args, generated(9, 9), rollout_id=0, evaluation=True) is None
    observed(args, 1, [[generated(1, 2), generated(1, 3)]])
    run = store.existing_run("watched")
    assert f.states(run) == ["consumed"]
    observer.flush()
    assert f.states(run) == ["consumed"] * 2
    steps = f.rows(run, "SELECT step, n_samples FROM batch ORDER BY id")
    assert [(r["step"], r["n_samples"]) for r in steps] == [(0, 2), (1, 2)], "none of the evaluation's"


def test_nothing_raises_into_slime(store: Store, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
    args = args_of("sqlite:////nowhere/at/all.db")
    for sample in (generated(0, 0), SimpleNamespace()):
        observe(args, sample, rollout_id=0, evaluation=False)
    observe_all(args, [[generated(0, 0)]], None)
    observe_all(args, [[generated(1, 0)]], None)
    told = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == len({r.getMessage() for r in told}) and told, "once for each kind of error"
    with pytest.raises(Exception, match="nowhere"):
        observe_all(args_of("sqlite:////nowhere/at/all.db", samplestore_strict=True), [[generated(0, 0)]], None)


def test_what_breaks_a_promise_is_left_out(store: Store, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
    args = args_of(db_url, "watched", reward_key="acc")
    bad = generated(0, 0, rollout_log_probs=[-1.0])
    odd = generated(1, 1, metadata={"x": object(), "y": 1}, reward={"acc": 0.5, "len": 3.0}, remove_sample=True)
    fanned = [[generated(2, 2), generated(2, 2, tokens=[7, 7, *f.ids_of(2)], response_length=2,
                                          rollout_log_probs=f.logprobs_of(2))]]  # fmt: skip
    observe_all(args, [[bad], [odd], fanned], None)
    run = store.existing_run("watched")
    assert "rollout_log_probs" in caplog.text
    assert len(f.states(run)) == 3, "a sub-agent with a prompt of its own is a group"
    first = f.rows(run, "SELECT reward, removed FROM sample ORDER BY id")[0]
    assert (first["reward"], first["removed"]) == (0.5, "slime")


def slime_generates(groups: list[list[Any]], n: int, status: str = "completed", version: str = "1") -> None:
    """As slime's generate does: finished samples stay as they are, the engine goes on from what others have."""
    for sample in (s for group in groups for s in group if s.status.value in ("pending", "aborted")):
        known = sample.response_length
        assert bool(known) == bool(sample.response), "slime sees by the text that there is something to go on from"
        sample.tokens = list(sample.tokens) or [1, 2, int(sample.label)]
        sample.tokens += f.ids_of(known + n)[known:]
        sample.rollout_log_probs = [*(sample.rollout_log_probs or []), *f.logprobs_of(known + n)[known:]]
        sample.response, sample.response_length = "text", known + n
        sample.weight_versions = [*sample.weight_versions, version]
        sample.status = type(sample.status)(status)
        sample.reward = 1.0 if status == "completed" else None


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    monkeypatch.setattr(objects, "tokenizer_of", lambda args: tokenizer)


def test_slime_generates_what_the_store_serves(store: Store, db_url: str, texts: None) -> None:
    run = f.make_run(store, prompts=6, stages=["reward"], max_staleness=3)
    source = StoreDataSource(args_of(db_url))
    source.load(-1)
    groups = source.get_samples(2)
    assert [[(s.index, s.status.value, s.tokens, s.response_length) for s in g] for g in groups] == [
        [(2 * g + i, "pending", [], 0) for i in range(2)] for g in range(2)
    ]
    slime_generates(groups, 4)
    late = source.get_samples(1)
    slime_generates(late, 2, status="aborted")
    source.add_samples(late)
    observe_all(source.args, groups, source.get_samples)  # slime gives this method in place of the source
    assert f.states(run)[:3] == ["leased", "leased", "open"]
    again = source.get_samples(1)
    assert [(s.status.value, s.response_length, s.rollout_log_probs) for s in again[0]] == [
        ("aborted", 2, f.logprobs_of(2))
    ] * 2
    slime_generates(again, 3, version="2")
    source.add_samples(again)  # more than the rollout needed: finished, and given again as it is
    again = source.get_samples(1)
    assert [(s.index, s.status.value) for s in again[0]] == [(4, "completed"), (5, "completed")]
    observe_all(source.args, again, source)
    source.save(0)
    assert f.states(run)[:3] == ["consumed", "consumed", "leased"], "save(0) is about rollout 0"
    assert [s["n_tokens"] for s in f.segments(run, 5)] == [2, 3]
    assert [(v.label, v.step) for v in run.weight_versions()][1:] == [
        (f"slime-{source.served.owner}-{n}", s) for n, s in (("1", None), ("2", 0))
    ]
    process_died()
    # rollout 1 was finished and not saved: it is given again as it is, and slime does not generate it again
    after = StoreDataSource(source.args)
    after.load(0)
    given = after.get_samples(2)
    assert [[s.status.value for s in g] for g in given] == [["completed"] * 2, ["pending"] * 2]
    assert [s.group_index for s in given[0]] == [2, 2] and given[0][0].reward == 1.0
    slime_generates(given, 4)
    observe_all(after.args, given, after)
    after.save(1)
    assert f.states(run)[:4] == ["consumed"] * 4
    f.sound(run)


def test_what_slime_may_not_bring(store: Store, db_url: str, texts: None, caplog: pytest.LogCaptureFixture) -> None:
    run = f.make_run(store, prompts=2, stages=["reward"])
    source = StoreDataSource(args_of(db_url, samplestore_timeout_s=0))
    (other, cut), *_ = source.get_samples(1)
    slime_generates([[other, cut]], 3)
    other.tokens = [9, 9, 9, *f.ids_of(3)]
    cut.rollout_log_probs = cut.rollout_log_probs[:2]
    source.add_samples([[other, cut]])
    assert "same tokenizer" in caplog.text and "2 log-probs" in caplog.text
    assert [r["failures"] for r in f.rows(run, "SELECT failures FROM sample WHERE group_id = 1 ORDER BY id")] == [1, 1]
    with pytest.raises(InvalidSetting, match="get_samples"):
        source.add_samples([[generated(7, 7, status="aborted")]])
    source.add_samples([[generated(7, 7), generated(7, 8)]])
    assert f.states(run)[-1] == "ready", "finished elsewhere: recorded as such"
    with pytest.raises(InvalidSetting, match="one reward itself"):
        f.make_run(store, "two", stages=["reward", "teacher"])
        StoreDataSource(args_of(db_url, "two")).get_samples(1)
    f.kill(run, source.served.owner)
    assert source.get_samples(2), "declared dead: it registers anew"
    f.make_run(store, "none", prompts=0)
    with pytest.raises(BatchTimeout):
        StoreDataSource(args_of(db_url, "none", samplestore_timeout_s=0)).get_samples(1)
    f.sound(run)


@pytest.mark.parametrize(
    "odd",
    [{"tokens": 3.5}, {"tokens": None}, {"response_length": "x"}, {"response_length": float("nan")},
     {"response_length": -2}, {"response_length": [1]}, {"loss_mask": "x"}, {"rollout_log_probs": {}}],
)  # fmt: skip
def test_a_sample_that_a_function_made_something_else_of_is_generated_again(
    store: Store, db_url: str, texts: None, caplog: pytest.LogCaptureFixture, odd: dict[str, Any]
) -> None:
    run = f.make_run(store, prompts=1, stages=["reward"])
    source = StoreDataSource(args_of(db_url))
    (group,) = source.get_samples(1)
    slime_generates([group], 3)
    for name, value in odd.items():
        setattr(group[0], name, value)
    observe_all(source.args, [group], source)
    assert "is generated again" in caplog.text
    found = f.rows(run, "SELECT status, failures, owner FROM sample ORDER BY id")
    assert found == [
        {"status": "pending", "failures": 1, "owner": None}, {"status": "completed", "failures": 0, "owner": None},
    ]  # fmt: skip
    f.sound(run)


def test_groups_that_were_stopped_in_the_middle_come_back_whole(store: Store, db_url: str, texts: None) -> None:
    """One sample of each group had got tokens when slime stopped, the others still waited for a request."""
    f.make_run(store, prompts=8, samples_per_prompt=4, stages=["reward"], max_staleness=3)
    source = StoreDataSource(args_of(db_url, samplestore_timeout_s=0))
    stopped = source.get_samples(4)
    for first, *others in stopped:
        slime_generates([[first]], 3, status="aborted")
        for sample in others:
            sample.status = type(sample.status)("aborted")
    source.add_samples(stopped)
    again = [source.get_samples(n) for n in (1, 4)]
    assert [len(groups) for groups in again] == [1, 4]
    begun = [[s.response_length for s in group] for groups in again for group in groups]
    assert begun == [[3, 0, 0, 0]] * 4 + [[0] * 4]


def test_slime_asks_for_more_than_the_window(store: Store, db_url: str, texts: None) -> None:
    """Its dynamic filter drops group after group: what it dropped is in its hands, and of the window, until the end."""
    run = f.make_run(store, prompts=30, groups_per_step=2, max_staleness=1, stages=["reward"])
    source = StoreDataSource(args_of(db_url, samplestore_timeout_s=0))
    rollout = []
    for _ in range(5):
        rollout += source.get_samples(2)
        slime_generates(rollout[-2:], 3)
    assert f.states(run) == ["open"] * 10, "the window, and as many as were asked for beyond it"
    observe_all(source.args, rollout, source)
    assert f.states(run) == ["leased"] * 10
    assert [len(source.get_samples(9))] == [9]
    f.sound(run)


def test_what_slime_has_left_out_is_left_out_of_a_replay(store: Store, db_url: str, texts: None) -> None:
    run = f.make_run(store, prompts=4, stages=["reward"], max_staleness=3)
    source = StoreDataSource(args_of(db_url))
    groups = source.get_samples(1)
    slime_generates(groups, 3)
    source.add_samples(groups)
    groups = source.get_samples(2)  # the first is finished already
    slime_generates(groups, 3)
    groups[0][1].remove_sample = groups[1][0].remove_sample = True
    observe_all(source.args, groups, source)
    source.save(0)
    assert [s.removed for s in run.replay(0).samples] == [None, "slime", "slime", None]
    assert run.replay(0).arrays()["loss_mask"].sum() == 6


def test_rewards_stand_under_their_key(store: Store, db_url: str, texts: None) -> None:
    run = f.make_run(store, prompts=4, stages=["reward"], max_staleness=3)
    args = args_of(db_url, reward_key="acc")
    source = StoreDataSource(args)
    (group,) = source.get_samples(1)
    slime_generates([group], 3)
    for sample in group:
        sample.reward = {"acc": 0.5, "format": 1.0}
    source.add_samples([group])
    (group,) = source.get_samples(1)
    assert train_data(args, group)["rewards"] == [0.5, 0.5], "given again"
    observe_all(args, [group], source)
    f.finish_all(run, f.register(run))
    assert Manager(args).generate(1)["rewards"] == [1.0] * 4, "generated by the store's workers"


def test_what_a_generate_function_made_itself(
    store: Store, db_url: str, texts: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Samples of its own are of the rollout; of several that it made of one, one is recorded, and the log says so."""
    run = f.make_run(store, prompts=4, stages=["reward"], max_staleness=3)
    source = StoreDataSource(args_of(db_url))
    (group,) = source.get_samples(1)
    slime_generates([group], 3)
    fanned = [[copy.deepcopy(sample), sample] for sample in group]
    own = [generated(7, 7), generated(7, 8)]
    observe_all(source.args, [fanned, own], source)
    assert "2 samples are not recorded" in caplog.text
    assert f.states(run).count("leased") == 2
    source.save(0)
    prompts = [s.prompt_ids.tolist() for s in run.replay(0).samples]
    assert prompts == [[1, 2, int(group[0].label)]] * 2 + [[1, 2, 7]] * 2
    f.sound(run)


def labels(run: Run) -> list[str]:
    return [v.label.rsplit("-", 1)[1] for v in run.weight_versions()[1:]]


def test_weights_are_numbered_in_the_order_of_the_engine(store: Store, db_url: str, texts: None) -> None:
    run = f.make_run(store, prompts=9, stages=["reward"], max_staleness=9)
    source = StoreDataSource(args_of(db_url))
    for versions in (["10", "9"], ["12", "11"], ["9", "13"]):
        groups = source.get_samples(2)
        for group, version in zip(groups, versions, strict=True):
            slime_generates([group], 3, version=version)
        source.ended(groups)
    late = source.get_samples(1)
    slime_generates(late, 3, version="8")
    source.add_samples(late)
    assert labels(run) == ["9", "10", "11", "12", "13"], "8 came too late: it is not newer than 13"
    of_group = f.rows(run, "SELECT DISTINCT group_id, version_min FROM sample WHERE n_tokens > 0 ORDER BY group_id")
    assert [r["version_min"] for r in of_group] == [2, 1, 4, 3, 1, 5, None]
    assert [v.step for v in run.weight_versions()[1:]] == [None, None, None, 0, 1]
    f.sound(run)


def test_an_engine_that_reports_nothing_has_no_version(store: Store, db_url: str, texts: None) -> None:
    """What stands in weight_versions of a resumed sample is the store's own number, and no label of slime's engine."""
    run = f.make_run(store, prompts=1, stages=["reward"], max_staleness=9)
    source = StoreDataSource(args_of(db_url))
    first = source.get_samples(1)
    slime_generates(first, 2, status="aborted", version="5")
    source.add_samples(first)
    again = source.get_samples(1)
    assert [s.weight_versions for s in again[0]] == [["1"]] * 2
    slime_generates(again, 3)
    for sample in again[0]:
        sample.weight_versions = sample.weight_versions[:1]
    source.add_samples(again)
    assert labels(run) == ["5"]
    assert [s["version_min"] for s in f.segments(run, 1)] == [1, None]


def test_a_write_that_failed_is_made_again(
    store: Store, db_url: str, texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f.make_run(store, prompts=4, stages=["reward"], max_staleness=9)
    source = StoreDataSource(args_of(db_url))
    returned, ended = source.get_samples(1), source.get_samples(1)
    slime_generates([*returned, *ended], 3)
    write, calls = verbs.finish, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 4 == 2:  # the second of two samples
            raise ConnectionError("the database is away")
        return write(*args)

    monkeypatch.setattr(verbs, "finish", failing)
    for back in (lambda: source.add_samples(returned), lambda: source.ended(ended)):
        with pytest.raises(ConnectionError):
            back()
        back()
        calls.append(None)
    assert f.states(run)[:2] == ["ready", "leased"] and source.rollout == 1
    assert f.value(run, "SELECT count(*) FROM sample WHERE status = 'completed'") == 4
    f.sound(run)


def test_a_trainer_that_was_away_ends_its_rollout(store: Store, db_url: str, texts: None) -> None:
    run = f.make_run(store, prompts=4, stages=["reward"], max_staleness=9)
    source = StoreDataSource(args_of(db_url))
    source.load(-1)
    groups = source.get_samples(2)
    slime_generates(groups, 3)
    (trainer,) = f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer'")
    f.kill(run, trainer["id"])
    source.ended(groups)
    assert f.states(run)[:2] == ["leased"] * 2
    source.save(0)
    assert f.states(run)[:2] == ["consumed"] * 2
    f.sound(run)


def test_an_observer_that_was_away_goes_on(store: Store, db_url: str) -> None:
    args = args_of(db_url, "watched", samplestore_strict=True)
    for rollout_id in range(2):
        groups = [[generated(rollout_id, 2 * rollout_id + i) for i in range(2)]]
        observed(args, rollout_id, groups)
        observe_all(args, groups, object())
        run = store.existing_run("watched")
        for trainer in f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer' AND state = 'live'"):
            f.kill(run, trainer["id"])
    assert f.states(run) == ["consumed"] * 2


ODD: list[dict[str, Any]] = [
    {"rollout_log_probs": [None, -1.0, -1.0]}, {"weight_versions": 5}, {"loss_mask": [1, None, 1]}, {"label": "\ud800"},
    {"response_length": "x"}, {"tokens": 7}, {"tokens": [1, 2, 2**40, 4, 5, 6]}, {"prompt": "\ud800"},
    {"metadata": {"k": "\ud800"}}, {"metadata": [1]}, {"group_index": [1]}, {"teacher_log_probs": ["x"] * 3},
]  # fmt: skip


def test_one_odd_sample_does_not_hide_the_others(store: Store, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
    args = args_of(db_url, "watched", samplestore_strict=True)
    caplog.set_level(logging.INFO, "samplestore.slime")
    given = [[generated(n, n, **odd)] for n, odd in enumerate(ODD)]
    rest = [[generated(90, 90)], [generated(91, 91, status="aborted"), generated(91, 92, response_length=0)]]
    observe_all(args, [*given, [SimpleNamespace()], *rest], object())
    run = store.existing_run("watched")
    assert f.states(run)[-1] == "ready" and 1 <= len(f.states(run)) < len(ODD)
    assert caplog.text.count("not recorded, of rollout") >= 8
    assert "1 aborted" in caplog.text and "1 without a response" in caplog.text
    f.sound(run)


def test_identical_groups_are_groups_of_their_own(store: Store, db_url: str) -> None:
    """A question that the model answers in the same words is another group each time; a repetition is none."""
    args = args_of(db_url, "watched", samplestore_strict=True)

    def group(index: int | None) -> list[PlainSample]:
        made = [generated(0, i) for i in range(2)]
        for sample in made:
            sample.group_index = index
        return made

    for rollout_id, indices in enumerate([(0, 1), (2, 3), (2, None)]):
        groups = [group(index) for index in indices]
        observed(args, rollout_id, groups)
        for _ in range(2):
            observe_all(args, groups, object())
    run = store.existing_run("watched")
    assert [r["n_groups"] for r in f.rows(run, "SELECT n_groups FROM batch ORDER BY step")] == [2, 2, 3]
    f.sound(run)


def test_a_release_that_fails_does_not_hide_why_it_was_needed(
    store: Store, db_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other claims are given back all the same."""
    run = f.make_run(store, prompts=2, stages=["reward"])
    source = StoreDataSource(args_of(db_url))
    assert source.served is not None
    served, release, tried = source.served, Run.release, []

    def broken(*_: Any) -> Any:
        raise RuntimeError("slime has no such field")

    def first_fails(self: Run, claim: Any, reason: str) -> None:
        tried.append(claim.sample_id)
        if len(tried) == 1:
            raise OSError("the database is away")
        release(self, claim, reason)

    monkeypatch.setattr(served, "_sample", broken)
    monkeypatch.setattr(Run, "release", first_fails)
    with pytest.raises(RuntimeError, match="slime has no such field") as raised:
        source.get_samples(2)
    assert raised.value.__notes__ == [f"sample {tried[0]} could not be given back: OSError: the database is away"]
    assert len(tried) == 4
    held = f.rows(run, "SELECT id FROM sample WHERE owner IS NOT NULL")
    assert [row["id"] for row in held] == tried[:1]
