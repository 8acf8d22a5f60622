"""What an engine answers: tokens with their log-probs, why it stopped, and what it refuses."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from samplestore.workers import engine_state
from samplestore.workers.replies import EngineError
from samplestore.workers.teacher import read_logprobs
from tests.engine.contract import CONTEXT, PROMPT, Talk, job, refused
from tests.engine.recompute import TOLERANCE, expected


async def test_a_unary_answer_has_everything_that_is_stored(talk: Talk) -> None:
    await talk.begin(talk.engine.weights.a, "unary")
    call = await talk.ask(job("unary", 8))
    [answer] = call.answers
    meta, t = answer["meta_info"], call.totals
    assert meta["id"] == call.rid
    assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 8
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(len(entry) == 3 and entry[0] < 0 for entry in meta["output_token_logprobs"])
    assert (t.prompt_tokens, t.completion_tokens, t.retractions) == (len(PROMPT), 8, 0)
    assert t.finish_reason == "length" and meta["finish_reason"] == {"type": "length", "length": 8}
    assert t.label == await talk.version() == "unary"
    assert t.e2e_s is not None and t.e2e_s > 0
    assert t.cached_tokens == 0
    spans = [{"version": "unary", "start": 0, "end": 8}] if talk.engine.traits.spans else None
    assert t.spans == spans


async def test_a_stream_says_the_same_as_a_unary_answer(talk: Talk) -> None:
    """Read by the worker's reader, whatever the dialect: the same ids and log-probs, none twice and none missing."""
    await talk.begin(talk.engine.weights.a, "stream")
    unary = await talk.ask(job("unary", 300, temperature=0.0))
    streamed = await talk.ask(job("streamed", 300, temperature=0.0, stream=True))
    assert streamed.ids == unary.ids and len(unary.ids) == 300
    assert streamed.logprobs == pytest.approx(unary.logprobs, abs=TOLERANCE)
    assert len(streamed.answers) > 10, "it came in pieces"
    counts = [answer["meta_info"]["completion_tokens"] for answer in streamed.answers]
    assert counts == sorted(counts) and counts[-1] == 300
    reasons = [answer["meta_info"]["finish_reason"] for answer in streamed.answers]
    assert reasons[-1] == {"type": "length", "length": 300} and not any(reasons[:-1])
    assert {delta.label for delta in streamed.deltas} == {"stream"}
    assert streamed.totals.spans == unary.totals.spans


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_token_belongs_to_the_answer(talk: Talk, stream: bool) -> None:
    await talk.begin(talk.engine.weights.a, "stop")
    free = await talk.ask(job("free", 40, temperature=0.0))
    token = next(t for place, t in enumerate(free.ids) if place >= 5 and t not in free.ids[:place])
    body = job("stop", 40, temperature=0.0, stop_token_ids=[token], ignore_eos=False, stream=stream)
    stopped = await talk.ask(body)
    assert stopped.ids == free.ids[: free.ids.index(token) + 1]
    assert len(stopped.logprobs) == len(stopped.ids)
    assert stopped.totals.finish_reason == "stop"
    assert stopped.answers[-1]["meta_info"]["finish_reason"]["matched"] == token


async def test_a_seed_is_never_relied_upon(talk: Talk) -> None:
    """Sampled tokens differ from request to request: a worker must never expect to get the same tokens again."""
    await talk.begin(talk.engine.weights.a, "seed")
    answers = [(await talk.ask(job(f"draw-{n}", 20))).ids for n in range(2)]
    assert answers[0] != answers[1]


async def test_an_engine_that_ignores_seeds_says_so(talk: Talk) -> None:
    """SGLang takes a seed and draws without it, unless it was started for it: a worker must know that beforehand. The
    embedded engine needs no flag."""
    await talk.begin(talk.engine.weights.a, "seeded")
    server = await engine_state.server(talk.client, talk.engine.url)
    answers = [(await talk.ask(job(f"seed-{n}", 20, sampling_seed=7))).ids for n in range(2)]
    assert len(answers[0]) == 20 and (answers[0] == answers[1]) == server.embedded
    assert server.deterministic is (None if server.embedded else False)
    assert server.embedded == (talk.engine.name == "embedded")
    assert server.embedded or server.release == talk.engine.name


async def test_an_engine_tells_which_model_it_serves(talk: Talk) -> None:
    """Workers compare it with the others': every fresh engine says "default", whatever its model is."""
    model = (await engine_state.server(talk.client, talk.engine.url)).model
    config = json.loads((talk.engine.weights.a / "config.json").read_text())
    assert model == {
        "architecture": config["architectures"][0], "vocabulary": config["vocab_size"],
        "hidden size": config["hidden_size"], "num hidden layers": config["num_hidden_layers"],
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_the_temperature(talk: Talk, temperature: float) -> None:
    await talk.begin(talk.engine.weights.a, "temperature")
    call = await talk.ask(job("warm", 60, temperature=temperature, top_k=50))
    folder = talk.engine.weights.a
    assert call.logprobs == pytest.approx(expected(folder, PROMPT, call.ids, temperature), abs=TOLERANCE)
    other = expected(folder, PROMPT, call.ids, 1.7 - temperature)
    assert max(abs(a - b) for a, b in zip(call.logprobs, other, strict=True)) > 0.1


async def test_log_probs_of_a_greedy_request_are_those_of_temperature_one(talk: Talk) -> None:
    await talk.begin(talk.engine.weights.a, "greedy")
    call = await talk.ask(job("cold", 60, temperature=0.0))
    assert call.logprobs == pytest.approx(expected(talk.engine.weights.a, PROMPT, call.ids, 1.0), abs=TOLERANCE)


async def test_a_request_that_goes_on_from_its_tokens_is_exact(talk: Talk) -> None:
    """A resumed sample: the prompt is followed by what is stored already."""
    await talk.begin(talk.engine.weights.a, "resume")
    whole = await talk.ask(job("whole", 80, temperature=0.0))
    rest = await talk.ask(job("rest", 50, prompt=[*PROMPT, *whole.ids[:30]], temperature=0.0))
    assert rest.ids == whole.ids[30:]
    assert rest.logprobs == pytest.approx(whole.logprobs[30:], abs=TOLERANCE)
    assert rest.totals.prompt_tokens == len(PROMPT) + 30


async def test_extra_key_keeps_requests_out_of_each_others_cache(talk: Talk) -> None:
    """Where weights change without a flush, the key is what keeps old keys and values away from new weights."""
    await talk.begin(talk.engine.weights.a, "cache")
    prompt = list(range(50, 250))
    counts = [
        (await talk.ask(job(f"key-{n}", 4, prompt=prompt, extra_key=key))).totals.cached_tokens
        for n, key in enumerate(["one", "one", "two"])
    ]
    assert counts[0] == 0
    assert (counts[2] == 0) == talk.engine.traits.extra_key
    if talk.engine.name != "embedded":  # which keeps no cache between requests
        assert counts[1] is not None and counts[1] > 150


# -- limits


async def test_the_engine_tells_its_limit(talk: Talk) -> None:
    """context_length is null unless it was given as a flag: what counts is max_req_input_len."""
    info = await talk.get("/server_info")
    assert info["max_req_input_len"] == CONTEXT - 6
    assert info["context_length"] in (None, CONTEXT)


async def test_the_longest_prompt_and_the_longest_request(talk: Talk) -> None:
    longest = CONTEXT - 7
    assert (await talk.ask(job("fits", 3, prompt=[7] * longest))).totals.completion_tokens == 3
    error = await refused(talk, job("long", 3, prompt=[7] * (longest + 1)))
    assert error.kind == "refused" and error.status == 400
    below = 0 if talk.engine.traits.whole_context else 1
    prompt = [7] * (CONTEXT - 40)
    full = await talk.ask(job("full", 40 - below, prompt=prompt))
    assert full.totals.finish_reason == "length"
    # Less than was asked for, and it says "length": a budget is counted from stored tokens, never from what was asked.
    assert len(full.ids) == 40 - 2
    error = await refused(talk, job("over", 41 - below, prompt=prompt))
    assert error.kind == "refused" and "context" in error.message


async def test_without_a_limit_it_runs_to_the_context(talk: Talk) -> None:
    body = job("open", 0, prompt=[7] * (CONTEXT - 40))
    body["sampling_params"]["max_new_tokens"] = None
    call = await talk.ask(body)
    assert (len(call.ids), call.totals.finish_reason) == (38, "length")


async def test_zero_new_tokens(talk: Talk) -> None:
    call = await talk.ask(job("zero", 0))
    assert (call.ids, call.totals.finish_reason, call.totals.completion_tokens) == ([], "length", 0)


# -- errors


@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("message", {"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ("empty", {"input_ids": []}, "empty"),
        ("pydantic", {"input_ids": "text"}, "input_ids"),
    ],
)
async def test_refused_requests_are_told_as_refused(talk: Talk, what: str, change: Any, said: str) -> None:
    error = await refused(talk, {**job(f"bad-{what}"), **change})
    assert (error.kind, error.status) == ("refused", 400)
    assert said in error.message


async def test_an_unknown_sampling_parameter(talk: Talk) -> None:
    error = await refused(talk, job("surprise", surprise=1))
    if talk.engine.traits.names_bad_parameter:
        assert (error.kind, error.status) == ("refused", 400) and "surprise" in error.message
    else:
        assert (error.kind, error.status) == ("unreachable", 500)
    # It lives. After a 500 the server closes the connection, which a GET may find out for the calls that follow.
    await talk.version()


async def test_an_error_inside_a_stream(talk: Talk) -> None:
    error = await refused(talk, job("stream-error", 41, prompt=[7] * (CONTEXT - 40), stream=True))
    assert "context" in error.message
    if talk.engine.traits.codes_stream_errors:
        assert (error.kind, error.status) == ("refused", 400)


async def test_a_control_call_of_a_wrong_type_is_refused(talk: Talk) -> None:
    with pytest.raises(EngineError) as caught:
        await talk.serve(talk.engine.weights.a, 7)  # type: ignore[arg-type]
    assert (caught.value.kind, caught.value.status) == ("refused", 400)
    assert "weight_version" in caught.value.message
    with pytest.raises(EngineError) as caught:
        await talk.post("/pause_generation", mode="sideways")
    assert (caught.value.kind, caught.value.status) == ("refused", 400)


@pytest.mark.needs("survives_nan")
async def test_damaged_weights_give_null_log_probs(talk: Talk) -> None:
    """HTTP 200, a finish reason, and tokens: only the log-probs tell that the weights are no weights."""
    await talk.begin(talk.engine.weights.nan, "nan")
    for stream in (False, True):
        call = await talk.ask(job("nan", 3, stream=stream))
        assert len(call.ids) == 3 and call.totals.finish_reason == "length"
        assert call.logprobs == [None, None, None]
    await talk.begin(talk.engine.weights.a, "mended")
    call = await talk.ask(job("mended", 3))
    assert all(value < 0 for value in call.logprobs)


async def test_counts_add_up_over_many_requests(talk: Talk) -> None:
    calls = [talk.start(job(f"many-{n}", 30 + n, stream=bool(n % 2))) for n in range(12)]
    for n, call in enumerate([await call.end() for call in calls]):
        assert len(call.ids) == len(call.logprobs) == call.totals.completion_tokens == 30 + n
    for one, other in itertools.combinations(calls, 2):
        assert one.ids[:30] != other.ids[:30]


async def test_a_response_is_scored_without_generating(talk: Talk) -> None:
    """What a teacher is asked: log-probs of a given response, from the last prompt token on, and no new token."""
    await talk.begin(talk.engine.weights.a, "teacher")
    made = await talk.ask(job("made", 24))
    body = job("score", 0, logprob_start_len=len(PROMPT) - 1)
    call = await talk.ask({**body, "input_ids": [*PROMPT, *made.ids]})
    assert call.ids == [] and call.totals.finish_reason == "length"
    probs = read_logprobs(call.answers[-1], made.ids)
    assert probs.tolist() == pytest.approx(made.logprobs, abs=TOLERANCE)
