"""The embedded engine as a process: SGLang's protocol over HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .conftest import RunningEngine
from .protocol import PROMPT, chunks, get, internal, job, post, until


async def test_unary_answer(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    status, body = await post(http, f"{engine.url}/generate", job("unary"))
    assert status == 200
    meta = body["meta_info"]
    assert meta["id"] == "unary"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert [entry[1] for entry in meta["output_token_logprobs"]] == body["output_ids"]
    assert all(entry[0] < 0 for entry in meta["output_token_logprobs"])
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 8, 0)
    assert meta["weight_version"] == "v0"
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 8}]
    assert meta["num_retractions"] == 0
    assert meta["input_token_logprobs"] == []
    assert meta["e2e_latency"] > 0


async def test_streams_say_the_same_as_the_unary_answer(
    engine: RunningEngine, engine_factory: Callable[..., RunningEngine], tiny_model: Path, http: aiohttp.ClientSession
) -> None:
    body = job("s", 40, stream=True, sampling_seed=3, temperature=0.8)
    _, unary = await post(http, f"{engine.url}/generate", {**body, "stream": False})
    cumulative = [chunk async for chunk in chunks(http, engine.url, body)]
    assert cumulative[-1]["output_ids"] == unary["output_ids"]
    assert cumulative[-1]["text"] == unary["text"]
    for before, after in itertools.pairwise(cumulative):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in before["meta_info"]
    incremental = engine_factory(tiny_model, "--incremental-streaming-output", "--stream-interval", "4")
    parts = [chunk async for chunk in chunks(http, incremental.url, body)]
    assert [token for part in parts for token in part["output_ids"]] == unary["output_ids"]
    assert "".join(part["text"] for part in parts) == unary["text"]
    logprobs = [entry for part in parts for entry in part["meta_info"]["output_token_logprobs"]]
    assert [entry[1] for entry in logprobs] == unary["output_ids"]
    assert parts[-1]["meta_info"]["completion_tokens"] == 40
    assert len(parts) < 20


async def test_stops(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    seed: dict[str, Any] = {"sampling_seed": 11, "temperature": 1.0}
    _, free = await post(http, f"{engine.url}/generate", job("free", 30, **seed))
    token = free["output_ids"][5]
    first = free["output_ids"].index(token)
    body = job("token", 30, stop_token_ids=[token], **seed)
    body["sampling_params"]["ignore_eos"] = False
    _, stopped = await post(http, f"{engine.url}/generate", body)
    assert stopped["output_ids"] == free["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    middle = len(free["text"]) // 2
    stop = free["text"][middle : middle + 3]
    for streaming in (False, True):
        body = job("string", 30, stream=streaming, stop=[stop], **seed)
        if streaming:
            seen = [chunk async for chunk in chunks(http, engine.url, body)]
            assert all(stop not in chunk["text"] for chunk in seen)
            answer = seen[-1]
        else:
            _, answer = await post(http, f"{engine.url}/generate", body)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == free["text"][: free["text"].index(stop)]
        assert answer["output_ids"] == free["output_ids"][: len(answer["output_ids"])]


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"input_ids": []}, "message"),
        ({"input_ids": [1, 384]}, "message"),
        ({"input_ids": [-1]}, "message"),
        ({"input_ids": [1] * 1020}, "message"),
        ({"input_ids": None}, "message"),
        ({"sampling_params": {"max_new_tokens": 1021}}, "message"),
        ({"sampling_params": {"max_new_tokens": -1}}, "message"),
        ({"sampling_params": {"temperature": -0.5}}, "message"),
        ({"sampling_params": {"top_k": 0}}, "message"),
        ({"sampling_params": {"frequency_penalty": 0.5}}, "message"),
        ({"sampling_params": {"surprise": 1}}, "text"),
    ],
)
async def test_bad_requests_are_400_and_the_engine_lives(
    engine: RunningEngine, http: aiohttp.ClientSession, change: dict[str, Any], shape: str
) -> None:
    status, body = await post(http, f"{engine.url}/generate", {**job("bad"), **change})
    assert status == 400
    assert isinstance(body["error"], str if shape == "text" else dict)
    if shape == "message":
        assert isinstance(body["error"], dict)
        assert body["error"]["message"]
        [chunk] = [chunk async for chunk in chunks(http, engine.url, {**job("bad", stream=True), **change})]
        assert chunk["error"]["code"] == 400
    assert (await get(http, f"{engine.url}/health_generate"))[0] == 200


async def test_batches(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    body: dict[str, Any] = {"text": ["The answer", "What is"], "rid": "bb", "sampling_params": {"max_new_tokens": 3}}
    _, answers = await post(http, f"{engine.url}/generate", body)
    assert [answer["meta_info"]["id"] for answer in answers] == ["bb_0", "bb_1"]
    body = {**job("nn", 5, n=2)}
    _, answers = await post(http, f"{engine.url}/generate", body)
    assert len(answers) == 2
    streamed = [chunk async for chunk in chunks(http, engine.url, {**job("bs", 4, n=2, stream=True)})]
    assert {chunk["index"] for chunk in streamed if chunk["meta_info"]["finish_reason"]} == {0, 1}


async def test_abort_takes_exactly_one_rid(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    tasks = {rid: asyncio.create_task(post(http, f"{engine.url}/generate", job(rid, 700))) for rid in ("x1", "x10")}
    await until(http, engine.url, lambda state: state["running_requests"] == 2)
    status, body = await post(http, f"{engine.url}/generate", job("x1"))
    assert status == 400
    assert "Duplicate request ID" in body["error"]["message"]
    assert await post(http, f"{engine.url}/abort_request", {"rid": "x1"}) == (200, b"")
    assert await post(http, f"{engine.url}/abort_request", {"rid": "nobody"}) == (200, b"")
    _, aborted = await tasks["x1"]
    _, complete = await tasks["x10"]
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(aborted["output_ids"]) == len(aborted["meta_info"]["output_token_logprobs"]) < 700
    assert len(complete["output_ids"]) == 700


async def test_queued_abort_and_pause(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    running = asyncio.create_task(post(http, f"{engine.url}/generate", job("running", 60)))
    await until(http, engine.url, lambda state: state["running_requests"] == 1)
    assert (await post(http, f"{engine.url}/pause_generation", {"mode": "in_place"}))[0] == 200
    assert (await get(http, f"{engine.url}/ready"))[0] == 503
    assert (await get(http, f"{engine.url}/health"))[0] == 200
    queued = asyncio.create_task(post(http, f"{engine.url}/generate", job("queued")))
    await until(http, engine.url, lambda state: state["waiting_requests"] == 1)
    await post(http, f"{engine.url}/abort_request", {"rid": "queued"})
    _, answer = await queued
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & meta.keys()
    assert not running.done()
    assert (await post(http, f"{engine.url}/continue_generation"))[0] == 200
    assert (await post(http, f"{engine.url}/continue_generation"))[0] == 200
    assert len((await running)[1]["output_ids"]) == 60
    running = asyncio.create_task(post(http, f"{engine.url}/generate", job("running", 800)))
    await until(http, engine.url, lambda state: state["running_requests"] == 1)
    assert (await post(http, f"{engine.url}/pause_generation"))[0] == 200
    assert (await running)[1]["meta_info"]["finish_reason"]["message"] == "Aborted"
    await post(http, f"{engine.url}/continue_generation")


async def test_a_client_that_goes_away_stops_its_request(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    for stream in (True, False):
        call = asyncio.create_task(post(http, f"{engine.url}/generate", job("gone", 900, stream=stream)))
        await until(http, engine.url, lambda state: state["running_requests"] == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        before = (await internal(http, engine.url))["generated_tokens_total"]
        await until(http, engine.url, lambda state: state["running_requests"] == 0)
        assert (await internal(http, engine.url))["generated_tokens_total"] - before < 800


async def test_information(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    _, info = await get(http, f"{engine.url}/get_server_info")
    assert (info["context_length"], info["vocab_size"], info["max_running_requests"]) == (1024, 384, 8)
    assert (await get(http, f"{engine.url}/v1/models"))[1]["data"][0]["max_model_len"] == 1024
    assert (await get(http, f"{engine.url}/get_load"))[1][0]["num_reqs"] == 0
    assert (await post(http, f"{engine.url}/flush_cache"))[0] == 200
    async with http.post(f"{engine.url}/abort_request", data=b"{nope") as response:
        assert response.status == 400


async def test_zero_new_tokens_scores_the_prompt(engine: RunningEngine, http: aiohttp.ClientSession) -> None:
    body = {**job("score", 0), "logprob_start_len": 0, "top_logprobs_num": 2}
    _, answer = await post(http, f"{engine.url}/generate", body)
    assert answer["output_ids"] == []
    scores = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scores] == PROMPT
    assert scores[0][0] is None
    assert all(entry[0] < 0 for entry in scores[1:])
    assert [entry and len(entry) for entry in answer["meta_info"]["input_top_logprobs"]] == [None, 2, 2, 2]
