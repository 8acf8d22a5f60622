"""What stands in for SGLang's kernels on machines without a GPU computes what they compute."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samplestore.workers.sglang.launch import CPU_SHIM


def murmur3(data: bytes) -> int:
    """MurmurHash3 for x86, 32 bits, seed 0, of whole blocks: as its author published it."""

    def rotl(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & 0xFFFFFFFF

    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = rotl(k * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotl(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_seeds_are_hashed_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # importing the shim adds to it
    spec = importlib.util.spec_from_file_location("cpu_shim", CPU_SHIM / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    shim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    seeds, positions, columns = [0, 7, -1, 2**63 - 1, 1 << 40], [0, 3, 2**31 - 1, 5, 9], [0, 1, 151_935]
    told = shim._murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    assert told.dtype == torch.uint32
    assert told.tolist() == [
        [murmur3(struct.pack("<qII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert murmur3(b"test") == 0xBA6BD213  # a published value


@pytest.mark.parametrize("there", [(), ("srt/arg_groups", "srt/mem_cache/pool_host")], ids=["without", "empty"])
def test_a_release_without_what_the_shim_mends_starts(tmp_path: Path, there: tuple[str, ...]) -> None:
    """0.5.9 has no package of choices, 0.5.18 has one without them in it."""
    modules = ("srt/server_args.py", "srt/state_capturer/base.py", *(f"{package}/__init__.py" for package in there))
    for module in modules:
        file = tmp_path / "sglang" / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    code = "import sglang.srt.server_args, sglang.srt.state_capturer.base"
    env = {**os.environ, "PYTHONPATH": f"{CPU_SHIM}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
