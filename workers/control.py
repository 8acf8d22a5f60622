"""Control calls to one engine: what it is to do. They never pass a router: it answers 404, or asks an engine of its own
choice. What breaks the protocol is an EngineError."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from samplestore.errors import SampleStoreError
from samplestore.states import WeightUpdateMode
from samplestore.workers import engine_state
from samplestore.workers.checkpoints import held_against, require_loadable
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.replies import EngineError

PAUSE_MODES = ("abort", "retract", "in_place")
PAUSE_S = 60.0  # mode abort answers when the engine is idle
MEMORY_S = 120.0  # weights travel between GPU and host
UPDATE_S = 600.0


async def pause(client: EngineClient, url: str, mode: str, timeout_s: float = PAUSE_S) -> None:
    """abort: what runs is handed back. retract: back into the queue, computed again later. in_place: frozen. In each,
    new requests wait. Raises EngineError."""
    if mode not in PAUSE_MODES:
        raise ValueError(f"pause mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}")
    await client.post(f"{url}/pause_generation", {"mode": mode}, timeout_s)


async def proceed(client: EngineClient, url: str, timeout_s: float = 30.0) -> None:
    """End a pause; harmless where there is none. Raises EngineError."""
    await client.post(f"{url}/continue_generation", {}, timeout_s)


def died_of(path: str) -> str:
    """What the error of an engine says that went away while it loaded a checkpoint."""
    return f"broke off while it loaded {path}"


async def update_from_disk(
    client: EngineClient, url: str, path: str, label: str, *, abort_all: bool = False, flush_cache: bool = True,
    timeout_s: float = UPDATE_S,
) -> None:  # fmt: skip
    """Load weights and serve them under `label`. Without `abort_all` an engine that isn't paused first finishes what
    it runs. `flush_cache` on an engine that is paused in place fails, after the weights have changed: the label is
    then a lie. Raises EngineError.

    Label and abort_all_requests are always said: left out, the one keeps the old label on new weights, and the other
    has a default on some releases that kills everything in flight.
    """
    body = {
        "model_path": path,
        "weight_version": label,
        "abort_all_requests": abort_all,
        "flush_cache": flush_cache,
    }
    try:
        answer = await client.post(f"{url}/update_weights_from_disk", body, timeout_s)
    except EngineError as error:
        if error.kind != "unreachable" or error.unconnected:
            raise
        raise EngineError(
            "unreachable",
            f"{url} {died_of(path)} ({error.message}). A checkpoint that does not fit ends the server: see the end of "
            "its own log",
            error.status,
        ) from error
    if not isinstance(answer, dict) or answer.get("success") is not True:
        said = answer.get("message", answer) if isinstance(answer, dict) else answer
        raise EngineError("refused", f"{url} did not load {path}: {str(said)[:1000]}")


async def may_not_fit(client: EngineClient, url: str, path: str, timeout_s: float = 10.0) -> bool:
    """Whether it can't be seen from this machine that a checkpoint fits what an engine serves. One that says nothing,
    or that is known not to fit, is no such case: its own update will say so, before it is told."""
    try:
        served = (await engine_state.info(client, url, timeout_s)).model_path
        return await asyncio.to_thread(held_against, path, served) is None
    except SampleStoreError:
        return False


async def change_weights(
    client: EngineClient, url: str, path: str, label: str, mode: WeightUpdateMode, timeout_s: float = UPDATE_S
) -> None:
    """Bring an engine to other weights. abort: what runs is handed back, labelled with the old version, before the
    weights change. keep: frozen in place, and goes on. drain: the engine waits until it is idle. Raises EngineError:
    before the engine is told, where the checkpoint can be seen from here and is not complete or does not fit; also
    where it then reports another label.

    The cache is only emptied in a pause, when nothing runs: with requests that are just ending SGLang 0.5.23 changes
    the weights, keeps the label and answers 400, and older servers die. Where it is not emptied requests carry a cache
    key of their version; 0.5.9 ignores that, so there a drain takes the risk.
    """
    before = await engine_state.info(client, url)
    try:
        await asyncio.to_thread(require_loadable, path, before.model_path)
    except SampleStoreError as error:
        raise EngineError("refused", str(error)) from None
    pauses = {WeightUpdateMode.ABORT: "abort", WeightUpdateMode.KEEP: "in_place"}
    flush = mode == WeightUpdateMode.ABORT
    if mode == WeightUpdateMode.DRAIN:
        flush = not engine_state.separates_caches((await engine_state.server(client, url)).release)
    async with _pausing(client, url, pauses.get(mode)):
        await update_from_disk(client, url, path, label, flush_cache=flush, timeout_s=timeout_s)
    served = (await engine_state.info(client, url)).label
    if served != label:
        raise EngineError("broken", f"{url} was told to serve {label}, says {served!r}")


@asynccontextmanager
async def _pausing(client: EngineClient, url: str, mode: str | None) -> AsyncIterator[None]:
    """Paused in this way while the block runs, and told to go on whatever comes of it. What failed first is what is
    raised: an engine that died of its weights can't be told to go on either."""
    if mode is None:
        yield
        return
    try:
        await pause(client, url, mode)
        yield
    except BaseException as failure:
        still = await _not_woken(client, url)
        if still is None or not isinstance(failure, EngineError):
            raise
        raise EngineError(failure.kind, f"{failure.message}. {still}", failure.status) from failure
    if (still := await _not_woken(client, url)) is not None:
        raise EngineError("unreachable", still)


async def _not_woken(client: EngineClient, url: str) -> str | None:
    """End a pause. Returns what to say where the engine is there and may still be paused."""
    try:
        await proceed(client, url)
    except EngineError as error:
        if error.unconnected:
            return None
        return (
            f"{url} was not heard to go on ({error.message}), and may be paused. Wake it with: samplestore engines "
            f"continue --engine {url}"
        )
    return None


async def abort(client: EngineClient, url: str, rid: str, timeout_s: float = 5.0) -> None:
    """Abort a request; one that the engine does not know is harmless. SGLang matches by prefix: request ids that are
    prefixes of others abort those too. Raises EngineError."""
    if not rid:
        raise ValueError("an empty request id is a prefix of all")
    await client.post(f"{url}/abort_request", {"rid": rid}, timeout_s)


async def abort_all(client: EngineClient, url: str, timeout_s: float = 5.0) -> None:
    """Abort everything that the engine runs, whoever asked for it. Raises EngineError."""
    await client.post(f"{url}/abort_request", {"rid": "", "abort_all": True}, timeout_s)


async def flush_cache(client: EngineClient, url: str, timeout_s: float = 30.0) -> None:
    """Empty the prefix cache. Raises EngineError: an engine refuses while requests run or wait."""
    await client.post(f"{url}/flush_cache", {}, timeout_s)


async def release_memory(client: EngineClient, url: str, tags: Sequence[str] = (), timeout_s: float = MEMORY_S) -> None:
    """Give GPU memory back: tags of "kv_cache", "weights", "cuda_graph", all without any. Raises EngineError, before
    the engine is told, where it has no memory saver or still has requests: the call would end the server."""
    if (await engine_state.server(client, url)).memory_saver is False:
        raise EngineError("refused", f"{url} can't release memory. Start it with: --enable-memory-saver")
    now = await engine_state.load(client, url)
    if now.running or now.queued:
        raise EngineError(
            "refused",
            f"{url} has {now.running} requests running and {now.queued} waiting, and would die. First: "
            "samplestore engines pause --mode abort",
        )
    await client.post(f"{url}/release_memory_occupation", _tags(tags), timeout_s)


async def resume_memory(client: EngineClient, url: str, tags: Sequence[str] = (), timeout_s: float = MEMORY_S) -> None:
    """Take the memory again: the tags that were released. Weights come back without content: update them after. An
    engine that has not released these tags dies, and none tells what it has released. Raises EngineError."""
    if (await engine_state.server(client, url)).memory_saver is False:
        raise EngineError("refused", f"{url} has released no memory. Start it with: --enable-memory-saver")
    await client.post(f"{url}/resume_memory_occupation", _tags(tags), timeout_s)


# -- what answers are checked with


def _tags(tags: Sequence[str]) -> dict[str, Any]:
    return {"tags": list(tags)} if tags else {}
