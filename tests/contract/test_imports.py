"""Precomputed samples: all of a file or nothing, once, and from then on samples like others."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting, MissingLogprobs
from samplestore.portable.imports import InvalidImport
from samplestore.promptfiles import PromptFileError
from samplestore.run import Run

from ..support import factory as f

PROMPT = {"prompt_ids": [1, 2, 3], "label": "4"}
ONE = {**PROMPT, "response_ids": [7, 8, 9], "log_probs": [-0.5, -1.0, -1.5]}


def run_of(store: Store, **settings: Any) -> Run:
    return store.run("r", **{"samples_per_prompt": 1, "groups_per_step": 1, "max_staleness": 0, **settings})


def row(i: int, **more: Any) -> dict[str, Any]:
    return {**ONE, "prompt_ids": [1, 2, i], **more}


def test_a_finished_sample_comes_in(store: Store) -> None:
    run = run_of(store)
    teacher = [-0.25, -0.5, -0.75]
    given = [{**ONE, "teacher_log_probs": teacher, "loss_mask": [1, 0, 1], "status": "truncated"}]
    assert (run.import_samples(given).added, run.import_samples(given).existing) == (1, 1)
    (sample,) = f.rows(run, "SELECT * FROM sample")
    told = ("status", "n_tokens", "n_loss_tokens", "n_segments", "finish_reason", "n_without_logprob", "logprob_sum")
    assert [sample[k] for k in told] == ["truncated", 3, 2, 3, "length", 0, -2.0]
    assert f.states(run) == ["ready"]
    assert run.claim(f.register(run), 9) == [], "nothing is left to generate"
    with run.batch(step=0, groups=1) as batch:
        arrays = batch.arrays(named=["teacher_log_probs"])
    assert arrays["tokens"].tolist() == [1, 2, 3, 7, 8, 9]
    assert arrays["loss_mask"].tolist() == [0, 0, 0, 1, 0, 1]
    assert arrays["rollout_log_probs"].tolist() == [0, 0, 0, -0.5, -1.0, -1.5]
    assert arrays["weight_versions"].tolist() == [-1] * 6
    assert arrays["teacher_log_probs"].tolist() == [0, 0, 0, *teacher]
    assert f.states(run) == ["consumed"]
    f.sound(run)


def test_a_list_of_samples_is_a_group_with_its_rewards(store: Store) -> None:
    run = run_of(store, samples_per_prompt=8, stages=["reward"], reward_weights={"reward": 2.0})
    samples = [{"response_ids": [5, 6], "log_probs": [-0.5, -0.5], "reward": float(i)} for i in range(4)]
    run.import_samples([{**PROMPT, "samples": samples}])
    (group,) = f.rows(run, "SELECT * FROM sample_group")
    assert (group["state"], group["n_samples"], group["reward_mean"]) == ("ready", 4, 3.0)
    assert {r["outcome"] for r in f.rows(run, "SELECT outcome FROM stage")} == {"ok"}
    f.sound(run)


def test_what_it_does_not_bring_is_scored_as_of_others(store: Store) -> None:
    run = run_of(store, stages=["reward", "teacher"], group_stages=["rank"], group_filters=["reward:0.5:1"])
    run.import_samples([row(i) for i in range(2)])
    assert f.states(run) == ["scoring", "scoring"]
    worker = f.register(run)
    rewards = iter([0.0, 1.0])
    while stages := run.claim_stages(worker, 9):
        for stage in stages:
            if stage.name == "teacher":
                run.complete_stage(stage, array=("teacher_log_probs", np.full(3, -0.5, np.float32)))
            elif stage.name == "reward":
                run.score(stage, next(rewards))
            elif stage.name == "rank":
                run.score_group(stage, [0.0])
            else:
                run.filter_group(stage, "reward" if stage.members[0].reward == 0.0 else None)
    assert f.states(run) == ["dropped", "ready"]
    f.sound(run)


def test_samples_without_log_probs_are_flagged_and_refused_where_they_are_needed(store: Store) -> None:
    run = run_of(store)
    run.import_samples([{**PROMPT, "tokens": [7, 8], "loss_mask": [1, 0]}])
    assert f.value(run, "SELECT n_without_logprob FROM sample") == 1
    with pytest.raises(MissingLogprobs, match="need_logprobs=False"), run.batch(step=0, groups=1) as batch:
        batch.arrays()
    assert f.states(run) == ["ready"], "given back"
    with run.batch(step=0, groups=1, need_logprobs=False) as batch:
        assert batch.arrays()["loss_mask"].sum() == 1
    f.sound(run)


def test_imported_groups_are_behind_no_weights_and_fill_no_window(store: Store) -> None:
    run = run_of(store, stale="expire")
    run.import_samples([row(i) for i in range(3)])
    run.add_prompts([{"prompt_ids": [9, 9]}])
    assert run.admit() == 1, "the window is free for what is generated here"
    for step in range(3):
        run.publish_weights(step=step)
    assert f.states(run) == ["ready", "ready", "ready", "open"]
    for step, mode in enumerate(("oldest", "newest", "mean")):
        with run.batch(step=step, groups=1, staleness_mode=mode):
            pass
    assert f.states(run) == ["consumed"] * 3 + ["open"]
    assert [r["staleness"] for r in f.rows(run, "SELECT staleness FROM batch_group")] == [0, 0, 0]
    f.sound(run)


def test_the_prompts_of_imports_are_never_served(store: Store) -> None:
    run = run_of(store)
    run.import_samples([row(i) for i in range(3)])
    assert run.admit() == 0
    with pytest.raises(InvalidSetting, match="import"):
        run.add_prompts([PROMPT], dataset="imported")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_ids": []}, "response_ids", "no tokens"),
    ({"response_ids": [1.5]}, "response_ids", "whole numbers"),
    ({"response_ids": [-1]}, "response_ids", "-1 at position 0"),
    ({"response_ids": [2**31]}, "response_ids", "position 0"),
    ({"reward": 10**400}, "reward", "must be a finite number"),
    ({"response_ids": None}, "response_ids", "is missing"),
    ({"response_ids": [1], "tokens": [1]}, "tokens", "stands beside"),
    ({"log_probs": [-0.5]}, "log_probs", "3 tokens but 1 log-prob"),
    ({"log_probs": [-0.5, None, -0.5]}, "log_probs", "position 1"),
    ({"log_probs": [-0.5, math.nan, -0.5]}, "log_probs", "position 1"),
    ({"loss_mask": [1, 1]}, "loss_mask", "2 values for 3 tokens"),
    ({"loss_mask": [1, 2, 0]}, "loss_mask", "0 or 1"),
    ({"teacher_log_probs": [-0.5]}, "teacher_log_probs", "1 row, expected 3"),
    ({"teacher_log_probs": ["a", "b", "c"]}, "teacher_log_probs", "teacher_log_probs"),
    ({"teacher_log_probs": [-0.5, -math.inf, 0.0]}, "teacher_log_probs", "[1]"),
    ({"arrays": {"loss_mask": [1, 1, 1]}}, "name", "its own tensor"),
    ({"arrays": {"mine": [1, 2]}}, "mine", "2 rows, expected 3"),
    ({"arrays": [1]}, "arrays", "must be an object"),
    ({"reward": math.inf}, "reward", "finite"),
    ({"reward": True}, "reward", "finite"),
    ({"status": "aborted"}, "status", "completed or truncated"),
    ({"prompt_ids": []}, "prompt_ids", "no tokens"),
    ({"typo": 1}, "typo", "is not one of"),
    ({"samples": [{"response_ids": [1]}]}, "response_ids", "beside samples"),
]


@pytest.mark.parametrize(("change", "field", "said"), BAD)
def test_a_row_that_is_refused_is_named(
    store: Store, tmp_path: Path, change: dict[str, Any], field: str, said: str
) -> None:
    run = run_of(store)
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in (row(0), {**row(1), **change}, row(2))) + "\n")
    with pytest.raises(InvalidImport) as caught:
        run.import_samples(path)
    (refused,) = caught.value.rows
    assert (refused.source, refused.line, refused.field) == (str(path), 2, field)
    assert said in str(caught.value)
    assert f.value(run, "SELECT count(*) FROM sample_group") == f.value(run, "SELECT count(*) FROM prompt") == 0


def test_a_bad_sample_of_a_group_is_named_by_its_place(store: Store) -> None:
    run = run_of(store)
    with pytest.raises(InvalidImport, match=r"rows:1: samples\[1\].log_probs: .*position 0"):
        run.import_samples([{**PROMPT, "samples": [{"response_ids": [1]}, {"response_ids": [1], "log_probs": ["x"]}]}])
    with pytest.raises(InvalidImport, match=r"samples\[0\].typo: is not one of"):
        run.import_samples([{**PROMPT, "samples": [{"typo": 1}]}])
    with pytest.raises(InvalidImport, match="0 samples, expected 1 to"):
        run.import_samples([{**PROMPT, "samples": []}])


def test_a_failure_in_the_middle_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from samplestore.verbs import imports

    run = run_of(store)
    store_all, calls = imports._Storing.store, []

    def breaks(*args: Any) -> None:
        calls.append(args)
        store_all(*args)
        if len(calls) == 2:
            raise RuntimeError("killed here")

    with monkeypatch.context() as broken:
        broken.setattr(imports._Storing, "store", breaks)
        with pytest.raises(RuntimeError):
            run.import_samples([row(i) for i in range(250)])
    assert f.value(run, "SELECT count(*) FROM sample_group") == f.value(run, "SELECT count(*) FROM prompt") == 0
    assert run.import_samples([row(i) for i in range(250)]).added == 250
    assert run.import_samples([row(i) for i in range(200, 260)]).added == 10
    f.sound(run)


def test_files_of_every_kind(store: Store, tmp_path: Path) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    run = run_of(store)
    rows = [row(i, teacher_log_probs=[-0.5, -0.5, -0.5]) for i in range(3)]
    packed, table = tmp_path / "a.jsonl.gz", tmp_path / "a.parquet"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    pq.write_table(pa.Table.from_pylist(rows), table)
    assert run.import_samples(packed).added == 3
    assert run.import_samples(str(table)).existing == 3, "the same content"
    (tmp_path / "cut.jsonl.gz").write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(PromptFileError, match="damaged"):
        run.import_samples(tmp_path / "cut.jsonl.gz")
    f.sound(run)


def test_a_reward_needs_a_place(store: Store) -> None:
    run = run_of(store, stages=["judge"])
    with pytest.raises(InvalidSetting, match="with the stage 'reward'"):
        run.import_samples([{**ONE, "reward": 1.0}])
    assert f.value(run, "SELECT count(*) FROM sample_group") == 0


def test_large_arrays_of_imports_are_files(store: Store, tmp_path: Path) -> None:
    run = run_of(store, array_url=str(tmp_path / "arrays"), array_file_bytes=16)
    run.import_samples([{**ONE, "arrays": {"hidden": [[0.5] * 8] * 3}, "teacher_log_probs": [-1.0, -1.0, -1.0]}])
    kept = {r["name"]: r["sidecar"] is not None for r in f.rows(run, "SELECT name, sidecar FROM segment_array")}
    assert kept == {"hidden": True, "teacher_log_probs": False}
    (sample,) = f.rows(run, "SELECT id FROM sample")
    assert run.array(sample["id"], "hidden")[0].shape == (3, 8)
    f.sound(run)


def test_an_imported_group_that_starts_afresh_is_generated(store: Store) -> None:
    run = run_of(store)
    run.import_samples([row(1)])
    run.requeue([f.value(run, "SELECT id FROM sample")], "once more")
    (claim,) = run.claim(f.register(run), 1)
    f.answer(run, claim)
    assert (f.states(run), f.value(run, "SELECT n_without_logprob FROM sample")) == (["ready"], 0)
    assert f.value(run, "SELECT oldest_version FROM sample_group") == 0
    f.sound(run)


def test_a_number_of_any_size_is_refused_with_its_place(store: Store) -> None:
    """Python writes none of more than 4300 digits."""
    with pytest.raises(InvalidImport, match=r"rows:1: prompt_ids: token 0 is outside .* \(got a large int\)"):
        run_of(store).import_samples([{**ONE, "prompt_ids": [10**5000]}])
