"""A checkpoint that does not fit the model that is served: no engine is told of it, as far as that can be seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from samplestore.errors import SampleStoreError
from samplestore.workers import checkpoints
from tests.support import factory
from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import Bench
from tests.worker.test_fleet_unfit import engine_rows

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1}
MODEL = {"model.embed.weight": ("F32", [8, 4]), "model.norm.weight": ("F32", [4]), "mtp.norm.weight": ("F32", [4])}

Shapes = dict[str, tuple[str, list[int]]]


def checkpoint(folder: Path, tensors: Shapes) -> Path:
    """A model folder whose safetensors file has these tensors, all zero."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(at))
    return folder


def with_norm(dtype: str, shape: list[int]) -> Shapes:
    return {**MODEL, "model.norm.weight": (dtype, shape)}


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (with_norm("F32", [5]), "model.norm.weight is F32 [5], and there F32 [4]"),
        (with_norm("F32", [4, 1]), "model.norm.weight is F32 [4, 1], and there F32 [4]"),
        (with_norm("I8", [4]), "model.norm.weight is I8 [4], and there F32 [4]"),
        ({"transformer.wte.weight": ("F32", [8, 4])}, "none of its tensors (transformer.wte.weight)"),
        ({}, "none of its tensors (none)"),
    ],
)
def test_what_an_engine_would_die_of_or_spoil(tmp_path: Path, new: Shapes, said: str) -> None:
    old, path = checkpoint(tmp_path / "old", MODEL), checkpoint(tmp_path / "new", new)
    with pytest.raises(SampleStoreError) as told:
        checkpoints.require_loadable(str(path), str(old))
    assert said in str(told.value) and str(old) in str(told.value) and "publish_weights" in str(told.value)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_floats_of_another_width_are_converted(tmp_path: Path, dtype: str) -> None:
    old, path = checkpoint(tmp_path / "old", MODEL), checkpoint(tmp_path / "new", with_norm(dtype, [4]))
    checkpoints.require_loadable(str(path), str(old))


def test_tensors_that_are_left_out_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Engines keep their old values, which is right for parts that are not trained, and wrong for the rest."""
    fewer = {name: told for name, told in MODEL.items() if not name.startswith("mtp")}
    old, path = checkpoint(tmp_path / "old", MODEL), checkpoint(tmp_path / "new", fewer)
    checkpoints.require_loadable(str(path), str(old))
    assert "lacks 1 tensor" in caplog.text and "mtp.norm.weight" in caplog.text


@pytest.mark.parametrize("served", ["", "missing", "hub/name", None])
def test_what_can_not_be_seen_is_not_judged(tmp_path: Path, served: str | None) -> None:
    path = checkpoint(tmp_path / "new", MODEL)
    checkpoints.require_loadable(str(path), served if served is None else str(tmp_path / served))
    checkpoints.require_loadable(str(tmp_path / "elsewhere"), str(path))


@pytest.mark.parametrize("entry", [{"shape": [2]}, {"data_offsets": [0, 8]}, {"shape": "2", "data_offsets": [0, 8]}, 7])
def test_a_header_that_is_broken(tmp_path: Path, entry: object) -> None:
    path = checkpoint(tmp_path / "new", MODEL)
    head = json.dumps({"w": entry}).encode()
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    with pytest.raises(SampleStoreError, match="has a broken header"):
        checkpoints.require_loadable(str(path), None)


def wait_until(bench: Bench, url: str, state: str) -> Callable[[], bool]:
    return lambda: engine_rows(bench).get(url, {}).get("state") == state


def test_the_engine_that_does_not_fit_is_told_apart(any_bench: Bench) -> None:
    """One of two serves another model: it is not told, is left out, and its error names the tensor. The other one gets
    the weights, and finishes everything."""
    bench = any_bench
    bench.make_run(prompts=2, samples_per_prompt=2, groups_per_step=2, max_staleness=1)
    engines = [bench.engine(Script(stall_after=8)) for _ in range(2)]
    other, fits = engines
    fits.model_path = str(checkpoint(bench.folder / "v0", MODEL))
    other.model_path = str(checkpoint(bench.folder / "wide", with_norm("F32", [6])))
    worker = bench.worker(*engines, exit_when_done=True)
    wait_running(engines, 4)
    path = checkpoint(bench.folder / "v1", MODEL)
    bench.run.publish_weights(str(path), step=1)
    bench.wait(wait_until(bench, other.url, "failed"), "the one that does not fit is out")
    assert "model.norm.weight is F32 [4], and there F32 [6]" in engine_rows(bench)[other.url]["error"]
    bench.wait(lambda: engine_rows(bench)[fits.url]["version"] == 1, "the other one is updated")
    assert "update_weights_from_disk" not in [name for name, _ in other.calls]
    assert "pause_generation" not in [name for name, _ in other.calls]
    for engine in engines:
        engine.release()
    assert worker.wait(60) == 0, worker.log()
    assert {(r["status"], r["failures"]) for r in bench.samples()} == {("truncated", 0)}
    assert other.url in str(factory.events(bench.run, "engine_failed")[0]["details"])
    bench.exact(32)
    bench.sound()
