"""Every cause of an empty wait that run.why() knows, each made and then found by its code. And a wait that has no end
says so while it lasts."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore import Store, batches
from samplestore.errors import BatchTimeout, WaitStopped
from samplestore.run import Run
from samplestore.types import EngineFacts
from samplestore.verbs import weights

from ..support import factory as f
from ..support.meter import measured

Made = tuple[Run, dict[str, Any]]  # a run, and the options of the batch that is waited for


def engine(run: Run, url: str = "http://e", label: str = "default") -> None:
    run.transact(lambda tx: weights.see_engine(tx, url, label, facts=EngineFacts()))


def finished(store: Store, **settings: Any) -> tuple[Run, int]:
    run = f.make_run(store, **settings)
    worker = f.register(run)
    f.finish_all(run, worker)
    return run, worker


def failed_engines(store: Store) -> Made:
    run, worker = f.make_run(store), 0
    worker = f.register(run)
    engine(run)
    run.transact(lambda tx: weights.engine_broken(tx, worker, "http://e", "not finite"))
    return run, {}


def run_not_running(store: Store) -> Made:
    run = f.make_run(store)
    run.pause()
    return run, {}


def no_prompts(store: Store) -> Made:
    return store.run("empty"), {}


def no_workers(store: Store) -> Made:
    return f.make_run(store), {}


def no_engine(store: Store) -> Made:
    run = f.make_run(store)
    f.register(run)
    return run, {}


def silent_workers(store: Store) -> Made:
    run = f.make_run(store)
    f.silence(run, f.register(run))
    return run, {}


def worker_error(store: Store) -> Made:
    run = f.make_run(store)
    run.goodbye(f.register(run), "no engine answers")
    return run, {}


def strange_engines(store: Store) -> Made:
    run = f.make_run(store)
    engine(run, label="weights of nobody")
    return run, {}


def too_stale(store: Store) -> Made:
    run, _ = finished(store, stale="skip")
    for step in (0, 1):
        run.publish_weights(step=step)
    return run, {}


def window_held(store: Store) -> Made:
    """Ready groups inside the run's window, and a batch that wants fresher ones."""
    run, _ = finished(store, prompts=9, epochs=None)
    run.publish_weights(step=0)
    return run, {"max_staleness": 0, "stale": "skip"}


def unknown_version(store: Store) -> Made:
    run, worker = f.make_run(store, prompts=1, samples_per_prompt=1), 0
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    f.answer(run, claim, 2, None)
    return run, {}


def regenerated(store: Store) -> Made:
    run = f.make_run(store, prompts=1, samples_per_prompt=1, max_staleness=0, stale="regenerate")
    worker = f.register(run)
    for step in (0, 1):
        (claim,) = run.claim(worker, 1)
        f.add(run, claim, 2, run.current_version)
        run.publish_weights(step=step)
    return run, {}


def unscored(store: Store) -> Made:
    run = f.make_run(store, prompts=1, stages=["reward"])
    for claim in run.claim(f.register(run), 9):
        f.answer(run, claim)
    return run, {}


def unfiltered(store: Store) -> Made:
    return finished(store, group_filters=["custom"])[0], {}


def evaluating(store: Store) -> Made:
    run = f.make_run(store)
    run.add_prompts([{"prompt_ids": [9]}], dataset="test", evaluation=True)
    run.start_evaluation("test")
    return run, {}


def in_flight(store: Store) -> Made:
    run = f.make_run(store)
    run.claim(f.register(run), 1)
    return run, {}


def waiting(store: Store) -> Made:
    run = f.make_run(store)
    f.register(run)
    return run, {}


def backing_off(store: Store) -> Made:
    run = f.make_run(store)
    (claim,) = run.claim(f.register(run), 1)
    run.fail(claim, "x", backoff_s=1000.0)
    return run, {}


def leased(store: Store) -> Made:
    run, _ = finished(store, prompts=2)
    assert f.lease(run, f.register(run, "trainer"), 0) is not None
    return run, {}


def prompts_used_up(store: Store) -> Made:
    run, _ = finished(store, prompts=1)
    return run, {}


def window_too_small(store: Store) -> Made:
    run, _ = finished(store, epochs=None)
    return run, {"groups": 99}


def nothing_admitted(store: Store) -> Made:
    run = f.make_run(store, admit=False)
    f.register(run)
    return run, {}


def nothing_admitted_since(store: Store) -> Made:
    """Some groups are ready, too few, and nobody has admitted others in the place of those that were consumed."""
    run, _ = finished(store, prompts=20)
    trainer = f.register(run, "trainer")
    batch = f.lease(run, trainer, 0, 2)
    assert batch is not None
    f.commit(run, batch, trainer)
    return run, {"groups": 3}


def dropped(store: Store) -> Made:
    run = f.make_run(store)
    run.drop([f.group_id(run, 0)], "unwanted")
    return run, {}


def expired(store: Store) -> Made:
    run, _ = finished(store)
    for step in (0, 1):
        run.publish_weights(step=step)
    return run, {}


def in_flight_limit(store: Store) -> Made:
    run = f.make_run(store, max_inflight_groups=1)
    run.claim(f.register(run), 9)
    return run, {}


def step_over(store: Store) -> Made:
    run, _ = finished(store, prompts=12, mode="sync")
    batch = f.lease(run, f.register(run, "trainer"), 0)
    assert batch is not None
    return run, {}


def curriculum_fails(store: Store) -> Made:
    """It ran on no rows when the run was made."""
    broken = "SELECT id FROM prompt WHERE run_id = :run AND abs(-9223372036854775807 - 1 + position) > 0 LIMIT :n"
    return f.make_run(store, admit=False, curriculum=broken), {}


def left_behind(store: Store) -> Made:
    run = f.make_run(store)
    f.register(run)
    engine(run)
    run.publish_weights(path=None)
    return run, {}


def failing_samples(store: Store) -> Made:
    run = f.make_run(store)
    for claim in run.claim(f.register(run), 3):
        run.fail(claim, f"KeyError of {claim.sample_id}")
    return run, {}


def refused_prompts(store: Store) -> Made:
    run = f.make_run(store)
    (claim,) = run.claim(f.register(run), 1)
    run.fail(claim, "too long", prompt_refused=True)
    return run, {}


def failing_stages(store: Store) -> Made:
    run, worker = finished(store, prompts=1, group_filters=["custom"])
    (claim,) = run.claim_stages(worker, 9)
    run.fail_stage(claim, "ZeroDivisionError in the filter")
    return run, {}


CAUSES: list[Callable[[Store], Made]] = [
    failed_engines, run_not_running, no_prompts, no_workers, no_engine, silent_workers, worker_error,
    strange_engines, too_stale, window_held, unknown_version,
    regenerated, unscored, in_flight, waiting, backing_off, leased, prompts_used_up,
    window_too_small, nothing_admitted, dropped, expired, step_over, in_flight_limit,
    unfiltered, evaluating, curriculum_fails, left_behind, failing_samples, failing_stages, refused_prompts,
]  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_each_cause_is_named(store: Store, cause: Callable[[Store], Made]) -> None:
    run, options = cause(store)
    told = run.why(**options)
    assert cause.__name__ in [code for code, _ in told.reasons], told
    assert told.ready_in_window < told.needed
    with pytest.raises(BatchTimeout) as caught:
        run.batch(step=77, timeout=0, **options)
    assert caught.value.why.reasons, "the error of the wait says it too"
    f.sound(run)


def test_a_window_that_nobody_fills_is_named(store: Store) -> None:
    run, options = nothing_admitted_since(store)
    told = run.why(**options)
    assert [code for code, _ in told.reasons] == ["nothing_admitted"], told
    assert "2 more" in told.reasons[0][1]


def test_every_code_has_a_test() -> None:
    source = Path(samplestore.queries.why.__file__).read_text()
    codes = set(re.findall(r'yield\s*\(?\s*"(\w+)"', source))
    assert codes == {cause.__name__ for cause in CAUSES}


def reason(run: Run, code: str) -> str:
    return dict(run.why().reasons)[code]


def test_engines_that_nobody_brings_to_the_weights_are_named_with_what_to_type(store: Store) -> None:
    run, _ = left_behind(store)
    said = reason(run, "left_behind")
    label = run.weight_versions()[-1].label
    assert "1 of 1 engine does not serve the run's version 1 (http://e serves 0)" in said
    assert said.endswith(f"samplestore engines update --path MODEL --label {label}")
    engine(run, label=label)  # the trainer has loaded them
    assert "left_behind" not in dict(run.why().reasons)
    run.publish_weights(path="/w/2")  # workers will load these
    assert "left_behind" not in dict(run.why().reasons)


def test_an_update_under_way_is_no_treadmill(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    engine(run)
    run.publish_weights(path="/w/1")
    assert run.transact(lambda tx: weights.claim_engine(tx, worker, "http://e")) is not None
    run.publish_weights(path=None)
    assert "left_behind" not in dict(run.why().reasons)


def test_the_newest_error_is_told_bounded_and_harmless(store: Store) -> None:
    run = f.make_run(store, max_attempts=9)
    worker = f.register(run)
    first, second = run.claim(worker, 2)
    run.fail(first, "an older error")
    run.fail(second, "Traceback:\n  of postgresql://u:secret@h/d \x1b[31m" + "x" * 9000 + "\nKeyError: 'label'")
    said = reason(run, "failing_samples")
    assert f"failed 2 times since the last batch; the newest, sample {second.sample_id}: Traceback: of" in said
    assert said.endswith("[shortened]") or said.endswith("KeyError: 'label'")
    assert len(said) < 600 and "secret" not in said and "\x1b" not in said and "\n" not in said
    with pytest.raises(BatchTimeout, match="the newest, sample"):
        run.batch(step=1, timeout=0)


def test_failures_before_the_last_batch_are_old_news(store: Store) -> None:
    run = f.make_run(store, prompts=2)
    worker = f.register(run)
    claim, *others = run.claim(worker, 9)
    run.fail(claim, "once", backoff_s=0.0)
    for other in [*others, *run.claim(worker, 9)]:
        f.answer(run, other)
    f.execute(run, "UPDATE event SET at = at - 10 WHERE kind = 'fail'")
    assert f.lease(run, f.register(run, "trainer"), 0) is not None
    assert "failing_samples" not in dict(run.why().reasons)


def test_dropped_groups_are_told_with_their_reasons(store: Store) -> None:
    """And which prompts were refused among them: both from one look at the groups."""
    run = f.make_run(store, prompts=8, groups_per_step=8)
    run.drop([f.group_id(run, 0), f.group_id(run, 1)], "unwanted")
    assert reason(run, "dropped") == "2 groups were dropped so far; the last ones for: unwanted (2)"
    run.drop([f.group_id(run, 2)], "another")
    worker = f.register(run)
    for why in ("too long", "far too long", "too long"):
        run.fail(run.claim(worker, 1)[0], why, prompt_refused=True)
    again = "UPDATE sample_group SET prompt_id = (SELECT prompt_id FROM sample_group WHERE number = 4) WHERE number = 5"
    f.execute(run, again)
    with measured(run.database) as reading:
        told = dict(run.why().reasons)
    assert told["dropped"].endswith("for: prompt refused: too long (2); unwanted (2); another (1)")
    refused = told["refused_prompts"]
    assert refused.startswith("2 prompts of 8 were refused") and "of group 5: too long. Once" in refused
    assert len([sent for sent, _ in reading.sent if "ORDER BY sample_group.number DESC" in sent]) == 1


def test_a_batch_that_is_there_needs_no_reason(store: Store) -> None:
    run, _ = finished(store)
    assert run.why().reasons == []
    assert str(run.why()).startswith("4 of 2 groups are ready inside the window")


def test_ready_groups_are_counted_by_the_batch_s_own_policy(store: Store) -> None:
    run, _ = finished(store, stale="skip", max_staleness=3)
    run.publish_weights(step=0)
    for options, ready in (
        ({"max_staleness": 0}, 0),
        ({"max_staleness": 0, "stale": "mask"}, 4),
        ({"max_staleness": 1}, 4),
        ({"max_staleness": 0, "staleness_mode": "mean"}, 0),
        ({"max_staleness": 1, "staleness_mode": "newest"}, 4),
    ):
        assert run.why(**options).ready_in_window == ready, options


@pytest.mark.parametrize("stale", ["expire", "regenerate"])
def test_a_narrow_batch_that_may_act_does_not_wait_for_ever(store: Store, stale: str) -> None:
    run, _ = window_held(store)
    trainer, worker = f.register(run, "trainer"), f.register(run)
    for _ in range(2):  # the first lease makes room, the second finds what was generated in it
        batch = f.lease(run, trainer, 5, max_staleness=0, stale=stale)
        run.admit()
        f.finish_all(run, worker)
    assert batch is not None
    f.sound(run)


def test_a_long_wait_tells_the_log_why(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a timeout nobody would ever learn that this batch can't come."""
    run, options = window_held(store)
    monkeypatch.setattr(batches, "TELL_S", 0.0)
    told = threading.Event()  # the wait goes on until it has told, however long a look at the database takes
    monkeypatch.setattr(caplog.handler, "filters", [lambda record: told.set() or True])
    with caplog.at_level(logging.WARNING, "samplestore.batches"), pytest.raises(WaitStopped):
        run.batch(step=7, timeout=60, stop=told, **options)
    assert "step 7 has waited" in caplog.text
    assert "4 ready groups that this batch passes over fill the run's window of 4" in caplog.text


# -- what starves, told by status


def test_status_says_what_starves(store: Store) -> None:
    from samplestore.queries.status import status

    told = {name: status(run.database, run.id)["starving"] for name, (run, _) in (
        ("regenerated", regenerated(store)), ("none", finished(store, name="fine")),
    )}  # fmt: skip
    assert told["none"] == []
    assert told["regenerated"] == [
        "1 group in the window was started afresh 2 times or more, at most 2 times: it is too old whenever it is done"
    ]


def test_status_says_which_prompts_are_lost_to_staleness(store: Store) -> None:
    from samplestore.queries.status import status

    run, _ = expired(store)
    assert status(run.database, run.id)["starving"] == [
        "4 prompts lost all their groups to staleness and were never trained on"
    ]
    many, _ = finished(store, name="epochs", prompts=1, epochs=3, groups_per_step=1, max_staleness=0)
    for step in (0, 1):
        many.publish_weights(step=step)
        assert bool(status(many.database, many.id)["starving"]) == (step == 1), "late once is no starving"
        many.admit()
        assert bool(status(many.database, many.id)["starving"]) == (step == 1), "one more that is begun is no hope"
        f.finish_all(many, f.register(many), version=0)
    kept = f.make_run(store, "skip", stale="skip", prompts=1)
    f.finish_all(kept, f.register(kept))
    for step in (0, 1):
        kept.publish_weights(step=step)
    assert status(kept.database, kept.id)["starving"] == [
        "1 ready group is beyond the window and waits for a batch that takes it"
    ]


def test_status_says_what_was_masked_away(store: Store) -> None:
    from samplestore.queries.status import status

    run, _ = finished(store, stale="mask", prompts=2)
    for step in (0, 1):
        run.publish_weights(step=step)
    with run.batch(step=2, timeout=0):
        pass
    assert status(run.database, run.id)["starving"] == [
        "2 groups of the last 20 batches were delivered beyond the window, their old tokens masked"
    ]
