"""Command lines of SGLang servers and routers that samplestore can rely on. docs/sglang.md explains each flag."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from samplestore.errors import InvalidSetting, SampleStoreError
from samplestore.workers.sglang.machine import find_sglang, has_gpu
from samplestore.workers.sglang.releases import ROUTERS, incremental_flag

# Tokens of a stream's chunk. Every chunk wakes the engine's HTTP process and the worker once, which costs more than its
# bytes; with 8 that is an eighth, and a crash loses at most 8 tokens more of a request.
STREAM_INTERVAL = 8

CPU_SHIM = Path(__file__).parent / "cpu_shim"
# float32: log-probs that a recomputation can be compared with. torch_native and pytorch need no compiled kernels.
# --max-total-tokens: the size of the cache cannot be derived from a GPU's memory. --sleep-on-idle: or a scheduler that
# has nothing to do takes a core from the one that has.
CPU_FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
    "--disable-overlap-schedule --dtype float32 --max-total-tokens 20000 --mem-fraction-static 0.1 "
    "--max-running-requests 32 --sleep-on-idle"
).split()

# For models of a few kilobytes: several engines share a GPU, and the default kernels have no attention heads so small.
SMALL_MODEL_GPU_FLAGS = "--mem-fraction-static 0.2 --attention-backend triton --sampling-backend pytorch".split()


@dataclass(frozen=True, slots=True)
class Command:
    """A program to start: its arguments, and what its environment has beyond this process's."""

    argv: list[str]
    env: dict[str, str]

    def environment(self) -> dict[str, str]:
        """The whole environment of the program."""
        return {**os.environ, **self.env}

    def __str__(self) -> str:
        """As one would type it."""
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        return f"{given} {shlex.join(self.argv)}".strip()


def engine_command(
    model: str, *, host: str = "127.0.0.1", port: int = 30000, weight_version: str = "default",
    release: str | None = None, home: Path | None = None, python: str | None = None, extra: Sequence[str] = (),
) -> Command:  # fmt: skip
    """An SGLang server of `model`. `extra` goes last on the command line, so that it overrules what is set here.
    Raises SampleStoreError where that SGLang is not installed."""
    found = find_sglang(release, home, python)
    cpu = not has_gpu()
    argv = [
        found.python, "-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", str(port),
        incremental_flag(found.version), "--stream-interval", str(STREAM_INTERVAL),
        "--weight-version", weight_version, "--enable-metrics", *(CPU_FLAGS if cpu else []), *extra,
    ]  # fmt: skip
    env = {
        # /health would generate a token: while the engine is paused it hangs, and a router takes the engine for dead.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # It keeps what the vision tower made of an image, in megabytes, through every change of weights.
        "SGLANG_VLM_CACHE_SIZE_MB": os.environ.get("SGLANG_VLM_CACHE_SIZE_MB", "0"),
    }
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "1")  # or it asks the hub about a folder's path
    path = list(found.path)
    if cpu:
        path.insert(0, str(CPU_SHIM))
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["CUDA_VISIBLE_DEVICES"] = ""
        # With more, the OpenMP threads of two engines fight for the cores: 550 tokens/s became 23.
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if path:
        env["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return Command(argv, env)


def small_model_flags() -> list[str]:
    """What an engine needs besides to serve a toy model on this machine."""
    return list(SMALL_MODEL_GPU_FLAGS) if has_gpu() else []


def router_command(
    engines: Sequence[str], *, host: str = "127.0.0.1", port: int = 30000, policy: str = "manual",
    kind: str = "sglang-router", metrics_port: int | None = None, extra: Sequence[str] = (),
) -> Command:  # fmt: skip
    """A router in front of `engines`: sglang-router or its successor smg. With none it waits to be told of them, by
    POST /workers or by what service discovery `extra` sets up. `extra` goes last, so that it overrules what
    is set here. Raises SampleStoreError where it is not installed, InvalidSetting for another kind."""
    if metrics_port is None:
        # The default is a fixed port, which the second router of a machine cannot have.
        metrics_port = port - 1000 if port > 2024 else port + 1000
    argv = [
        *_router_program(kind), "--host", host, "--port", str(port), "--policy", policy,
        *(["--worker-urls", *engines] if engines else []),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
        # The worker owns retries. The router's would generate the same tokens up to five times, under one request id.
        "--disable-retries",
        # An engine that died is left out after ten seconds, one that is back is used after two. Weight updates and
        # pauses do not count as illness as long as the engine's health check generates nothing (engine_command).
        "--health-check-interval-secs", "2", "--health-check-timeout-secs", "5",
        "--health-failure-threshold", "5", "--health-success-threshold", "1",
        # sglang-router counts what an engine refuses (HTTP 400) as its failure: after ten bad requests in a row a well
        # engine would get none for a minute, and the list would still call it healthy. Health checks find dead ones.
        "--disable-circuit-breaker",
        # The default cuts streams after half an hour, which long generations take.
        "--request-timeout-secs", "86400",
    ]  # fmt: skip
    return Command([*argv, *extra], {})


def _router_program(kind: str) -> list[str]:
    if kind not in ROUTERS:
        raise InvalidSetting("--kind", kind, " | ".join(ROUTERS))
    if kind == "smg":
        if find_spec("smg"):  # not the program of that name: sglang-router installs one, too, which starts itself
            return [sys.executable, "-m", "smg", "launch"]
    elif find_spec("sglang_router"):
        return [sys.executable, "-m", "sglang_router.launch_router"]
    raise SampleStoreError(f"{kind} is not installed. Run: pip install '{kind}>={ROUTERS[kind]}'")
