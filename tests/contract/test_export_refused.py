"""Files of exports that were cut, changed by hand or made up: refused with their place, and nothing stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from samplestore import Store
from samplestore.portable import parquet
from samplestore.portable.files import MANIFEST
from samplestore.portable.imports import InvalidImport
from samplestore.promptfiles import PromptFileError

from ..support import factory as f
from ..support.extras import library
from .exporting import exported_in

library("pyarrow")


@pytest.fixture(scope="module")
def exported(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return exported_in(sqlite_template, tmp_path_factory.mktemp("exported"))


def test_bad_rows_are_refused_with_their_place(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    path = tmp_path / "out.jsonl"
    shutil.copyfile(exported[1] / "out.jsonl", path)
    good = [json.loads(line) for line in path.read_text().splitlines()]
    again = store.run("again")
    before = f.snapshot(again)
    for change, field in (
        ({"id": "x"}, "id"),
        ({"response_ids": good[0]["response_ids"][:-1]}, "rollout_log_probs"),
        ({"response_ids": [-1]}, "response_ids"),
        ({"rollout_log_probs": good[0]["rollout_log_probs"][:-1]}, "rollout_log_probs"),
        ({"rollout_log_probs": None}, "rollout_log_probs"),
        ({"segments": good[0]["segments"][:-1]}, "segments"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"status": "done"}, "status"),
        ({"segments": [{"n_tokens": 0}]}, "segments[0].n_tokens"),
        ({"segments": [{**good[0]["segments"][0], "kind": "other"}]}, "segments[0].kind"),
        ({"finish_reason": "a\0b"}, "finish_reason"),
        ({"rewards": [{"name": "r", "status": "done", "value": float("nan")}]}, "rewards[0].value"),
        ({"parent": 77, "parent_upto": 0}, "parent"),
        ({"arrays": [{"seq": 0, "name": "x", "dtype": "float32", "shape": [3], "data": "AAAA"}]}, "arrays[0]"),
        ({"label": {"deep": "\ud800"}}, "label.deep"),
        ({"loss_mask": 5}, "loss_mask"),
        ({"weight_versions": 5}, "weight_versions"),
        ({"metadata": [1]}, "metadata"),
        ({"metadata": "x"}, "metadata"),
        ({"reward": 10**400}, "reward"),
        ({"segments": [{**good[0]["segments"][0], "version_min": 0, "version_max": 2**31}]}, "segments[0].version_max"),
        ({"images": [str(tmp_path / "out.jsonl")]}, "images[0]"),
        ({"images": [{"path": str(path)}]}, "images[0]"),
        ({"rewards": [{"name": "reward", "status": "pending"}]}, "rewards[0].status"),
        ({"rewards": [None]}, "rewards[0]"),
        ({"arrays": [{"seq": 0, "name": "x", "dtype": "float32", "shape": [0], "data": ""}] * 2}, "arrays"),
        ({"rewards": [{"name": "r", "status": "done"}] * 2}, "rewards"),
        ({"parent_upto": 1}, "parent_upto"),
        ({"response_ids": [], "segments": [], "arrays": [], "loss_mask": None, "weight_versions": None,
          "rollout_log_probs": None}, "response_ids"),
    ):  # fmt: skip
        path.write_text("".join(json.dumps(r) + "\n" for r in [{**good[0], **change}, *good[1:]]))
        with pytest.raises(InvalidImport) as error:
            again.import_samples(path)
        assert (error.value.rows[0].line, error.value.rows[0].field) == (1, field), error.value
    assert f.snapshot(again) == before


def test_a_fork_that_contradicts_its_parent_is_refused(
    store: Store, tmp_path: Path, exported: tuple[str, Path]
) -> None:
    rows = [json.loads(line) for line in (exported[1] / "out.jsonl").read_text().splitlines()]
    fork = next(row for row in rows if row["parent_upto"])
    group = [row for row in rows if row["group"] == fork["group"]]
    again = store.run("again")
    before = f.snapshot(again)
    shared = fork["parent_upto"]
    longer = fork["response_ids"][:1] * 50
    for change, field in (
        ({"response_ids": [99, *fork["response_ids"][1:]]}, "response_ids"),
        ({"rollout_log_probs": [-9.0, *fork["rollout_log_probs"][1:]]}, "rollout_log_probs"),
        ({"weight_versions": [-(2**63), *fork["weight_versions"][1:]]}, "weight_versions"),
        ({"prompt_ids": [5]}, "prompt_ids"),
        ({"parent_upto": 50, "response_ids": longer + fork["response_ids"][shared:], "loss_mask": None,
          "rollout_log_probs": [0.0] * 50 + fork["rollout_log_probs"][shared:],
          "weight_versions": None}, "parent_upto"),
    ):  # fmt: skip
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps({**row, **change} if row is fork else row) + "\n" for row in group)
        )
        with pytest.raises(InvalidImport) as error:
            again.import_samples(tmp_path / "rows.jsonl")
        assert error.value.rows[0].field == field, error.value
    assert f.snapshot(again) == before


def test_a_null_among_the_rewards_of_a_parquet_row_is_refused(
    store: Store, tmp_path: Path, exported: tuple[str, Path]
) -> None:
    pa, pq = (library(name) for name in ("pyarrow", "pyarrow.parquet"))
    table = pq.read_table(exported[1] / "out" / "step=1" / "part-0.parquet")
    at = table.schema.get_field_index("rewards")
    nulls = pa.array([[None]] * table.num_rows, table.schema.field("rewards").type)
    pq.write_table(table.set_column(at, "rewards", nulls), tmp_path / "rows.parquet")
    with pytest.raises(InvalidImport, match=r"rows\.parquet:1: rewards\[0\]: is not an object"):
        store.run("again").import_samples(tmp_path / "rows.parquet")


def test_files_that_are_cut_short_are_refused(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    path = tmp_path / "out"
    shutil.copytree(exported[1] / "out", path)
    again = store.run("again")
    file = path / "step=1" / "part-0.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PromptFileError, match=r"step=1/part-0.parquet: is no readable Parquet file"):
        again.import_samples(path)
    file.unlink()
    with pytest.raises(PromptFileError, match=r"part-0\.parquet"):
        again.import_samples(path)
    about = json.loads((path / MANIFEST).read_text())
    about["files"][0]["path"] = "../../etc/passwd"
    (path / MANIFEST).write_text(json.dumps(about))
    with pytest.raises(PromptFileError, match="names files that an export does not have"):
        again.import_samples(path)
    (path / MANIFEST).write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(PromptFileError, match="has format 99"):
        again.import_samples(path)
    (path / MANIFEST).unlink()
    with pytest.raises(PromptFileError, match=MANIFEST):
        again.import_samples(path)
    assert again.check() == [] and f.states(again) == []


def test_rows_beside_the_manifest_of_others_are_refused(
    store: Store, tmp_path: Path, exported: tuple[str, Path]
) -> None:
    """An export was replaced, and broke off between the rows and their manifest."""
    rows, beside = tmp_path / "out.jsonl", tmp_path / f"out.jsonl.{MANIFEST.lstrip('_')}"
    shutil.copyfile(exported[1] / rows.name, rows)
    told = json.loads((exported[1] / beside.name).read_text())
    again = store.run("again")
    before = f.snapshot(again)
    for key in ("samples", "tokens"):
        beside.write_text(json.dumps({**told, "counts": {**told["counts"], key: told["counts"][key] + 1}}))
        with pytest.raises(PromptFileError, match="of two exports"):
            again.import_samples(rows)
    beside.write_text(json.dumps({**told, "run_uuid": "0" * 36}))
    with pytest.raises(InvalidImport, match="run_uuid: is of another run"):
        again.import_samples(rows)
    assert f.snapshot(again) == before


def test_a_hostile_manifest_is_refused_with_its_field(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    rows, beside = tmp_path / "out.jsonl", tmp_path / "out.jsonl.manifest.json"
    shutil.copyfile(exported[1] / rows.name, rows)
    told = json.loads((exported[1] / beside.name).read_text())
    first, last = told["weight_versions"]
    again = store.run("again")
    before = f.snapshot(again)

    def versions(*changed: dict[str, Any]) -> dict[str, Any]:
        return {"weight_versions": list(changed)}

    for change, field in (
        ({"current_version": None}, "current_version"),
        ({"current_version": [1]}, "current_version"),
        ({"current_version": 2}, "current_version"),
        ({"current_version": True}, "current_version"),
        ({"timelines": 5}, "timelines"),
        ({"timelines": [5]}, "timelines[0]"),
        ({"timelines": [{"number": 0, "parent": "x"}]}, "timelines[0].parent"),
        ({"timelines": [{"number": 0}, {"number": 0}]}, "timelines[1].number"),
        ({"timelines": [{"number": 0}, {"number": 1, "parent": 1}]}, "timelines[number 1].parent"),
        ({"timelines": [{"number": 0, "forked_at_step": "y"}]}, "timelines[0].forked_at_step"),
        ({"timeline": 9}, "timeline"),
        (versions(), "current_version"),
        (versions(first, 5), "weight_versions[1]"),
        (versions(first, {**last, "version": 2**30}), "weight_versions[1].version"),
        (versions(first, last, {**last, "label": "other"}), "weight_versions[2].version"),
        (versions(first, {**last, "label": first["label"]}), "weight_versions[version 1].label"),
        (versions(first, {**last, "label": "\ud800"}), "weight_versions[1].label"),
        (versions(first, {**last, "path": "a\0"}), "weight_versions[1].path"),
        (versions(first, {**last, "parent": 1}), "weight_versions[number 1].parent"),
        (versions({**first, "parent": 1}, last), "weight_versions[number 0].parent"),
        (versions(first, {**last, "parent": None}), "weight_versions[number 1].parent"),
        (versions(first, {**last, "timeline": 7}), "weight_versions[version 1].timeline"),
        (versions(first, {**last, "depth": 0}), "weight_versions[version 1].depth"),
        (versions(first, {**last, "depth": 2**29}), "weight_versions[version 1].depth"),
        ({"counts": None}, "counts"),
        ({"run_uuid": 5}, "run_uuid"),
    ):  # fmt: skip
        beside.write_text(json.dumps({**told, **change}))
        with pytest.raises(InvalidImport) as error:
            again.import_samples(rows)
        assert [(row.source, row.field) for row in error.value.rows] == [(str(beside), field)], error.value
    assert f.snapshot(again) == before
    beside.write_text(json.dumps({**told, **versions({**last, "common_depth": 77}, first)}))
    again.import_samples(rows)
    assert [v["common_depth"] for v in f.rows(again, "SELECT * FROM weight_version ORDER BY version")] == [0, 1]
    f.sound(again)


def test_a_label_that_names_another_version_there(store: Store, tmp_path: Path, exported: tuple[str, Path]) -> None:
    """Then numbers don't mean the same here, and labels say what does."""
    rows, beside = tmp_path / "out.jsonl", tmp_path / "out.jsonl.manifest.json"
    shutil.copyfile(exported[1] / rows.name, rows)
    told = json.loads((exported[1] / beside.name).read_text())
    again = store.run("again")
    (mine,) = again.weight_versions()
    first, last = told["weight_versions"]
    changed = [{**first, "label": "base"}, {**last, "label": mine.label}]
    beside.write_text(json.dumps({**told, "weight_versions": changed}))
    again.import_samples(rows)
    assert again.weight_versions() == [mine]
    assert {row["v"] for row in f.rows(again, "SELECT DISTINCT version_max AS v FROM sample")} == {0, None}
    f.sound(again)


def test_a_few_bytes_that_stand_for_many_values(
    store: Store, exported: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_VALUES", 20)
    again = store.run("again")
    with pytest.raises(PromptFileError, match=r"row group 0 has .* values in one column; at most 20 are read"):
        again.import_samples(exported[1] / "out")
    assert f.states(again) == []
