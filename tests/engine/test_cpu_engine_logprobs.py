"""The log-probs of the embedded engine against a plain forward pass over the whole sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samplestore.workers.cpu_engine.checkpoint import load_model
from samplestore.workers.cpu_engine.request import Request
from samplestore.workers.cpu_engine.scheduler import QueueFull
from tests.support.models import build_model

from .direct import TOLERANCE, assert_exact, finished, make, produced, scheduler_for


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
