"""Weights that change, also under running requests: every token keeps the log-prob of its own version."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from samplestore.workers.cpu_engine.checkpoint import load_model
from samplestore.workers.cpu_engine.options import CheckpointError
from samplestore.workers.cpu_engine.request import Request
from tests.support.models import build_model

from .direct import assert_exact, finished, make, produced, produced_or_finished, scheduler_for


async def test_in_place_update_changes_the_weights_under_running_requests(
    tiny_model: Path, tiny_model_v1: Path, models: dict[str, Any]
) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        batch = [make(f"r{index}", 2 + 50 * index, max_new_tokens=60) for index in range(4)]
        for request in batch:
            scheduler.submit(request)
        await produced(batch[-1], 10)
        await scheduler.pause("in_place")
        before = [len(request.output) for request in batch]
        waiting = make("waiting", max_new_tokens=5)
        scheduler.submit(waiting)
        assert await scheduler.update_weights(str(tiny_model_v1), "v1", False) == 5
        assert [len(request.output) for request in batch] == before
        scheduler.resume()
        await finished(*batch, waiting)
    for request, count in zip(batch, before, strict=True):
        assert request.spans == [("v0", 0, count), ("v1", count, 60)]
        assert_exact(models, request)
    assert waiting.spans == [("v1", 0, 5)]
    assert_exact(models, waiting)


async def test_retracted_requests_go_on_exactly(tiny_model: Path, tiny_model_v1: Path, models: dict[str, Any]) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        batch = [make(f"r{index}", 2 + 50 * index, max_new_tokens=40) for index in range(3)]
        for request in batch:
            scheduler.submit(request)
        await produced(batch[-1], 5)
        await scheduler.pause("retract")
        assert scheduler.running == []
        await scheduler.update_weights(str(tiny_model_v1), "v1", False)
        scheduler.resume()
        await finished(*batch)
    for request in batch:
        assert request.retractions == 1
        assert [name for name, _, _ in request.spans] == ["v0", "v1"]
        assert_exact(models, request)


async def test_update_waits_for_older_requests_and_holds_newer_ones(tiny_model: Path, tiny_model_v1: Path) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        older = make("older", max_new_tokens=40)
        scheduler.submit(older)
        await produced(older, 3)
        update = asyncio.create_task(scheduler.update_weights(str(tiny_model_v1), "v1", False))
        await produced(older, 6)
        newer = make("newer", max_new_tokens=4)
        scheduler.submit(newer)
        await finished(older)
        assert newer.output == []
        assert await update == 0
        await finished(newer)
    assert older.spans == [("v0", 0, 40)]
    assert newer.spans == [("v1", 0, 4)]


async def test_update_that_aborts_labels_partials_with_the_old_version(tiny_model: Path, tiny_model_v1: Path) -> None:
    async with scheduler_for(tiny_model, decode_interval_s=0.001) as scheduler:
        running = make("running", max_new_tokens=500)
        scheduler.submit(running)
        await produced(running, 5)
        await scheduler.update_weights(str(tiny_model_v1), "v1", True)
        assert running.finish is not None
        assert running.finish["type"] == "abort"
        assert [name for name, _, _ in running.spans] == ["v0"]
        assert scheduler.version == "v1"


async def test_a_label_changes_at_once_under_a_request_that_never_pauses(tiny_model: Path) -> None:
    """Between two steps without an interval nobody else gets a turn: who waits for one waits to the end."""
    async with scheduler_for(tiny_model) as scheduler:
        request = make("long", max_new_tokens=900)
        scheduler.submit(request)
        await produced(request, 5)
        await scheduler.relabel("v1", False)
        assert request.finish is None
        await produced(request, len(request.output) + 5)
        scheduler.abort("long")
        await finished(request)
    assert [name for name, _, _ in request.spans] == ["v0", "v1"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "wider", "no tensor"])
async def test_a_bad_checkpoint_leaves_the_old_weights(
    damage: str, tiny_model: Path, tmp_path: Path, models: dict[str, Any]
) -> None:
    bad = tmp_path / "bad"
    if damage != "missing":
        build_model(bad, seed=9, hidden=96 if damage == "wider" else 64)
    if damage == "truncated":
        file = bad / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
    if damage == "no tensor":
        from safetensors.torch import load_file, save_file

        tensors = load_file(bad / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    async with scheduler_for(tiny_model) as scheduler:
        with pytest.raises(CheckpointError):
            await scheduler.update_weights(str(bad), "v9", False)
        assert scheduler.version == "v0"
        request = make("after")
        scheduler.submit(request)
        await finished(request)
    assert_exact(models, request)


async def test_overwriting_the_served_folder_changes_nothing(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "served", seed=5)
    async with scheduler_for(folder) as scheduler:
        model = load_model(str(folder), "float32")
        file = folder / "model.safetensors"
        with file.open("r+b") as opened:
            opened.truncate(100)
        request = make("served")
        scheduler.submit(request)
        await finished(request)
    assert_exact({"v0": model}, request)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_any_mix_of_operations_keeps_every_logprob_exact(
    seed: int, tiny_model: Path, tiny_model_v1: Path, models: dict[str, Any]
) -> None:
    chance = random.Random(seed)
    folders = {"v0": tiny_model, "v1": tiny_model_v1}
    requests: list[Request] = []
    async with scheduler_for(tiny_model, max_running=5, max_total_tokens=900) as scheduler:
        for step in range(30):
            for _ in range(chance.randrange(3)):
                kinds: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 7}]
                parameters = chance.choice(kinds)
                length = chance.choice([1, 9, 60, 140])
                made = make(f"f{step}_{len(requests)}", length, seed=step, max_new_tokens=40, **parameters)
                requests.append(made)
                scheduler.submit(made)
            if requests:
                await produced_or_finished(chance.choice(requests), chance.randrange(1, 20))
            action = chance.choice(["none", "none", "abort", "in_place", "retract", "update"])
            if action == "abort" and requests:
                scheduler.abort(chance.choice(requests).rid)
            elif action in ("in_place", "retract"):
                await scheduler.pause(action)
                version = chance.choice(["v0", "v1"])
                await scheduler.update_weights(str(folders[version]), version, False)
                scheduler.resume()
            elif action == "update":
                version = chance.choice(["v0", "v1"])
                await scheduler.update_weights(str(folders[version]), version, chance.random() < 0.5)
        await finished(*requests)
        assert scheduler.by_rid == {}
        assert scheduler.running == []
    assert len(requests) > 20
    for request in requests:
        assert_exact(models, request)
    assert sum(len(request.output) for request in requests) == scheduler.generated_total


async def test_damaged_weights_are_told_as_nan_and_not_hidden(tmp_path: Path) -> None:
    import orjson

    from samplestore.workers.cpu_engine.answers import answer

    folder = build_model(tmp_path / "nan", seed=8)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    async with scheduler_for(folder) as scheduler:
        request = make("nan", max_new_tokens=3)
        request.return_logprob = True
        scheduler.submit(request)
        await finished(request)
    body = orjson.loads(orjson.dumps(answer(request, "v0", text=False)))
    assert body["meta_info"]["output_token_logprobs"] == [[None, 0, None]] * 3
    assert body["meta_info"]["finish_reason"]["type"] == "length"
