"""What a run with seeds and prompts with images come to on real SGLang: the same tokens again, and the log-probs of a
model that sees these images, also after aborts and under other weights."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplestore import codec, migrations
from samplestore.run import Run
from tests.support import factory, vision
from tests.support.processes import Processes
from tests.support.sglang import chosen_releases, start_sglang
from tests.support.vision import END, PLACE, START, VIDEO
from tests.worker.conftest import Bench, made_bench
from tests.worker.recompute import TOLERANCE

LABEL = "v0"  # of the server's first weights
WAIT_S = 300.0
# A model of random weights draws the place of an image as often as any token, and no engine goes on from that.
BANNED = [START, END, PLACE, VIDEO]
SAMPLING = {"ignore_eos": True, "logit_bias": {str(id): -1e9 for id in BANNED}}
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@dataclass
class Served:
    """A server with both: seeds that it heeds, and a model that sees."""

    url: str
    folders: list[Path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("vision")
    folders = [vision.build_vision_model(root / f"v{seed}", seed) for seed in range(2)]
    processes = Processes(root)
    flags = ("--enable-deterministic-inference",)
    try:
        yield Served(start_sglang(processes, folders[0], *flags, release=chosen_releases()[0]).url, folders)
    finally:
        processes.close()


def seeded(served: Served, processes: Processes, folder: Path, *, prompts: int, aborts: int) -> list[Any]:
    """[(tokens, what is told of them)] of the samples of one prompt, in a database of their own."""
    url = f"sqlite:///{folder}.db"
    migrations.upgrade(url)
    folder.mkdir()
    with made_bench(url, processes, folder) as bench:
        run = bench.make_run(
            prompts=prompts, groups_per_step=prompts, sampling_seed=7, max_new_tokens=160, sampling=SAMPLING
        )
        run.describe_first_weights(str(served.folders[0]), LABEL)
        worker = bench.worker(served.url, exit_when_done=True)
        for n in range(aborts):
            bench.wait_stored(24 * (n + 1), WAIT_S)
            run.abort_inflight("in the middle", wait_s=WAIT_S)
        assert worker.wait(WAIT_S) == 0, worker.log()
        bench.sound()
        asked = np.array([1, 2, 0], dtype="<i4").tobytes()
        rows = factory.rows(
            run, "SELECT s.id FROM sample s JOIN sample_group g ON g.id = s.group_id "
            'JOIN prompt p ON p.id = g.prompt_id WHERE p.prompt_ids = :p ORDER BY s."index"', p=asked,
        )  # fmt: skip
        return [(bench.tokens(row["id"])[0], run.determinism(row["id"])) for row in rows]


def test_the_same_again(served: Served, processes: Processes, tmp_path: Path) -> None:
    """Alone, and interrupted twice among the samples of five other prompts."""
    first = seeded(served, processes, tmp_path / "1", prompts=1, aborts=0)
    again = seeded(served, processes, tmp_path / "2", prompts=6, aborts=2)
    assert [ids for ids, _ in first] == [ids for ids, _ in again]
    assert first[0][0] != first[1][0], "each sample of a group has a seed of its own"
    assert all(told.holds and told.resumed == 0 for _, told in first)
    assert all(told.holds and told.resumed >= 1 for _, told in again)


PICTURES = [vision.picture(1), vision.picture(2, 56, 84), vision.picture(3, 84, 28)]


def add_rows(bench: Bench, served: Served, folder: Path) -> None:
    """As a user does: a file of messages, each with its images in another form."""
    (folder / "a.png").write_bytes(PICTURES[0])
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in PICTURES]

    def row(images: list[Any], text: str) -> str:
        content = [*[{"type": "image"}] * len(images), {"type": "text", "text": text}]
        return json.dumps({"messages": [{"role": "user", "content": content}], "images": images})

    rows = [row(["a.png"], "What is 17?"), row([urls[1], urls[2]], "Which one?"), row([urls[2]], "What is 17?")]
    (folder / "rows.jsonl").write_text("\n".join([*rows, json.dumps({"prompt": "Without any"})]))
    subprocess.run(
        [sys.executable, "-m", "samplestore.cli", "add-prompts", "rows.jsonl", "--db", bench.url, "--run", "r",
         "--tokenizer", served.folders[0]],
        check=True, cwd=folder, timeout=120,
    )  # fmt: skip


def test_images(served: Served, bench: Bench, tmp_path: Path) -> None:
    """Aborted and resumed, under the same weights and under others. Each log-prob is what the model of the segment's
    version gives that token after these images; the prompt's places are kept as they were added, and the engine's count
    of the prompt tells what it made of them."""
    bench.run = run = bench.store.run(
        "r", samples_per_prompt=2, groups_per_step=4, max_staleness=1, epochs=1, max_new_tokens=200, sampling=SAMPLING
    )
    run.describe_first_weights(str(served.folders[0]), LABEL)
    add_rows(bench, served, tmp_path)
    run.admit()
    worker = bench.worker(served.url, exit_when_done=True)
    bench.wait_stored(24, WAIT_S)
    run.abort_inflight("in the middle", wait_s=WAIT_S)
    bench.wait_stored(56, WAIT_S)
    run.publish_weights(str(served.folders[1]), step=1)
    assert worker.wait(WAIT_S) == 0, worker.log()
    assert bench.statuses() == ["truncated"] * 8

    models = [vision.load_vision(folder) for folder in served.folders]
    rows = bench.samples()
    assert all(resumed_with_same_tokens(run, row) for row in rows)
    assert sum(row["version_min"] < row["version_max"] for row in rows) >= 4
    for row in rows:
        pictures, others = pictures_of(run, row), [vision.picture(9, 84, 28)]
        assert largest_error(run, row, models, pictures) < TOLERANCE
        assert largest_error(run, row, models[::-1], pictures) > TOLERANCE
        if pictures == PICTURES[2:]:
            assert largest_error(run, row, models, others) > TOLERANCE, "another picture would be seen"
    factory.sound(run)


def prompt_of(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    (found,) = factory.rows(
        run, "SELECT p.prompt_ids, p.images FROM prompt p JOIN sample_group g ON g.prompt_id = p.id WHERE g.id = :g",
        g=row["group_id"],
    )  # fmt: skip
    return {**found, "prompt_ids": codec.ids_from(found["prompt_ids"]).tolist()}


def pictures_of(run: Run, row: dict[str, Any]) -> list[bytes]:
    digests = json.loads(prompt_of(run, row)["images"] or "[]")
    found = run.images(digests)
    return [found[digest].data for digest in digests]


def resumed_with_same_tokens(run: Run, row: dict[str, Any]) -> bool:
    """Whether it was resumed. The prompt has one place for each picture; what the engine made of it is told by its
    count, which has nothing else than those tokens and what was stored before."""
    prompt, pictures = prompt_of(run, row)["prompt_ids"], pictures_of(run, row)
    assert prompt.count(PLACE) == len(pictures)
    begins: dict[str, int] = {}
    for part in factory.segments(run, row["id"]):
        begins.setdefault(part["request_rid"], part["start"])
    for asked in factory.rows(run, "SELECT * FROM request WHERE sample_id = :s", s=row["id"]):
        if asked["rid"] in begins:
            assert asked["prompt_tokens"] == len(vision.widened(prompt, pictures)) + begins[asked["rid"]]
    return len(begins) > 1


def largest_error(run: Run, row: dict[str, Any], models: list[Any], pictures: list[bytes]) -> float:
    """Of its log-probs, against the model of each segment's version, which has seen these pictures."""
    parts = factory.segments(run, row["id"])
    decoded = [codec.decode(part["payload"]) for part in parts]
    response = [token for ids, _ in decoded for token in ids.tolist()]
    prompt = prompt_of(run, row)["prompt_ids"]
    expected = [vision.logprobs(model, prompt, pictures, response, BANNED) for model in models]
    worst = 0.0
    for part, (ids, probs) in zip(parts, decoded, strict=True):
        assert probs is not None and part["version_min"] == part["version_max"]
        there = slice(part["start"], part["start"] + ids.size)
        worst = max(worst, float(abs(expected[part["version_min"]][there] - probs).max()))
    return worst


def test_a_place_too_many_fails_at_once(served: Served, bench: Bench) -> None:
    """SGLang would never answer: the worker finds it before it asks."""
    bench.run = run = bench.store.run(
        "r", samples_per_prompt=1, groups_per_step=1, max_attempts=1, max_new_tokens=8, epochs=1
    )
    run.describe_first_weights(str(served.folders[0]), LABEL)
    run.add_prompts([{"prompt_ids": [9, START, *[PLACE] * 4, END], "images": [PICTURES[0]]}])
    worker = bench.worker(served.url, exit_when_done=True)
    assert worker.wait(WAIT_S) == 0, worker.log()
    (row,) = bench.samples()
    assert row["status"] == "failed" and "(token 4): 4, images: 1" in row["error"]
