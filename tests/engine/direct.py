"""Driving the embedded engine's scheduler without HTTP, and the log-probs that it must report."""

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
from samplestore.workers.cpu_engine.params import SamplingParams
from samplestore.workers.cpu_engine.request import Request
from samplestore.workers.cpu_engine.runner import ModelRunner
from samplestore.workers.cpu_engine.scheduler import Scheduler

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


async def produced_or_finished(request: Request, count: int) -> None:
    async with asyncio.timeout(120):
        while len(request.output) < count and request.finish is None:
            request.changed.clear()
            await request.changed.wait()
