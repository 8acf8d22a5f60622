"""Control calls against canned answers: the shapes that releases give, and those that none should."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from samplestore.states import WeightUpdateMode
from samplestore.types import EngineFacts
from samplestore.workers import control, engine_state
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError
from tests.workers.canned import canned

SERVER = {"context_length": 2048, "version": "0.5.23", "stream_interval": 1, "incremental_streaming_output": True}
LOADS = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 30}] * 2}
METRICS = """# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 8.0
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 1.2e+06
sglang:generation_tokens_histogram_sum{model_name="m"} 77.0
"""


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(5.0) as made:
        yield made


@pytest.mark.parametrize("page", ["/model_info", "/get_model_info"])
async def test_info_under_the_newer_and_the_older_name(client: EngineClient, page: str) -> None:
    async with canned({f"GET {page}": {"weight_version": "v7", "model_path": "/m"}}) as engine:
        assert await engine_state.info(client, engine.url) == engine_state.Info("v7", "/m")


@pytest.mark.parametrize("told", [["a"], "text", None])
async def test_info_that_is_no_object_is_broken(client: EngineClient, told: Any) -> None:
    async with canned({"GET /model_info": (200, told)}) as engine:
        with pytest.raises(EngineError, match="model_info answered") as raised:
            await engine_state.info(client, engine.url)
        assert raised.value.kind == "broken"


async def test_what_is_no_engine(client: EngineClient) -> None:
    async with canned({}) as other:
        with pytest.raises(EngineError, match="no SGLang engine"):
            await engine_state.info(client, other.url)


async def test_server_takes_the_context_length_from_the_model_where_none_was_given(
    client: EngineClient, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 512}}))
    answers = {
        "GET /server_info": {**SERVER, "context_length": None, "model_path": str(tmp_path)},
        "GET /v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
    }
    async with canned(answers) as engine:
        told = await engine_state.server(client, engine.url)
    assert (told.context_length, told.vocab_size, told.release, told.incremental) == (4096, 512, "0.5.23", True)
    assert told.routed_experts is None


@pytest.mark.parametrize("wrong", [True, -1, "2048", 2.5, 2**40, [2048]])
async def test_server_believes_no_nonsense(client: EngineClient, wrong: Any) -> None:
    answers = {"GET /server_info": {"context_length": wrong, "vocab_size": wrong, "version": 5, "page_size": wrong}}
    async with canned(answers) as engine:
        assert await engine_state.server(client, engine.url) == engine_state.Server()


async def test_a_release_without_server_info_tells_nothing(client: EngineClient) -> None:
    async with canned({}) as engine:
        assert await engine_state.server(client, engine.url) == engine_state.Server()
        assert await engine_state.load(client, engine.url) == engine_state.Load()
        assert await engine_state.generated_tokens(client, engine.url) is None


async def test_load_is_over_all_ranks(client: EngineClient) -> None:
    async with canned({"GET /v1/loads": LOADS}) as engine:
        assert await engine_state.load(client, engine.url) == engine_state.Load(4, 2, 60)


@pytest.mark.parametrize("newer", [(404, ""), (500, "Internal Server Error")])
async def test_load_of_older_releases(client: EngineClient, newer: tuple[int, str]) -> None:
    """Theirs counts what waits among the requests."""
    older = [{"num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 22}]
    async with canned({"GET /v1/loads": newer, "GET /get_load": older}) as engine:
        assert await engine_state.load(client, engine.url) == engine_state.Load(2, 1, 22)


@pytest.mark.parametrize("told", [{"loads": 3}, {"loads": [1]}, [], "x"])
async def test_broken_loads(client: EngineClient, told: Any) -> None:
    async with canned({"GET /v1/loads": (200, told)}) as engine:
        with pytest.raises(EngineError, match="/v1/loads answered"):
            await engine_state.load(client, engine.url)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (METRICS, 1_200_008),
        ("sglang:num_running_reqs 0.0\n", 0),
        ("other 1\n", None),
        (f"# {'x' * 5000}\n{METRICS}", 1_200_008),
    ],
)
async def test_generated_tokens(client: EngineClient, page: str, expected: int | None) -> None:
    async with canned({"GET /metrics": page}) as engine:
        assert await engine_state.generated_tokens(client, engine.url) == expected


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "many"])
async def test_a_counter_that_is_no_count(client: EngineClient, value: str) -> None:
    async with canned({"GET /metrics": f"sglang:generation_tokens_total {value}\n"}) as engine:
        with pytest.raises(EngineError, match="no number of tokens"):
            await engine_state.generated_tokens(client, engine.url)


async def test_facts(client: EngineClient) -> None:
    answers = {"GET /server_info": SERVER, "GET /v1/loads": LOADS, "GET /metrics": METRICS}
    async with canned(answers) as engine:
        assert await engine_state.facts(client, engine.url) == EngineFacts(1_200_008, 2048, "0.5.23", 4, 2)


async def test_an_update_always_names_the_label_and_whether_to_abort(client: EngineClient) -> None:
    async with canned({"POST /update_weights_from_disk": {"success": True}}) as engine:
        await control.update_from_disk(client, engine.url, "/m", "v3")
        [body] = engine.bodies("POST /update_weights_from_disk")
    assert body == {"model_path": "/m", "weight_version": "v3", "abort_all_requests": False, "flush_cache": True}


@pytest.mark.parametrize("answer", [{"success": False, "message": "no such file"}, "loaded", None, {}])
async def test_an_update_counts_only_where_the_engine_says_so(client: EngineClient, answer: Any) -> None:
    async with canned({"POST /update_weights_from_disk": (200, answer)}) as engine:
        with pytest.raises(EngineError, match="did not load"):
            await control.update_from_disk(client, engine.url, "/m", "v3")


@pytest.mark.parametrize(
    ("mode", "release", "pause", "flush"),
    [
        ("abort", "0.5.23", "abort", True),
        ("drain", "0.5.23", None, False),
        ("drain", "0.5.9", None, True),  # it has no cache keys
        ("drain", None, None, True),
        ("keep", "0.5.9", "in_place", False),
    ],
)
async def test_change_weights(
    client: EngineClient, mode: str, release: str | None, pause: str | None, flush: bool
) -> None:  # fmt: skip
    """The cache is emptied in a pause only, or where nothing else keeps old keys and values from new requests."""
    answers = {
        "GET /server_info": {"version": release, "context_length": 100},
        "POST /update_weights_from_disk": {"success": True},
        "POST /pause_generation": {"status": "ok"},
        "POST /continue_generation": {"status": "ok"},
        "GET /model_info": {"weight_version": "v3"},
    }
    async with canned(answers) as engine:
        await control.change_weights(client, engine.url, "/m", "v3", WeightUpdateMode(mode))
        posts = [asked.removeprefix("POST /") for asked, _ in engine.asked if asked.startswith("POST")]
        [body] = engine.bodies("POST /update_weights_from_disk")
        told = engine.bodies("POST /pause_generation") if pause else []
    update = ["update_weights_from_disk"]
    assert posts == (["pause_generation", *update, "continue_generation"] if pause else update)
    assert [body["mode"] for body in told] == ([pause] if pause else [])
    assert (body["abort_all_requests"], body["flush_cache"]) == (False, flush)


async def test_a_frozen_engine_goes_on_when_its_update_fails(client: EngineClient) -> None:
    answers = {
        "POST /update_weights_from_disk": (400, {"success": False, "message": "no"}),
        "POST /pause_generation": {},
        "POST /continue_generation": {},
        "GET /model_info": {"weight_version": "v2", "model_path": "/m0"},
    }
    async with canned(answers) as engine:
        with pytest.raises(EngineError, match=r": no$"):
            await control.change_weights(client, engine.url, "/m", "v3", WeightUpdateMode.KEEP)
        assert engine.asked[-1][0] == "POST /continue_generation"


async def test_one_that_can_not_be_woken_is_told_with_what_failed(client: EngineClient) -> None:
    answers = {
        "POST /update_weights_from_disk": (400, {"success": False, "message": "no such folder"}),
        "POST /pause_generation": {},
        "POST /continue_generation": (500, "oops"),
        "GET /model_info": {"weight_version": "v2", "model_path": "/m0"},
    }
    async with canned(answers) as engine:
        with pytest.raises(EngineError, match="no such folder") as told:
            await control.change_weights(client, engine.url, "/m", "v3", WeightUpdateMode.ABORT)
    assert str(told.value).endswith(f"Wake it with: samplestore engines continue --engine {engine.url}")


async def test_another_label_than_was_asked_for_is_an_error(client: EngineClient) -> None:
    answers = {"POST /update_weights_from_disk": {"success": True}, "GET /model_info": {"weight_version": "v2"}}
    async with canned(answers) as engine:
        with pytest.raises(EngineError, match="told to serve v3, says 'v2'"):
            await control.change_weights(client, engine.url, "/m", "v3", WeightUpdateMode.DRAIN)


async def test_abort_takes_no_prefix_of_everything(client: EngineClient) -> None:
    async with canned({"POST /abort_request": (200, "")}) as engine:
        with pytest.raises(ValueError, match="prefix"):
            await control.abort(client, engine.url, "")
        await control.abort(client, engine.url, "r1")
        await control.abort_all(client, engine.url)
        assert engine.bodies("POST /abort_request") == [{"rid": "r1"}, {"rid": "", "abort_all": True}]


async def test_an_unknown_pause_mode_reaches_no_engine(client: EngineClient) -> None:
    async with canned({}) as engine:
        with pytest.raises(ValueError, match="pause mode"):
            await control.pause(client, engine.url, "freeze")
        assert engine.asked == []


@pytest.mark.parametrize(
    ("saver", "running", "told"),
    [(False, 0, "--enable-memory-saver"), (True, 1, "pause --mode abort"), (True, 0, None)],
)
async def test_memory_is_released_only_where_the_engine_survives_it(
    client: EngineClient, saver: bool, running: int, told: str | None
) -> None:
    answers = {
        "GET /server_info": {**SERVER, "enable_memory_saver": saver},
        "GET /v1/loads": {"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]},
        "POST /release_memory_occupation": {},
    }
    async with canned(answers) as engine:
        if told is None:
            await control.release_memory(client, engine.url, ["kv_cache"])
            assert engine.bodies("POST /release_memory_occupation") == [{"tags": ["kv_cache"]}]
        else:
            with pytest.raises(EngineError, match=told):
                await control.release_memory(client, engine.url)
            assert engine.bodies("POST /release_memory_occupation") == []
