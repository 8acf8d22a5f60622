"""slime's debug rollouts: what a store writes slime reads, what slime wrote comes in, and nothing of it is run."""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting
from samplestore.portable import exports
from samplestore.portable.exports import Selection
from samplestore.portable.imports import Imported, InvalidImport, read_portable
from samplestore.portable.replaced import ExportExists
from samplestore.portable.slime_extras import EXTRAS
from samplestore.portable.slime_files import SlimeFileError
from samplestore.portable.slime_samples import KEY, from_slime, to_slime
from samplestore.promptfiles import InvalidRow, PromptFileError
from samplestore.rowvalues import BadValue

from ..support import factory as f
from ..support.extras import library
from .exporting import lived, told

torch = library("torch")

# A sample as slime dumps it today, with all that this store has no place for.
SAMPLE: dict[str, Any] = {
    "group_index": 3, "index": 24, "rollout_id": 24, "prompt": [{"role": "user", "content": "2 + 2 = ?"}],
    "tokens": [1, 2, 3, 7, 8, 9], "multimodal_inputs": None, "multimodal_train_inputs": None, "response": "vier",
    "response_length": 3, "label": "4", "reward": 1.0, "loss_mask": [1, 0, 1], "weight_versions": ["5"],
    "rollout_log_probs": [-0.5, 0.0, -0.25], "rollout_routed_experts": torch.ones(5, 2, 2, dtype=torch.int32),
    "remove_sample": False, "teacher_log_probs": [-0.1, -0.2, -0.30000001192092896], "status": "truncated",
    "metadata": {"start_rollout_id": 2, "nested": {"a": [1, None]}}, "generate_function_path": None,
    "train_metadata": {"w": 0.5}, "session_id": "s", "non_generation_time": 0.25,
    "spec_info": {"spec_accept_token_num": 3, "completion_token_num": 3}, "prefix_cache_info": {"cached_tokens": 2},
    "rollout_top_p_token_ids": [1, 2], "trace": torch.tensor([0.5, 1.5], dtype=torch.float64),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal, with types; tensors by their bytes."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def dump(path: Path, samples: list[dict[str, Any]], rollout_id: Any = 4) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def replayed(store: Store, path: Path, to: Path) -> list[dict[str, Any]]:
    """What slime gets back after its file was imported, trained on and exported again."""
    run = store.run("replayed", samples_per_prompt=2, max_staleness=9)
    run.import_samples(path)
    n = f.value(run, "SELECT count(*) FROM sample_group WHERE run_id = :r AND state = 'ready'", r=run.id)
    with run.batch(step=0, groups=n, timeout=5, need_logprobs=False):
        pass
    run.export(to / "{rollout_id}.pt", format="slime", arrays=["all"])
    f.sound(run)
    return list(loaded(to / "0.pt")["samples"])


def test_what_slime_wrote_comes_back_field_by_field(store: Store, tmp_path: Path) -> None:
    siblings = [
        SAMPLE,
        {**SAMPLE, "index": 25, "reward": {"acc": 1.0, "len": 2}, "weight_versions": ["5", "6"], "loss_mask": None,
         "metadata": {"other": True}, "label": "four", "status": "completed"},
        {**SAMPLE, "group_index": 4, "index": 32, "tokens": [4, 5], "response_length": 1, "loss_mask": [1],
         "rollout_log_probs": None, "rollout_routed_experts": None, "teacher_log_probs": None, "weight_versions": []},
    ]  # fmt: skip
    path = dump(tmp_path / "4.pt", siblings)
    back = replayed(store, path, tmp_path / "out")
    assert len(back) == 3
    for given, got in zip(siblings, back, strict=True):
        assert "status" not in got.pop(KEY), "what slime says is not said twice"
        assert got.keys() == given.keys()
        for key, value in given.items():
            assert same(got[key], value), (key, value, got[key])


def test_a_step_replays_in_slime(store: Store, tmp_path: Path) -> None:
    """The file is what slime loads: plain values, of the types that slime has, in the batch's order."""
    run = lived(store)
    run.export(tmp_path / "rollout_{rollout_id}.pt", format="slime", steps=(1, 1))
    file = loaded(tmp_path / "rollout_1.pt")
    assert file["rollout_id"] == 1 and file.keys() == {"rollout_id", "samples"}
    batch = run.replay(step=1)
    delivered = {(s.group_number, s.index): s for s in batch.samples}
    assert len(file["samples"]) >= len(delivered) > 0
    for sample in file["samples"]:
        one = delivered.get((sample["group_index"], sample[KEY]["sample"]))
        if one is None:
            assert sample["status"] == "failed"
            continue
        n = sample["response_length"]
        assert sample["tokens"] == [*one.prompt_ids.tolist(), *one.response_ids.tolist()] and n == one.response_ids.size
        assert sample["loss_mask"] == one.loss_mask.tolist() and type(sample["loss_mask"][0]) is int
        assert sample["rollout_log_probs"] == one.logprobs.tolist() and type(sample["rollout_log_probs"][0]) is float
        assert sample["weight_versions"] == [str(v) for v in dict.fromkeys(one.versions.tolist()) if v >= 0]
        assert (sample["reward"], sample["status"], sample["label"]) == (one.reward, one.status, one.label)
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == n


def test_a_store_reads_its_own_steps_exactly(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    run.export(tmp_path / "rollout_{rollout_id}.pt", format="slime", arrays=["all"])
    again = store.run("again", samples_per_prompt=2, stages=["reward"], on_failed="short")
    assert again.import_samples(tmp_path / "rollout_{rollout_id}.pt").added == 4
    assert again.import_samples(tmp_path / "rollout_1.pt").existing == 2
    kept = {r["order"]: r for r in told(run, steps=(0, 1))}
    back = told(again)
    numbers = {(r["prompt_ids"], r["sample"]): r for r in kept.values()}
    assert len(back) == len(kept)
    for row in back:
        other = numbers[row["prompt_ids"], row["sample"]]
        left_out = ("order", "rollout_id", "epoch", "timeline")
        assert {k: v for k, v in row.items() if k not in left_out} == {
            k: v for k, v in other.items() if k not in left_out
        }
    f.sound(again)


@dataclass
class Evil:
    command: str

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_pickle_that_runs_something_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    run, mark = store.run("r"), tmp_path / "ran"
    before = f.snapshot(run)
    for path, name in (
        (dump(tmp_path / "a.pt", [{**SAMPLE, "label": Evil(f"touch {mark}")}]), "posix.system"),
        (dump(tmp_path / "b.pt", [{**SAMPLE, "trace": Path("x")}]), "pathlib"),
        (
            dump(tmp_path / "c.pt", [{**SAMPLE, "trace": np.array([Evil(f"touch {mark}")], dtype=object)}]),
            "ObjectDType",
        ),
    ):
        with pytest.raises(SlimeFileError, match=name) as error:
            run.import_samples(path)
        assert str(path) in str(error.value) and "samplestore import" in str(error.value)
    assert not mark.exists() and f.snapshot(run) == before


def test_files_that_are_no_rollouts_are_refused(store: Store, tmp_path: Path) -> None:
    run = store.run("r")
    whole = dump(tmp_path / "whole.pt", [SAMPLE]).read_bytes()
    old = pickle.dumps({"rollout_id": 0, "samples": []})
    bomb = tmp_path / "bomb.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\0" * 10_000_000)
    for name, data, said in (
        ("cut.pt", whole[: len(whole) // 2], "no whole file of torch.save"),
        ("turned.pt", whole[:80] + bytes(200) + whole[280:], "damaged"),
        ("old.pt", old, "no whole file of torch.save"),
        ("text.pt", b"hello", "no whole file of torch.save"),
        ("bomb.pt", bomb.read_bytes(), "compressed"),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(SlimeFileError, match=said):
            run.import_samples(path)
    for value in ([1], {"samples": []}, {"rollout_id": -1, "samples": []}, {"rollout_id": 0, "samples": [1]}):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(SlimeFileError):
            run.import_samples(tmp_path / "x.pt")
    with pytest.raises(PromptFileError, match="names no file"):
        run.import_samples(tmp_path / "none_{rollout_id}.pt")
    assert f.states(run) == []


def test_wrong_fields_are_named_with_file_and_sample(store: Store, tmp_path: Path) -> None:
    run = store.run("r")
    tree: Any = 0
    for _ in range(70):
        tree = [tree]
    wide: Any = [0]
    for _ in range(40):
        wide = [wide, wide]
    for change, field in (
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, "x"]}, "tokens"),
        ({"response_length": 6}, "response_length"),
        ({"loss_mask": [1, 0]}, "loss_mask"),
        ({"loss_mask": [1, 0, 2]}, "loss_mask"),
        ({"rollout_log_probs": [-0.5]}, "rollout_log_probs"),
        ({"rollout_log_probs": [-0.5, 0.0, float("nan")]}, "rollout_log_probs"),
        ({"teacher_log_probs": [-0.5]}, "teacher_log_probs"),
        ({"rollout_routed_experts": torch.zeros(4, 2, 2, dtype=torch.int32)}, "rollout_routed_experts"),
        ({"status": "gone"}, "status"),
        ({"reward": float("inf")}, "reward"),
        ({"metadata": [1]}, "metadata"),
        ({"metadata": {EXTRAS: 1}}, f"metadata.{EXTRAS}"),
        ({"session_id": "a\0b"}, "session_id"),
        ({"rollout_log_probs": 5}, "rollout_log_probs"),
        ({"response_length": 0, "rollout_log_probs": 5, "loss_mask": []}, "rollout_log_probs"),
        ({"weight_versions": 5}, "weight_versions"),
        ({"reward": 10**400}, "reward"),
        ({"trace": tree}, ""),
        ({"trace": wide}, ""),
    ):
        path = dump(tmp_path / "x.pt", [SAMPLE, {**SAMPLE, **change}])
        with pytest.raises(InvalidImport) as error:
            run.import_samples(path)
        (row,) = error.value.rows
        assert (row.source, row.line, row.field) == (str(path), 2, f"samples[1].{field}".rstrip(".")), change
    with pytest.raises(SlimeFileError, match="rollout_id: must be"):
        run.import_samples(dump(tmp_path / "x.pt", [SAMPLE], "9" * 5000))
    empty = {**SAMPLE, "response_length": 0, "loss_mask": [], "rollout_log_probs": [], "teacher_log_probs": None}
    with pytest.raises(InvalidImport, match="response_ids: has no tokens, and the sample is truncated"):
        run.import_samples(dump(tmp_path / "x.pt", [empty]))
    assert f.states(run) == []
    at = torch.tensor([1, 2])
    assert run.import_samples(dump(tmp_path / "x.pt", [{**SAMPLE, "group_index": at}] * 2)).added == 1


def test_a_rollout_that_slime_wrote_is_not_replaced(store: Store, tmp_path: Path) -> None:
    run, template = lived(store), tmp_path / "{rollout_id}.pt"
    run.export(template, format="slime")
    run.export(template, format="slime", force=True, steps=(1, 1), statuses=["pending"])
    assert loaded(tmp_path / "1.pt")["samples"] == []
    run.export(template, format="slime", force=True)
    theirs = dump(tmp_path / "1.pt", [SAMPLE]).read_bytes()
    ours = (tmp_path / "0.pt").read_bytes()
    with pytest.raises(ExportExists, match="is no export"):
        run.export(template, format="slime", force=True, statuses=["failed"])
    assert (tmp_path / "1.pt").read_bytes() == theirs and (tmp_path / "0.pt").read_bytes() == ours


def test_numpy_and_flags_keep_their_types() -> None:
    given = {**SAMPLE, "reward": np.float32(0.5), "remove_sample": True, "trace": np.arange(3, dtype=np.int64)}
    made = from_slime(given)
    assert (made.reward, made.removed) == (0.5, "slime")
    back = to_slime(made, torch=torch)
    assert back["remove_sample"] is True and back["reward"] == 0.5 and back["loss_mask"] == [1, 0, 1]
    assert back["trace"].dtype == np.int64 and back["trace"].tolist() == [0, 1, 2]


def test_a_path_needs_a_place_for_the_step(store: Store, tmp_path: Path) -> None:
    run = lived(store)
    for template in ("out.pt", "{step}.pt", "{rollout_id}_{rollout_id}.pt", "{rollout_id.real}.pt", "{"):
        with pytest.raises(InvalidSetting, match=r"\{rollout_id\}"):
            run.export(tmp_path / template, format="slime")


WEIRD: list[Any] = [
    True, -1, 2**64, 10**400, float("nan"), "", "\ud800", "a\0", [], {}, {1: 2}, [None], [[1]], [10**400],
    np.arange(3), [np.arange(3)], torch.arange(3), torch.tensor([]), torch.tensor(1.5), [torch.arange(2)],
    torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1).expand(10**12), [torch.zeros(1).expand(10**12)],
]  # fmt: skip


@pytest.mark.parametrize("field", [*SAMPLE, KEY, "other"])
def test_whatever_a_field_holds_it_is_taken_or_refused(field: str) -> None:
    """A tensor has no truth, arrays are equal place by place, and a stride of 0 makes terabytes of one number."""
    for value in WEIRD:
        try:
            (group,) = read_portable([("file", 1, from_slime({**SAMPLE, field: value}))])
        except BadValue as error:
            assert error.field or "KiB of arrays" in error.reason
        else:
            assert isinstance(group, Imported | InvalidRow)


def test_whatever_the_store_itself_said_it_is_taken_or_left(store: Store) -> None:
    run = lived(store)
    parts = exports.parts(run, Selection())
    every = [to_slime(one) for part in parts for one in exports.samples(run, run.uuid, part, Selection())]
    said = next(one for one in every if one[KEY].get("parent_upto"))
    changes = [{field: value} for field in said[KEY] for value in WEIRD]
    for name in ("segments", "rewards"):
        first = said[KEY][name][0] if said[KEY][name] else {"name": "r", "status": "done"}
        changes += [{name: [{**first, field: value}]} for field in first for value in WEIRD]
    for change in changes:
        try:
            changed = from_slime({**said, KEY: {**said[KEY], **change}})
        except BadValue as error:
            assert "KiB of arrays" in error.reason
        else:
            assert changed.response_ids.tolist() == said["tokens"][-said["response_length"] :]


def test_tokens_of_the_prompt_that_do_not_compare(store: Store, tmp_path: Path) -> None:
    path = dump(tmp_path / "0.pt", [{**SAMPLE, "tokens": [torch.arange(2), 2, 3, 7, 8, 9]}] * 2)
    with pytest.raises(InvalidImport, match=r"samples\[0\].tokens"):
        store.run("r").import_samples(path)
