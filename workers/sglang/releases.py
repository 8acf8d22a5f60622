"""The SGLang releases that samplestore is tested with, and what differs between them.

The only place that knows pins and flags by release: installer, launcher, tests and documentation read this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from samplestore.errors import InvalidSetting

ROUTERS = {"sglang-router": "0.3.2", "smg": "1.13.0"}  # the router packages, and the versions that were tested

# What SGLang imports when it serves text on a CPU. Its own requirements ask for gigabytes of CUDA packages, so it is
# installed without them, beside these.
CPU_REQUIREMENTS = (
    "torch==2.13.0 aiohttp apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill distro einops fastapi gguf IPython "
    "mistral_common>=1.11.5 msgspec numpy nvidia-ml-py openai==2.8.0 orjson packaging partial_json_parser pillow "
    "prometheus-client psutil pybase64 pydantic python-multipart pyzmq>=25.1.2 regex requests scipy "
    "sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken tokenizers==0.23.2 transformers==5.19.0 "
    "uvicorn>=0.51 uvloop watchfiles xgrammar==0.2.7 zstandard"
).split()
# Built for CUDA, and beside a CPU torch only importable with cpu_shim: without its requirements.
CPU_WITHOUT_DEPS = ("torchvision==0.28.0",)


@dataclass(frozen=True, slots=True)
class Release:
    """An SGLang release. `cpu_pins`: packages that it needs in other versions than CPU_REQUIREMENTS has."""

    version: str
    cpu_pins: tuple[str, ...] = ()

    @property
    def cpu_packages(self) -> tuple[str, ...]:
        """What is installed for this release alone, without requirements."""
        return (f"sglang=={self.version}", *self.cpu_pins)


# Newest first.
RELEASES = {
    release.version: release
    for release in (
        Release("0.5.23"),
        Release("0.5.21"),
        Release("0.5.18", ("transformers==5.12.1", "tokenizers==0.22.2")),
        Release("0.5.12.post1", ("transformers==5.6.0", "tokenizers==0.22.2")),
        Release("0.5.9", ("transformers==4.57.1", "tokenizers==0.22.2", "huggingface-hub<1.0")),
    )
}
NEWEST, OLDEST = next(iter(RELEASES)), next(reversed(RELEASES))


def parse_releases(text: str) -> list[str]:
    """Release numbers from a list such as "0.5.23,oldest", or "all". Raises InvalidSetting for one that is not in the
    table."""
    short = {"all": list(RELEASES), "newest": [NEWEST], "oldest": [OLDEST]}
    names: list[str] = []
    for name in filter(None, re.split(r"[,\s]+", text)):
        if name not in RELEASES and name not in short:
            raise InvalidSetting("SGLang release", name, " | ".join([*RELEASES, *short]))
        names += [found for found in short.get(name, [name]) if found not in names]
    return names


def incremental_flag(version: str) -> str:
    """The flag that makes a stream carry deltas. Before 0.5.10 only the ids were deltas, and it had another name."""
    return "--incremental-streaming-output" if _numbers(version) >= (0, 5, 10) else "--stream-output"


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 12) of 0.5.12.post1."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
