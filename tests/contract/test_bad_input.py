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
    WorkerDead,
)
from samplestore.types import RequestInfo

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
