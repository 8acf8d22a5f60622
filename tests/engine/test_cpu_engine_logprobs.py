"""The log-probs of the embedded engine against a plain forward pass over the whole sequence."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from samplestore.workers.cpu_engine.checkpoint import load_model
from samplestore.workers.cpu_engine.options import CheckpointError
from samplestore.workers.cpu_engine.params import SamplingParams
from samplestore.workers.cpu_engine.request import Request
from samplestore.workers.cpu_engine.runner import ModelRunner
from samplestore.workers.cpu_engine.scheduler import QueueFull, Scheduler

from .conftest import build_model

TOLERANCE = 1e-4


def reference(model: Any, request: Request) -> list[float]:
    """Log-prob of each output token, by one uncached forward pass at the request's temperature."""
    ids = torch.tensor([request.prompt + request.output])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    temperature = 1.0 if request.params.greedy else request.params.temperature
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    first = len(request.prompt)
    return [logprobs[first - 1 + index, token].item() for index, token in enumerate(request.output)]


def assert_exact(models: dict[str, Any], request: Request) -> None:
    """Every token's log-prob is that of the version its span names; spans cover the output without gaps."""
    by_version = {name: reference(model, request) for name, model in models.items()}
    at = 0
    for version, start, end in request.spans:
        assert start == at
        at = end
        for index in range(start, end):
            assert request.logprobs[index] == pytest.approx(by_version[version][index], abs=TOLERANCE), (version, index)
    assert at == len(request.output) == len(request.logprobs)


def make(rid: str, length: int = 5, seed: int = 0, **parameters: Any) -> Request:
    values: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, **parameters}
    tokens = random.Random(f"{rid}{length}").choices(range(2, 384), k=length)
    limit = values["max_new_tokens"]
    return Request(rid=rid, prompt=tokens, params=SamplingParams(**values), seed=seed, limit=limit, eos=frozenset({1}))


@asynccontextmanager
async def scheduler_for(folder: Path, **options: Any) -> AsyncIterator[Scheduler]:
    runner = ModelRunner(
        load_model(str(folder), "float32"),
        max_running=options.pop("max_running", 8),
        context_length=None,
        max_total_tokens=options.pop("max_total_tokens", None),
    )
    scheduler = Scheduler(runner, version="v0", model_path=str(folder), dtype="float32", **options)
    loop = asyncio.create_task(scheduler.run())
    try:
        yield scheduler
    finally:
        scheduler.close()
        await loop


async def finished(*requests: Request) -> None:
    async with asyncio.timeout(120):
        for request in requests:
            while request.finish is None:
                request.changed.clear()
                await request.changed.wait()


async def produced(request: Request, count: int) -> None:
    async with asyncio.timeout(120):
        while len(request.output) < count:
            request.changed.clear()
            await request.changed.wait()


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_model_v1: Path) -> dict[str, Any]:
    return {"v0": load_model(str(tiny_model), "float32"), "v1": load_model(str(tiny_model_v1), "float32")}


async def test_mixed_batch_with_joins_and_leaves(tiny_model: Path, models: dict[str, Any]) -> None:
    async with scheduler_for(tiny_model) as scheduler:
        first = [
            make("long", 300, max_new_tokens=40),
            make("short", 1, temperature=0.7, max_new_tokens=9),
            make("greedy", 17, temperature=0.0, max_new_tokens=33),
            make("filtered", 40, temperature=1.3, top_k=5, top_p=0.8, max_new_tokens=21),
            make("minimum", 3, min_p=0.1, ignore_eos=False, min_new_tokens=12, max_new_tokens=25),
        ]
        for request in first:
            scheduler.submit(request)
        await produced(first[0], 6)
        second = [make(f"late{index}", 4 + 31 * index, max_new_tokens=12 + index) for index in range(6)]
        for request in second:
            scheduler.submit(request)
        await produced(second[0], 4)
        scheduler.abort("greedy")
        await finished(*first, *second)
    for request in first + second:
        assert_exact(models, request)
    assert first[2].finish is not None
    assert first[2].finish["type"] == "abort"
    assert 0 < len(first[2].output) < 33
    assert not first[4].output[:12].count(1)


async def test_a_seed_decides_the_tokens_whoever_shares_the_batch(tiny_model: Path) -> None:
    def seeded(rid: str, seed: int) -> Request:
        request = make(rid, seed=seed, temperature=0.9)
        request.prompt = [7, 8, 9, 10]
        return request

    async with scheduler_for(tiny_model) as scheduler:
        alone, other_seed = seeded("alone", 42), seeded("other", 43)
        scheduler.submit(alone)
        await finished(alone)
        crowd = [make(f"mate{index}", 3 + 20 * index, temperature=1.1) for index in range(5)]
        for mate in crowd:
            scheduler.submit(mate)
        again = seeded("again", 42)
        scheduler.submit(again)
        scheduler.submit(other_seed)
        await finished(again, other_seed, *crowd)
        resumed = seeded("resumed", 42)
        resumed.prompt = alone.prompt + alone.output[:11]
        resumed.limit = len(alone.output) - 11
        scheduler.submit(resumed)
        await finished(resumed)
    assert again.output == alone.output
    assert other_seed.output != alone.output
    assert alone.output[11:] == resumed.output


async def test_in_place_update_changes_the_weights_under_running_requests(
    tiny_model: Path, tiny_model_v1: Path, models: dict[str, Any]
) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        batch = [make(f"r{index}", 2 + 50 * index, max_new_tokens=60) for index in range(4)]
        for request in batch:
            scheduler.submit(request)
        await produced(batch[-1], 10)
        await scheduler.pause("in_place")
        before = [len(request.output) for request in batch]
        waiting = make("waiting", max_new_tokens=5)
        scheduler.submit(waiting)
        assert await scheduler.update_weights(str(tiny_model_v1), "v1", False) == 5
        assert [len(request.output) for request in batch] == before
        scheduler.resume()
        await finished(*batch, waiting)
    for request, count in zip(batch, before, strict=True):
        assert request.spans == [("v0", 0, count), ("v1", count, 60)]
        assert_exact(models, request)
    assert waiting.spans == [("v1", 0, 5)]
    assert_exact(models, waiting)


async def test_retracted_requests_go_on_exactly(tiny_model: Path, tiny_model_v1: Path, models: dict[str, Any]) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        batch = [make(f"r{index}", 2 + 50 * index, max_new_tokens=40) for index in range(3)]
        for request in batch:
            scheduler.submit(request)
        await produced(batch[-1], 5)
        await scheduler.pause("retract")
        assert scheduler.running == []
        await scheduler.update_weights(str(tiny_model_v1), "v1", False)
        scheduler.resume()
        await finished(*batch)
    for request in batch:
        assert request.retractions == 1
        assert [name for name, _, _ in request.spans] == ["v0", "v1"]
        assert_exact(models, request)


async def test_small_memory_retracts_and_still_answers_exactly(tiny_model: Path, models: dict[str, Any]) -> None:
    async with scheduler_for(tiny_model, max_total_tokens=150) as scheduler:
        batch = [make(f"r{index}", 20, max_new_tokens=60) for index in range(5)]
        for request in batch:
            scheduler.submit(request)
        await finished(*batch)
    assert sum(request.retractions for request in batch) > 0
    for request in batch:
        assert len(request.output) == 60
        assert_exact(models, request)


async def test_update_waits_for_older_requests_and_holds_newer_ones(tiny_model: Path, tiny_model_v1: Path) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        older = make("older", max_new_tokens=40)
        scheduler.submit(older)
        await produced(older, 3)
        update = asyncio.create_task(scheduler.update_weights(str(tiny_model_v1), "v1", False))
        await produced(older, 6)
        newer = make("newer", max_new_tokens=4)
        scheduler.submit(newer)
        await finished(older)
        assert newer.output == []
        assert await update == 0
        await finished(newer)
    assert older.spans == [("v0", 0, 40)]
    assert newer.spans == [("v1", 0, 4)]


async def test_update_that_aborts_labels_partials_with_the_old_version(tiny_model: Path, tiny_model_v1: Path) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        running = make("running", max_new_tokens=500)
        scheduler.submit(running)
        await produced(running, 5)
        await scheduler.update_weights(str(tiny_model_v1), "v1", True)
        assert running.finish is not None
        assert running.finish["type"] == "abort"
        assert [name for name, _, _ in running.spans] == ["v0"]
        assert scheduler.version == "v1"


@pytest.mark.parametrize("damage", ["missing", "truncated", "wider", "no tensor"])
async def test_a_bad_checkpoint_leaves_the_old_weights(
    damage: str, tiny_model: Path, tmp_path: Path, models: dict[str, Any]
) -> None:
    bad = tmp_path / "bad"
    if damage != "missing":
        build_model(bad, seed=9, hidden=96 if damage == "wider" else 64)
    if damage == "truncated":
        file = bad / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
    if damage == "no tensor":
        from safetensors.torch import load_file, save_file

        tensors = load_file(bad / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    async with scheduler_for(tiny_model) as scheduler:
        with pytest.raises(CheckpointError):
            await scheduler.update_weights(str(bad), "v9", False)
        assert scheduler.version == "v0"
        request = make("after")
        scheduler.submit(request)
        await finished(request)
    assert_exact(models, request)


async def test_overwriting_the_served_folder_changes_nothing(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "served", seed=5)
    async with scheduler_for(folder) as scheduler:
        model = load_model(str(folder), "float32")
        file = folder / "model.safetensors"
        with file.open("r+b") as opened:
            opened.truncate(100)
        request = make("served")
        scheduler.submit(request)
        await finished(request)
    assert_exact({"v0": model}, request)


async def test_qwen2_with_tied_embeddings(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "qwen", seed=3, kind="qwen2")
    other = build_model(tmp_path / "qwen1", seed=4, kind="qwen2")
    async with scheduler_for(folder) as scheduler:
        batch = [make(f"q{index}", 5 + 13 * index) for index in range(4)]
        for request in batch:
            scheduler.submit(request)
        await finished(*batch)
        await scheduler.update_weights(str(other), "v1", False)
        after = make("after")
        scheduler.submit(after)
        await finished(after)
    for request in batch:
        assert_exact({"v0": load_model(str(folder), "float32")}, request)
    assert_exact({"v1": load_model(str(other), "float32")}, after)


async def test_prompts_longer_than_a_prefill_chunk_and_their_scores(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "long", seed=6, context=2048)
    model = load_model(str(folder), "float32")
    async with scheduler_for(folder) as scheduler:
        request = make("scored", 1100, max_new_tokens=3)
        request.return_logprob, request.logprob_start = True, 500
        scheduler.submit(request)
        await finished(request)
    assert_exact({"v0": model}, request)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([request.prompt])).logits[0].float(), dim=-1)
    assert request.prompt_logprobs is not None
    assert len(request.prompt_logprobs) == 599
    for offset, value in enumerate(request.prompt_logprobs):
        position = 501 + offset
        assert value == pytest.approx(expected[position - 1, request.prompt[position]].item(), abs=TOLERANCE)


async def test_queue_bound(tiny_model: Path) -> None:
    async with scheduler_for(tiny_model, max_running=1, max_queued=1, decode_interval_s=0.01) as scheduler:
        running, queued = make("running", max_new_tokens=20), make("queued", max_new_tokens=2)
        scheduler.submit(running)
        await produced(running, 1)
        scheduler.submit(queued)
        with pytest.raises(QueueFull):
            scheduler.submit(make("refused"))
        await finished(running, queued)


async def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler_for(tiny_model) as scheduler:
        real = scheduler.runner.decode

        def broken(*arguments: Any) -> Any:
            raise RuntimeError("no memory")

        monkeypatch.setattr(scheduler.runner, "decode", broken)
        victim = make("victim")
        scheduler.submit(victim)
        await finished(victim)
        assert victim.finish is not None
        assert victim.finish["status_code"] == 500
        monkeypatch.setattr(scheduler.runner, "decode", real)
        after = make("after")
        scheduler.submit(after)
        await finished(after)
        assert after.finish == {"type": "length", "length": 30}
