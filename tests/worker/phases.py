"""What an engine must have computed, when its weights change under a running request.

An engine whose weights are changed in place keeps the keys and values that the old weights made. So a request is
recomputed in phases: each stretch of tokens is fed to the weights that served it, on the cache that the stretches
before it left behind. Without changes in the middle that is one plain forward pass.
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

TOLERANCE = 1e-3


class Call:
    """What one request added to a sample: its input, its tokens with their log-probs and versions."""

    def __init__(self, rid: str, temperature: float, prefix: list[int]) -> None:
        self.rid, self.temperature, self.prefix = rid, temperature, list(prefix)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []


def calls_of(run: Run, sample: dict[str, Any]) -> list[Call]:
    """The requests behind a finished sample, in order. Fails where a segment's version is not certain."""
    prompt = factory.value(
        run, "SELECT p.prompt_ids FROM prompt p JOIN sample_group g ON g.prompt_id = p.id WHERE g.id = :g",
        g=sample["group_id"],
    )  # fmt: skip
    temperature = {r["rid"]: r["temperature"] for r in factory.rows(run, "SELECT rid, temperature FROM request")}
    sequence = codec.ids_from(prompt).tolist()
    found: list[Call] = []
    for part in factory.segments(run, sample["id"]):
        ids, probs = codec.decode(part["payload"])
        assert probs is not None
        assert part["version_min"] is not None and part["version_min"] == part["version_max"], part
        if not found or found[-1].rid != part["request_rid"]:
            found.append(Call(part["request_rid"], temperature[part["request_rid"]], sequence))
        found[-1].ids += ids.tolist()
        found[-1].logprobs += probs.tolist()
        found[-1].versions += [part["version_min"]] * ids.size
        sequence += ids.tolist()
    return found


def recompute(call: Call, models: Mapping[int, Any]) -> tuple[npt.NDArray[np.float64], list[list[list[int]]]]:
    """(log-probs [n], experts [rows][layers] as sorted ids; rows are the tokens that were fed) of a request."""
    fed = [*call.prefix, *call.ids[:-1]]
    # the weights that were fed each token: those that made the token after it
    by = [call.versions[0]] * len(call.prefix) + call.versions[1:]
    cache, told, experts, at = None, [], [], 0
    while at < len(fed):
        stop = at + next((i for i, v in enumerate(by[at:]) if v != by[at]), len(fed) - at)
        with torch.inference_mode():
            out = models[by[at]](
                input_ids=torch.tensor([fed[at:stop]]), past_key_values=cache, use_cache=True,
                position_ids=torch.arange(at, stop).unsqueeze(0), **_wants_routing(models[by[at]]),
            )  # fmt: skip
        cache = out.past_key_values
        told.append(torch.log_softmax(out.logits[0].double() / call.temperature, dim=-1))
        experts += _chosen(out, models[by[at]])
        at = stop
    logprobs = torch.cat(told)[len(call.prefix) - 1 :]
    picked = logprobs.gather(1, torch.tensor(call.ids).unsqueeze(1)).squeeze(1)
    result: npt.NDArray[np.float64] = picked.numpy()
    return result, experts


def _wants_routing(model: Any) -> dict[str, Any]:
    return {"output_router_logits": True} if hasattr(model.config, "num_experts") else {}


def _chosen(out: Any, model: Any) -> list[list[list[int]]]:
    if not hasattr(model.config, "num_experts"):
        return []
    per_layer = [layer.topk(model.config.num_experts_per_tok, dim=-1).indices.sort(dim=-1).values
                 for layer in out.router_logits]  # fmt: skip
    chosen: list[list[list[int]]] = torch.stack(per_layer, dim=1).tolist()
    return chosen


def worst(run: Run, models: Mapping[int, Any]) -> tuple[float, int]:
    """(largest error, tokens compared) over all finished samples."""
    error, n = 0.0, 0
    for sample in factory.rows(run, "SELECT * FROM sample WHERE status IN ('completed', 'truncated')"):
        for call in calls_of(run, sample):
            off = np.abs(recompute(call, models)[0] - np.asarray(call.logprobs))
            assert (off < TOLERANCE).all(), (sample["id"], call.rid, int(off.argmax()), float(off.max()))
            error, n = max(error, float(off.max())), n + off.size
    return error, n
