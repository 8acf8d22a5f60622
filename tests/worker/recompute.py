"""The proof of a rollout system: every stored log-prob is what the weights that its segment names give that token.

Off-by-one, retokenisation, a wrong version, a lost, repeated or foreign token: each changes what a forward pass over
the stored ids gives, and so shows here. Nothing of the worker's code is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from samplestore import codec
from samplestore.run import Run
from tests.support import factory

TOLERANCE = 1e-3  # float32, other kernels and batch shapes
FINISHED = ("completed", "truncated")


def load(folder: Any) -> Any:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def expected(model: Any, ids: list[int], temperature: float) -> npt.NDArray[np.float64]:
    """Log-prob of ids[1:], each given those before it: float64 [len(ids) - 1]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    told = torch.log_softmax(logits / temperature, dim=-1)
    result: npt.NDArray[np.float64] = told[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).numpy()
    return result


def problems(run: Run, models: Mapping[int, Any], eos: int) -> list[str]:
    """What is wrong with the finished samples of a run; empty is good. `models`: weight version -> model."""
    found: list[str] = []
    rows = factory.rows(
        run,
        "SELECT s.*, p.prompt_ids FROM sample s JOIN sample_group g ON g.id = s.group_id "
        "JOIN prompt p ON p.id = g.prompt_id WHERE s.run_id = :r AND s.status IN ('completed', 'truncated')",
        r=run.id,
    )
    temperatures = {r["rid"]: r["temperature"] for r in factory.rows(run, "SELECT rid, temperature FROM request")}
    for row in rows:
        parts = [s for s in factory.segments(run, row["id"]) if s["incarnation"] == row["incarnation"]]
        found += [f"sample {row['id']}: {text}" for text in _of_sample(row, parts, temperatures, models, eos, run)]
    return found


def _of_sample(
    row: dict[str, Any], parts: list[dict[str, Any]], temperatures: dict[str, float], models: Mapping[int, Any],
    eos: int, run: Run,
) -> list[str]:  # fmt: skip
    found: list[str] = []
    response: list[int] = []
    decoded = []
    for seq, part in enumerate(parts):
        ids, probs = codec.decode(part["payload"])
        if (part["seq"], part["start"], part["n_tokens"]) != (seq, len(response), ids.size) or probs is None:
            found.append(f"segment {seq} does not follow the one before it")
            continue
        if part["version_min"] is None or part["version_min"] != part["version_max"]:
            found.append(f"segment {seq} names versions {part['version_min']}..{part['version_max']}")
            continue
        decoded.append((part, len(response), probs))
        response += ids.tolist()
    if len(response) != row["n_tokens"]:
        found.append(f"{len(response)} tokens in segments, {row['n_tokens']} in its row")
    found += _ending(row, response, eos, run.settings.max_new_tokens)
    prompt = codec.ids_from(row["prompt_ids"]).tolist()
    told: dict[tuple[int, float], npt.NDArray[np.float64]] = {}
    for part, start, probs in decoded:
        temperature = temperatures[part["request_rid"]]
        key = (part["version_min"], temperature)
        if key not in told:
            told[key] = expected(models[key[0]], prompt + response, temperature)[len(prompt) - 1 :]
        off = np.abs(told[key][start : start + probs.size] - probs)
        if off.size != probs.size or not (off < TOLERANCE).all():
            at = int(off.argmax()) if off.size else 0
            found.append(f"segment {part['seq']} position {at}: log-prob is off by {off[at] if off.size else '?'}")
    return found


def _ending(row: dict[str, Any], response: list[int], eos: int, limit: int) -> list[str]:
    """It ends with the end token, or after exactly the budget; an end token stands nowhere else."""
    if eos in response[:-1]:
        return ["goes on after its end token"]
    ended = bool(response) and response[-1] == eos
    if row["status"] == "completed" and not ended:
        return ["is completed without an end token"]
    if row["status"] == "truncated" and (ended or len(response) != limit):
        return [f"is truncated at {len(response)} tokens of {limit}"]
    return []
