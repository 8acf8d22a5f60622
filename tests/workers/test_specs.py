"""Functions of another shape than a worker calls are refused when it starts, not with every sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from samplestore import tokenizers
from samplestore.config import WorkerConfig
from samplestore.errors import SampleStoreError
from samplestore.runsettings import RunSettings
from samplestore.tokenizers import Tokenizer
from samplestore.workers import commands, filter_process, stage_servers
from samplestore.workers.episode_runs import EpisodeSpecError, load_episode
from samplestore.workers.reward_process import SpecFailure
from tests.support import demo_data

SOURCE = """
import functools

def plain(ctx): ...
async def none(): ...
async def two(ctx, other): ...
async def good(ctx, limit=3): ...
async def yields(ctx):
    yield 1

@functools.wraps(good)
def wrapped(*args):
    return good(*args)

bound = functools.partial(two, other=1)

class Episode:
    async def __call__(self, ctx): ...
instance = Episode()

def group(args, samples): ...
def samples_only(samples): ...
def three(args, samples, more): ...
def nothing(): ...
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "shapes.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("name", ["good", "wrapped", "bound", "instance"])
def test_an_episode(file: Path, name: str) -> None:
    assert callable(load_episode(f"{file}:{name}"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "no async function"), ("yields", "no async function"), ("Episode", "no async function"),
        ("none", "can't be called with ctx alone"), ("two", "missing a required argument: 'other'"),
    ],
)  # fmt: skip
def test_what_is_no_episode(file: Path, name: str, said: str) -> None:
    with pytest.raises(EpisodeSpecError, match="async def f") as caught:
        load_episode(f"{file}:{name}")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["group", "samples_only"])
def test_a_filter(file: Path, name: str) -> None:
    assert filter_process.load(f"{file}:{name}") is not None


@pytest.mark.parametrize("name", ["three", "nothing"])
def test_what_is_no_filter(file: Path, name: str) -> None:
    with pytest.raises(SpecFailure, match="can't be called as f"):
        filter_process.load(f"{file}:{name}")


@pytest.mark.parametrize(
    ("band", "rules", "refused"),
    [
        ("reward:1.5:2", {}, True), ("reward:0.5:1", {}, False), ("reward:1.5:2", {"weights": {"reward": 2.0}}, False),
        ("reward:0.1:1", {"weights": {"reward": -1.0}}, True), ("reward:1.5:2", {"spec": "module:function"}, False),
    ],
)  # fmt: skip
def test_a_band_that_a_built_in_reward_never_reaches(band: str, rules: dict[str, object], refused: bool) -> None:
    settings = RunSettings.parse(
        {"stages": ["reward"], "group_filters": [band], "reward_weights": rules.get("weights", {})}
    )
    specs = {"reward": str(rules.get("spec", "math"))}
    if not refused:
        stage_servers._check_bands(settings, specs)
        return
    with pytest.raises(SampleStoreError, match="would drop every group"):
        stage_servers._check_bands(settings, specs)


def test_the_tokenizer_of_episodes_is_warm_before_the_worker_registers(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first ctx.append of text would import transformers in the event loop."""
    loaded: list[Tokenizer] = []

    def from_folder(path: str) -> Tokenizer:
        loaded.append(Tokenizer(path, folder=tmp_path))
        return loaded[0]

    monkeypatch.setattr(tokenizers, "load_tokenizer", from_folder)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: FakeTokenizer())
    config = WorkerConfig(db="x", episode=f"{file}:good", tokenizer="model")
    assert commands._episodes(config).tokenizer is loaded[0]
    assert {"_hf", "control_names"} <= vars(loaded[0]).keys(), "cached before the first append"


def test_a_tokenizer_that_only_decodes_keeps_no_episode_from_starting(file: Path, tmp_path: Path) -> None:
    demo_data.build_tokenizer(tmp_path)
    config = WorkerConfig(db="x", episode=f"{file}:good", tokenizer=str(tmp_path))
    assert commands._episodes(config).tokenizer.decode([1]) != ""


class FakeTokenizer:
    all_special_tokens = ("<|end|>",)

    def encode(self, text: str, **_: object) -> list[int]:
        return []
