"""Tiny models built on the spot, and engines started as real processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from samplestore.workers.engine_client import EngineClient
from tests.engine.contract import CONTEXT, PATIENCE_S, SLOTS, Engine, Talk, Weights
from tests.engine.traits import TRAITS
from tests.support.models import build_model, with_nan
from tests.support.processes import Processes
from tests.support.sglang import chosen_releases, start_sglang


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights "v0"."""
    return build_model(tmp_path_factory.mktemp("models") / "v0", seed=1)


@pytest.fixture(scope="session")
def tiny_model_v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return build_model(tmp_path_factory.mktemp("models") / "v1", seed=2)


@dataclass
class RunningEngine:
    """An engine process that answers at `url`."""

    url: str
    process: subprocess.Popen[str]

    def stop(self, deadline_s: float = 30.0) -> int:
        """SIGTERM and wait; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)


def start_engine(model: Path, *arguments: str, deadline_s: float = 240.0) -> RunningEngine:
    """Start the engine on a free port of its own choice and wait until it says that it is ready."""
    command = [sys.executable, "-m", "samplestore.workers.cpu_engine", "--model", str(model), "--port", "0", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        # Read to the end: a full pipe would block the engine.
        assert process.stderr is not None
        for line in process.stderr:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    end, seen = time.monotonic() + deadline_s, ""
    while (left := end - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        seen += line
        if line.startswith("engine ready "):
            return RunningEngine(line.split()[-1], process)
        if not line:
            break
    process.kill()
    process.wait()
    raise AssertionError(f"the engine did not start: {seen}")


@pytest.fixture
def engine_factory() -> Iterator[Callable[..., RunningEngine]]:
    """`engine_factory(model, *arguments)` starts engines that are killed after the test."""
    started: list[RunningEngine] = []

    def start(model: Path, *arguments: str) -> RunningEngine:
        started.append(start_engine(model, *arguments))
        return started[-1]

    yield start
    for engine in started:
        if engine.process.poll() is None:
            engine.process.kill()
            engine.process.wait()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[RunningEngine]:
    """One engine per test module with weights "v0", 2 ms between steps, and room for 8 requests at once."""
    running = start_engine(tiny_model, "--weight-version", "v0", "--max-running", "8", "--decode-interval", "0.002")
    yield running
    code = running.stop()
    assert code == 0, f"the engine ended with {code}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture(scope="module")
def models(tiny_model: Path, tiny_model_v1: Path) -> dict[str, Any]:
    from samplestore.workers.cpu_engine.checkpoint import load_model

    return {"v0": load_model(str(tiny_model), "float32"), "v1": load_model(str(tiny_model_v1), "float32")}


# -- the contract suite: the same tests on the embedded engine and on every chosen SGLang release

_SGLANG = [pytest.mark.sglang, pytest.mark.timeout(900)]  # a server starts in 25 s, and in minutes on a busy machine


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(trait): a contract test for the engines that have this trait")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of the contract runs on every engine that has the traits it needs."""
    if "engine_name" not in metafunc.fixturenames:
        return
    needed = [trait for mark in metafunc.definition.iter_markers("needs") for trait in mark.args]
    names = [name for name in ("embedded", *chosen_releases()) if all(getattr(TRAITS[name], one) for one in needed)]
    given = [pytest.param(name, marks=() if name == "embedded" else _SGLANG) for name in names]
    metafunc.parametrize("engine_name", given, indirect=True, scope="session")


@pytest.fixture(scope="session")
def contract_weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    root = tmp_path_factory.mktemp("contract")
    a, b = (build_model(root / name, seed, "qwen2", context=CONTEXT) for name, seed in (("a", 11), ("b", 12)))
    return Weights(a, b, with_nan(root / "nan", a))


@pytest.fixture(scope="session")
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Engines:
    """Starts engines of one kind; all of them end together."""

    def __init__(self, name: str, weights: Weights, folder: Path) -> None:
        self.name, self.weights, self.processes = name, weights, Processes(folder)
        self.embedded: list[RunningEngine] = []

    def start(self, *flags: str, cumulative: bool = False) -> Engine:
        """One with weights "a" under the label v0, and one token a chunk. `flags` are understood by both kinds."""
        flags = ("--stream-interval", "1", *flags)
        if self.name != "embedded":
            served = start_sglang(self.processes, self.weights.a, *flags, release=self.name, cumulative=cumulative)
            return Engine(self.name, served.url, self.weights)
        flags = flags if cumulative else ("--incremental-streaming-output", *flags)
        self.embedded.append(
            start_engine(self.weights.a, "--weight-version", "v0", "--decode-interval", "0.0015", *flags)
        )
        return Engine(self.name, self.embedded[-1].url, self.weights)

    def close(self) -> None:
        for engine in self.embedded:
            engine.process.kill()
            engine.process.wait()
        self.processes.close()


@pytest.fixture(scope="session")
def contract_engines(
    engine_name: str, contract_weights: Weights, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    engines = Engines(engine_name, contract_weights, tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def contract_engine(contract_engines: Engines) -> Engine:
    """One server for all tests of an engine, with the flags of our launcher."""
    return contract_engines.start("--max-running-requests", str(SLOTS))


@pytest.fixture(scope="session")
def narrow_engine(contract_engines: Engines) -> Engine:
    """One that runs one request, lets one wait, refuses others, and streams cumulatively."""
    return contract_engines.start("--max-running-requests", "1", "--max-queued-requests", "1", cumulative=True)


async def _talk(engine: Engine) -> AsyncIterator[Talk]:
    async with EngineClient(PATIENCE_S) as client:
        talk = Talk(engine, client)
        yield talk
        await talk.close()


@pytest.fixture
async def talk(contract_engine: Engine) -> AsyncIterator[Talk]:
    async for talk in _talk(contract_engine):
        yield talk


@pytest.fixture
async def narrow(narrow_engine: Engine) -> AsyncIterator[Talk]:
    async for talk in _talk(narrow_engine):
        yield talk
