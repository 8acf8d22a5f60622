"""Weights that change: what each token is labelled with, and that a label never runs ahead of its tokens."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from samplestore.states import WeightUpdateMode
from samplestore.workers import control
from samplestore.workers.replies import EngineError
from tests.engine.contract import LONG, PROMPT, Call, Talk, in_time, job
from tests.engine.recompute import TOLERANCE, expected

UPDATES = 15  # under requests of LONG tokens


def by_span(call: Call) -> list[str]:
    """The label of each token by the final spans, which have to tile the answer."""
    labels: list[str] = []
    for span in call.totals.spans or []:
        assert span["start"] == len(labels)
        labels += [span["version"]] * (span["end"] - span["start"])
    assert len(labels) == len(call.ids)
    return labels


def unchanged(call: Call, label: str) -> int:
    """How many tokens came before a chunk had another label than this one."""
    return sum(len(d.ids) for d in itertools.takewhile(lambda d: d.label == label, call.deltas))


@in_time
async def test_an_update_waits_for_what_runs(talk: Talk) -> None:
    """Without a flush: the answer to a request comes a moment before the engine is done with it, and a flush that finds
    it fails, or worse."""
    n = 300 << min(talk.attempt, 2)
    await talk.begin(talk.engine.weights.a, "drain-0")
    running = talk.start(job("older", n, stream=True))
    await running.seen(5)
    await talk.check_running(running)
    answer = await talk.serve(talk.engine.weights.b, "drain-1", flush_cache=False)
    assert answer["success"] is True
    await running.end()
    assert (running.totals.finish_reason, len(running.ids), running.totals.label) == ("length", n, "drain-0")
    assert await talk.version() == "drain-1"
    await talk.idle()
    await talk.client.text(f"{talk.engine.url}/flush_cache")
    after = await talk.ask(job("newer", 5))
    assert after.totals.label == "drain-1"
    assert after.logprobs == pytest.approx(expected(talk.engine.weights.b, PROMPT, after.ids), abs=TOLERANCE)


async def check_partial(talk: Talk, call: Call, label: str) -> None:
    """It ended early, and all its tokens are of weights "a", which were called `label`."""
    await call.aborted()
    assert call.totals.label == label
    assert 0 < len(call.ids) < LONG
    if talk.engine.traits.spans:
        assert set(by_span(call)) == {label}
    assert call.logprobs == pytest.approx(expected(talk.engine.weights.a, PROMPT, call.ids), abs=TOLERANCE)


@pytest.mark.parametrize("stream", [True, False])
@in_time
async def test_an_update_after_a_pause_that_aborts(talk: Talk, stream: bool) -> None:
    """The way that is safe everywhere: the pause returns when nothing runs any more, so the flush finds nothing."""
    await talk.begin(talk.engine.weights.a, "pause-0")
    call = talk.start(job("partial", LONG, stream=stream))
    await talk.until(lambda running, waiting: running == 1, "it runs", call)
    async with talk.paused("abort"):
        await talk.serve(talk.engine.weights.b, "pause-1")
    await check_partial(talk, call, "pause-0")
    assert await talk.version() == "pause-1"


@pytest.mark.needs("survives_flush")
@pytest.mark.parametrize("stream", [True, False])
@in_time
async def test_an_update_that_aborts(talk: Talk, stream: bool) -> None:
    """Labels are right, but the flush may meet what was aborted a moment ago: releases without that trait end then, now
    and then."""
    await talk.begin(talk.engine.weights.a, "abort-0")
    call = talk.start(job("partial", LONG, stream=stream))
    await talk.until(lambda running, waiting: running == 1, "it runs", call)
    try:
        await talk.serve(talk.engine.weights.b, "abort-1", abort_all_requests=True)
    except EngineError as error:
        assert talk.engine.traits.flush_while_running == "fails" and "flush" in error.message
    await check_partial(talk, call, "abort-0")


async def test_an_update_without_a_label_is_silent(talk: Talk) -> None:
    """The weights change and the label stays: so the worker always says one."""
    await talk.begin(talk.engine.weights.a, "named")
    await talk.post("/update_weights_from_disk", model_path=str(talk.engine.weights.b), abort_all_requests=False)
    assert await talk.version() == "named"
    call = await talk.ask(job("silent", 5))
    assert call.logprobs == pytest.approx(expected(talk.engine.weights.b, PROMPT, call.ids), abs=TOLERANCE)


async def test_a_checkpoint_that_does_not_fit_never_reaches_the_engine(talk: Talk, tmp_path: Path) -> None:
    """A tensor of another shape ends an SGLang server. Seen beforehand it is an error that names the tensor, and the
    engine does not even pause."""
    await talk.begin(talk.engine.weights.a, "kept")
    running = talk.start(job("goes on", 60, stream=True))
    wide = shutil.copytree(talk.engine.weights.b, tmp_path / "wide")
    tensors = load_file(wide / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(tensors["model.norm.weight"].size + 8, np.float32)
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"model\.norm\.weight is F32") as caught:
        await control.change_weights(talk.client, talk.engine.url, str(wide), "never", WeightUpdateMode.ABORT)
    assert caught.value.kind == "refused" and str(talk.engine.weights.a) in str(caught.value)
    await running.end()
    assert (running.totals.finish_reason, len(running.ids)) == ("length", 60) and await talk.version() == "kept"


async def test_a_missing_folder_leaves_the_old_weights(talk: Talk) -> None:
    await talk.begin(talk.engine.weights.a, "kept")
    with pytest.raises(EngineError) as caught:
        await talk.serve(Path(f"{talk.engine.weights.a}-nowhere"), "never")
    assert (caught.value.kind, caught.value.status) == ("refused", 400)
    assert await talk.version() == "kept"
    call = await talk.ask(job("kept", 5))
    assert call.logprobs == pytest.approx(expected(talk.engine.weights.a, PROMPT, call.ids), abs=TOLERANCE)


@pytest.mark.needs("flush_after_retract")
@in_time
async def test_retracted_requests_go_on_under_new_weights_exactly(talk: Talk) -> None:
    """Their keys and values are computed again, so every log-prob is that of the weights that made the token. Releases
    without that trait have no way to do it: the flush ends them, and without one it is not exact."""
    n = 200 << min(talk.attempt, 3)
    weights = talk.engine.weights
    await talk.begin(weights.a, "retract-0")
    call = talk.start(job("retract", n, stream=True))
    await call.seen(40)
    async with talk.paused("retract"):
        await talk.still(call)
        await talk.serve(weights.b, "retract-1")
    await call.end()
    assert len(call.ids) == n and call.totals.finish_reason == "length"
    old, new = (expected(folder, PROMPT, call.ids) for folder in (weights.a, weights.b))
    if talk.engine.traits.spans:
        made = by_span(call)
        change = made.index("retract-1")
        assert made == ["retract-0"] * change + ["retract-1"] * (n - change)
    else:  # the log-probs tell it by themselves
        change = next(i for i, value in enumerate(call.logprobs) if value != pytest.approx(old[i], abs=TOLERANCE))
    assert call.logprobs[:change] == pytest.approx(old[:change], abs=TOLERANCE)
    assert call.logprobs[change:] == pytest.approx(new[change:], abs=TOLERANCE)
    assert 0 < unchanged(call, "retract-0") <= change, "a chunk of the old label has a token of the new weights"
    assert call.totals.label == "retract-1"


@in_time
async def test_frozen_requests_go_on_under_new_weights(talk: Talk) -> None:
    n = 300 << min(talk.attempt, 2)
    weights = talk.engine.weights
    await talk.begin(weights.a, "frozen-0")
    unary, call = talk.start(job("frozen-unary", n)), talk.start(job("frozen-stream", n, stream=True))
    await talk.until(lambda running, waiting: running == 2, "both run", unary, call)
    await call.goes_on(40)
    async with talk.paused("in_place"):
        await talk.still(unary, call)
        answer = await talk.serve(weights.b, "frozen-1", flush_cache=False)
        assert answer["success"] is True
        assert await talk.version() == "frozen-1"
        late = talk.start(job("frozen-later", 5))
    assert (await late.end()).totals.label == "frozen-1"
    for one in (unary, call):
        await one.end()
        assert one.totals.finish_reason == "length" and len(one.ids) == n
        assert one.totals.label == "frozen-1"  # the last one alone: which tokens are of which, it does not say
        if talk.engine.traits.spans:
            assert [span["version"] for span in one.totals.spans or []] == ["frozen-0", "frozen-1"]
            assert set(by_span(one)) == {"frozen-0", "frozen-1"}


@pytest.mark.needs("survives_flush")
@in_time
async def test_a_flush_under_frozen_requests(talk: Talk) -> None:
    """The worker says flush_cache=false there. Else the answer is that it failed, and the new weights are served; and
    releases without that trait end."""
    n = 400 << min(talk.attempt, 2)
    weights = talk.engine.weights
    await talk.begin(weights.a, "flush-0")
    call = talk.start(job("flush", n, stream=True))
    await call.seen(20)
    async with talk.paused("in_place"):
        await talk.still(call)
        if talk.engine.traits.flush_while_running == "works":
            await talk.serve(weights.b, "flush-1", flush_cache=True)
        else:
            with pytest.raises(EngineError, match="flush"):
                await talk.serve(weights.b, "flush-1", flush_cache=True)
    await call.end()
    assert len(call.ids) == n
    if talk.engine.traits.spans:
        assert set(by_span(call)) == {"flush-0", "flush-1"}
    await talk.begin(weights.a, "flush-2")
    assert await talk.version() == "flush-2"


@in_time
async def test_a_label_alone_aborts_everything_unless_told_otherwise(talk: Talk) -> None:
    await talk.begin(talk.engine.weights.a, "label-0")
    call = talk.start(job("label", LONG, stream=True))
    await call.seen(5)
    await talk.post("/update_weight_version", new_version="label-1", abort_all_requests=False)
    await call.goes_on()
    await talk.post("/update_weight_version", new_version="label-2")
    await call.aborted()
    assert len(call.ids) < LONG
    assert await talk.version() == "label-2"


@pytest.mark.needs("spans")
@in_time
async def test_a_label_is_never_behind_its_tokens(talk: Talk) -> None:
    """The rule by which a worker stores tokens before the stream ends: as long as every chunk has the label that the
    engine had before the request, all tokens are of that version.

    More cannot be said of chunks. Tokens that were on their way when the weights changed come under the new label, and
    on a busy machine many chunks do: the label runs ahead. So after the first change only the final spans count. Many
    updates under frozen requests, one token a chunk; the spans are the truth. Where there are none, the test with
    retracted requests goes by log-probs."""
    updates = max(2, UPDATES >> talk.attempt)  # fewer where the engine makes hundreds of tokens between two of them
    weights = itertools.cycle([talk.engine.weights.b, talk.engine.weights.a])
    await talk.begin(talk.engine.weights.a, "rule-000")
    calls = [talk.start(job("rule", LONG, stream=True)) for _ in range(3)]
    for call in calls:
        await call.seen(2)
    for update in range(1, updates + 1):
        async with talk.paused("in_place"):
            await talk.still(*calls)
            await talk.serve(next(weights), f"rule-{update:03d}", flush_cache=False)
        for call in calls:
            await call.goes_on(15)  # else the same span would only be replaced
    await talk.post("/abort_request", abort_all=True)
    ahead = 0
    for call in calls:
        await call.aborted()
        made = by_span(call)
        told = [str(delta.label) for delta in call.deltas for _ in delta.ids]
        behind = [(n, m, t) for n, (m, t) in enumerate(zip(made, told, strict=True)) if t < m]
        assert not behind, f"(place, made by, told): {behind[:5]}"
        first = told[0]
        assert set(made[: unchanged(call, first)]) == {first}
        assert sum(one != other for one, other in itertools.pairwise(made)) == updates
        ahead += sum(t > m for m, t in zip(made, told, strict=True))
    print(f"{updates} updates under {len(calls)} requests, {ahead} tokens under a label that ran ahead")
