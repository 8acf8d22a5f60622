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

CORPUS = [
    "samples are stored before they are acknowledged",
    "What is 17 + 25? The answer is 42.",
    "for step in range(10): print(step * step)",
    "<think>carry the one</think> 3 * 4 = 12, naïve café déjà vu",
]


def build_tokenizer(folder: Path, vocab_size: int = 384) -> None:
    """A byte-level BPE tokenizer with <|end|> (id 1) as its end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>").save_pretrained(folder)


def build_model(folder: Path, seed: int, kind: str = "llama", hidden: int = 64, context: int = 1024) -> Path:
    """Save a random 2-layer model and its tokenizer in `folder`; the seed decides the weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(folder)
    shape: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "tie_word_embeddings": kind == "qwen2",
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**shape)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough that the distribution is far from uniform, so that a wrong cache shows in the log-probs.
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


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
