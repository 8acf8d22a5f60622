"""Control calls on real SGLang: what each release tells, and what it does when told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from samplestore.states import WeightUpdateMode
from samplestore.workers import control, engine_state
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError
from tests.support.models import VOCAB, build_model
from tests.support.processes import Processes, wait_until_async
from tests.support.sglang import chosen_releases, start_sglang

CONTEXT = 2048
LONG = 1900  # tokens of a request that is to be found running: at least 3 s, or less than one on a fast machine
ATTEMPTS = 6
WAIT_S = 120.0
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(WAIT_S) as made:
        yield made


async def _generate(client: EngineClient, url: str, rid: str, tokens: int) -> int:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    reply = client.generate(url, {"rid": rid, "input_ids": [5, 6], "sampling_params": sampling, "stream": False}, rid)
    try:
        [answer] = await reply.read()
        return int(answer["meta_info"]["completion_tokens"])
    finally:
        await reply.aclose()


async def _paused_amid(client: EngineClient, url: str) -> tuple[str, asyncio.Task[int]]:
    """(request id, its answer): one that the engine holds in the middle, frozen. It may have ended before the pause
    came, on a fast machine or when this process stalls: then another one is tried."""
    for number in range(ATTEMPTS):
        rid = f"{number:032d}"
        task = asyncio.create_task(_generate(client, url, rid, LONG))
        await wait_until_async(lambda t=task: _running_or(t, client, url), what="it runs", timeout=WAIT_S)
        await control.pause(client, url, "in_place")
        # An answer that was on its way when the engine paused is here before that of many other calls.
        for _ in range(20):
            await engine_state.server(client, url)
        if not task.done():
            return rid, task
        await control.proceed(client, url)
    raise AssertionError(f"{ATTEMPTS} requests of {LONG} tokens had each ended before a pause")


@pytest.mark.parametrize("release", chosen_releases())
async def test_control_calls(client: EngineClient, processes: Processes, tmp_path: Path, release: str) -> None:
    first, second = (build_model(tmp_path / f"v{n}", seed=n, context=CONTEXT) for n in (0, 1))
    url = start_sglang(processes, first, release=release).url
    assert await engine_state.info(client, url) == engine_state.Info("v0", str(first))
    told = await engine_state.server(client, url)
    assert (told.context_length, told.vocab_size, told.release) == (CONTEXT, VOCAB, release)
    assert (told.metrics, told.memory_saver, told.routed_experts, told.speculative) == (True, False, False, None)

    # load and counter
    before = await engine_state.generated_tokens(client, url)
    assert before is not None
    assert await _generate(client, url, "a" * 32, 7) == 7
    counted = before + 7
    await wait_until_async(
        lambda: _is(engine_state.generated_tokens(client, url), counted), what="7 tokens more", timeout=WAIT_S
    )
    facts = await engine_state.facts(client, url)
    assert (facts.context_length, facts.release) == (CONTEXT, release)

    # our launcher switches off that health checks generate: a paused engine stays well
    rid, running = await _paused_amid(client, url)
    await engine_state.health(client, url, 20.0)
    assert (await engine_state.load(client, url)).running == 1
    with pytest.raises(EngineError, match="enable-memory-saver"):
        await control.release_memory(client, url)
    # of a frozen request it is heard when the engine goes on
    await control.abort(client, url, rid)
    await control.proceed(client, url)
    await engine_state.health(client, url, 30.0)
    assert 0 < await running < LONG
    await wait_until_async(lambda: _is_idle(client, url), what="nothing runs", timeout=WAIT_S)

    # weights
    for mode in WeightUpdateMode:
        await control.change_weights(client, url, str(second), f"v-{mode}", mode)
    with pytest.raises(EngineError):
        await control.change_weights(client, url, str(tmp_path / "missing"), "v9", WeightUpdateMode.ABORT)
    assert (await engine_state.info(client, url)).label == f"v-{list(WeightUpdateMode)[-1]}"

    await wait_until_async(lambda: _flushed(client, url), what="the cache is flushed", timeout=WAIT_S)
    await control.abort_all(client, url)
    await control.pause(client, url, "abort")
    await control.proceed(client, url)
    assert await _generate(client, url, "c" * 32, 3) == 3


async def _is(asked: object, expected: object) -> bool:
    return await asked == expected  # type: ignore[misc]


async def _running_or(task: asyncio.Task[int], client: EngineClient, url: str) -> bool:
    return task.done() or (await engine_state.load(client, url)).running == 1


async def _is_idle(client: EngineClient, url: str) -> bool:
    return (await engine_state.load(client, url)).running == 0


async def _flushed(client: EngineClient, url: str) -> bool:
    try:
        await control.flush_cache(client, url)
    except EngineError:
        return False
    return True
