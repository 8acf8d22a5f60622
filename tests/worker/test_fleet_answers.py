"""What no engine is asked for, and answers that are not what they seem."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import factory
from tests.support.scripted_engine import Script, token_at, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 64, 2], "prompt token 64 at position 1 is outside the vocabulary (0 to 63)"),
        ([1] * 300, "a prompt of 300 tokens leaves no room in a context of 256"),
    ],
)
def test_a_prompt_that_no_engine_can_take(any_bench: Bench, ids: list[int], said: str) -> None:
    """It never reaches one: a token outside the vocabulary kills the whole server. It ends at once, whatever
    max_attempts says, and in the other epochs it does not come again."""
    bench = any_bench
    run = bench.make_run(prompts=1, samples_per_prompt=2, groups_per_step=9, max_attempts=3, epochs=3, admit=False)
    run.add_prompts([{"prompt_ids": ids, "label": "poison"}])
    engine = bench.engine()
    engine.server = {"context_length": 256, "vocab_size": 64}
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    groups = factory.rows(run, "SELECT state, reason FROM sample_group ORDER BY state")
    # The window has room for all three epochs at once: those that were admitted before it was found end too.
    refused = [g for g in groups if g["state"] == "dropped"]
    assert [g["state"] for g in groups if g not in refused] == ["ready"] * 3
    assert refused and {g["reason"] for g in refused} == {f"prompt refused: {said}"}
    assert all(len(body["input_ids"]) == PROMPT_TOKENS and max(body["input_ids"]) < 64 for body in engine.requests)
    assert {row["failures"] for row in bench.samples()} <= {0, 1}
    assert said in dict(run.why(groups=9).reasons)["refused_prompts"]
    bench.sound()


@pytest.mark.parametrize(
    ("message", "failures"),
    [
        ("The input (1801 tokens) is longer than the model's context length (1024 tokens).", 1),
        ("An exception occurred while loading IMAGE data at index 0: image file is truncated", 1),
        ("top_k must be at least 1", 3),
    ],
)
def test_what_only_an_engine_can_tell_of_a_prompt(bench: Bench, message: str, failures: int) -> None:
    """How many tokens an image takes, and whether it is one, the engine finds out. Refused for the prompt, it ends at
    once; for anything else the attempt has failed, and the group is dropped for that."""
    run = bench.make_run(samples_per_prompt=1, max_attempts=3)
    engine = bench.engine(Script(status=400, body={"error": {"message": message}}))
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    [row] = bench.samples()
    assert (row["status"], row["failures"], len(engine.requests)) == ("failed", failures, failures)
    assert factory.value(run, "SELECT reason FROM sample_group").startswith("prompt refused: ") == (failures == 1)
    assert message in row["error"]


@pytest.mark.parametrize(
    ("server", "flags", "said"),
    [
        ({"incremental_streaming_output": False, "stream_interval": 1}, {"max_new_tokens": 4000}, "--incremental-str"),
        ({"enable_return_routed_experts": False}, {"routed_experts": True}, "--enable-return-routed-experts"),
    ],
)
def test_engines_that_were_started_otherwise_are_refused(
    bench: Bench, server: dict[str, Any], flags: dict[str, Any], said: str
) -> None:  # fmt: skip
    bench.make_run(max_new_tokens=4000)
    (bench.folder / "config.json").write_text(
        '{"vocab_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}'
    )
    engine = bench.engine()
    engine.server = {"context_length": 8192, **server}
    worker = bench.worker(engine, tokenizer=str(bench.folder), **flags)
    assert worker.wait(60) != 0
    assert said in worker.log() and engine.requests == []
    assert bench.unowned()


def test_a_long_cumulative_stream_stops_the_worker(bench: Bench) -> None:
    """The engine does not say how it streams; what it sends shows. What came is kept."""
    bench.make_run(samples_per_prompt=1, max_new_tokens=3000)
    engine = bench.engine(Script(dialect="cumulative", chunk=4))
    worker = bench.worker(engine)
    assert worker.wait(60) != 0
    assert "cumulative stream" in worker.log() and "--incremental-streaming-output" in worker.log()
    [row] = bench.samples()
    assert row["status"] == "aborted" and row["owner"] is None and 2048 <= row["n_tokens"] < 3000
    assert row["failures"] == 0
    bench.exact()
    bench.sound()


def test_an_engine_that_errs_on_one_sample_again_and_again(bench: Bench) -> None:
    """HTTP 500 from the engine itself is tried again, and is the sample's failure in the end, not tried for ever."""
    bench.make_run(prompts=2, samples_per_prompt=1, groups_per_step=2, max_attempts=1)
    boom = Script(status=500, body={"error": {"message": "boom", "code": 500}})
    engine = bench.engine(lambda body, n: boom if body["input_ids"][2] == 0 else Script())
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert sorted(bench.statuses()) == ["failed", "truncated"]
    assert any("boom" in (row["error"] or "") for row in bench.samples())


def test_a_plain_server_error_is_not_tried_for_ever(bench: Bench) -> None:
    """Straight from the engine it is its word about this request; the engine stays in use for the others."""
    bench.make_run(prompts=2, samples_per_prompt=1, groups_per_step=2, max_attempts=1)
    boom = Script(status=500, body="Internal Server Error")
    engine = bench.engine(lambda body, n: boom if body["input_ids"][2] == 0 else Script())
    worker = bench.worker(engine, exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    assert sorted(bench.statuses()) == ["failed", "truncated"]


@pytest.mark.parametrize("mode", ["stream", "unary", "sliced"])
def test_a_reply_that_was_continued_from_other_weights_cache_is_asked_for_again(bench: Bench, mode: str) -> None:
    """The weights changed between the request's cache key and its start: no version would describe its tokens."""
    bench.make_run(samples_per_prompt=1, max_staleness=2, weight_update="keep")
    engine = bench.engine(lambda body, n: Script(stall_after=0) if n == 0 else Script())
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 1)
    engine.cached = 2
    made = bench.run.publish_weights("/weights/1", step=1)
    bench.wait(lambda: engine.label == made.label and not engine.paused, "it serves the new weights")
    engine.release()
    assert worker.wait(60) == 0, worker.log()
    assert [body["extra_key"] for body in engine.requests] == ["default", made.label]
    assert [row["lost_reason"] for row in bench.requests()] == ["stale cache", None]
    parts = factory.segments(bench.run, bench.samples()[0]["id"])
    assert {s["version_min"] for s in parts} == {1} and sum(s["n_tokens"] for s in parts) == 32
    bench.sound()


@pytest.mark.parametrize("by", ["model", "sampling"])
def test_an_abort_that_comes_with_the_end_token_is_the_end(bench: Bench, by: str) -> None:
    """The reply says "abort", but the sample is complete: another token would be one too many."""
    end = token_at(PROMPT_TOKENS + 7)
    bench.make_run(
        samples_per_prompt=1, sampling={"temperature": 1.0, **({"stop_token_ids": [end]} if by == "sampling" else {})}
    )
    (bench.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    engine = bench.engine(Script(stall_after=8, chunk=8))
    if by == "model":
        engine.server["model_path"] = str(bench.folder)
    worker = bench.worker(engine, exit_when_done=True)
    wait_running([engine], 1)
    bench.wait(lambda: any(len(one.ids) == 8 for one in list(engine.running.values())), "its last token was made")
    bench.run.abort_inflight("just now")
    assert worker.wait(60) == 0, worker.log()
    assert len(engine.requests) == 1
    [row] = bench.samples()
    assert (row["status"], row["n_tokens"], row["finish_reason"]) == ("completed", 8, "stop")
    bench.exact(8)
    bench.sound()
