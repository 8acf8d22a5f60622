"""Sampling, parameter checks and text streams of the embedded engine, without a model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from samplestore.workers.cpu_engine.checkpoint import load_tokenizer
from samplestore.workers.cpu_engine.generate import GenerateHandler
from samplestore.workers.cpu_engine.options import BadRequest, ContractError, EngineOptions
from samplestore.workers.cpu_engine.params import parse_sampling_params
from samplestore.workers.cpu_engine.request import TextStream, first_stop
from samplestore.workers.cpu_engine.sampler import Choice, pick, uniform
from tests.support.models import build_tokenizer


def choice(draw: float, **changes: Any) -> Choice:
    values: dict[str, Any] = {"greedy": False, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    return Choice(**{**values, "draw": draw, **changes})


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.0, 0.2]])).repeat(4000, 1)
    picked = pick(logits, [choice(uniform(7, position)) for position in range(4000)])
    counts = Counter(picked.tokens)
    assert counts[2] == 0
    assert abs(counts[0] / 4000 - 0.5) < 0.03
    assert abs(counts[3] / 4000 - 0.2) < 0.03


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.45}, {1, 3}),
        ({"top_p": 0.05}, {1}),
        ({"min_p": 0.7}, {1, 3}),
        ({"greedy": True}, {1}),
        ({"forbidden": (1,)}, {0, 2, 3}),
        ({"forbidden": (1,), "top_k": 1}, {3}),
    ],
)
def test_filters_remove_tokens_and_leave_the_logprob(changes: dict[str, Any], allowed: set[int]) -> None:
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    draws = [index / 200 for index in range(200)]
    picked = pick(probs.log().repeat(200, 1), [choice(draw, **changes) for draw in draws])
    assert set(picked.tokens) == allowed
    for token, logprob in zip(picked.tokens, picked.logprobs, strict=True):
        assert logprob == pytest.approx(probs[token].log().item(), abs=1e-6)


def test_rows_do_not_influence_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    rows = [choice(0.3), choice(0.9, temperature=0.5), choice(0.1, greedy=True), choice(0.6, top_k=3), choice(0.2)]
    rows.append(choice(0.7, top_p=0.5, temperature=2.0))
    together = pick(logits, rows)
    for index, row in enumerate(rows):
        alone = pick(logits[index : index + 1], [row])
        assert alone.tokens[0] == together.tokens[index]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[index], abs=1e-6)
    scaled = torch.log_softmax(logits[1] / 0.5, dim=-1)
    assert together.logprobs[1] == pytest.approx(scaled[together.tokens[1]].item(), abs=1e-6)
    raw = torch.log_softmax(logits[2], dim=-1)
    assert together.logprobs[2] == pytest.approx(raw.max().item(), abs=1e-6)


def test_the_largest_draw_and_nan_rows_give_a_valid_id() -> None:
    logits = torch.stack([torch.randn(1000), torch.full((1000,), torch.nan)])
    picked = pick(logits, [choice(1 - 2**-48), choice(0.5)])
    assert 0 <= picked.tokens[0] < 1000
    assert picked.tokens[1] == 0
    assert picked.logprobs[1] != picked.logprobs[1]


def test_uniform_is_spread_and_depends_on_both_arguments() -> None:
    values = [uniform(seed, position) for seed in (0, 1, -5, 2**63 - 1) for position in range(500)]
    assert len(set(values)) == 2000
    assert all(0 <= value < 1 for value in values)
    assert 0.45 < sum(values) / 2000 < 0.55


@pytest.mark.parametrize("raw", [{"unknown": 1}, [], "x"])
def test_contract_errors(raw: object) -> None:
    with pytest.raises(ContractError):
        parse_sampling_params(raw)


@pytest.mark.parametrize(
    "raw",
    [
        {"temperature": float("nan")},
        {"temperature": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"max_new_tokens": 1.5},
        {"min_new_tokens": 5, "max_new_tokens": 3},
        {"stop": [1]},
        {"stop": ["x"] * 65},
        {"stop_token_ids": ["1"]},
        {"sampling_seed": 2**63},
        {"n": 0},
        {"regex": "a+"},
        {"ignore_eos": 1},
        {"stream_interval": 0},
    ],
)
def test_refused_values(raw: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        parse_sampling_params(raw)


def test_nulls_and_neutral_values_mean_the_default() -> None:
    raw = {"temperature": None, "top_k": None, "stop": None, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    assert parse_sampling_params({**raw, "regex": None}) == parse_sampling_params(None)
    assert parse_sampling_params({"max_new_tokens": None}).max_new_tokens is None


@pytest.mark.parametrize(
    "changes", [{"max_running": 0}, {"decode_interval_s": -1.0}, {"dtype": "int8"}, {"port": 70000}]
)
def test_impossible_options(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\d|int8"):
        EngineOptions(model="m", **changes)


def test_text_streams_hold_back_unfinished_characters(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer("naïve 日本語 🙂 café")["input_ids"]
    stream = TextStream(lambda tokens: tokenizer.decode(list(tokens)))
    shown = ""
    for token in ids:
        stream.push([token])
        assert stream.text.startswith(shown)
        assert "\ufffd" not in stream.text
        shown = stream.text
    assert stream.complete() == "naïve 日本語 🙂 café"
    cut = TextStream(lambda tokens: tokenizer.decode(list(tokens)))
    cut.push(tokenizer("a日")["input_ids"][:-1])
    assert cut.complete().startswith("a")
    assert "\ufffd" in cut.complete()


def test_the_first_stop_in_the_text_wins() -> None:
    assert first_stop("one two three", ["three", "two"]) == (4, "two")
    assert first_stop("one", ["two"]) is None


@pytest.mark.parametrize("is_list", [False, True])
async def test_a_client_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch, is_list: bool) -> None:
    """Each left a traceback in the engine's log."""

    async def gone(*given: Any) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    options = SimpleNamespace(stream_interval=1, incremental_streaming_output=False)
    handler = GenerateHandler(cast(Any, None), cast(Any, None), cast(Any, options))
    monkeypatch.setattr(handler, "_answer", lambda *given: {})
    monkeypatch.setattr(web.StreamResponse, "write", gone)
    params = SimpleNamespace(stream_interval=None)
    request = SimpleNamespace(finish={"type": "stop"}, output=[1], params=params, visible_text=lambda: "")
    response = await handler._stream(make_mocked_request("POST", "/generate"), cast(Any, [request, request]), is_list)
    assert response.status == 200
