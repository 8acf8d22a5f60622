"""Routers in front of engines: which one it is, what it drops from requests, and the engines that it lists.

Routers parse a generate call and write it anew: what their structure does not name is gone, without an error, and the
answer is 200. So what passes is known by name here; anything else counts as dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError

LIST_PATHS = ("/workers", "/list_workers")  # the second: older releases
NOWHERE = "/samplestore-looks-around"  # a page that no router has: each refuses it in its own way
MAX_ENGINES = 10_000

# Seen to arrive at an engine behind sglang-router 0.3.2 and smg 1.13.0. (smg passes more where it need not read the
# body: without retries, under some policies. That can't be seen from outside, so it does not count.)
PASSES = frozenset(
    """rid text input_ids input_embeds sampling_params return_logprob logprob_start_len top_logprobs_num
    token_ids_logprob return_text_in_logprobs stream return_hidden_states image_data video_data audio_data modalities
    session_params priority extra_key data_parallel_rank custom_logit_processor custom_labels no_logs log_metrics
    lora_path lora_id bootstrap_host bootstrap_port bootstrap_room conversation_id return_bytes return_entropy
    background model""".split()
)
PASSES_SAMPLING = frozenset(
    """max_new_tokens min_new_tokens temperature top_p top_k min_p stop stop_token_ids ignore_eos no_stop_trim
    skip_special_tokens n frequency_penalty presence_penalty repetition_penalty sampling_seed json_schema regex
    ebnf""".split()
)
# What else SGLang knows: named so that `engines list` can say what is lost.
MORE = frozenset(
    """return_routed_experts routed_experts_start_len return_prompt_token_ids return_sampling_mask return_indexer_topk
    session_id routing_key routed_dp_rank cache_salt max_thinking_tokens require_reasoning""".split()
)
MORE_SAMPLING = frozenset(
    "custom_params logit_bias stop_regex stream_interval spaces_between_special_tokens structural_tag".split()
)


@dataclass(frozen=True, slots=True)
class Listed:
    """An engine in a router's list. id: None where the router has none. healthy: it gets requests."""

    url: str
    id: str | None
    healthy: bool
    model_id: str | None


@dataclass(frozen=True, slots=True)
class Router:
    """A router, as it was recognised.

    kind              "sglang-router", "smg", or "unknown": then all that any of them drops counts as dropped
    version           None where it does not tell
    passes            request fields that arrive at the engine; None: all
    passes_sampling   keys of sampling_params that arrive
    tells_engine      whether an answer says which engine gave it
    """

    url: str
    kind: str
    version: str | None
    passes: frozenset[str] | None
    passes_sampling: frozenset[str]
    tells_engine: bool

    @property
    def drops(self) -> frozenset[str]:
        """Fields of SGLang's that get lost; fields that SGLang does not know get lost too, unless all pass."""
        return frozenset() if self.passes is None else MORE - self.passes

    @property
    def drops_sampling(self) -> frozenset[str]:
        return MORE_SAMPLING - self.passes_sampling

    def __str__(self) -> str:
        name = f"{self.kind} {self.version or ''}".strip()
        return f"{name} at {self.url}" if self.kind != "unknown" else f"a router of an unknown kind at {self.url}"


async def identify(client: EngineClient, url: str) -> Router:
    """Which router answers at `url`; no engine is asked to generate. Raises EngineError; kind "setup" where it is
    no router."""
    url = url.rstrip("/")
    await listed(client, url)
    try:
        await client.text(f"{url}{NOWHERE}")
        refusal = "200"
    except EngineError as error:
        if error.status is None or error.status >= 500:
            raise
        refusal = error.message
    if '"unknown_url"' in refusal:
        sampling = PASSES_SAMPLING | {"custom_params"}
        return Router(url, "smg", await _version(client, url), None, sampling, tells_engine=True)
    kind = "unknown" if refusal else "sglang-router"  # the latter refuses with an empty body
    return Router(url, kind, None, PASSES, PASSES_SAMPLING, tells_engine=False)


def require_passes(router: Router, fields: Iterable[str], sampling: Iterable[str]) -> None:
    """Raises EngineError, kind "setup", where the router would drop something that is going to be asked for."""
    lost = sorted(set(fields) - router.passes) if router.passes is not None else []
    lost += sorted(f"sampling_params.{name}" for name in set(sampling) - router.passes_sampling)
    if lost:
        gets_through = router.kind != "smg" and not set(sampling) - PASSES_SAMPLING - {"custom_params"}
        other = "Use the router smg, or talk to the engines themselves" if gets_through else "Talk to the engines"
        raise EngineError("setup", f"{router} drops {', '.join(lost)} from requests. {other}: --dispatch direct")


# -- the engines that it lists


async def workers(client: EngineClient, router: str) -> list[Listed]:
    """Its engines, without those that are leaving. Raises EngineError; kind "setup" where it is no router."""
    for path in LIST_PATHS:
        try:
            answer = await client.get(f"{router}{path}")
        except EngineError as error:
            if error.status not in (404, 405):
                raise
            continue
        return _workers(answer, f"{router}{path}")
    if await _is_engine(client, router):
        raise EngineError("setup", f"{router} is an engine, not a router. Say --engine {router}")
    raise EngineError("setup", f"{router} is no router: it lists its engines neither at /workers nor at /list_workers")


async def is_router(client: EngineClient, url: str) -> bool:
    """Whether it lists engines, as no engine does."""
    try:
        await workers(client, url)
    except EngineError:
        return False
    return True


async def listed(client: EngineClient, router: str) -> set[str]:
    """URLs of its engines, also of those that it holds to be unhealthy. Raises EngineError."""
    return {worker.url for worker in await workers(client, router)}


async def register(client: EngineClient, router: str, url: str, model_id: str | None = None) -> str | None:
    """Add an engine, if it is not listed; the router looks at it before it lists it, so that takes a moment. Returns
    the id under which it will be known, None where there is none or it was there. Raises EngineError."""
    if url in await listed(client, router):
        return None
    body = {"url": url, **({"model_id": model_id} if model_id else {})}
    try:
        answer = await client.post(f"{router}/workers", body)
    except EngineError as error:
        if error.status not in (404, 405):
            raise
        await client.post(f"{router}/add_worker?url={quote(url, safe='')}", {})
        return None
    return _text(answer.get("worker_id")) if isinstance(answer, dict) else None


async def unregister(client: EngineClient, router: str, url: str, known_as: str | None = None) -> None:
    """Take an engine out: no new requests go there, what runs goes on. One that is not listed is harmless.
    `known_as`: the id that `register` returned, for an engine that may not be listed yet. Raises EngineError."""
    ids = {known_as} if known_as else set()
    found = [worker for worker in await workers(client, router) if worker.url == url]
    if found and all(worker.id is None for worker in found):
        await client.post(f"{router}/remove_worker?url={quote(url, safe='')}", {})
        return
    for name in ids | {worker.id for worker in found if worker.id}:
        try:
            await client.delete(f"{router}/workers/{quote(name, safe='')}")
        except EngineError as error:
            if error.status != 404:  # gone meanwhile
                raise


def _workers(answer: Any, page: str) -> list[Listed]:
    """The shapes that routers list engines in: {"workers": [{"url", "id"}]}, {"urls": [...]}, or a bare list."""
    told = answer.get("workers", answer.get("urls")) if isinstance(answer, dict) else answer
    if not isinstance(told, list) or len(told) > MAX_ENGINES:
        raise EngineError("broken", f"{page} lists no engines: {str(answer)[:200]}")
    found = []
    for item in told:
        worker = item if isinstance(item, dict) else {"url": item}
        url, name, model = (_text(worker.get(key)) for key in ("url", "id", "model_id"))
        if url and url.startswith(("http://", "https://")) and worker.get("status") != "draining":
            found.append(Listed(url.rstrip("/"), name, worker.get("is_healthy") is not False, model))
    return found


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= 2000 else None


async def _is_engine(client: EngineClient, url: str) -> bool:
    try:
        told = await client.get(f"{url}/model_info")
    except EngineError:
        return False
    return isinstance(told, dict) and "model_path" in told


async def _version(client: EngineClient, url: str) -> str | None:
    """smg's, beside the loads of its engines; one of those that hangs must not make the router unknown."""
    try:
        told = await client.get(f"{url}/get_loads", 5.0)
    except EngineError:
        return None
    version = told.get("version") if isinstance(told, dict) else None
    return version[:40].removeprefix("smg-") if isinstance(version, str) else None
