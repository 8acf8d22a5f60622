"""doctor --router against the real routers, with and without retries, with traffic, and interrupted."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from samplestore.cli.doctor import FAIL, OK, WARN, Result
from samplestore.workers import router_check
from samplestore.workers.router_check import check
from tests.support.processes import Processes, wait_until
from tests.support.router import Kind, Router
from tests.support.scripted_engine import ScriptedEngine

KINDS: list[Kind] = ["sglang-router", "smg"]


def by_name(results: list[Result]) -> dict[str, Result]:
    return {result.check: result for result in results}


@pytest.mark.parametrize("retries", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_router_that_retries_is_told_from_one_that_does_not(processes: Processes, kind: Kind, retries: bool) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    try:
        router = Router.start(processes, [e.url for e in engines], kind=kind, retries=retries)
        told = by_name(check(router.url))
        assert told["router"].state == OK and kind in told["router"].said
        assert told["router's engines"].state == OK
        found = told["router retries"]
        assert (found.state, found.said.partition(":")[0]) == ((FAIL, "yes") if retries else (OK, "no"))
        assert ("--disable-retries" in found.said) == retries
        assert router_check.NAME not in {w.get("model_id") for w in router.workers() if w.get("status") != "draining"}
        asked = [body["sampling_params"]["max_new_tokens"] for e in engines for body in e.requests]
        assert set(asked) <= {1}, "real engines were asked for more than a token"
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("policy", ["cache_aware", "power_of_two", "random", "manual"])
def test_no_policy_misleads(processes: Processes, policy: str) -> None:
    """cache_aware may send everything to the engines that it knew before: then it is not known whether it retries."""
    engines = [ScriptedEngine(), ScriptedEngine()]
    try:
        urls = [e.url for e in engines]  # power_of_two wants them at its start
        router = Router.start(processes, policy=policy, extra_args=["--worker-urls", *urls])
        wait_until(lambda: len(router.workers()) == 2, what="both are listed")
        found = by_name(check(router.url))["router retries"]
        unknown = policy == "cache_aware" and (found.state, found.said[:7]) == (WARN, "unknown")
        assert found.state == OK or unknown, found.said
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_leaves_the_list_as_it_was(processes: Processes, number: int) -> None:
    engine = ScriptedEngine()
    try:
        router = Router.start(processes, [engine.url])
        code = (
            "import asyncio\n"
            "from samplestore.workers import router_check as r\n"
            "async def wait(*args): print('asking', flush=True); await asyncio.sleep(60)\n"
            "r._ask = wait\n"
            f"r.check({router.url!r})\n"
        )
        doctor = processes.start([sys.executable, "-c", code], name="doctor")
        doctor.wait_for_log("asking")
        assert len(router.workers()) == 2
        doctor.signal(number)
        assert doctor.wait() != 0
        assert [w["url"] for w in router.workers()] == [engine.url]
    finally:
        engine.close()


def test_what_a_killed_check_left_behind_is_cleared_by_the_next(processes: Processes) -> None:
    engine, left = ScriptedEngine(), ScriptedEngine()
    try:
        router = Router.start(processes, [engine.url])
        assert router.request("POST", "/workers", {"url": left.url, "model_id": router_check.NAME})[0] == 202
        wait_until(lambda: len(router.workers()) == 2, what="the probe is listed")
        left.close()
        wait_until(lambda: not all(w["is_healthy"] for w in router.workers()), what="it is held to be dead")
        assert by_name(check(router.url))["router retries"].state == OK
        assert [w["url"] for w in router.workers()] == [engine.url]
    finally:
        engine.close()


def test_dead_engines_are_told(processes: Processes) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    try:
        router = Router.start(processes, [e.url for e in engines])
        engines[1].close()
        wait_until(lambda: not all(w["is_healthy"] for w in router.workers()), what="the router sees it")
        told = by_name(check(router.url))
        assert told["router's engines"].state == FAIL and engines[1].url in told["router's engines"].said
        assert (
            told["router's list"].state == FAIL
            and "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION" in told["router's list"].said
        )
    finally:
        for engine in engines:
            engine.close()


def test_no_router_and_an_engine_instead() -> None:
    engine = ScriptedEngine()
    try:
        [told] = check(engine.url)
        assert (told.state, told.exit_code) == (FAIL, 4) and f"--engine {engine.url}" in told.said
    finally:
        engine.close()
    [told] = check(engine.url)
    assert (told.state, told.exit_code) == (FAIL, 4)


def test_a_router_that_cannot_reach_the_probe_is_no_ok(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as unknown, never as well."""
    monkeypatch.setattr(router_check, "LISTED_S", 0.0)
    engine = ScriptedEngine()
    try:
        router = Router.start(processes, [engine.url])
        found = by_name(check(router.url))["router retries"]
        assert found.state == WARN and found.said.startswith("unknown: ")
        wait_until(lambda: [w["url"] for w in router.workers()] == [engine.url], what="the probe is gone")
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("outcome", "arrivals", "state"),
    [
        ("refused", 1, OK), ("refused", 2, FAIL), ("answered", 1, FAIL), ("no answer within 5 s", 1, WARN),
        ("engine busy (HTTP 503): other", 1, WARN),
    ],
)  # fmt: skip
def test_only_what_came_back_as_it_was_counts_as_no_retry(outcome: str, arrivals: int, state: str) -> None:
    assert router_check._judge(outcome, arrivals).state == state


async def test_requests_of_others_are_refused_and_not_counted() -> None:
    probe = router_check.Probe(own={"mine"})
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", probe.refuse)
    async with TestClient(TestServer(app)) as client:
        for body in ({"rid": "theirs"}, [1], {"rid": ["x"]}):
            async with client.post("/generate", json=body) as answer:
                assert answer.status == 503
        assert not probe.hit.is_set() and not probe.came
        await client.post("/generate", json={"rid": "mine"})
        async with asyncio.timeout(5):
            await probe.hit.wait()
