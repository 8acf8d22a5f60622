"""ReplyReader and EventSplitter: every dialect gives the exact tokens, every contradiction is told."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplestore.workers.replies import EngineError, EventSplitter, ReplyReader, error_of, parse_json

DIALECTS = ("incremental", "cumulative", "delta_ids")
IDS = [7, 8, 9, 10, 11]
PROBS = [-0.5, -0.25, -1.0, -2.0, -0.125]


def chunk(
    ids: list[int], probs: list[Any], start: int, stop: int, dialect: str, reason: str | None = None, **meta: Any
) -> dict[str, Any]:
    """The chunk that brings tokens start..stop of an answer."""
    pairs = [[p, i, None] for p, i in zip(probs[:stop], ids[:stop], strict=True)]
    return {
        "text": "",
        "output_ids": ids[:stop] if dialect == "cumulative" else ids[start:stop],
        "meta_info": {
            "finish_reason": None if reason is None else {"type": reason},
            "completion_tokens": stop,
            "output_token_logprobs": pairs[start:] if dialect == "incremental" else pairs,
            "weight_version": "v0",
            **meta,
        },
    }


def read(chunks: list[Any]) -> tuple[list[int], list[Any], ReplyReader]:
    reader, ids, probs = ReplyReader(), [], []
    for one in chunks:
        delta = reader.feed(one)
        assert delta.logprobs is not None and len(delta.ids) == len(delta.logprobs)
        ids += delta.ids
        probs += delta.logprobs
    return ids, probs, reader


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[float], list[int], str, bool]:
    """Tokens, log-probs, where the chunks end (some bring nothing), the dialect, whether the engine repeats the last
    token when it aborts."""
    n = draw(st.integers(0, 40))
    ids = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))  # few values: repeats must not confuse
    probs = draw(st.lists(st.floats(-20, 0), min_size=n, max_size=n))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=12)))
    return ids, probs, [*cuts, n], draw(st.sampled_from(DIALECTS)), draw(st.booleans())


@given(answers())
@settings(max_examples=400, deadline=None)
def test_any_chunking_in_any_dialect_gives_the_exact_sequence(answer: tuple[Any, ...]) -> None:
    ids, probs, stops, dialect, repeats = answer
    chunks, at = [], 0
    for stop in stops:
        chunks.append(chunk(ids, probs, at, stop, dialect))
        at = stop
    if repeats and ids:  # after a retraction and an abort: the last id again, and all log-probs
        last = chunk(ids, probs, len(ids) - 1, len(ids), "delta_ids", "abort")
    else:
        last = chunk(ids, probs, len(ids), len(ids), dialect, "stop")
    got_ids, got_probs, reader = read([*chunks, last])
    assert got_ids == ids
    assert got_probs == probs
    assert reader.totals.completion_tokens == len(ids)
    assert reader.totals.finish_reason == ("abort" if repeats and ids else "stop")


@given(st.lists(st.binary(min_size=1, max_size=30).map(lambda b: b.hex()), max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_events_survive_any_cut_of_the_stream(texts: list[str], data: st.DataObject) -> None:
    end = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    stream = b": a comment" + end + b"".join(b"data: " + json.dumps(t).encode() + end for t in texts)
    splitter, got, at = EventSplitter(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, 40))
        got += [json.loads(event) for event in splitter.feed(stream[at : at + step])]
        at += step
    assert got == texts


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplestore.workers.replies.MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: " + b"x" * 80)) == []
    with pytest.raises(EngineError, match="more than 100 bytes"):
        list(splitter.feed(b"x" * 80))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_unary_answer_is_one_chunk(dialect: str) -> None:
    ids, probs, reader = read([chunk(IDS, PROBS, 0, 5, dialect, "length", prompt_tokens=3, cached_tokens=2)])
    assert (ids, probs) == (IDS, PROBS)
    totals = reader.totals
    assert (totals.prompt_tokens, totals.cached_tokens, totals.finish_reason) == (3, 2, "length")


def test_a_first_chunk_without_counts_is_taken_by_its_ids() -> None:
    answer = {"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "stop"}}}
    delta = ReplyReader().feed(answer)
    assert (delta.ids, delta.logprobs) == ([5, 6], None)


def test_an_abort_in_the_queue_brings_nothing() -> None:
    for answer in (
        {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}},
        {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}},  # 0.4.9 to 0.5.2: no output_ids
    ):
        reader = ReplyReader()
        assert reader.feed(answer).ids == []
        assert reader.totals.finish_reason == "abort"


def test_an_abort_without_counts_after_tokens_repeats_nothing() -> None:
    chunks = [chunk(IDS, PROBS, 0, 3, "incremental")]
    last = {"text": "", "output_ids": [9], "meta_info": {"finish_reason": {"type": "abort"}}}
    ids, _, reader = read([*chunks, last])
    assert ids == IDS[:3] and reader.totals.finish_reason == "abort"


def test_what_is_missing_or_null_is_left_to_the_store() -> None:
    whole = chunk(IDS, [-0.1, None, float("nan"), "x", -0.2], 0, 5, "incremental", "stop")
    assert ReplyReader().feed(whole).logprobs == [-0.1, None, pytest.approx(float("nan"), nan_ok=True), "x", -0.2]
    del whole["meta_info"]["output_token_logprobs"]
    assert ReplyReader().feed(whole).logprobs is None


def broken(**changes: Any) -> dict[str, Any]:
    made = chunk(IDS, PROBS, 0, 5, "incremental", "stop")
    for key, value in changes.items():
        (made if key == "output_ids" else made["meta_info"])[key] = value
    return made


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "NoneType, not an object"),
        ([1, 2], "list, not an object"),
        ("text", "str, not an object"),
        ({}, "no meta_info"),
        ({"meta_info": []}, "no meta_info"),
        (broken(output_ids=7), "output_ids is int"),
        (broken(output_ids={"a": 1}), "output_ids is dict"),
        (broken(completion_tokens=6), "6 new tokens by completion_tokens, but 5"),
        (broken(completion_tokens=-1), "from 0 to -1"),
        (broken(completion_tokens="5"), "from 0 to '5'"),
        (broken(completion_tokens=True), "from 0 to True"),
        (broken(completion_tokens=10**9), f"from 0 to {10**9}"),
        (broken(output_token_logprobs=[[-0.1, 7, None]]), "5 new tokens, but 1 output_token_logprobs"),
        (broken(output_token_logprobs={"a": 1}), "log"),
        (broken(output_token_logprobs=[-0.1] * 5), "entry 0 is -0.1"),
        (broken(output_token_logprobs=[[-0.1]] * 5), "entry 0 is"),
        (broken(output_token_logprobs=[[-0.1, i, None] for i in (7, 8, 99, 10, 11)]), "entry 2 is of token 99"),
        (broken(finish_reason=7), "finish_reason is '7'"),
        (broken(finish_reason={}), "finish_reason is '{}'"),
        (broken(finish_reason={"type": None}), "finish_reason is"),
    ],
)
def test_a_reply_that_breaks_the_protocol_says_how(answer: Any, said: str) -> None:
    with pytest.raises(EngineError, match="broken") as caught:
        ReplyReader().feed(answer)
    assert said in str(caught.value)


def test_counts_never_go_back() -> None:
    reader = ReplyReader()
    reader.feed(chunk(IDS, PROBS, 0, 4, "incremental"))
    with pytest.raises(EngineError, match="from 4 to 2"):
        reader.feed(chunk(IDS, PROBS, 0, 2, "incremental"))


def test_information_that_fits_no_column_is_left_out() -> None:
    """An engine's nonsense about itself must not make the store refuse the request's row."""
    reader = ReplyReader()
    reader.feed(
        chunk(
            IDS, PROBS, 0, 5, "incremental", "stop", prompt_tokens=10**30, cached_tokens=-1, num_retractions=2**40,
            e2e_latency=float("nan"), queue_time="soon", weight_version=7, weight_versions="all",
        )
    )  # fmt: skip
    t = reader.totals
    assert [t.prompt_tokens, t.cached_tokens, t.retractions, t.e2e_s, t.queue_s, t.label, t.spans] == [None] * 7


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"error": {"message": "bad input"}}, 400, "refused", "bad input"),
        ({"error": "unknown sampling parameter"}, 400, "refused", "unknown sampling parameter"),
        ({"object": "error", "message": "The request queue is full.", "code": 503}, 503, "busy", "queue is full"),
        ({"detail": "no route"}, 422, "refused", "no route"),
        ({"error": {"message": "no_available_workers", "code": "no_available_workers"}}, 503, "busy", "no_available"),
        ({"error": {"code": "call_upstream_request_error"}}, 500, "unreachable", "call_upstream"),
        ("<html>bad gateway</html>", 502, "busy", "bad gateway"),
        (None, 500, "unreachable", "None"),
        (["odd"], 404, "refused", "odd"),
    ],
)
def test_all_shapes_of_error_bodies(body: Any, status: int, kind: str, said: str) -> None:
    error = error_of(body, status)
    assert error.kind == kind and said in str(error)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"error": {"message": "too long", "type": "x", "code": 400, "retryable": False}}, "refused"),
        ({"error": {"message": "Stream error: connection closed", "type": "stream_error"}}, "unreachable"),
        (broken(finish_reason={"type": "abort", "status_code": 503, "message": "The request queue is full."}), "busy"),
        (broken(finish_reason={"type": "abort", "status_code": 400, "message": "too long"}), "refused"),
    ],
)
def test_errors_inside_a_stream(answer: dict[str, Any], kind: str) -> None:
    with pytest.raises(EngineError) as caught:
        ReplyReader().feed(answer)
    assert caught.value.kind == kind


def test_a_null_error_is_none() -> None:
    answer = {**chunk(IDS, PROBS, 0, 5, "incremental", "stop"), "error": None}
    assert ReplyReader().feed(answer).ids == IDS


def test_nan_is_read_and_nonsense_is_not() -> None:
    assert parse_json(b'{"a": NaN}')["a"] != 0
    with pytest.raises(EngineError, match="not JSON"):
        parse_json(b"<html>")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["meta_info", "output_ids", "finish_reason", "type", "completion_tokens", "output_token_logprobs", "error", "message", "code", "status_code", "weight_versions"]), inner), max_leaves=15))  # fmt: skip # noqa: E501
@settings(max_examples=300, deadline=None)
def test_no_reply_raises_anything_but_an_engine_error(answer: Any) -> None:
    with contextlib.suppress(EngineError):
        ReplyReader().feed(answer)
