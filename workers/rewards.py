"""Rewards in separate processes: a pool of children, each scoring one sample at a time, with a hard timeout.

Model output is untrusted and verifiers fail: they loop for ever, exhaust memory, crash the interpreter. None of that
may reach the worker, and none of it may look like a reward of 0. So every sample ends as exactly one of `ok`,
`unparsed` (a judge has answered, and nothing could be read from it), `verifier_error` and `verifier_timeout`, and only
`ok` carries a number. A group is scored in one call, and has an outcome of its own; each of its samples then has a
number, or None where it is unparsed.

The child process is not a sandbox: it has the rights of the worker. A verifier that executes generated code must
isolate it itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

from samplestore import codec
from samplestore.errors import InvalidSetting, SampleStoreError
from samplestore.workers.reward_child import Child, ChildFailed

Outcome = Literal["ok", "unparsed", "verifier_error", "verifier_timeout"]

BUILTINS = ("math", "reasoning_gym")
MAX_REQUEST_BYTES = 32 * 2**20  # of one sample as JSON
MAX_ERROR_CHARS = 4000
HOW_TO_NAME = (
    f"Use --reward {' or --reward '.join(BUILTINS)}, --reward MODULE:FUNCTION (the module is looked for in the current "
    "folder first), --reward PATH/TO/FILE.py:FUNCTION, or --reward http://HOST:PORT/PATH"
)


class RewardSpecError(SampleStoreError):
    """`--reward` names nothing that can be called. Found when the pool starts."""

    def __init__(self, spec: str, why: str) -> None:
        self.spec, self.why = spec, why
        super().__init__(f"--reward {spec}: {why.rstrip('. ')}. {HOW_TO_NAME}")


class RewardPoolStopped(SampleStoreError):
    """The pool is not running (or was stopped meanwhile): the sample has no result, nothing may be recorded for it."""

    def __init__(self, sample_id: int) -> None:
        self.sample_id = sample_id
        super().__init__(
            f"no reward for sample {sample_id}: the reward pool is not running. "
            "Use it inside `async with RewardPool(...)`"
        )


@dataclass(frozen=True)
class RewardSample:
    """What a reward function receives. Names and meanings are those of slime's Sample.

    prompt is a string or a list of chat messages; tokens are prompt ids followed by response ids, of which the last
    `response_length` belong to the response; label is any JSON value of the prompt row, or None.
    """

    sample_id: int
    group_index: int
    index: int
    prompt: str | list[dict[str, Any]]
    response: str
    response_length: int
    tokens: list[int]
    label: Any = None
    status: str = "completed"
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """How scoring one sample ended.

    reward    a finite number if outcome is "ok", else None
    details   what the function returned beside the reward; JSON, without NaN, NUL or lone surrogates, at most 16 KiB
    error     None if "ok"; else what went wrong, ending in the last lines of the traceback
    elapsed_s seconds from handing the sample to the child until the end, without the wait for a free child
    """

    outcome: Outcome
    reward: float | None
    details: dict[str, Any]
    error: str | None
    elapsed_s: float


@dataclass(frozen=True)
class GroupResult:
    """How scoring a group ended. rewards: one for each sample if outcome is "ok", None where one is unparsed; else
    empty. The rest is as in RewardResult."""

    outcome: Outcome
    rewards: list[float | None]
    details: dict[str, Any]
    error: str | None
    elapsed_s: float


R = TypeVar("R", RewardResult, GroupResult)


class Judge(Protocol):
    """What gives rewards: reward processes, a reward model behind HTTP."""

    room: int  # samples or groups that it can have at once, those included that wait for a turn

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: Any) -> None: ...

    async def score(self, sample: RewardSample) -> RewardResult: ...

    async def score_group(self, samples: Sequence[RewardSample]) -> GroupResult: ...


class RewardPool:
    """Scores samples in up to `processes` children, which are started when needed and replaced when they fail.

    spec        "math", "reasoning_gym", "module:function" or "path/to/file.py:function"; the function takes a
                RewardSample, may be async, and returns a finite number or a dict with "reward" (or "score")
    timeout_s   for one sample, from the moment a child has it; then the child is killed
    memory_mb   address space (RLIMIT_AS) of a child, libraries included; 0 for no cap (needed by CUDA builds of torch)
    start_timeout_s  for starting a child and importing the verifier
    reward_key  of a returned dict, which key is the reward; None: "reward", else "score"
    args        for functions of slime's kind, f(args, sample): the attributes of args

    Raises InvalidSetting for numbers that make no sense, RewardSpecError from `start` for a spec that cannot be loaded.
    Belongs to the event loop that starts it.
    """

    def __init__(
        self,
        spec: str,
        *,
        processes: int = 1,
        timeout_s: float = 30.0,
        memory_mb: int = 2048,
        start_timeout_s: float = 120.0,
        reward_key: str | None = None,
        args: dict[str, Any] | None = None,
    ) -> None:
        if processes < 1:
            raise InvalidSetting("processes", processes, "a whole number above 0")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidSetting(name, value, "seconds above 0")
        if memory_mb < 0:
            raise InvalidSetting("memory_mb", memory_mb, "megabytes, or 0 for no cap")
        self.spec, self.processes, self.timeout_s = spec, processes, timeout_s
        self.memory_mb, self.start_timeout_s = memory_mb, start_timeout_s
        self.options = json.dumps({"reward_key": reward_key, "args": args or {}})
        self.room = 2 * processes
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._reaping: set[asyncio.Task[None]] = set()
        self._running = False
        self._requests = 0

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the first child, which loads the verifier. Raises RewardSpecError if it cannot."""
        if self._running:
            return
        if self.spec not in BUILTINS and not all(self.spec.rpartition(":")):
            raise RewardSpecError(self.spec, "this is neither a built-in verifier nor of the form MODULE:FUNCTION")
        try:
            self._idle.append(await self._spawn())
        except BaseException:  # a cancellation too
            await self.stop()  # `async with` calls no __aexit__ after a failed __aenter__
            raise
        self._running = True

    async def stop(self) -> None:
        """Kill all children. A `score` in flight raises RewardPoolStopped: a shutdown is not a verifier error."""
        self._running = False
        for child in [*self._idle, *self._busy]:
            self._discard(child)
        self._idle.clear()
        await asyncio.gather(*self._reaping)

    async def score(self, sample: RewardSample) -> RewardResult:
        """Score one sample; waits for a free child. Cancelling it kills the child, the pool stays usable.

        Never raises for what the verifier does. Raises RewardPoolStopped if the pool is not running.
        """
        return await self._ask(sample.sample_id, {"sample": _fields(sample)}, RewardResult)

    async def score_group(self, samples: Sequence[RewardSample]) -> GroupResult:
        """Score the samples of a group in one call of the function, which is given all of them as a list. As `score`,
        otherwise."""
        named = samples[0].sample_id if samples else 0
        return await self._ask(named, {"samples": [_fields(s) for s in samples]}, GroupResult)

    async def _ask(self, sample_id: int, what: dict[str, Any], kind: type[R]) -> R:
        if not self._running:
            raise RewardPoolStopped(sample_id)
        self._requests += 1
        request = self._requests
        try:
            payload = json.dumps({"id": request, **what}, separators=(",", ":"), default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return failed_result(kind, f"the sample cannot be written as JSON: {error}")
        if len(payload) > MAX_REQUEST_BYTES:
            return failed_result(
                kind, f"the sample is {len(payload)} bytes of JSON; rewards accept up to {MAX_REQUEST_BYTES}"
            )
        async with self._slots:
            return await self._answered(sample_id, request, payload, kind, len(what.get("samples", [1])))

    async def _answered(self, sample_id: int, request: int, payload: bytes, kind: type[R], n: int) -> R:
        try:
            child = await self._take()
        except (RewardSpecError, OSError) as error:
            if not self._running:
                raise RewardPoolStopped(sample_id) from error
            return failed_result(kind, f"no reward process could be started: {error}")
        if not self._running:
            self._discard(child)
            raise RewardPoolStopped(sample_id)
        self._busy.add(child)
        clock = asyncio.get_running_loop().time
        start, keep = clock(), False
        try:
            reply = await child.ask(payload, self.timeout_s)
            result, keep = _read_reply(reply, request, clock() - start, kind, n)
        except TimeoutError:
            text = f"no result after {self.timeout_s:g} s; the reward process was killed"
            result = failed_result(kind, text, clock() - start, "verifier_timeout")
        except ChildFailed as error:
            result = failed_result(kind, str(error), clock() - start)
        finally:
            self._busy.discard(child)
            if keep and self._running:
                self._idle.append(child)
            else:
                self._discard(child)
        if not self._running and result.outcome not in ("ok", "unparsed"):
            raise RewardPoolStopped(sample_id)
        return result

    async def _take(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            self._discard(child)  # it died while no sample was with it: no sample's fault
        return await self._spawn()

    async def _spawn(self) -> Child:
        one_thread = {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        # -P: a json.py in the current folder must not replace the library's before our own imports are done.
        command = [sys.executable, "-P", "-u", "-m", "samplestore.workers.reward_process"]
        command += ["--memory-mb", str(self.memory_mb), "--parent-pid", str(os.getpid())]
        command += ["--options", self.options, "--", self.spec]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env={**os.environ, **one_thread}
        )
        child = Child(process)
        self._busy.add(child)
        loaded = False
        try:
            reply = await child.ask(None, self.start_timeout_s)
            if reply.get("ready") is not True:
                raise RewardSpecError(self.spec, str(reply.get("spec_error", "it could not be loaded")))
            loaded = True
        except TimeoutError:
            raise RewardSpecError(self.spec, f"loading it took more than {self.start_timeout_s:g} s") from None
        except ChildFailed as error:
            cap = f" (with reward_memory_mb = {self.memory_mb}; 0 is no cap)" if self.memory_mb else ""
            raise RewardSpecError(self.spec, f"while loading it, {error}{cap}") from error
        finally:
            self._busy.discard(child)
            if not loaded:
                self._discard(child)
        return child

    def _discard(self, child: Child) -> None:
        child.kill()
        task = asyncio.create_task(child.reap())
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)


def _fields(sample: RewardSample) -> dict[str, Any]:
    return {f.name: getattr(sample, f.name) for f in fields(RewardSample)}


def _read_reply(reply: dict[str, Any], request: int, elapsed_s: float, kind: type[R], n: int = 1) -> tuple[R, bool]:
    """(result, child may be used again). The child runs foreign code: its words are checked like any input."""
    if reply.get("id") != request:
        # Whatever wrote this: a stray answer must not become another sample's reward.
        raise ChildFailed(f"the reward process answered request {reply.get('id')!r} instead of {request}")
    details, error = reply.get("details"), reply.get("error")
    if isinstance(error, str):
        return failed_result(kind, error, elapsed_s), reply.get("retire") is not True
    rewards = reply.get("rewards") if kind is GroupResult else [reply.get("reward", "none")]
    if not isinstance(rewards, list) or len(rewards) != n or not all(map(is_reward, rewards)):
        raise ChildFailed("the reward process wrote a reply without a finite reward and details")
    if not isinstance(details, dict):
        raise ChildFailed("the reward process wrote a reply without a finite reward and details")
    return made_result(kind, rewards, details, elapsed_s), True


def is_reward(value: Any) -> bool:
    return value is None or (isinstance(value, float) and codec.reward(value) is not None)


def made_result(kind: type[R], rewards: list[float | None], details: dict[str, Any], elapsed_s: float) -> R:
    """The result of checked rewards; None is one that could not be read."""
    made: Any
    if kind is GroupResult:
        made = GroupResult("ok", rewards, details, None, elapsed_s)
    elif rewards[0] is None:
        made = RewardResult("unparsed", None, details, "the judge's answer could not be read", elapsed_s)
    else:
        made = RewardResult("ok", rewards[0], details, None, elapsed_s)
    return made  # type: ignore[no-any-return]


def failed_result(kind: type[R], error: str, elapsed_s: float = 0.0, outcome: Outcome = "verifier_error") -> R:
    made: Any = kind(outcome, [] if kind is GroupResult else None, {}, error[-MAX_ERROR_CHARS:], elapsed_s)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """numpy scalars and arrays as JSON; anything else is refused by json itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON value")
