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


def test_whole_events_and_cut_ones_split_alike() -> None:
    events = [b'{"a": 1}', b"", b"[DONE]", b'{"text": "data: x"}']
    stream = b"".join(b"data: " + e + b"\n\n" for e in events)
    assert EventSplitter().feed(stream) == events  # as it comes nearly always
    cut = EventSplitter()
    assert [e for at in range(len(stream)) for e in cut.feed(stream[at : at + 1])] == events
    odd = EventSplitter()
    assert odd.feed(b"event: x\ndata:1\ndata: 2\n\nid: 7\n\n: still here\n\ndata: 3\r\n\r\ndata: 4") == [b"1\n2", b"3"]
    assert odd.feed(b"\n\n") == [b"4"]


# -- the dialects of the releases, chunk by chunk: ids, entries of log-probs, completion_tokens


def release_chunk(ids: list[int], entries: list[int], total: int, reason: str | None = None, **meta: Any) -> Any:
    """A chunk with these ids, and log-prob entries of the tokens at these places of IDS."""
    return {
        "text": "never read",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": None if reason is None else {"type": reason},
            "completion_tokens": total,
            "output_token_logprobs": [[PROBS[place], IDS[place], None] for place in entries],
            "output_token_logprobs_length": total,
            **meta,
        },
    }


RELEASES = {
    "all, by default": [
        ([7], [0], 1, None), ([7, 8, 9], [0, 1, 2], 3, None), (IDS, [0, 1, 2, 3, 4], 5, "stop"),
    ],
    "0.5.9 --stream-output: ids are deltas, text and log-probs are not": [
        ([7], [0], 1, None), ([8, 9], [0, 1, 2], 3, None), ([10, 11], [0, 1, 2, 3, 4], 5, "stop"),
    ],
    "0.5.10 incremental: ids and text are deltas, log-probs are not; the last chunk brings nothing": [
        ([7, 8], [0, 1], 2, None), ([9, 10, 11], [0, 1, 2, 3, 4], 5, None), ([], [0, 1, 2, 3, 4], 5, "stop"),
    ],
    "0.5.12.post1, 0.5.23 incremental: all are deltas": [
        ([7], [0], 1, None), ([8, 9], [1, 2], 3, None), ([10, 11], [3, 4], 5, "stop"),
    ],
    "0.5.23 incremental, retracted, then aborted: the last token again, and all log-probs": [
        ([7, 8, 9], [0, 1, 2], 3, None), ([10, 11], [3, 4], 5, None), ([11], [0, 1, 2, 3, 4], 5, "abort"),
    ],
    "0.5.9 by default, retracted, then aborted": [
        ([7, 8, 9], [0, 1, 2], 3, None), (IDS, [0, 1, 2, 3, 4], 5, None), ([11], [0, 1, 2, 3, 4], 5, "abort"),
    ],
    "chunks that coalesced, and empty ones while text lags": [
        ([], [], 0, None), ([7, 8, 9, 10], [0, 1, 2, 3], 4, None), ([], [], 4, None), ([11], [4], 5, "length"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASES)
def test_the_dialect_of_a_release(name: str) -> None:
    reader, ids, probs = ReplyReader(), [], []
    for one in RELEASES[name]:
        delta = reader.feed(release_chunk(*one))
        ids += delta.ids
        probs += delta.logprobs or []
    assert (ids, probs) == (IDS, PROBS)
    assert reader.totals.completion_tokens == 5
    assert reader.totals.finish_reason == RELEASES[name][-1][3]


@pytest.mark.parametrize(
    ("name", "cumulative"),
    [*zip(RELEASES, [True, True, True, False, False, True, False], strict=True)],
)
def test_whether_a_stream_repeats_itself(name: str, cumulative: bool) -> None:
    reader = ReplyReader()
    reader.feed(release_chunk(*RELEASES[name][0]))
    assert not reader.cumulative  # one chunk has no dialect
    for one in RELEASES[name][1:]:
        reader.feed(release_chunk(*one))
    assert reader.cumulative == cumulative


@pytest.mark.parametrize(
    ("dialect", "chunk_tokens", "refused_at"),
    [("cumulative", 1, 2049), ("delta_ids", 8, 2056), ("cumulative", 16, None), ("incremental", 1, None)],
)
def test_a_long_cumulative_stream_is_too_costly(dialect: str, chunk_tokens: int, refused_at: int | None) -> None:
    n = 2400
    ids, probs, reader = list(range(n)), [-0.5] * n, ReplyReader()
    for start in range(0, n, chunk_tokens):
        reader.feed(chunk(ids, probs, start, start + chunk_tokens, dialect))
        if (told := reader.too_costly()) is not None:
            assert "--incremental-streaming-output" in told and "--mode sliced" in told
            assert reader.totals.completion_tokens == refused_at
            return
    assert refused_at is None


def test_a_long_unary_answer_is_not_too_costly() -> None:
    reader = ReplyReader()
    reader.feed(chunk([1] * 9000, [-0.5] * 9000, 0, 9000, "cumulative", "stop"))
    assert reader.too_costly() is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("chunks", "without"),
    [
        ([[None, None, None]], True),
        ([[NAN, None], [NAN]], True),
        ([[None], [-0.5]], False),
        ([[-0.5], [None, None]], False),
        ([[0]], False),
        ([["-0.5"]], True),
        ([[]], False),  # no token yet: nothing is known
    ],
)
def test_an_answer_without_a_number(chunks: list[list[Any]], without: bool) -> None:
    """Weights that are not finite: every log-prob is null or NaN, with HTTP 200."""
    probs = [p for one in chunks for p in one]
    reader, at = ReplyReader(), 0
    for one in chunks:
        reader.feed(chunk(list(range(len(probs))), probs, at, at + len(one), "incremental"))
        at += len(one)
    assert reader.without_numbers == without


def test_an_answer_without_logprobs_is_not_one_of_null_logprobs() -> None:
    reader = ReplyReader()
    assert reader.feed({"output_ids": [5, 6], "meta_info": {"completion_tokens": 2}}).logprobs is None
    assert not reader.without_numbers


def test_counts_of_speculative_decoding_and_of_the_cache_are_kept() -> None:
    told = {
        "spec_accept_rate": 0.75, "spec_accept_length": 3.25, "spec_verify_ct": 12, "spec_num_correct_drafts": 27,
        "spec_num_proposed_drafts": 36, "spec_correct_drafts_histogram": [1, 4, 7],
        "cached_tokens_details": {"device": 64, "host": 0},
    }  # fmt: skip
    older = {"spec_accept_token_num": 27, "spec_draft_token_num": 36}
    for one in (told, older):
        reader = ReplyReader()
        reader.feed(chunk(IDS, PROBS, 0, 5, "incremental", "stop", **one, queue_time=0.25, e2e_latency=1.5))
        assert reader.totals.spec == one
        assert (reader.totals.queue_s, reader.totals.e2e_s) == (0.25, 1.5)


@pytest.mark.parametrize(
    "odd",
    [None, True, "0.5", -1, float("nan"), float("inf"), 10**30, [1, "2"], [1] * 65, {"device": "many"}, {}, [[1]]],
)
def test_telemetry_that_is_no_number_is_left_out(odd: Any) -> None:
    reader = ReplyReader()
    reader.feed(chunk(IDS, PROBS, 0, 5, "incremental", "stop", spec_accept_rate=odd, spec_verify_ct=3))
    assert reader.totals.spec == {"spec_verify_ct": 3}


def test_telemetry_of_the_first_chunk_outlives_a_last_one_without() -> None:
    reader = ReplyReader()
    reader.feed(chunk(IDS, PROBS, 0, 3, "incremental", prompt_tokens=9, cached_tokens=4, num_retractions=0))
    reader.feed({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "total_retractions": 1}})
    totals = reader.totals
    assert (totals.prompt_tokens, totals.cached_tokens, totals.retractions) == (9, 4, 1)


def test_routed_experts_come_with_the_last_chunk() -> None:
    reader = ReplyReader()
    reader.feed(chunk(IDS, PROBS, 0, 3, "incremental"))
    assert reader.totals.routed_experts is None
    reader.feed(chunk(IDS, PROBS, 3, 5, "incremental", "stop", routed_experts="AAAA"))
    assert reader.totals.routed_experts == "AAAA"


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


@pytest.mark.parametrize("dialect", ["incremental", "cumulative"])
@pytest.mark.parametrize("seen", [3, 4])
def test_an_abort_that_repeats_the_last_id_after_new_ones(dialect: str, seen: int) -> None:
    """Chunks coalesced: what came before the abort is in the chunk that repeats."""
    last = chunk(IDS, PROBS, seen, 5, dialect, "abort")
    last["output_ids"] = [*last["output_ids"], IDS[-1]]
    last["meta_info"]["output_token_logprobs"] = chunk(IDS, PROBS, 0, 5, dialect)["meta_info"]["output_token_logprobs"]
    ids, probs, _ = read([chunk(IDS, PROBS, 0, seen, dialect), last])
    assert (ids, probs) == (IDS, PROBS)


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
        (broken(output_token_logprobs=[["-0.1", "7"]] * 5), "entry 0 is of token '7'"),
        (broken(output_token_logprobs=["ab"] * 5), "entry 0 is ab"),
        (broken(output_token_logprobs=[{"1": 7}] * 5), "entry 0 is {'1': 7}"),
        (broken(output_token_logprobs_length=4), "5 tokens by completion_tokens, but 4 log-probs"),
        (broken(output_token_logprobs_length="five"), "5 tokens by completion_tokens, but five log-probs"),
        (broken(routed_experts=[1, 2]), "routed_experts is list"),
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
        (None, 500, "unreachable", "it says no more"),
        ({"object": "error", "message": "bad state", "type": "x", "code": 500}, 500, "error", "bad state"),
        ({"error": {"message": "bad state", "code": 500}}, 200, "error", "bad state"),
        ({"error": {"message": "no", "code": True}}, 500, "unreachable", "no"),
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
