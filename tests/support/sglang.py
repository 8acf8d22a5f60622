"""Real SGLang servers for tests: of any installed release, on a machine with or without a GPU."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from samplestore.errors import SampleStoreError
from samplestore.workers.sglang.launch import engine_command
from samplestore.workers.sglang.machine import find_sglang, home_folder
from samplestore.workers.sglang.releases import NEWEST, OLDEST, incremental_flag, parse_releases

from .processes import HOST, Process, Processes, free_port, in_ci

START_S = 480.0  # 25 s on an idle machine, 110 s beside ten busy processes


def chosen_releases() -> list[str]:
    """The releases that this run tests: SAMPLESTORE_TEST_SGLANG ("0.5.23,0.5.9", "all"), else newest and oldest."""
    return parse_releases(os.environ.get("SAMPLESTORE_TEST_SGLANG") or f"{NEWEST},{OLDEST}")


def require_sglang(release: str) -> None:
    """Skip the test where that release is not installed; under CI fail it."""
    try:
        find_sglang(release, home_folder())
    except SampleStoreError as error:
        message = f"{error} (or: make sglang)"
    else:
        return
    if in_ci():
        pytest.fail(message)
    pytest.skip(message)


@dataclass(frozen=True)
class SGLang:
    """A server that answers at `url`."""

    url: str
    process: Process


def start_sglang(
    processes: Processes, model: Path, *extra: str, release: str = NEWEST, cumulative: bool = False,
    port: int | None = None,
) -> SGLang:  # fmt: skip
    """Start a server as our launcher does, with weight version "v0", and wait until it is ready.

    `extra` are flags of the server. `cumulative` leaves out the flag for streams of deltas. `port`: a free one, unless
    a server comes back at its old address. It and its children end with `processes`. Skips, or under CI fails, where
    the release is not installed."""
    require_sglang(release)
    port = port or low_port()
    url = f"http://{HOST}:{port}"
    command = engine_command(
        str(model), host=HOST, port=port, release=release, home=home_folder(), weight_version="v0", extra=extra
    )
    argv = [word for word in command.argv if not (cumulative and word == incremental_flag(release))]
    # setproctitle overwrites the environment that it finds, and with it the tag by which children are found.
    env = {**command.env, "SPT_NOENV": "1"}
    process = processes.start(argv, name=f"sglang-{release}", env=env)
    process.wait_for(lambda: answers(f"{url}/health"), what=f"SGLang {release} is healthy", timeout=START_S)
    return SGLang(url, process)


def low_port() -> int:
    """A free port that SGLang can count up from: some releases take port + 10000 for gRPC, and end if there is none."""
    while (port := free_port()) > 55_000:
        continue
    return port


def answers(url: str, timeout: float = 5.0) -> bool:
    """Whether GET `url` is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
