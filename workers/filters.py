"""Filters of scored groups: the built-in ones here, the user's functions in a process of their own with a timeout.

A filter is the operator's code, but a loop without end in it must not stop the worker that streams samples.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from samplestore import filters, slimehooks
from samplestore.errors import LeaseLost, SampleStoreError
from samplestore.runsettings import RunSettings
from samplestore.types import StageClaim
from samplestore.verbs import filters as verbs
from samplestore.verbs import stages
from samplestore.workers.reward_child import Child, ChildFailed
from samplestore.workers.rewards import MAX_REQUEST_BYTES

log = logging.getLogger("samplestore.filters")

Write = Callable[..., Awaitable[Any]]
START_TIMEOUT_S = 120.0
HOW_TO_NAME = "Say --group-filter MODULE:FUNCTION or --group-filter PATH/TO/FILE.py:FUNCTION (--sample-filter likewise)"


class FilterSpecError(SampleStoreError):
    """`--group-filter` or `--sample-filter` names nothing that can be called. Found when the worker starts."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the filter can't be loaded: {why.rstrip('. ')}. {HOW_TO_NAME}")


class FilterFailed(Exception):
    """A user's filter gave no answer; the text says why."""


class FilterProcess:
    """One child that runs the user's filters, group after group; started again after it failed.

    group, sample   specs of a dynamic sampling filter and of a sample filter, or None
    timeout_s       for one group, from the moment the child has it; then the child is killed
    """

    def __init__(self, group: str | None, sample: str | None, *, timeout_s: float, memory_mb: int) -> None:
        self.group, self.sample, self.timeout_s, self.memory_mb = group, sample, timeout_s, memory_mb
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._requests = 0

    async def __aenter__(self) -> FilterProcess:
        async with self._turn:
            self._child = await self._start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with self._turn:
            await self._end()

    async def ask(self, args: dict[str, Any], samples: list[dict[str, Any]]) -> tuple[str | None, dict[int, str]]:
        """(why the group is dropped or None, why samples are taken out of the loss). Raises FilterFailed."""
        async with self._turn:
            self._requests += 1
            try:
                payload = json.dumps({"id": self._requests, "args": args, "samples": samples}).encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise FilterFailed(f"the group cannot be written as JSON: {error}") from error
            if len(payload) > MAX_REQUEST_BYTES:
                raise FilterFailed(f"the group is {len(payload)} bytes of JSON; filters take up to {MAX_REQUEST_BYTES}")
            try:
                if self._child is None or not self._child.alive:
                    await self._end()
                    self._child = await self._start()
                reply = await self._child.ask(payload, self.timeout_s)
                return self._read(reply, {s["sample_id"] for s in samples})
            except TimeoutError:
                await self._end()
                raise FilterFailed(f"no answer after {self.timeout_s:g} s; the filter process was killed") from None
            except (ChildFailed, FilterSpecError, OSError) as error:
                await self._end()
                raise FilterFailed(str(error)) from error
            except asyncio.CancelledError:
                await self._end()  # its answer would be taken for that of the next group
                raise

    def _read(self, reply: dict[str, Any], known: set[int]) -> tuple[str | None, dict[int, str]]:
        """The child runs foreign code: its words are checked like any input."""
        if reply.get("id") != self._requests:
            raise ChildFailed(f"the filter process answered request {reply.get('id')!r} instead of {self._requests}")
        if isinstance(error := reply.get("error"), str):
            raise FilterFailed(error)
        drop, removed = reply.get("drop"), reply.get("removed")
        fits = isinstance(removed, dict) and all(
            k.isascii() and k.isdigit() and int(k) in known and isinstance(v, str) for k, v in removed.items()
        )
        if not fits or not (drop is None or isinstance(drop, str)):
            raise ChildFailed("the filter process wrote a reply without drop and removed")
        return drop, {int(id): why for id, why in (removed or {}).items()}

    async def _start(self) -> Child:
        # -P: a json.py in the current folder must not replace the library's
        command = [sys.executable, "-P", "-u", "-m", "samplestore.workers.filter_process"]
        for flag, spec in (("--group", self.group), ("--sample", self.sample)):
            command += [] if spec is None else [flag, spec]
        command += ["--memory-mb", str(self.memory_mb), "--parent-pid", str(os.getpid())]
        pipe = asyncio.subprocess.PIPE
        one_thread = {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        child = Child(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
                env={**os.environ, **one_thread},
            )
        )  # fmt: skip
        try:
            reply = await child.ask(None, START_TIMEOUT_S)
            if reply.get("ready") is True:
                return child
            raise FilterSpecError(str(reply.get("spec_error", "it could not be loaded")))
        except TimeoutError:
            await _kill(child)
            raise FilterSpecError(f"loading it took more than {START_TIMEOUT_S:g} s") from None
        except ChildFailed as error:
            await _kill(child)
            raise FilterSpecError(str(error)) from error
        except (FilterSpecError, asyncio.CancelledError):
            await _kill(child)
            raise

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await _kill(child)


async def _kill(child: Child) -> None:
    child.kill()
    await asyncio.shield(child.reap())


class Filterer:
    """Runs the filters of a run on claimed groups, and stores what they say.

    process     the user's functions; None where the run has built-in filters only
    tokenizer   gives the user's functions the response as text; None: they see token ids only
    """

    def __init__(
        self, settings: RunSettings, write: Write, process: FilterProcess | None = None, tokenizer: Any = None
    ) -> None:
        self.settings, self.write, self.process, self.tokenizer = settings, write, process, tokenizer
        self.of_groups = filters.parse(filters.GROUP, settings.group_filters)
        self.of_samples = filters.parse(filters.SAMPLE, settings.sample_filters)

    async def run(self, claim: StageClaim) -> None:
        """Filter one group and store what came out. A lost lease means that somebody else does it."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            drop, removed = await self.judge(claim)
            await self.write(verbs.filter_group, claim, drop, removed, clock() - start)
        except asyncio.CancelledError:
            await asyncio.shield(self._given_back(claim))
            raise
        except LeaseLost as error:
            log.warning("group=%d filter %s", claim.group_id, error)
        except Exception as error:
            # a stage has no deadline: one that nobody settles would stay with this worker for as long as it lives
            log.log(
                logging.WARNING if isinstance(error, FilterFailed) else logging.ERROR,
                "group=%d %s",
                claim.group_id,
                error,
            )
            await self._failed(claim, str(error) or type(error).__name__)

    async def judge(self, claim: StageClaim) -> tuple[str | None, dict[int, str]]:
        """What the built-in filters say, and then the user's. Raises FilterFailed."""
        known = [filters.Scored(m.reward, int(m.response_ids.size), m.status) for m in claim.members]
        drop = filters.refusal(self.of_groups, known)
        found = {m.sample_id: filters.removal(self.of_samples, s) for m, s in zip(claim.members, known, strict=True)}
        removed = {id: why for id, why in found.items() if why is not None}
        if self.process is not None and drop is None:
            args = vars(slimehooks.hook_args(self.settings))
            drop, more = await self.process.ask(args, [self._sample(claim, i) for i in range(len(claim.members))])
            removed = {**more, **removed}
        return drop, removed

    def _sample(self, claim: StageClaim, place: int) -> dict[str, Any]:
        """By slime's names, as JSON."""
        member = claim.members[place]
        ids = member.response_ids.tolist()
        return {
            "sample_id": member.sample_id,
            "group_index": claim.group_number,
            # a fork's is that of its rollout, as slime's rollout_id: the next ones are of another group
            "index": claim.group_number * self.settings.samples_per_prompt + member.root,
            "prompt": claim.prompt,
            "tokens": [*member.prompt_ids.tolist(), *ids],
            "response": "" if self.tokenizer is None else self.tokenizer.decode(member.response_ids),
            "response_length": len(ids),
            "label": claim.label,
            "reward": member.reward,
            "status": member.status,
            "metadata": claim.metadata,
        }

    async def _given_back(self, claim: StageClaim) -> None:
        try:
            await self.write(stages.release_stage, claim)
        except LeaseLost as lost:
            log.warning("group=%d filter %s", claim.group_id, lost)

    async def _failed(self, claim: StageClaim, error: str) -> None:
        try:
            await self.write(stages.fail_stage, claim, error)
        except LeaseLost as lost:
            log.warning("group=%d filter %s", claim.group_id, lost)
