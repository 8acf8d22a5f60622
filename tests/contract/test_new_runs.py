"""What is refused when a run is made: settings that do nothing where they stand, and filters that keep no group. And
names of slime's are answered with ours."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from samplestore import Store
from samplestore.cli.add_prompts import parse_settings
from samplestore.errors import InvalidSetting
from samplestore.slime import rollout as slime_rollout
from samplestore.workers import limits, routers
from samplestore.workers.cpu_engine import params

from ..support import factory as f


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"over_sampling_batch_size": 16}, "None in mode async, or mode='partial'"),
        ({"mode": "sync", "max_aborts": 2}, "None in mode sync, or mode='partial'"),
        ({"on_straggler": "drop"}, "group_deadline_s"),
        ({"group_filters": ["reward_std"], "samples_per_prompt": 1}, "samples_per_prompt of at least 2"),
        ({"group_filters": ["reward_std:0.1"], "samples_per_prompt": 1}, "samples_per_prompt of at least 2"),
        ({"group_filters": ["reward_std:-1"]}, "a MIN of 0 or more"),
        ({"group_filters": ["length:0:0"]}, "1 or more, can lie in"),
        ({"sample_filters": ["length:3.2:3.8"]}, "1 or more, can lie in"),
        ({"group_filters": ["length:1:5", "length:6:9"]}, "none passes"),
        ({"group_filters": ["reward:0:0.3", "reward:0.5:1"]}, "none passes"),
        ({"group_filters": ["reward:0.5:0.3"]}, "reward:LOW:HIGH"),
    ],
)
def test_what_can_do_nothing_is_refused(store: Store, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        store.run("r", **settings)
    assert said in str(caught.value) and store.run_names() == []


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "partial", "over_sampling_batch_size": 16, "max_aborts": 2, "max_staleness": 2},
        {"on_straggler": "drop", "group_deadline_s": 60.0},
        {"group_filters": ["reward_std", "length:1:9", "length:9:12", "reward:1:1"], "stages": ["reward"]},
    ],
)
def test_what_can_do_something_is_not(store: Store, settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "samplestore.store"):
        store.run("r", **settings)
    assert not caplog.records


def test_what_is_hardly_meant_is_said_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    given = {"group_filters": ["reward_std", "length:90:200"], "max_new_tokens": 64}
    with caplog.at_level(logging.WARNING, "samplestore.store"):
        store.run("r", **given)
        store.run("r", **given)
    long, unscored = (record.getMessage() for record in caplog.records)
    assert "length:90:200 wants more tokens than max_new_tokens=64" in long
    assert "no stage that gives some" in unscored


def test_what_sglang_does_not_know_is_told_with_what_is_meant(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """And taken: engines gain names."""
    odd = {"temprature": 0.5, "max_tokens": 9, "max_new_tokens": 9, "top-p": 0.9, "new_in_2030": 1, "seed": 3}
    said = [
        "Did you mean temperature?", "Did you mean max_new_tokens beside sampling?", "give it beside sampling",
        "Did you mean top_p?", "SGLang is not known to take", "Did you mean sampling_seed?",
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING, "samplestore"):
        run = store.run("r", sampling=odd)
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == len(said) and all(part in text for part, text in zip(said, told, strict=True)), told
        assert run.settings.sampling == odd and "Did you mean" not in told[4]
        caplog.clear()
        run.add_prompts([{"prompt_ids": [1]}], dataset="test", evaluation=True)
        run.start_evaluation("test", sampling={"temprature": 0.0})
        with pytest.raises(InvalidSetting):
            run.start_evaluation("test", sampling="temprature")
    (told_again,) = caplog.records
    assert "Did you mean temperature?" in told_again.getMessage()


def test_nothing_is_said_of_what_is_sent_anywhere_here(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    known = {
        *params._KNOWN,
        *params._NEUTRAL,
        *routers.PASSES_SAMPLING,
        *routers.MORE_SAMPLING,
        *slime_rollout.SAMPLING,
    }
    known |= {*limits.GRAMMARS, *limits.PER_REQUEST}
    with caplog.at_level(logging.WARNING, "samplestore"):
        store.run("r", sampling=dict.fromkeys(sorted(known - {"max_new_tokens"}), 1))
    assert not caplog.records


def test_a_stored_run_that_would_be_refused_today_is_still_opened(store: Store) -> None:
    run = f.make_run(store)
    settings = json.dumps({**run.settings.as_json(), "over_sampling_batch_size": 4})
    f.execute(run, "UPDATE run SET settings = :s WHERE id = :r", s=settings, r=run.id)
    assert store.run("r").settings.over_sampling_batch_size == 4


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("n_samples_per_prompt", "samples_per_prompt"), ("rollout_batch_size", "groups_per_step"),
        ("num_epoch", "epochs"), ("rollout_max_response_len", "max_new_tokens"), ("max_stalenes", "max_staleness"),
    ],
)  # fmt: skip
def test_names_of_slime_and_typing_errors_are_understood(store: Store, given: str, ours: str) -> None:
    with pytest.raises(InvalidSetting, match=f"use {ours}, if that is meant"):
        store.run("r", **{given: 4})


@pytest.mark.parametrize(
    ("given", "python", "typed"),
    [
        ("sampling.temperature", 'sampling={"temperature": ...}', """sampling='{"temperature": VALUE}'"""),
        ("top_p", 'sampling={"top_p": ...}', """sampling='{"top_p": VALUE}'"""),
        ("rollout_temperature", 'sampling={"temperature": ...}', """sampling='{"temperature": VALUE}'"""),
        ("sampling.max_new_tokens", "max_new_tokens", "max_new_tokens=VALUE"),
        ("reward_weights.format", 'reward_weights={"format": ...}', """reward_weights='{"format": VALUE}'"""),
        ("samplign", "sampling", "sampling=VALUE"),
        ("n", "samples_per_prompt", "samples_per_prompt=VALUE"),
    ],
)
def test_what_is_part_of_an_object_is_given_with_it(store: Store, given: str, python: str, typed: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        store.run("r", **{given: 1.0})
    assert f"; use {python}, if that is meant" in str(caught.value)
    with pytest.raises(InvalidSetting) as caught:
        parse_settings([f"{given}=1"])
    assert f"--set='{given}=1' is not allowed; use --set {typed}, if that is meant" in str(caught.value)


@pytest.mark.parametrize(
    ("slimes", "said"), [("global_batch_size", r"run\.batch\(step, groups=N\)"), ("max-tokens-per-gpu", "datasets")]
)
def test_what_the_trainer_says_is_no_setting(store: Store, slimes: str, said: str) -> None:
    """Similar names of settings would lead astray."""
    with pytest.raises(InvalidSetting, match=f"use .*{said}.*, in the trainer: it is no setting"):
        store.run("r", **{slimes: 1})


def test_a_name_like_no_other_is_not_guessed_at(store: Store) -> None:
    with pytest.raises(InvalidSetting, match="use one of: "):
        store.run("r", zzzz=4)
