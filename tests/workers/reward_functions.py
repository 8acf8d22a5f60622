"""Reward functions for test_rewards.py; loaded by path in a child process. The prompt's metadata steers them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from samplestore.workers.rewards import RewardSample

NOT_CALLABLE = 3
_calls = 0


def length(sample: RewardSample) -> float:
    return float(len(sample.response))


async def later(sample: RewardSample) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": 0.5, "loop": id(asyncio.get_running_loop()), "label": sample.label, "status": sample.status}


def steer(sample: RewardSample) -> Any:
    """Do what the metadata says, else count the calls in this process."""
    global _calls
    _calls += 1
    do = sample.metadata.get("do")
    return _ACTIONS[do](sample) if do else {"reward": 1, "calls": _calls, "pid": os.getpid()}


def _loop(sample: RewardSample) -> None:
    if path := sample.metadata.get("path"):
        Path(path).write_text(str(os.getpid()))
    while True:
        pass


def _hold_gil(sample: RewardSample) -> None:
    """Block in C code without giving up the interpreter: no other thread runs, so only the kernel can help."""
    Path(sample.metadata["path"]).write_text(str(os.getpid()))
    ctypes.PyDLL(None).pause()


def _loop_with_helper(sample: RewardSample) -> None:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sample.metadata["path"]).write_text(str(helper.pid))
    helper.wait()


def _leave_helper(sample: RewardSample) -> None:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sample.metadata["path"]).write_text(str(helper.pid))
    os._exit(7)


def _print(sample: RewardSample) -> float:
    print("printed", sample.response, flush=True)
    os.write(1, b"\x00\x00\x00\x02{}")
    sys.stdin.read()  # must see the end of /dev/null, not the protocol
    return 1.0


def _eat(sample: RewardSample) -> int:
    return len(bytearray(8 * 2**30))


def _raise(sample: RewardSample) -> None:
    raise ZeroDivisionError("my verifier is broken \ud800 \x00")


def _fork(sample: RewardSample) -> float:
    return 1.0 if os.fork() else 0.25  # both return


def _segfault(sample: RewardSample) -> None:
    ctypes.string_at(0)


def _huge_details(sample: RewardSample) -> dict[str, Any]:
    nested: list[Any] = []
    for _ in range(500):
        nested = [nested]
    lines = {f"line {i}": "x" * 1900 for i in range(1000)}
    return {"reward": 2, "nan": float("nan"), "text": "a\ud800\x00b", "nested": nested, "object": object(), **lines}


class _Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _unshowable(sample: RewardSample) -> None:
    raise _Unshowable


_ACTIONS: dict[str, Any] = {
    "loop": _loop,
    "hold_gil": _hold_gil,
    "loop_with_helper": _loop_with_helper,
    "leave_helper": _leave_helper,
    "print": _print,
    "eat": _eat,
    "raise": _raise,
    "unshowable": _unshowable,
    "fork": _fork,
    "segfault": _segfault,
    "kill": lambda s: os.kill(os.getpid(), signal.SIGTERM),
    "sys_exit": lambda s: sys.exit(3),
    "os_exit": lambda s: os._exit(7),
    "huge_details": _huge_details,
    "echo": lambda s: {"reward": len(s.response), "codes": [ord(c) for c in s.response[:3]], "last": s.tokens[-1]},
    "nan": lambda s: float("nan"),
    "inf": lambda s: float("-inf"),
    "none": lambda s: None,
    "str": lambda s: "1.0",
    "list": lambda s: [1.0],
    "big": lambda s: 10**400,
    "bigger": lambda s: 10**10000,
    "too_big": lambda s: 1e39,
    "no_key": lambda s: {"accuracy": 1},
    "true": lambda s: True,
    "both": lambda s: {"reward": 0.25, "score": 9},
}
