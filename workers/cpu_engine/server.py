"""The process: load the model, serve HTTP, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import torch
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from transformers.utils.logging import disable_progress_bar

from .checkpoint import eos_token_ids, load_model, load_tokenizer
from .control import Control
from .generate import GenerateHandler
from .intake import Intake, Limits
from .options import EngineOptions
from .runner import ModelRunner
from .scheduler import Scheduler

_MAX_BODY_BYTES = 64 << 20


def run_server(options: EngineOptions) -> None:
    """Serve until SIGTERM or SIGINT has drained the engine. Raises `ValueError` if it can't start."""
    # Nothing may be fetched from a hub: a path that doesn't exist must be an error and not a download.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(options.threads)
    asyncio.run(_serve(options))


async def _serve(options: EngineOptions) -> None:
    loop = asyncio.get_running_loop()
    model = await loop.run_in_executor(None, load_model, options.model, options.dtype)
    tokenizer = None
    if not options.skip_tokenizer_init:
        tokenizer = await loop.run_in_executor(None, load_tokenizer, options.model)
    runner = ModelRunner(
        model,
        max_running=options.max_running,
        context_length=options.context_length,
        max_total_tokens=options.max_total_tokens,
    )
    scheduler = Scheduler(
        runner,
        version=options.weight_version,
        model_path=options.model,
        dtype=options.dtype,
        threads=options.threads,
        max_queued=options.max_queued_requests,
        decode_interval_s=options.decode_interval_s,
    )
    eos = eos_token_ids(options.model, model, tokenizer)
    limits = Limits(runner.vocab_size, runner.context_length, runner.max_total_tokens, eos)
    intake = Intake(limits, tokenizer, scheduler.by_rid.__contains__)
    control = Control(scheduler, intake, options, model.config)
    del model  # the runner owns it: a second reference would keep the old weights alive after an update
    generate = GenerateHandler(scheduler, intake, options)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes([*control.routes(), web.post("/generate", generate), web.put("/generate", generate)])
    await _run(options, app, scheduler, control, generate)


async def _run(
    options: EngineOptions, app: web.Application, scheduler: Scheduler, control: Control, generate: GenerateHandler
) -> None:
    stop = asyncio.Event()
    signals = _Signals(stop, scheduler)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.received)
    log = logging.getLogger("aiohttp.access") if options.access_log else None
    if log is not None:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("aiohttp.server").addFilter(_wanted)
    web_runner = web.AppRunner(app, handler_cancellation=True, access_log=log, shutdown_timeout=5.0)
    await web_runner.setup()
    site = web.TCPSite(web_runner, options.host, options.port, backlog=1024)
    steps = asyncio.create_task(scheduler.run(), name="scheduler")
    try:
        await site.start()
        port = web_runner.addresses[0][1]
        print(f"engine ready http://{options.host}:{port}", file=sys.stderr, flush=True)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({steps, stopped}, return_when=asyncio.FIRST_COMPLETED)
        control.closing = generate.closing = True
        if not steps.done():
            await scheduler.drained()
    finally:
        await web_runner.cleanup()
        scheduler.close()
        await steps


def _wanted(record: logging.LogRecord) -> bool:
    # sglang-router first speaks HTTP/2 to every engine; a traceback per attempt would look like an engine failure.
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage))


class _Signals:
    """The first signal drains; a second one aborts what is still generating."""

    def __init__(self, stop: asyncio.Event, scheduler: Scheduler) -> None:
        self.stop = stop
        self.scheduler = scheduler

    def received(self) -> None:
        if self.stop.is_set():
            self.scheduler.abort_all()
        self.stop.set()
