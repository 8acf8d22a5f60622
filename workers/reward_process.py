"""The child of a RewardPool: `python -m samplestore.workers.reward_process SPEC --memory-mb N`.

Reads frames (4-byte big-endian length, ASCII JSON) from standard input, one sample each, and answers each with one
frame on what was standard output at the start. User code runs in the main thread and sees /dev/null as input and
standard error as output, so that nothing it prints can end up between the frames.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import io
import json
import logging
import math
import numbers
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

from samplestore import codec
from samplestore.words import amount
from samplestore.workers.rewards import BUILTINS, MAX_REQUEST_BYTES, RewardSample
from samplestore.workers.slime_types import SlimeArgs, SlimeSample, takes_args

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]

MAX_DETAILS_BYTES = 16 * 2**10
_PR_SET_PDEATHSIG = 1


class SpecFailure(Exception):
    """The spec cannot be loaded; the text goes to the user."""


class BadReturn(Exception):
    """The function returned something that is not a reward."""


# ---- loading


def load(spec: str) -> RewardFunction:
    """The function that `spec` names. Raises SpecFailure."""
    if spec in BUILTINS:
        from samplestore.workers import verifiers

        try:
            return verifiers.load(spec)
        except ImportError as error:
            raise SpecFailure(f"{error}; run: pip install 'samplestore[verify]'") from error
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise SpecFailure("this is neither a built-in verifier nor of the form MODULE:FUNCTION")
    found: Any = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")][:10]
            raise SpecFailure(f"{place} has no {name!r}; it has: {', '.join(public) or 'nothing callable'}")
        found = getattr(found, part)
    if not callable(found):
        raise SpecFailure(f"{name!r} in {place} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _load_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise SpecFailure(f"there is no module {name!r} (looked in {os.getcwd()} and the Python path)") from error
        raise SpecFailure(f"importing {name} failed:\n{describe(error)}\n") from error
    except BaseException as error:  # the user's code: SystemExit at its top level too
        raise SpecFailure(f"importing {name} failed:\n{describe(error)}\n") from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise SpecFailure(f"there is no file {path} (seen from {os.getcwd()})")
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as in a script
    name = f"samplestore_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise SpecFailure(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        found.loader.exec_module(module)
    except BaseException as error:  # as above
        raise SpecFailure(f"running {path} failed:\n{describe(error)}\n") from error
    return module


# ---- from what user code gives to what may be stored


def safe_text(text: str, limit: int) -> str:
    """Text that any database takes: lone surrogates and NUL escaped (PostgreSQL refuses both), at most `limit` long."""
    cut = text if len(text) <= limit else text[:limit] + f"... ({len(text)} characters)"
    return cut.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


def describe(error: BaseException) -> str:
    """The last lines of the traceback, at most 2,000 characters."""
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-6)
        text = "".join(lines)[-20_000:].strip()
    except Exception as broken:  # a __str__ or __repr__ of user code
        text = f"{type(error).__name__} (its text cannot be shown: {type(broken).__name__})"
    return safe_text("\n".join(text.splitlines()[-15:])[-2000:], 2000)


def to_reward(value: Any, key: str | None = None) -> tuple[float | None, dict[str, Any]]:
    """(finite reward, details) of what a function returned; a dict whose reward is None tells of a judge's answer that
    could not be read. None alone is what a function returns that forgot its `return`. `key`: the reward's in a dict.
    Raises BadReturn naming what it was."""
    details: dict[str, Any] = {}
    if isinstance(value, dict):
        wanted = ("reward", "score") if key is None else (key,)
        found = next((k for k in wanted if k in value), None)
        if found is None:
            names = ", ".join(safe_text(repr(k), 40) for k in list(value)[:10])
            raise BadReturn(
                f"the reward function returned a dict without {' or '.join(map(repr, wanted))}; its keys: {names}. "
                "Say which one counts with: --reward-key NAME"
            )
        details = json_details({k: v for k, v in value.items() if k != found})
        value = value[found]
        if value is None:
            return None, details
    shown = f"{type(value).__name__} {safe_text(_show(value), 100)}"
    if callable(getattr(value, "item", None)) and not isinstance(value, numbers.Real):
        try:
            value = value.item()  # a 0-d tensor or array
        except (ValueError, RuntimeError, TypeError) as error:
            raise BadReturn(f"the reward function returned {shown}, which is not one number") from error
    if not isinstance(value, numbers.Real | Decimal):
        raise BadReturn(
            f"the reward function returned {shown}; it must be a finite number or a dict with 'reward' (None in "
            "it: a judge's answer that can't be read)"
        )
    try:
        reward = float(value)
    except (OverflowError, ValueError) as error:
        raise BadReturn(f"the reward function returned {shown}, which is not a finite float") from error
    if codec.reward(reward) is None:
        raise BadReturn(f"the reward function returned {shown}; a reward is {codec.REWARDS}")
    return reward, details


def to_rewards(value: Any, n: int, key: str | None = None) -> tuple[list[float | None], dict[str, Any]]:
    """The rewards of n samples, and {"samples": [their details]} if there are any, each bounded and all together not.
    Raises BadReturn."""
    if callable(getattr(value, "tolist", None)):
        value = value.tolist()  # a tensor or array
    if not isinstance(value, list | tuple) or len(value) != n:
        got = amount(len(value), "value") if isinstance(value, list | tuple) else type(value).__name__
        raise BadReturn(
            f"the reward function returned {got} for a group of {amount(n, 'sample')}; it must be a list of "
            f"{amount(n, 'reward')}"
        )
    made = [(None, {}) if v is None else to_reward(v, key) for v in value]
    told = [details for _, details in made]
    return [reward for reward, _ in made], {"samples": told} if any(told) else {}


def _show(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # a broken __repr__ of user code, or an int beyond the digits limit
        return f"(repr failed: {type(error).__name__})"


def json_details(values: dict[Any, Any]) -> dict[str, Any]:
    """A dict as storable JSON of at most 16 KiB; keys that do not fit are counted under `details_dropped`."""
    kept: dict[str, Any] = {}
    size = dropped = 0
    for key, value in values.items():
        name, plain = safe_text(str(key), 100), _json_value(value, 5)
        size += len(json.dumps([name, plain]))
        if size > MAX_DETAILS_BYTES - 64:
            dropped += 1
        else:
            kept[name] = plain
    if dropped:
        kept["details_dropped"] = dropped
    return kept


def _json_value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return safe_text(value, 2000)
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth and isinstance(value, dict):
        return {safe_text(str(k), 100): _json_value(v, depth - 1) for k, v in list(value.items())[:200]}
    if depth and isinstance(value, list | tuple):
        return [_json_value(v, depth - 1) for v in value[:200]]
    return safe_text(_show(value), 200)  # nan, inf, objects


# ---- the process


def _die_with_parent(parent_pid: int | None) -> None:
    """Ask Linux for SIGKILL when the worker dies: a verifier stuck in C code never notices a closed pipe."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        raise SystemExit("the worker died while this process started")  # before prctl: no signal will come


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol to private descriptors; give user code /dev/null and standard error."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # print(response) must not fail on a lone surrogate
    threading.Thread(target=_watch_parent, args=(requests,), daemon=True).start()
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def _watch_parent(descriptor: int) -> None:
    """Kill the whole process group when the worker's end of the pipe closes, also in the middle of a sample."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-up only
    poll.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _cap_memory(memory_mb: int) -> None:
    if memory_mb > 0:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = memory_mb * 2**20
        cap = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (cap, cap))


def _send(replies: BinaryIO, reply: dict[str, Any]) -> None:
    body = json.dumps(reply, allow_nan=False).encode()
    replies.write(len(body).to_bytes(4, "big") + body)
    replies.flush()


def _receive(requests: BinaryIO) -> dict[str, Any] | None:
    header = requests.read(4)
    if len(header) < 4:
        return None
    size = int.from_bytes(header, "big")
    if size > MAX_REQUEST_BYTES:
        raise SystemExit(f"a request of {amount(size, 'byte')} is over the limit of {MAX_REQUEST_BYTES}")
    return json.loads(requests.read(size))  # type: ignore[no-any-return]


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def answer(
    function: RewardFunction, request: dict[str, Any], runner: asyncio.Runner, options: dict[str, Any]
) -> dict[str, Any]:
    """The reply to one request. Every failure of the function, SystemExit included, becomes an error reply."""
    key, group = options.get("reward_key"), request.get("samples")
    try:
        made = [_made(function, values) for values in ([request["sample"]] if group is None else group)]
        given: Any = made if group is not None else made[0]
        value = function(SlimeArgs(_slime_args(options)), given) if takes_args(function) else function(given)
        if inspect.isawaitable(value):
            value = runner.run(_wait_for(value))
        if group is not None:
            rewards, details = to_rewards(value, len(group), key)
            return {"id": request["id"], "rewards": rewards, "details": json_details(details)}
        reward, details = to_reward(value, key)
    except BadReturn as error:
        return {"id": request["id"], "error": safe_text(str(error), 2000)}
    except BaseException as error:
        # After a MemoryError the heap may stay full, and the next sample would fail for this one's sin.
        return {"id": request["id"], "error": describe(error), "retire": isinstance(error, MemoryError)}
    return {"id": request["id"], "reward": reward, "details": details}


def _made(function: RewardFunction, values: dict[str, Any]) -> Any:
    return SlimeSample.of(values) if takes_args(function) else RewardSample(**values)


def _slime_args(options: dict[str, Any]) -> dict[str, Any]:
    return {"reward_key": options.get("reward_key"), **options.get("args", {})}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m samplestore.workers.reward_process", description=__doc__)
    parser.add_argument("spec")
    parser.add_argument("--memory-mb", type=int, default=2048, help="cap of the address space; 0 for none")
    parser.add_argument("--parent-pid", type=int, default=None, help="exit if this is not the parent any more")
    parser.add_argument("--options", default="{}", help="JSON: reward_key, args")
    args = parser.parse_args(argv)
    options = json.loads(args.options)
    _die_with_parent(args.parent_pid)
    requests, replies = _take_pipes()
    faulthandler.enable()
    try:
        _cap_memory(args.memory_mb)
        function = load(args.spec)
    except SpecFailure as error:
        _send(replies, {"spec_error": safe_text(str(error), 4000)})
        return 2
    except (MemoryError, OSError, ValueError) as error:
        _send(
            replies, {"spec_error": f"loading it failed with reward_memory_mb = {args.memory_mb}:\n{describe(error)}\n"}
        )
        return 2
    _send(replies, {"ready": True})
    with asyncio.Runner() as runner:  # one loop for all samples: a session that user code keeps open stays valid
        own_pid = os.getpid()
        while (request := _receive(requests)) is not None:
            reply = answer(function, request, runner, options)
            if os.getpid() != own_pid:
                os._exit(0)  # the function forked and returned twice; the copy must not answer, nor take requests
            _send(replies, reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
