"""What engines must not do with a prompt that has images is refused before it harms: other tokens of the same text, an
engine that never answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samplestore.run import Run
from tests.support import factory
from tests.support.scripted_engine import Script, ScriptedEngine, token_at
from tests.worker.conftest import Bench

PNG = b"\x89PNG\r\n\x1a\n" + b"a picture"
PLACE = 2  # the image's token within PROMPT
PROMPT = [1, PLACE, 3]
MADE = 64  # tokens that the engine makes of the image


def made_run(bench: Bench, ids: list[int] = PROMPT, images: int = 1, **settings: Any) -> Run:
    size = {"samples_per_prompt": 1, "groups_per_step": 1, "max_staleness": 0, "epochs": 1, "max_new_tokens": 32}
    bench.run = bench.store.run("r", **size, **settings)
    bench.run.add_prompts([{"prompt_ids": ids, "images": [PNG + bytes([i]) for i in range(images)]}])
    bench.run.admit()
    return bench.run


def engine_of(bench: Bench, folder: Path, plan: Any = None, **server: Any) -> ScriptedEngine:
    """It serves a model that has PLACE for images."""
    (folder / "config.json").write_text(json.dumps({"image_token_id": PLACE, "vocab_size": 100, "eos_token_id": 99}))
    engine = bench.engine(plan)
    engine.server |= {"model_path": str(folder), **server}
    return engine


def ended(bench: Bench, engine: ScriptedEngine) -> tuple[int, str, dict[str, Any]]:
    """(exit code, log, the sample's row) of a worker that has done all."""
    worker = bench.worker(engine, exit_when_done=True)
    code = worker.wait(60)
    (row,) = bench.samples()
    return code, worker.log(), row


@pytest.mark.parametrize("resume", [True, False])
def test_an_engine_that_encodes_anew_is_refused(bench: Bench, tmp_path: Path, resume: bool) -> None:
    """What a sample is resumed from would be other tokens. A run that starts over instead has no use for them."""
    made_run(bench, resume=resume)
    engine = engine_of(bench, tmp_path, version="0.5.12.post1")
    code, log, row = ended(bench, engine)
    if not resume:
        assert (code, row["status"], row["n_tokens"]) == (0, "truncated", 32), log
        return
    assert code != 0 and "is older than SGLang 0.5.13" in log and "Traceback" not in log
    assert engine.requests == [] and row["status"] == "pending" and row["failures"] == 0


@pytest.mark.parametrize("server", [{"version": "0.5.13"}, {"version": "0.1.0", "engine": "samplestore-cpu"}, {}])
def test_others_are_not(bench: Bench, tmp_path: Path, server: dict[str, Any]) -> None:
    made_run(bench)
    code, log, row = ended(bench, engine_of(bench, tmp_path, **server))
    assert (code, row["status"], row["n_tokens"]) == (0, "truncated", 32), log


def test_no_rows_of_other_tokens(bench: Bench) -> None:
    """Routed experts come by place in what the engine made of the prompt, which is longer than what is stored."""
    made_run(bench)
    (bench.folder / "config.json").write_text('{"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}')
    engine = bench.engine()
    engine.experts = (3, 2)
    worker = bench.worker(engine, routed_experts=True, tokenizer=str(bench.folder), exit_when_done=True)
    assert worker.wait(60) != 0 and "without --routed-experts" in worker.log()
    assert engine.requests == [] and bench.statuses() == ["pending"]


@pytest.mark.parametrize(
    ("ids", "images", "refused"),
    [
        ([1, *[PLACE] * 4, 3], 1, "has places for images (token 2): 4, images: 1"),
        ([1, PLACE, 3], 2, "has places for images (token 2): 1, images: 2"),
        ([1, PLACE, 3, PLACE], 2, None),
        ([1, 3], 1, None),
    ],
)
def test_each_image_has_one_place(
    bench: Bench, tmp_path: Path, ids: list[int], images: int, refused: str | None
) -> None:
    """Of a prompt as the model's processor widens it SGLang 0.5.23 never answers, and 0.5.9 fails."""
    made_run(bench, ids, images, max_attempts=1)
    engine = engine_of(bench, tmp_path)
    *_, row = ended(bench, engine)
    if refused is None:
        assert row["status"] == "truncated" and len(engine.requests[0]["image_data"]) == images
    else:
        assert row["status"] == "failed" and refused in row["error"] and engine.requests == []


def test_a_place_in_a_response_is_not_sent(bench: Bench, tmp_path: Path) -> None:
    """A model can draw that token. The engine would look for an image."""
    made_run(bench, [1, token_at(5), 3], max_attempts=1)
    engine = engine_of(bench, tmp_path, lambda body, n: Script(die_after=8))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_index": token_at(5)}))
    *_, row = ended(bench, engine)
    assert len(engine.requests) == 1 and row["n_tokens"] == 8 and row["status"] == "failed"
    assert f"token {token_at(5)} in the response is the place of an image" in row["error"]


@pytest.mark.parametrize("drift", [0, 1])
def test_what_a_sample_is_resumed_from(any_bench: Bench, tmp_path: Path, drift: int) -> None:
    """The engine tells how many tokens its prompt had: those of the first request, and what was generated since."""

    def plan(body: dict[str, Any], n: int) -> Script:
        return Script(die_after=8, widened=MADE) if n == 0 else Script(widened=MADE - drift)

    run = made_run(any_bench, max_attempts=1)
    engine = engine_of(any_bench, tmp_path, plan)
    _, log, row = ended(any_bench, engine)
    assert [len(body["input_ids"]) for body in engine.requests] == [len(PROMPT), len(PROMPT) + 8]
    if drift:
        assert row["status"] == "failed" and row["n_tokens"] == 8, "none of it is stored"
        assert "made 74 tokens of a prompt with images that had 75" in row["error"]
    else:
        assert (row["status"], row["n_tokens"]) == ("truncated", 32), log
    told = factory.rows(run, "SELECT prompt_tokens FROM request ORDER BY id")
    assert [r["prompt_tokens"] for r in told] == [len(PROMPT) + MADE, len(PROMPT) + MADE + 8 - drift]
    any_bench.sound()


def test_another_worker_knows_it_too(bench: Bench, tmp_path: Path) -> None:
    def plan(body: dict[str, Any], n: int) -> Script:
        return Script(stall_after=8, widened=MADE) if n == 0 else Script(widened=MADE + 2)

    made_run(bench, max_attempts=1)
    engine = engine_of(bench, tmp_path, plan)
    worker = bench.worker(engine)
    bench.wait_stored(8)
    assert worker.terminate() == 0, worker.log()
    *_, row = ended(bench, engine)
    assert row["status"] == "failed" and "made 77 tokens of a prompt with images that had 75" in row["error"]
    bench.sound()
