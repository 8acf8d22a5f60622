"""Routers: which one it is, what it drops, what it lists; the real ones, and shapes of others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from samplestore.workers import routers
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError
from tests.support.processes import Processes, wait_until_async
from tests.support.router import Kind, Router
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.workers.canned import canned

FIELDS = {name: None for name in sorted(routers.MORE)} | {
    "return_routed_experts": True, "routed_experts_start_len": 1, "return_prompt_token_ids": True,
    "return_sampling_mask": True, "return_indexer_topk": True, "session_id": "s", "routing_key": "k",
    "routed_dp_rank": 0, "cache_salt": "c", "max_thinking_tokens": 5, "require_reasoning": True,
    "extra_key": "v1", "priority": 3, "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 1,
    "token_ids_logprob": [3], "custom_logit_processor": "p",
}  # fmt: skip
SAMPLING = {
    "custom_params": {"a": 1}, "logit_bias": {"3": 1.0}, "stop_regex": ["y"], "stream_interval": 4,
    "spaces_between_special_tokens": False, "structural_tag": "t", "max_new_tokens": 3, "temperature": 0.5,
    "top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_new_tokens": 1, "stop": ["x"], "stop_token_ids": [4],
    "ignore_eos": True, "no_stop_trim": True, "skip_special_tokens": False, "n": 1, "frequency_penalty": 0.1,
    "presence_penalty": 0.2, "repetition_penalty": 1.1, "sampling_seed": 7, "json_schema": "{}", "regex": "a",
    "ebnf": "b",
}  # fmt: skip


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(10.0) as made:
        yield made


@pytest.mark.parametrize(("kind", "retries"), [("sglang-router", True), ("sglang-router", False), ("smg", True)])
async def test_a_real_router_is_known_and_drops_what_is_said(
    client: EngineClient, processes: Processes, kind: Kind, retries: bool
) -> None:
    """Everything is sent through it, and what arrives is held against the tables. (smg without retries passes bodies
    on unread under some policies, but from outside one can't see that it does.)"""
    engine = ScriptedEngine(lambda body, n: Script(chunk=1))
    try:
        url = Router.start(processes, kind=kind, retries=retries).url
        found = await routers.identify(client, url)
        assert (found.kind, found.tells_engine) == (kind, kind == "smg")
        assert found.version == (None if kind == "sglang-router" else "1.13.0")
        assert await routers.listed(client, url) == set()
        await routers.register(client, url, engine.url)
        await wait_until_async(lambda: _healthy(client, url), what="the engine is listed")
        reply = client.generate(url, {"rid": "r", "input_ids": [1], "sampling_params": SAMPLING, **FIELDS}, "k")
        await reply.read()
        await reply.aclose()
        assert reply.engine == (engine.url if found.tells_engine else None)
        [arrived] = engine.requests
        assert FIELDS.keys() - arrived.keys() == found.drops
        assert SAMPLING.keys() - arrived["sampling_params"].keys() == found.drops_sampling
        assert await routers.register(client, url, engine.url) is None  # it is there
        await routers.unregister(client, url, engine.url)
        await wait_until_async(lambda: _gone(client, url), what="the engine is not listed")
        await routers.unregister(client, url, engine.url)  # harmless
    finally:
        engine.close()


async def _healthy(client: EngineClient, url: str) -> bool:
    return any(one.healthy for one in await routers.workers(client, url))


async def _gone(client: EngineClient, url: str) -> bool:
    return not await routers.listed(client, url)


@pytest.mark.parametrize(
    "told",
    [
        {"workers": [{"url": "http://a:1/", "id": "x"}, {"url": "file:///etc/passwd"}, 7, {"url": 8}]},
        {"urls": ["http://a:1"]},
        ["http://a:1"],
        {"workers": [{"url": "http://a:1"}, {"url": "http://b:1", "status": "draining"}]},
    ],
)
@pytest.mark.parametrize("page", routers.LIST_PATHS)
async def test_shapes_of_lists(client: EngineClient, page: str, told: Any) -> None:
    async with canned({f"GET {page}": told}) as router:
        assert await routers.listed(client, router.url) == {"http://a:1"}


@pytest.mark.parametrize("told", [{"engines": []}, "x", None, {"workers": 3}])
async def test_a_list_that_is_none_is_broken(client: EngineClient, told: Any) -> None:
    async with canned({"GET /workers": (200, told)}) as router:
        with pytest.raises(EngineError, match="lists no engines"):
            await routers.listed(client, router.url)


async def test_an_engine_that_is_given_as_a_router(client: EngineClient) -> None:
    engine = ScriptedEngine()
    try:
        with pytest.raises(EngineError, match=f"is an engine, not a router. Say --engine {engine.url}") as raised:
            await routers.identify(client, engine.url)
        assert raised.value.kind == "setup"
    finally:
        engine.close()


async def test_an_unknown_router_drops_whatever_any_of_them_drops(client: EngineClient) -> None:
    async with canned({"GET /workers": {"workers": []}}) as other:
        found = await routers.identify(client, other.url)
    assert (found.kind, found.drops, found.drops_sampling) == ("unknown", routers.MORE, routers.MORE_SAMPLING)
    with pytest.raises(EngineError, match=r"unknown kind .* drops return_routed_experts .*--dispatch direct"):
        routers.require_passes(found, ["return_routed_experts"], [])


def test_what_is_dropped_is_refused_with_a_remedy_that_helps() -> None:
    old = routers.Router("http://r", "sglang-router", None, routers.PASSES, routers.PASSES_SAMPLING, False)
    new = routers.Router("http://r", "smg", "1.13.0", None, routers.PASSES_SAMPLING | {"custom_params"}, True)
    routers.require_passes(old, ["rid", "extra_key", "stream"], ["temperature", "min_p"])
    routers.require_passes(new, ["return_routed_experts", "anything"], ["custom_params"])
    for router, fields, sampling, told in (
        (
            old,
            ["return_routed_experts"],
            ["custom_params"],
            "return_routed_experts, sampling_params.custom_params .*smg",
        ),
        (old, ["a_field_of_tomorrow"], [], "a_field_of_tomorrow"),
        (old, [], ["logit_bias"], "sampling_params.logit_bias from requests. Talk to the engines: --dispatch direct"),
        (new, [], ["logit_bias"], "smg 1.13.0 .*sampling_params.logit_bias from requests. Talk to the engines"),
    ):
        with pytest.raises(EngineError, match=told) as raised:
            routers.require_passes(router, fields, sampling)
        assert raised.value.kind == "setup"


async def test_older_routers_take_engines_by_query(client: EngineClient) -> None:
    answers = {"GET /list_workers": {"urls": ["http://b:1"]}, "POST /add_worker": "ok", "POST /remove_worker": "ok"}
    async with canned(answers) as router:
        assert await routers.register(client, router.url, "http://a:1") is None
        await routers.unregister(client, router.url, "http://b:1")
        calls = [asked for asked, _ in router.asked if "_worker?" in asked]
    assert calls == ["POST /add_worker?url=http://a:1", "POST /remove_worker?url=http://b:1"]


@pytest.mark.parametrize(
    ("kind", "flags", "survives"),
    [("sglang-router", [], False), ("sglang-router", ["--disable-circuit-breaker"], True), ("smg", [], True)],
)
async def test_refused_requests_and_the_circuit_breaker(
    client: EngineClient, processes: Processes, kind: Kind, flags: list[str], survives: bool
) -> None:
    """sglang-router counts an engine's 400 as a failure of the engine: ten bad requests in a row, and it gets nothing
    for a minute, though it is well. So prompts are checked before they are sent."""
    bad = Script(status=400, body={"error": {"message": "input_ids cannot be empty."}})
    engine = ScriptedEngine(lambda body, n: bad if n < 10 else Script(chunk=1))
    try:
        router = Router.start(processes, [engine.url], kind=kind, extra_args=flags)
        outcomes = [await _outcome(client, router.url, n) for n in range(11)]
        assert [o.kind if o else "" for o in outcomes] == ["refused"] * 10 + ["" if survives else "busy"]
        assert router.workers()[0]["is_healthy"], "its list does not tell"
    finally:
        engine.close()


async def _outcome(client: EngineClient, url: str, n: int) -> EngineError | None:
    body = {"rid": f"{n:032}", "input_ids": [1], "sampling_params": {"max_new_tokens": 2}, "stream": False}
    reply = client.generate(url, body, str(n))
    try:
        await reply.read()
    except EngineError as error:
        return error
    finally:
        await reply.aclose()
    return None
