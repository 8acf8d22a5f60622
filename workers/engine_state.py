"""What one engine says of itself: how it was started, what it serves, what it is doing. Asked of the engine, never of a
router, which answers 404, or asks an engine of its own choice.

Every answer is checked; what breaks the protocol is an EngineError. Whatever an engine does not tell is None.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from samplestore.types import EngineFacts
from samplestore.verbs.weights import MAX_COUNTER
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.model_folder import ModelFolder, count, read
from samplestore.workers.replies import EngineError

KEYS_SINCE = (0, 5, 12)  # 0.5.9 drops extra_key on its way to the scheduler
IDS_SINCE = (0, 5, 13)  # before, the ids of a prompt with images were decoded, and the text encoded again
EMBEDDED = "samplestore-cpu"
COUNTER = "sglang:generation_tokens_total"
INFO_PATHS = ("/model_info", "/get_model_info")  # the second: older releases


@dataclass(frozen=True, slots=True)
class Info:
    """label: of the weights that it serves. model_path: where they were loaded from."""

    label: str | None
    model_path: str | None


@dataclass(frozen=True, slots=True)
class Server:
    """How an engine was started. context_length: tokens. stream_interval: tokens of a chunk; incremental: chunks are
    deltas. speculative: name of the algorithm. release: version of SGLang, or of samplestore where it is
    the embedded one. deterministic: SGLang heeds seeds only if this is set. stop_ids: tokens that end a response, and
    image_token: the place of an image in a prompt, both where the model's folder exists on this machine too. model:
    what tells its model from others, by name, where known."""

    context_length: int | None = None
    vocab_size: int | None = None
    release: str | None = None
    embedded: bool = False
    stream_interval: int | None = None
    incremental: bool | None = None
    page_size: int | None = None
    metrics: bool | None = None
    speculative: str | None = None
    routed_experts: bool | None = None
    memory_saver: bool | None = None
    deterministic: bool | None = None
    stop_ids: frozenset[int] = frozenset()
    image_token: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run, requests that wait, tokens in the key/value cache that are in use."""

    running: int | None = None
    queued: int | None = None
    tokens: int | None = None


async def info(client: EngineClient, url: str, timeout_s: float = 10.0) -> Info:
    """What an engine serves. Raises EngineError."""
    told = await _either(client, url, INFO_PATHS, timeout_s)
    if told is None:
        raise EngineError("broken", f"{url} is no SGLang engine: it has no /model_info", 404)
    return Info(_text(told.get("weight_version")), _text(told.get("model_path"), 4096))


async def served_label(client: EngineClient, url: str, timeout_s: float = 10.0) -> str | None:
    """Of the weights that an engine serves; None where it does not tell."""
    try:
        return (await info(client, url, timeout_s)).label
    except EngineError:
        return None


async def server(client: EngineClient, url: str, timeout_s: float = 10.0) -> Server:
    """How an engine was started. Raises EngineError."""
    told = await _either(client, url, ("/server_info", "/get_server_info"), timeout_s)
    if told is None:
        return Server()
    # The older name of a flag has another meaning on some releases: only what is told under the newer one counts.
    found = Server(
        context_length=count(told.get("context_length")) or await _context(client, url, timeout_s),
        vocab_size=count(told.get("vocab_size")),
        release=_text(told.get("version")),
        embedded=told.get("engine") == EMBEDDED,
        stream_interval=count(told.get("stream_interval")),
        incremental=_flag(told.get("incremental_streaming_output")),
        page_size=count(told.get("page_size")),
        metrics=_flag(told.get("enable_metrics")),
        speculative=_text(told.get("speculative_algorithm")),
        routed_experts=_flag(told.get("enable_return_routed_experts")),
        memory_saver=_flag(told.get("enable_memory_saver")),
        deterministic=_flag(told.get("enable_deterministic_inference")),
    )
    path = _text(told.get("model_path"), 4096)
    folder = ModelFolder() if path is None else await asyncio.to_thread(read, path)
    return replace(
        found, vocab_size=found.vocab_size or folder.vocab_size, stop_ids=folder.stop_ids,
        image_token=folder.image_token, model=await _model(client, url, found, folder, timeout_s),
    )  # fmt: skip


async def _model(
    client: EngineClient, url: str, found: Server, folder: ModelFolder, timeout_s: float
) -> dict[str, Any]:
    told = await _either(client, url, INFO_PATHS, timeout_s) or {}
    kinds = told.get("architectures")
    model = {
        "architecture": _text(kinds[0]) if isinstance(kinds, list) and kinds else None,
        "vocabulary": found.vocab_size or folder.vocab_size,
        **{name.replace("_", " "): size for name, size in folder.sizes.items()},
    }
    return {name: value for name, value in model.items() if value is not None}


async def health(client: EngineClient, url: str, timeout_s: float = 5.0) -> None:
    """Ask as a router does. By default the engine generates a token to answer, so a paused one is silent for 20 s and
    then says 503. Raises EngineError where it does not answer in time or says that it is not well."""
    await client.get(f"{url}/health", timeout_s)


async def load(client: EngineClient, url: str, timeout_s: float = 10.0) -> Load:
    """What an engine is doing, over all its data-parallel ranks; all None where the release can't tell. Raises
    EngineError."""
    try:
        told = await client.get(f"{url}/v1/loads?include=core", timeout_s)
    except EngineError as error:
        if error.status not in (404, 405, 500):  # 0.5.9 with newer libraries breaks down over this page
            raise
        return await _older_load(client, url, timeout_s)
    ranks = _ranks(told.get("loads") if isinstance(told, dict) else None, f"{url}/v1/loads")
    return Load(_sum(ranks, "num_running_reqs"), _sum(ranks, "num_waiting_reqs"), _sum(ranks, "num_used_tokens"))


async def generated_tokens(client: EngineClient, url: str, timeout_s: float = 10.0) -> int | None:
    """Tokens generated since the engine started, as it counts them: a request's are added when it ends. None without
    --enable-metrics. Raises EngineError."""
    try:
        page = await client.text(f"{url}/metrics", timeout_s)
    except EngineError as error:
        if error.status in (404, 405):
            return None
        raise
    if "sglang:" not in page:
        return None
    counted = 0.0  # a counter that nothing was added to yet is not on the page
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name == COUNTER or name.startswith(f"{COUNTER}{{"):
            try:
                counted += float(value)
            except ValueError:
                counted = math.nan
    if not 0 <= counted < MAX_COUNTER:
        raise EngineError("broken", f"{url}/metrics has no number of tokens in {COUNTER}")
    return int(counted)


async def facts(client: EngineClient, url: str, timeout_s: float = 10.0) -> EngineFacts:
    """What is recorded of an engine each time it is looked at. Raises EngineError."""
    started, now, counter = await asyncio.gather(
        server(client, url, timeout_s), load(client, url, timeout_s), generated_tokens(client, url, timeout_s)
    )
    return EngineFacts(counter, started.context_length, started.release, now.running, now.queued)


def separates_caches(release: str | None) -> bool:
    """Whether a release heeds extra_key: requests of different keys then share no prefix cache."""
    numbers = _numbers(release)
    return numbers is not None and numbers >= KEYS_SINCE


def rewrites_beside_images(server: Server) -> bool:
    """Whether it is an SGLang that encodes the ids of a prompt with images anew."""
    numbers = _numbers(server.release)
    return not server.embedded and numbers is not None and numbers < IDS_SINCE


def _numbers(release: str | None) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", release or "")
    return None if found is None else tuple(map(int, found.groups()))


async def _either(client: EngineClient, url: str, paths: Sequence[str], timeout_s: float) -> dict[str, Any] | None:
    """The object at the first of `paths` that the engine has: releases renamed them. None: it has none."""
    for path in paths:
        try:
            told = await client.get(f"{url}{path}", timeout_s)
        except EngineError as error:
            if error.status not in (404, 405):
                raise
            continue
        if not isinstance(told, dict):
            raise EngineError("broken", f"{url}{path} answered {str(told)[:100]!r}")
        return told
    return None


async def _older_load(client: EngineClient, url: str, timeout_s: float) -> Load:
    try:
        told = await client.get(f"{url}/get_load", timeout_s)
    except EngineError as error:
        if error.status not in (404, 405):
            raise
        return Load()
    ranks = _ranks(told, f"{url}/get_load")
    both, queued = _sum(ranks, "num_reqs"), _sum(ranks, "num_waiting_reqs")
    running = None if both is None or queued is None else max(0, both - queued)
    return Load(running, queued, _sum(ranks, "num_tokens"))


def _ranks(told: Any, page: str) -> list[dict[str, Any]]:
    if not isinstance(told, list) or not all(isinstance(rank, dict) for rank in told):
        raise EngineError("broken", f"{page} answered {str(told)[:100]!r}")
    return told


async def _context(client: EngineClient, url: str, timeout_s: float) -> int | None:
    """The context length that an engine took from its model: /server_info tells only one that was given."""
    try:
        told = await client.get(f"{url}/v1/models", timeout_s)
    except EngineError as error:
        if error.status not in (404, 405):
            raise
        return None
    models = told.get("data") if isinstance(told, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    return count(first.get("max_model_len")) if isinstance(first, dict) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any, longest: int = 200) -> str | None:
    return value[:longest] if isinstance(value, str) and value else None


def _sum(ranks: list[dict[str, Any]], name: str) -> int | None:
    counts = [count(rank.get(name)) for rank in ranks]
    return None if not counts or None in counts else sum(n for n in counts if n is not None)
