"""Everything but /generate: abort, pause, weights, health, information."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from aiohttp import web

from .intake import Intake
from .options import CheckpointError, EngineOptions
from .params import SamplingParams
from .replies import exception_reply, json_reply
from .request import Request
from .scheduler import PAUSE_MODES, QueueFull, Scheduler

_PROBE_SECONDS = 20.0


class Control:
    """Handlers over one scheduler. `closing` is set while the process drains."""

    def __init__(self, scheduler: Scheduler, intake: Intake, options: EngineOptions, model_config: Any) -> None:
        self.scheduler = scheduler
        self.intake = intake
        self.options = options
        self.closing = False
        self._name = options.served_model_name or options.model
        self._architectures = list(getattr(model_config, "architectures", None) or [])
        self._model_type = str(getattr(model_config, "model_type", ""))

    def routes(self) -> list[web.RouteDef]:
        """All routes; both methods where SGLang takes both."""
        get = {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/ready": self.ready,
            "/ping": self.health,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/v1/models": self.models,
            "/get_load": self.load,
            "/get_loads": self.loads,
            "/v1/loads": self.loads,
            "/flush_cache": self.flush_cache,
        }
        post = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.update_weights,
            "/update_weight_version": self.update_version,
            "/flush_cache": self.flush_cache,
        }
        return [web.get(path, call) for path, call in get.items()] + [
            web.post(path, call) for path, call in post.items()
        ]

    async def abort(self, http: web.Request) -> web.Response:
        """Abort by rid or all; 200 whatever the rid, because it may have finished a moment ago."""
        body = await _body(http)
        if body.get("abort_all"):
            self.scheduler.abort_all()
        elif isinstance(body.get("rid"), str):
            self.scheduler.abort(body["rid"])
        return web.Response()

    async def pause(self, http: web.Request) -> web.Response:
        mode = (await _body(http)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            return exception_reply(400, f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await self.scheduler.pause(mode)
        return json_reply({"status": "ok", "message": "Generation paused successfully."})

    async def resume(self, http: web.Request) -> web.Response:
        self.scheduler.resume()
        return json_reply({"status": "ok", "message": "Generation continued successfully."})

    async def update_weights(self, http: web.Request) -> web.Response:
        body = await _body(http)
        path, label = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            return exception_reply(400, "model_path must be the path of a model folder")
        if label is not None and (not isinstance(label, str) or not 0 < len(label) <= 512):
            return exception_reply(400, f"weight_version must be a string of 1 to 512 characters, got {label!r}")
        if body.get("load_format") not in (None, "auto", "safetensors"):
            return exception_reply(400, f"load_format must be auto or safetensors, got {body['load_format']!r}")
        try:
            kept = await self.scheduler.update_weights(path, label, bool(body.get("abort_all_requests")))
        except CheckpointError as error:
            return json_reply({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return json_reply(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": kept}
        )

    async def update_version(self, http: web.Request) -> web.Response:
        body = await _body(http)
        label = body.get("new_version")
        if not isinstance(label, str) or not 0 < len(label) <= 512:
            return exception_reply(400, f"new_version must be a string of 1 to 512 characters, got {label!r}")
        await self.scheduler.relabel(label, bool(body.get("abort_all_requests", True)))
        return json_reply({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def health(self, http: web.Request) -> web.Response:
        """200 while the process serves, also when paused (a router must not evict an engine that waits for weights)."""
        return web.Response(status=503 if self.closing else 200)

    async def ready(self, http: web.Request) -> web.Response:
        busy = self.closing or self.scheduler.paused is not None or self.scheduler.updating
        return web.Response(status=503 if busy else 200)

    async def health_generate(self, http: web.Request) -> web.Response:
        """Generates one token; 503 at once when paused and after 20 seconds without an answer."""
        if self.closing or self.scheduler.paused is not None:
            return web.Response(status=503)
        probe = Request(
            rid=f"HEALTH_CHECK_{secrets.token_hex(8)}",
            prompt=[0],
            params=SamplingParams(max_new_tokens=1, temperature=0.0),
            seed=0,
            limit=1,
            eos=frozenset(),
        )
        try:
            self.scheduler.submit(probe)
            async with asyncio.timeout(_PROBE_SECONDS):
                await probe.changed.wait()
        except (TimeoutError, QueueFull):
            return web.Response(status=503)
        finally:
            self.scheduler.abort(probe.rid)
        return web.Response(status=200 if probe.finish and probe.finish["type"] == "length" else 503)

    async def model_info(self, http: web.Request) -> web.Response:
        return json_reply(
            {
                "model_path": self.scheduler.model_path,
                "tokenizer_path": self.options.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.scheduler.version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._model_type,
                "architectures": self._architectures,
            }
        )

    async def server_info(self, http: web.Request) -> web.Response:
        limits, scheduler = self.intake.limits, self.scheduler
        state = {
            "running_requests": len(scheduler.running),
            "waiting_requests": len(scheduler.waiting),
            "generated_tokens_total": scheduler.generated_total,
            "prompt_tokens_total": scheduler.prompt_total,
            "finished_requests_total": scheduler.finished_total,
            "paused": scheduler.paused,
            "updating_weights": scheduler.updating,
        }
        return json_reply(
            {
                "engine": "samplestore-cpu",
                "version": _version(),
                "model_path": scheduler.model_path,
                "tokenizer_path": self.options.model,
                "served_model_name": self._name,
                "weight_version": scheduler.version,
                "status": "stopping" if self.closing else "ready",
                "dtype": self.options.dtype,
                "device": "cpu",
                "context_length": limits.context_length,
                "max_req_input_len": limits.context_length - 6,
                "max_total_num_tokens": limits.max_total_tokens,
                "max_running_requests": self.options.max_running,
                "max_queued_requests": self.options.max_queued_requests,
                "stream_interval": self.options.stream_interval,
                "incremental_streaming_output": self.options.incremental_streaming_output,
                "skip_tokenizer_init": self.options.skip_tokenizer_init,
                "vocab_size": limits.vocab_size,
                "dp_size": 1,
                "tp_size": 1,
                "internal_states": [state],
            }
        )

    async def models(self, http: web.Request) -> web.Response:
        card = {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "samplestore",
            "root": self._name,
            "parent": None,
            "max_model_len": self.intake.limits.context_length,
        }
        return json_reply({"object": "list", "data": [card]})

    def _load(self) -> dict[str, int]:
        scheduler = self.scheduler
        return {
            "dp_rank": 0,
            "num_reqs": len(scheduler.by_rid),
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_tokens": sum(request.length for request in scheduler.by_rid.values()),
        }

    async def load(self, http: web.Request) -> web.Response:
        return json_reply([self._load()])

    async def loads(self, http: web.Request) -> web.Response:
        return json_reply({"dp_rank_count": 1, "loads": [self._load()]})

    async def flush_cache(self, http: web.Request) -> web.Response:
        """200 when idle. No prefix is kept between requests, so there is nothing to free; 400 while some run."""
        if self.scheduler.running:
            return web.Response(status=400, text="The cache can't be flushed while requests are running.\n")
        return web.Response(text="Cache flushed.\n")


async def _body(http: web.Request) -> Mapping[str, Any]:
    """The JSON object sent; an empty body is an empty object. Answers 400 for anything else."""
    raw = await http.read()
    if not raw.strip():
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _bad_body(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _bad_body("the body must be a JSON object")
    return body


def _bad_body(message: str) -> web.HTTPBadRequest:
    body = orjson.dumps({"object": "error", "message": message, "type": "400", "param": None, "code": 400})
    return web.HTTPBadRequest(body=body, content_type="application/json")


def _version() -> str:
    try:
        return version("samplestore")
    except PackageNotFoundError:
        return "unknown"
