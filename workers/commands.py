"""`samplestore worker` and `samplestore engine`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from samplestore.workers.command_options import (
    ConfigFile,
    Db,
    LogFormat,
    LogLevel,
    MetricsHost,
    MetricsPort,
    ModelFolder,
    Name,
    Reward,
    RewardArgs,
    RewardBatch,
    RewardConcurrency,
    RewardKey,
    RewardProcesses,
    RewardTimeout,
    RewardTries,
    Teacher,
    WorkedFor,
)

log = logging.getLogger("samplestore.worker")

EXIT_SECOND_SIGNAL = 130


def worker(
    db: Db = None,
    run: WorkedFor = None,
    router: Annotated[str | None, typer.Option(help="sglang-router URL")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="engine URL, without a router; may be repeated")] = None,
    concurrency: Annotated[int | None, typer.Option(help="samples in flight")] = None,
    mode: Annotated[str | None, typer.Option(help="stream | sliced | unary")] = None,
    slice_tokens: Annotated[int | None, typer.Option(help="tokens of a request in mode sliced")] = None,
    dispatch: Annotated[str | None, typer.Option(help="router | direct: to the engines that the router lists")] = None,
    routed_experts: Annotated[bool | None, typer.Option(help="store the experts of every token")] = None,
    flush_tokens: Annotated[int | None, typer.Option(help="store a segment after this many tokens")] = None,
    flush_seconds: Annotated[float | None, typer.Option(help="or after this many seconds")] = None,
    episode: Annotated[str | None, typer.Option(help="module:function or file.py:function, async def f(ctx)")] = None,
    episode_max_calls: Annotated[int | None, typer.Option(help="calls of ctx that one episode may make")] = None,
    episode_max_aborts: Annotated[int | None, typer.Option(help="an episode aborted more often fails")] = None,
    episode_step_timeout_s: Annotated[float | None, typer.Option(help="seconds that a step may take")] = None,
    reward: Reward = None,
    reward_key: RewardKey = None,
    reward_args: RewardArgs = None,
    reward_batch: RewardBatch = None,
    reward_tries: RewardTries = None,
    reward_concurrency: RewardConcurrency = None,
    teacher: Teacher = None,
    reward_processes: RewardProcesses = None,
    reward_timeout_s: RewardTimeout = None,
    group_filter: Annotated[
        str | None, typer.Option(help="the run's group filter `custom`: module:function or file.py:function")
    ] = None,
    sample_filter: Annotated[str | None, typer.Option(help="the run's sample filter `custom`")] = None,
    filter_timeout_s: Annotated[float | None, typer.Option(help="seconds after which a filter is killed")] = None,
    tokenizer: ModelFolder = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="response budget; the run's if left out")] = None,
    sampling: Annotated[str | None, typer.Option(help="JSON object of SGLang sampling parameters")] = None,
    update_engines: Annotated[bool | None, typer.Option(help="bring engines to the current weights")] = None,
    drain_timeout_s: Annotated[float | None, typer.Option(help="seconds that a stop waits for partials")] = None,
    exit_when_done: Annotated[bool | None, typer.Option(help="leave when all prompts are used up")] = None,
    max_queued: Annotated[int | None, typer.Option(help="claim no more while each engine has more waiting")] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    name: Name = None,
    config: ConfigFile = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Generate: claim samples, drive engines, store segments, score.

    SIGTERM or Ctrl-C stores what is in flight, gives it back and exits 0; a second one exits at once.
    """
    from samplestore.config import load_worker_config
    from samplestore.logs import setup_logging

    given = {key: value for key, value in locals().items() if key in _FLAGS and value is not None}
    if engine:
        given["engines"] = engine
    settings = load_worker_config(config, given)
    setup_logging(settings.log_level, settings.log_format)
    raise typer.Exit(run_worker(settings))


_FLAGS = frozenset(
    (
        "db run router dispatch concurrency mode slice_tokens routed_experts flush_tokens flush_seconds reward episode "
        "reward_key reward_args reward_batch reward_tries reward_concurrency teacher "
        "episode_max_calls episode_max_aborts episode_step_timeout_s "
        "reward_processes reward_timeout_s group_filter sample_filter filter_timeout_s tokenizer max_new_tokens "
        "sampling update_engines drain_timeout_s "
        "exit_when_done max_queued metrics_port metrics_host name log_level log_format"
    ).split()
)


def run_worker(settings: Any) -> int:
    """Open the store and work until told to stop. Returns the exit code. Raises SampleStoreError."""
    import samplestore
    from samplestore import newruns
    from samplestore.errors import SampleStoreError
    from samplestore.workers.collector import collect_seldom
    from samplestore.workers.rollout import RolloutWorker
    from samplestore.workers.stage_servers import scorer_of

    for doubt in newruns.doubts_of_sampling(settings.sampling):
        log.warning("%s", doubt)
    if not settings.router and not settings.engines:
        raise SampleStoreError("no engines to drive. Say --router http://HOST:PORT or --engine http://HOST:PORT")
    if settings.dispatch == "router" and not settings.router:
        raise SampleStoreError("--dispatch router needs a router. Say --router http://HOST:PORT or --dispatch direct")
    with samplestore.open(settings.db, create=False) as store:
        run = store.existing_run(settings.run)
        episodes = _episodes(settings) if settings.episode else None
        experts = _expert_shape(run, settings.tokenizer) if settings.routed_experts else None
        collect_seldom()
        worker = RolloutWorker(run, settings, scorer_of(run, settings), experts, episodes)
        worker.filterer_of = filterer_of(run.settings, settings)
        return asyncio.run(with_signals(worker))


def _episodes(settings: Any) -> Any:
    from samplestore.workers.episode_runs import load_episode
    from samplestore.workers.episodes import EpisodeOptions

    function, tokenizer = load_episode(settings.episode), None
    if settings.tokenizer:
        tokenizer = _tokenizer(settings.tokenizer)
        tokenizer.warm()  # before the worker registers: its heartbeat and its streams would wait for the first append
    return EpisodeOptions(
        function, tokenizer,
        settings.episode_max_calls, settings.episode_max_aborts, settings.episode_step_timeout_s,
    )  # fmt: skip


def filterer_of(rules: Any, config: Any) -> Any:
    """(write) -> Filterer for a worker of these settings; None where it can't run all filters of the run. Raises
    SampleStoreError for a function that no filter of the run would ask."""
    from samplestore.errors import SampleStoreError
    from samplestore.filters import CUSTOM
    from samplestore.workers.filters import Filterer, FilterProcess

    needed = {"group_filter": CUSTOM in rules.group_filters, "sample_filter": CUSTOM in rules.sample_filters}
    for name, wanted in needed.items():
        if getattr(config, name) is not None and not wanted:
            raise SampleStoreError(
                f"the run has no {name} {CUSTOM!r}, so --{name.replace('_', '-')} would never be asked. Make one that "
                f"has: samplestore add-prompts FILE --run NEW_NAME --set '{name}s=[\"{CUSTOM}\"]'"
            )
    if not rules.group_filters and not rules.sample_filters:
        return None
    if any(wanted and getattr(config, name) is None for name, wanted in needed.items()):
        return None
    process = None
    if any(needed.values()):
        process = FilterProcess(
            config.group_filter, config.sample_filter, timeout_s=config.filter_timeout_s,
            memory_mb=config.reward_memory_mb,
        )  # fmt: skip
    tokenizer = _tokenizer(config.tokenizer) if process and config.tokenizer else None
    return lambda write: Filterer(rules, write, process, tokenizer)


def _expert_shape(run: Any, tokenizer: str | None) -> Any:
    """Layers, top-k and experts of the run's model, from the config.json of --tokenizer or of its weights."""
    from samplestore.errors import SampleStoreError
    from samplestore.workers.experts import shape_of

    folders = [tokenizer, *(v.path for v in reversed(run.weight_versions()))]
    for folder in filter(None, folders):
        if (shape := shape_of(Path(folder))) is not None:
            return shape
    raise SampleStoreError(
        "--routed-experts needs the config.json of a mixture-of-experts model: how many layers and experts it has is "
        "in no answer. Say --tokenizer DIR"
    )


def _tokenizer(path: str) -> Any:
    from samplestore.tokenizers import load_tokenizer

    return load_tokenizer(path)


async def with_signals(rollout: Any) -> int:
    from samplestore.workers.metrics import serving

    loop, seen = asyncio.get_running_loop(), [0]

    def on_signal(number: int) -> None:
        seen[0] += 1
        if seen[0] > 1:
            print("second signal: leaving at once", file=sys.stderr, flush=True)
            os._exit(EXIT_SECOND_SIGNAL)
        rollout.stop(f"worker got {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    async with serving(rollout):
        return int(await rollout.run_forever())


def engine(
    model: Annotated[str, typer.Option(help="folder with config.json and *.safetensors")],
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free port")] = 30000,
    weight_version: Annotated[str, typer.Option(help="label of the weights it starts with")] = "default",
    max_running: Annotated[int, typer.Option(help="requests decoded at once")] = 32,
    max_queued_requests: Annotated[int | None, typer.Option(help="more waiting requests are refused")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="key/value memory in tokens")] = None,
    context_length: Annotated[int | None, typer.Option(help="tokens; the model's if left out")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of the model")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 | bfloat16")] = "float32",
    incremental_streaming_output: Annotated[bool, typer.Option(help="stream deltas")] = True,
    stream_interval: Annotated[int, typer.Option(help="tokens of a stream chunk")] = 8,
    decode_interval: Annotated[float, typer.Option(help="least seconds of a decoding step, to pace it")] = 0.0,
    access_log: Annotated[bool, typer.Option(help="a line for each HTTP request")] = False,
) -> None:
    """Serve a Hugging Face model on the CPU with SGLang's native protocol.

    For laptops, tests and the demo. SIGTERM drains and exits 0.
    """
    from samplestore.errors import MissingExtra, SampleStoreError

    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401

        from samplestore.workers.cpu_engine import serve_options
        from samplestore.workers.cpu_engine.options import EngineOptions
    except ImportError:
        raise MissingExtra("samplestore engine", "engine") from None
    try:
        serve_options(
            EngineOptions(
                model=model, host=host, port=port, weight_version=weight_version, max_running=max_running,
                max_queued_requests=max_queued_requests, max_total_tokens=max_total_tokens,
                context_length=context_length, threads=threads, dtype=dtype,
                incremental_streaming_output=incremental_streaming_output, stream_interval=stream_interval,
                decode_interval_s=decode_interval, access_log=access_log,
            )
        )  # fmt: skip
    except ValueError as error:
        raise SampleStoreError(str(error)) from None
