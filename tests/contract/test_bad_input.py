"""What an attacker or a tired person passes in: a clear error at the door, and nothing changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore import Store
from samplestore.cli import main
from samplestore.errors import (
    InvalidSegment,
    InvalidSetting,
    LeaseLost,
    NotInRun,
    RunNotFound,
    SampleStoreError,
    StoreClosed,
    UnknownWorker,
    WorkerDead,
)
from samplestore.heart import Heart
from samplestore.run import Run
from samplestore.types import RequestInfo
from samplestore.verbs import appends, episodes, samples, stages
from samplestore.writer import Writer

from ..support import factory as f


def test_a_claim_of_another_run_changes_neither(store: Store) -> None:
    mine, other = f.make_run(store, name="mine"), f.make_run(store, name="other")
    worker = f.register(mine)
    claim = mine.claim(worker, 1)[0]
    mine.append(claim, [1, 2], [-0.1, -0.2], 0)
    attacks: list[Any] = [
        lambda: other.append(claim, [3], [-0.1], 0),
        lambda: other.finish(claim),
        lambda: other.release(claim, "why"),
        lambda: other.fail(claim, "why"),
        lambda: other.begin_request(claim, "rid"),
        lambda: other.attach(claim, "x", np.zeros(1)),
    ]
    for attack in attacks:
        with pytest.raises(NotInRun):
            attack()
    with pytest.raises(WorkerDead):
        other.heartbeat(worker)
    other.goodbye(worker)
    mine.append(claim, [3], [-0.3], 0)
    f.sound(mine)
    f.sound(other)


def test_a_claim_put_together_by_hand_is_refused(store: Store) -> None:
    run = f.make_run(store, prompts=2, groups_per_step=2)
    worker = f.register(run)
    first, *_, last = run.claim(worker, 100)
    assert first.group_id != last.group_id
    run.append(first, [1], [-0.1], 0)
    with pytest.raises(NotInRun):
        run.finish(dataclasses.replace(first, group_id=last.group_id))
    f.sound(run)


NO_CLAIMS: list[Any] = [5, None, "x", [], {"sample_id": 1}, RequestInfo(rid="r")]
ON_SAMPLES = {
    "append": ([1], [-0.1], 0), "finish": (), "release": ("why",), "fail": ("why",), "begin_request": ("rid",),
    "attach": ("x", np.zeros(1)),
}  # fmt: skip
ON_STAGES = {
    "score": (1.0,), "score_group": ([1.0],), "unparsed": ("what",), "complete_stage": (), "fail_stage": ("why",),
    "filter_group": (), "release_stage": (),
}  # fmt: skip


def staged(store: Store) -> tuple[Run, Any, Any]:
    """A run, a claim of a sample, and one of a stage."""
    run = f.make_run(store, stages=["reward"])
    worker = f.register(run)
    claim, other = run.claim(worker, 2)
    f.answer(run, other)
    return run, claim, run.claim_stages(worker, 1)[0]


def test_what_is_no_claim_is_told_where_claims_come_from(store: Store) -> None:
    run, claim, stage = staged(store)
    for verbs, wrong, source in (
        (ON_SAMPLES, stage, r"run\.claim\(worker, limit\)"),
        (ON_STAGES, claim, r"run\.claim_stages\(worker, limit\)"),
    ):
        for verb, args in verbs.items():
            for given in [*NO_CLAIMS, wrong, [claim, stage]]:
                shown = repr(given if isinstance(given, int | str | None) else type(given).__name__)
                with pytest.raises(InvalidSetting, match=source) as caught:
                    getattr(run, verb)(given, *args)
                assert f"claim={shown} " in str(caught.value), (verb, given)
    with pytest.raises(InvalidSetting, match="RequestInfo"):
        run.end_request(claim)
    f.sound(run)


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        (appends.append, (0, [1], [-0.1], 0)), (samples.finish, ()), (samples.release, ("why",)),
        (appends.note_abort, ("why",)), (episodes.touch, ()), (stages.release_stage, ()), (stages.score, (1.0,)),
    ],
)  # fmt: skip
def test_what_is_no_claim_fails_alone_in_a_commit_with_others(store: Store, verb: Any, args: tuple[Any, ...]) -> None:
    run, claim, _ = staged(store)
    writer = Writer(run)
    asked = [writer.submit(verb, given, *args) for given in NO_CLAIMS]
    good = writer.submit(appends.append, claim, 0, [1], [-0.1], 0)
    writer.close()
    assert good.result() == 1
    assert {type(one.exception()) for one in asked} == {InvalidSetting}
    f.sound(run)


def test_a_stage_of_another_run_is_not_given_back(store: Store) -> None:
    run, _, stage = staged(store)
    with pytest.raises(NotInRun):
        f.make_run(store, name="other").release_stage(stage)
    run.score(stage, 1.0)


def test_a_worker_that_there_is_none_of_is_not_called_dead(store: Store) -> None:
    run, other = f.make_run(store), f.make_run(store, name="other")
    run.register(name="w")
    of_other = other.register()
    verbs: list[Any] = [
        lambda given: run.claim(given, 1), lambda given: run.claim_stages(given, 1), run.heartbeat,
        lambda given: run.disown(given, []),
    ]  # fmt: skip
    for given in ("w", None, 1.5, True, 0, -1, 2**70, 10**6, of_other):
        for verb in verbs:
            with pytest.raises(UnknownWorker, match=r"no worker .*run\.register\(") as caught:
                verb(given)
            assert "dead" not in str(caught.value) and repr(given) in str(caught.value)
    for given in ("w", 1.5, True, 2**70):
        for verb in (run.goodbye, run.reap):
            with pytest.raises(UnknownWorker):
                verb(given)
    mine = run.register()
    f.kill(run, mine)
    run.reap()
    with pytest.raises(WorkerDead, match="declared dead") as dead:
        run.claim(mine, 1)
    assert not isinstance(dead.value, UnknownWorker)


def test_a_closed_store_says_so(store: Store) -> None:
    run, other = f.make_run(store), Store(store.database)
    claim = run.claim(f.register(run), 1)[0]
    heart = Heart(run, claim.owner, interval_s=0.01)
    store.database.close_connections()  # which is another thing
    f.add(run, claim)
    with store.session() as session:
        session.connection()
    store.close()
    store.close()
    attacks: list[Any] = [
        store.run_names, other.run_names, lambda: store.run("r"), lambda: store.run("new"), lambda: store.frame("runs"),
        lambda: f.add(run, claim), lambda: run.finish(claim), run.register, run.why,
        run.check, lambda: run.current_version, lambda: run.batch(1, timeout=0.0), lambda: run.publish_weights(step=1),
        lambda: look(store),
    ]  # fmt: skip
    for attack in attacks:
        with pytest.raises(StoreClosed, match=r"is closed.*samplestore\.open\(") as caught:
            attack()
        assert repr(store.database.shown_url) in str(caught.value)
    heart._thread.join(30)
    assert not heart._thread.is_alive(), "nobody is there to hear it"
    heart.leave()


def test_what_are_no_ids_is_refused(store: Store) -> None:
    run = f.make_run(store)
    worker = run.register()
    several: list[Any] = [
        lambda given: run.requeue(given, "why"), lambda given: run.drop(given, "why"),
        lambda given: run.expire(given, reason="why"), lambda given: run.abort_inflight("why", samples=given),
        lambda given: run.abort_inflight("why", groups=given), lambda given: run.disown(worker, given),
    ]  # fmt: skip
    one: list[Any] = [run.determinism, run.routed_experts, lambda given: run.array(given, "x"), run.replay]
    bad: list[Any] = ["12", "x", 1.5, {"a": 1}, b"x"]
    for verbs, wrong in (
        (several, [*bad, 5, ["x"], [1.5], [None], [True], [2**70]]),
        (one, [*bad, None, True, 2**70, [1]]),
    ):
        for verb in verbs:
            for given in wrong:
                with pytest.raises(InvalidSetting):
                    verb(given)
    f.sound(run)


def test_numpys_ids_are_ids(store: Store) -> None:
    run = f.make_run(store)
    claim = run.claim(f.register(run), 1)[0]
    f.answer(run, claim)
    assert run.requeue(np.array([claim.sample_id]), "why") == 1
    assert run.drop(np.array([claim.group_id]), "why") == 1


def test_numpys_whole_numbers_are_whole_numbers(store: Store) -> None:
    """What a frame gives goes back in: ids of workers, steps, counts, settings."""
    run = store.run("r", samples_per_prompt=np.int64(1), groups_per_step=np.int32(1), heartbeat_ttl_s=np.float32(30))
    assert store.run("r", samples_per_prompt=1, groups_per_step=1) is not None
    run.add_prompts([{"prompt_ids": [1]}, {"prompt_ids": [2]}], max_prompt_tokens=np.int64(5))
    run.admit()
    worker, one = np.int64(run.register()), np.int64(1)
    run.heartbeat(worker)
    (claim,) = run.claim(worker, one)
    assert type(claim.owner) is int and run.reap(worker).samples == 0
    assert run.disown(worker, [claim.sample_id]) == 0 and run.claim_stages(worker, one) == []
    f.answer(run, claim)
    with run.batch(one, one, max_staleness=one, rank=np.int64(0), world=one, timeout=np.float32(5)) as batch:
        assert type(batch.step) is int
    assert run.replay(one).step == 1 and run.why(one, one) and run.simulate(one)
    assert run.publish_weights(step=one).step == 1 and run.rewind(one).step == 1
    assert run.prune(one).retention_step is not None
    assert len(store.frame("batches", limit=one, step=one)) == 1
    run.goodbye(worker)
    f.sound(run)


def test_what_is_no_list_no_path_and_no_time_is_refused(store: Store, tmp_path: Path) -> None:
    """Each argument that a person types: refused by its name, before anything is done."""
    run, claim, stage = staged(store)
    out, info = str(tmp_path / "out"), run.register()
    bad: dict[str, tuple[Any, list[Any]]] = {
        "steps": (lambda v: run.export(out, steps=v), ["x", "", 5, (1,), (1, 2, 3), {"a": 1}, ("1", 2), (3, 1)]),
        "status": (lambda v: run.export(out, statuses=v), ["completed", 5, [5], ["complete"]]),
        "arrays": (lambda v: run.export(out, arrays=v), ["all", 5, [5], ["\ud800"]]),
        "to": (run.export, [None, 5, "", "a\x00b", "\ud800"]),
        "progress": (lambda v: run.export(out, progress=v), ["x", 5]),
        "rows": (lambda v: run.add_prompts(v), [5, None, "x", {}, np.array(5)]),
        "max_prompt_tokens": (lambda v: run.add_prompts([], max_prompt_tokens=v), ["x", 0, 1.5]),
        "backoff_s": (lambda v: run.fail(claim, "e", backoff_s=v), ["x", None, float("nan"), -1, [1], 2**70]),
        "elapsed_s": (lambda v: run.score(stage, 1.0, None, v), ["x", float("nan"), -1, [1], 2**70]),
        "rid": (lambda v: run.begin_request(claim, v), [None, 5, "", "\ud800", [1]]),
        "engine": (lambda v: run.begin_request(claim, "r", v), [5, "\ud800", [1]]),
        "temperature": (lambda v: run.begin_request(claim, "r", None, v), ["x", [1], 2**70, float("nan")]),
        "names": (lambda v: run.claim_stages(info, 1, v), [5, "reward", [5]]),
        "digests": (run.images, [None, 5, "x", ["\ud800"], [5]]),
        "array": (lambda v: run.complete_stage(stage, array=v), ["x", 5, ("x",)]),
        "path": (lambda v: run.publish_weights(path=v), [5, [1], ""]),
        "dataset": (lambda v: run.start_evaluation(v), [5, [1], None]),
        "wait_s": (lambda v: run.abort_inflight("why", wait_s=v), ["x", float("nan"), [1]]),
        "reason": (lambda v: run.abort_inflight(v), [5, "", None, np.array([1, 2])]),
        "busy_s": (lambda v: samplestore.open(tmp_path / "x.db", busy_s=v), ["x", None, -1, float("nan"), 2**70, [1]]),
        "columns": (lambda v: store.frame("samples", columns=v), [5, [5]]),
    }
    for name, (verb, values) in bad.items():
        for value in values:
            with pytest.raises(InvalidSetting, match=f"^{name}") as caught:
                verb(value)
                pytest.fail(f"{name}={value!r} was taken")
            assert caught.value.allowed
    for attack in (
        lambda: run.fail_stage(stage, "e", backoff_s="x"), lambda: run.fail_stage(stage, "e", elapsed_s="x"),
        lambda: run.describe_first_weights(5), lambda: run.import_samples(5), lambda: run.import_samples("a\x00b"),
        lambda: run.import_samples([], progress="x"), lambda: run.evaluate("x", timeout="x"),
        lambda: run.array(np.array([1, 2]), "x"), lambda: samplestore.open("a\x00b"),
        lambda: samplestore.open("\ud800"),
    ):  # fmt: skip
        with pytest.raises(SampleStoreError):
            attack()
    assert not Path(out).exists() and not (tmp_path / "x.db").exists()
    f.sound(run)


def test_what_a_worker_or_a_stage_tells_must_be_json(store: Store) -> None:
    """Nobody could read it again, or no status be made of it."""
    run, _, stage = staged(store)
    for attack in (
        lambda: run.register(info="x"), lambda: run.register(info={"a": np.ones(1)}), lambda: run.register(name=5),
        lambda: run.score(stage, 1.0, {"a": np.float32(1)}), lambda: run.score(stage, 1.0, {"a": float("nan")}),
        lambda: run.unparsed(stage, "x", {"a": b"x"}), lambda: run.complete_stage(stage, {"a": {1, 2}}),
        lambda: run.claim(run.register(), "x"), lambda: run.claim(run.register(), 1.5),
        lambda: run.claim_stages(run.register(), None), lambda: run.claim_stages(run.register(), 1, "reward"),
    ):  # fmt: skip
        with pytest.raises(InvalidSetting):
            attack()
    run.score(stage, 1.0, {"a": [1, None, "x"]})
    assert run.why() and run.metrics()
    f.sound(run)


def look(store: Store) -> None:
    with store.session() as session:
        session.connection()


def test_finishing_again_with_another_status_is_no_repetition(store: Store) -> None:
    run = f.make_run(store)
    claim = run.claim(f.register(run), 1)[0]
    run.append(claim, [1], [-0.1], 0)
    run.finish(claim)
    run.finish(claim)
    with pytest.raises(LeaseLost):
        run.finish(claim, "truncated")


def test_publishing_an_old_step_again_does_not_move_weights_back(store: Store) -> None:
    run = f.make_run(store)
    first = run.publish_weights(path=Path("/w/1"), step=1)  # a Path is an easy mistake, so it is taken
    second = run.publish_weights(path="/w/2", step=2)
    assert run.publish_weights(path="/w/1", step=1) == first
    assert run.current_version == second.version


@pytest.mark.parametrize("step", [3, -2, 1.5, "2", True])
def test_a_rewind_to_a_step_that_was_never_reached_is_refused(store: Store, step: Any) -> None:
    run = f.make_run(store)
    run.publish_weights(path="/w/1", step=1)
    run.publish_weights(path="/w/2", step=2)
    with pytest.raises(InvalidSetting):
        run.rewind(step)
    assert run.current_version == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"stages": "reward"},
        {"stages": ["a", "a"]},
        {"stages": ["a\x00"]},
        {"max_staleness": 2**70},
        {"samples_per_prompt": 10**20},
        {"sampling": {1: 2}},
        {"heartbeat_ttl_s": float("inf")},
        {"seed": "7"},
    ],
)
def test_settings_that_cannot_be_are_refused(store: Store, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        store.run("bad", **settings)
    assert store.run_names() == []


@pytest.mark.parametrize(
    "options", [{"max_staleness": "0"}, {"max_staleness": -1}, {"advantages": "zz"}, {"stale": "x"}, {"groups": 0}]
)
def test_a_batch_with_options_that_cannot_be_is_refused(store: Store, options: dict[str, Any]) -> None:
    run = f.make_run(store)
    with pytest.raises(InvalidSetting):
        run.batch(**{"step": 1, "groups": 1, "timeout": 0.0, **options})


def test_arguments_of_other_types_are_refused(store: Store) -> None:
    run = f.make_run(store)
    claim = run.claim(f.register(run), 1)[0]
    for attack in (
        lambda: run.register("zzz"),
        lambda: run.publish_weights(step="x"),
        lambda: run.publish_weights(path="a\x00b"),
        lambda: run.publish_weights(label="default"),
        lambda: run.fail(claim, "why", backoff_s=float("inf")),
        lambda: run.end_request(RequestInfo(rid="r", generated_tokens=-5)),
    ):
        with pytest.raises(InvalidSetting):
            attack()
    for logprobs in ({0.5: 1}, np.array([1 + 2j]), "x", b"x"):
        with pytest.raises(InvalidSegment):
            run.append(claim, [1], logprobs, 0)
    with pytest.raises(InvalidSetting):
        run.append(claim, [1], [-0.1], 0, kind="bogus")
    f.sound(run)


def test_a_segment_is_not_counted_to_another_samples_request(store: Store) -> None:
    run = f.make_run(store)
    one, two = run.claim(f.register(run), 2)
    run.begin_request(one, "rid-1")
    run.append(two, [1], [-0.1], 0, rid="rid-1")
    findings = [finding.code for finding in run.check()]
    assert "request_stored" not in findings


def test_check_as_json_shows_sums(store: Store, db_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """PostgreSQL's sums are Decimals, which json refuses: the one command that must not fail when things are wrong."""
    run = f.make_run(store)
    claim = run.claim(f.register(run), 1)[0]
    run.append(claim, [1, 2], [-0.1, -0.2], 0)
    with store.database.writing() as connection:
        connection.exec_driver_sql("UPDATE sample SET n_tokens = 7")
    with pytest.raises(SystemExit) as left:
        main(["check", "--db", db_url, "--json"])
    assert left.value.code == 5
    told = json.loads(capsys.readouterr().out)
    assert "sample_summary" in json.dumps(told)


def test_a_frame_is_of_its_run(store: Store) -> None:
    one, two = f.make_run(store, name="one"), f.make_run(store, name="two")
    claim = one.claim(f.register(one), 1)[0]
    one.append(claim, [1], [-0.1], 0)
    assert len(store.frame("segments", run="one")) == 1
    assert len(store.frame("segments", run=two.name)) == 0
    with pytest.raises(RunNotFound):
        store.frame("segments", run="three")


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(SampleStoreError, match="folder"):
        samplestore.open(str(tmp_path / "missing" / "x.db"))
    assert not (tmp_path / "missing").exists()
