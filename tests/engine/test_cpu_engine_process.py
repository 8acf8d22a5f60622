"""The life of an embedded engine: start, other weights, the router in front of it, the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.support.router import Router

from .conftest import RunningEngine
from .protocol import chunks, get, internal, job, post, until


async def test_weight_updates(
    engine_factory: Callable[..., RunningEngine], tiny_model: Path, tiny_model_v1: Path, http: aiohttp.ClientSession
) -> None:
    engine = engine_factory(tiny_model, "--weight-version", "v0", "--decode-interval", "0.005")
    update = f"{engine.url}/update_weights_from_disk"
    greedy = job("greedy", 20, temperature=0.0)
    _, before = await post(http, f"{engine.url}/generate", greedy)
    assert (await post(http, update, {"model_path": str(tiny_model_v1), "weight_version": 1}))[0] == 400
    status, body = await post(http, update, {"model_path": str(tiny_model_v1 / "nowhere"), "weight_version": "v9"})
    assert (status, body["success"]) == (400, False)
    assert (await post(http, f"{engine.url}/generate", greedy))[1]["output_ids"] == before["output_ids"]
    running = asyncio.create_task(post(http, f"{engine.url}/generate", job("running", 400)))
    await until(http, engine.url, lambda state: state["running_requests"] == 1)
    body = {"model_path": str(tiny_model_v1), "weight_version": "v1", "abort_all_requests": True}
    status, answer = await post(http, update, body)
    assert (status, answer["success"]) == (200, True)
    partial = (await running)[1]
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    assert {span["version"] for span in partial["meta_info"]["weight_versions"]} == {"v0"}
    for path in ("/model_info", "/get_model_info"):
        info = (await get(http, engine.url + path))[1]
        assert (info["weight_version"], info["model_path"], info["is_generation"]) == ("v1", str(tiny_model_v1), True)
    _, after = await post(http, f"{engine.url}/generate", greedy)
    assert after["output_ids"] != before["output_ids"]
    running = asyncio.create_task(post(http, f"{engine.url}/generate", job("inplace", 400)))
    await until(http, engine.url, lambda state: state["running_requests"] == 1)
    await post(http, f"{engine.url}/pause_generation", {"mode": "in_place"})
    _, answer = await post(http, update, {"model_path": str(tiny_model), "weight_version": "v2"})
    assert answer["num_paused_requests"] == 1
    await post(http, f"{engine.url}/continue_generation")
    spans = (await running)[1]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["v1", "v2"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 400)
    await post(http, update, {"model_path": str(tiny_model_v1)})
    assert (await get(http, f"{engine.url}/model_info"))[1]["weight_version"] == "v2"
    await post(http, f"{engine.url}/update_weight_version", {"new_version": "v3"})
    assert (await get(http, f"{engine.url}/model_info"))[1]["weight_version"] == "v3"
    running = asyncio.create_task(post(http, f"{engine.url}/generate", job("frozen", 400)))
    await until(http, engine.url, lambda state: state["running_requests"] == 1)
    await post(http, f"{engine.url}/pause_generation", {"mode": "in_place"})
    engine.process.terminate()
    assert (await running)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert await asyncio.to_thread(engine.process.wait, 30) == 0


async def test_sigterm_finishes_what_is_running(
    engine_factory: Callable[..., RunningEngine], tiny_model: Path, http: aiohttp.ClientSession
) -> None:
    engine = engine_factory(
        tiny_model, "--decode-interval", "0.005", "--max-running", "1", "--max-queued-requests", "1"
    )
    running = asyncio.create_task(post(http, f"{engine.url}/generate", job("a", 400)))
    await until(http, engine.url, lambda state: state["running_requests"] == 1)
    queued = asyncio.create_task(post(http, f"{engine.url}/generate", job("b", 5)))
    await until(http, engine.url, lambda state: state["waiting_requests"] == 1)
    status, body = await post(http, f"{engine.url}/generate", job("c"))
    assert (status, body["message"], body["code"]) == (503, "The request queue is full.", 503)
    [chunk] = [chunk async for chunk in chunks(http, engine.url, job("d", stream=True))]
    assert chunk["meta_info"]["finish_reason"]["status_code"] == 503
    engine.process.terminate()
    assert len((await running)[1]["output_ids"]) == 400
    assert len((await queued)[1]["output_ids"]) == 5
    assert await asyncio.to_thread(engine.process.wait, 30) == 0


async def test_without_a_tokenizer(
    engine_factory: Callable[..., RunningEngine], tiny_model: Path, http: aiohttp.ClientSession
) -> None:
    engine = engine_factory(tiny_model, "--skip-tokenizer-init")
    _, body = await post(http, f"{engine.url}/generate", job("ids"))
    assert "text" not in body
    assert len(body["output_ids"]) == 8
    assert (await post(http, f"{engine.url}/generate", {"text": "hello"}))[0] == 400
    assert (await post(http, f"{engine.url}/generate", job("stop", stop="x")))[0] == 400


@pytest.mark.parametrize("content", ["nothing", "no weights"])
def test_a_folder_that_cannot_be_served_is_named(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if content == "no weights":
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    command = [sys.executable, "-m", "samplestore.workers.cpu_engine", "--model", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert str(folder) in done.stderr
    assert "Traceback" not in done.stderr


async def test_behind_the_real_router(
    engine: RunningEngine,
    engine_factory: Callable[..., RunningEngine],
    tiny_model: Path,
    router: Router,
    http: aiohttp.ClientSession,
) -> None:
    second = engine_factory(tiny_model, "--weight-version", "v0")
    for url in (engine.url, second.url):
        await asyncio.to_thread(router.add_worker, url)
    body = job("routed", 12, sampling_seed=5)
    answers = [await post(http, f"{router.url}/generate", body) for _ in range(2)]
    for status, answer in answers:
        assert status == 200
        assert answer["meta_info"]["id"] == "routed"
        assert len(answer["meta_info"]["output_token_logprobs"]) == 12
    assert answers[0][1]["output_ids"] == answers[1][1]["output_ids"]
    last = [chunk async for chunk in chunks(http, router.url, {**body, "stream": True})][-1]
    assert last["output_ids"] == answers[0][1]["output_ids"]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    status, answer = await post(http, f"{router.url}/generate", {**body, "input_ids": [9999]})
    assert (status, "input_ids" in answer["error"]["message"]) == (400, True)
    # Both engines were used: the policy is round robin.
    assert (await internal(http, second.url))["finished_requests_total"] >= 1
