"""A claimed sample whose tokens come from an episode: its function runs, again and again, until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from samplestore import codec
from samplestore.errors import EpisodeDiverged, EpisodeLimit, EpisodeTruncated, LeaseLost, SampleStoreError
from samplestore.queries import episodes as queries
from samplestore.run import Run
from samplestore.states import CLAIMABLE, SampleStatus
from samplestore.types import Claim, Ids, StageClaim
from samplestore.verbs import episodes as verbs
from samplestore.verbs import fanout, samples
from samplestore.words import amount
from samplestore.workers.episodes import Context, EpisodeOptions
from samplestore.workers.reward_process import SpecFailure, describe, load
from samplestore.workers.rewards import BUILTINS
from samplestore.workers.slime_types import misfit
from samplestore.workers.trajectory import Host, LetGo, Trajectory
from samplestore.writer import Call

log = logging.getLogger("samplestore.worker")

STOP_S = 10.0  # that calls get to end in, once the function has ended
OPEN = [status.value for status in CLAIMABLE]
HOW_TO_NAME = "Use --episode MODULE:FUNCTION or --episode PATH/TO/FILE.py:FUNCTION"


class EpisodeSpecError(SampleStoreError):
    """`--episode` names nothing that can be run. Found when the worker starts."""

    def __init__(self, spec: str, why: str) -> None:
        self.spec, self.why = spec, why
        super().__init__(f"--episode {spec}: {why.rstrip('. ')}. {HOW_TO_NAME}")


class EpisodeFailed(SampleStoreError):
    """The function of an episode raised. The sample is tried again, from its record, until max_attempts."""

    def __init__(self, sample_id: int, error: str) -> None:
        self.sample_id, self.error = sample_id, error
        super().__init__(
            f"the episode of sample {sample_id} raised: {error}\nTo start it afresh: "
            f"samplestore requeue {sample_id} --reason TEXT"
        )


def load_episode(spec: str) -> Any:
    """The function that `spec` names. Raises EpisodeSpecError."""
    if spec in BUILTINS:
        raise EpisodeSpecError(spec, "this is a reward")
    try:
        function = load(spec)
    except SpecFailure as error:
        raise EpisodeSpecError(spec, str(error)) from None
    real: Any = inspect.unwrap(function)  # a decorator may have put a plain function around it
    if not inspect.iscoroutinefunction(real) and not inspect.iscoroutinefunction(type(real).__call__):
        raise EpisodeSpecError(spec, "it is no async function; an episode is: async def f(ctx)")
    if why := misfit(function, 1):
        raise EpisodeSpecError(spec, f"it can't be called with ctx alone: {why}; an episode is: async def f(ctx)")
    return function


class EpisodeHost(Host, Protocol):
    run: Run

    async def read(self, question: Any) -> Any: ...


class Turns(Trajectory):
    """A sample that is generated turn by turn."""

    host: EpisodeHost

    def __init__(self, claim: Claim, host: EpisodeHost, keep_stages: Any, own_prompt: int = 0, shared: int = 0) -> None:
        super().__init__(claim, host, keep_stages)
        # A fork's own prompt stands in its response, and takes nothing from the budget. What it shares with its parent
        # stands before it, and is delivered with it: both together keep to the budget.
        budget = max(0, self.limits.max_new_tokens + own_prompt - shared)
        self.limits = self.all = dataclasses.replace(self.limits, max_new_tokens=budget)
        self.record: queries.Record | None = None
        self.turn_number = 0  # of the call that runs
        self.turn_stop: int | None = None  # response position where it must end

    def check(self) -> None:
        """Raises LetGo where the sample is to go back."""
        self._check_told()

    def room(self) -> int:
        """Tokens that the response may still have."""
        return super()._budget()

    async def turn(self, number: int, start: int, limit: int | None, sampling: Mapping[str, Any]) -> str:
        """Generate until the turn ends, which is recorded together with its last tokens. Returns why it ended."""
        claim, limits = self.claim, self.all
        self.turn_number, self.turn_start = number, start
        self.turn_stop = None if limit is None else start + limit
        self.limits = dataclasses.replace(limits, sampling={**limits.sampling, **sampling})
        whole = claim.n_tokens > start and claim.finish_reason not in (None, "abort", "length")
        if whole or await self._turn() is None:  # whole: its worker died before it could say so
            await self.host.write(*self._finish(claim.finish_reason))
        return claim.finish_reason or "stop"

    def _budget(self) -> int:
        left = super()._budget()
        return left if self.turn_stop is None else min(left, self.turn_stop - self.claim.n_tokens)

    def _out_of_room(self) -> None:
        self.claim.finish_reason = "length"  # that there was room for one token was seen before the turn began

    def _finish(self, reason: str | None) -> Call:
        """The end of a turn, not of the sample."""
        return verbs.settle, self.claim, self.turn_number, {"finish_reason": reason or "stop"}


class EpisodeTrajectory(Turns):
    """A claimed sample, and the task that runs its episode."""

    def __init__(self, claim: Claim, host: EpisodeHost, keep_stages: Any, options: EpisodeOptions) -> None:
        super().__init__(claim, host, keep_stages)
        self.options = options
        self.forks: list[Turns] = []

    # -- forks

    async def forked(
        self, number: int, key: str, asked: Any, upto: int | None, own_prompt: Ids | None, child: int | None
    ) -> Turns:
        """The sample that call `number` forks, or has forked: `child`."""
        host, claim = self.host, self.claim
        if child is None:
            made = await host.write(fanout.fork, claim, number, key, asked, len(self.forks), upto, own_prompt)
        else:
            made = await host.write(fanout.take, claim, child)
        if made.status == SampleStatus.FAILED:
            raise EpisodeFailed(claim.sample_id, f"sample {made.sample_id}, which it forked, was given up")
        turns = Turns(made, host, self.keep_stages, 0 if own_prompt is None else int(own_prompt.size), upto or 0)
        turns.task, turns.told = self.task, self.told
        self.forks.append(turns)
        turns.record = await host.read(lambda c: queries.record(c, made.sample_id, made.incarnation))
        return turns

    @property
    def generating(self) -> bool:
        return super().generating or any(fork.generating for fork in self.forks)

    @property
    def sample_ids(self) -> list[int]:
        return [self.claim.sample_id, *(fork.claim.sample_id for fork in self.forks)]

    def tell(self, reason: str) -> None:
        super().tell(reason)
        for fork in self.forks:
            fork.tell(reason)

    async def abort(self, timeout_s: float) -> None:
        await asyncio.gather(super().abort(timeout_s), *(fork.abort(timeout_s) for fork in self.forks))

    async def run(self) -> list[StageClaim]:
        try:
            return await super().run()
        finally:
            for fork in self.forks:
                await asyncio.shield(self._let_go(fork))

    async def _let_go(self, fork: Turns) -> None:
        """A fork that did not end goes back; nobody claims it but whoever claims its parent."""
        if fork.claim.status in OPEN:
            with contextlib.suppress(LeaseLost):  # it has gone with its parent
                await self.host.write(samples.release, fork.claim, self.told or "its episode stopped")

    async def _end(self, context: Context, reward: float | None) -> list[StageClaim]:
        """Finish the sample and its forks in one transaction. Raises EpisodeDiverged."""
        ends = [
            _ending(turns, forked, reward if forked.reward is None else number(self.claim, forked.reward))
            for turns, forked in zip(self.forks, context.forks, strict=True)
            # finished by a worker that died before it could finish the rest, or empty: then its parent's end closes it
            if turns.claim.status in OPEN and turns.claim.n_tokens
        ]
        whole = _ending(self, context, reward)
        done: list[StageClaim]
        if self.forks or (self.record is not None and self.record.children):
            done = await self.host.write(fanout.end_all, self.claim, [*ends, whole], self.keep_stages)
            for turns in self.forks:
                turns.claim.status = SampleStatus.COMPLETED.value  # nothing of it goes back
        else:
            done = await self.host.write(verbs.finish, *whole[:3], self.keep_stages, whole[3])
        self.claim.status = whole[1]
        return done

    # -- the function

    async def _generate(self) -> list[StageClaim] | None:
        host, claim = self.host, self.claim
        record = self.record = await host.read(lambda c: queries.record(c, claim.sample_id, claim.incarnation))
        if record.n_aborts > self.options.max_aborts:
            what = f"its episode was aborted {amount(record.n_aborts, 'time')}"
            raise EpisodeLimit(claim.sample_id, what, self.options.max_aborts, "episode-max-aborts")
        self._check_vocabulary()
        if not claim.n_tokens and self.room() <= 0:
            Trajectory._out_of_room(self)  # raises, with the numbers
        context = Context(self, record, self.options, host.run.uuid, forked=self.forked)
        keeper = asyncio.create_task(self._keep(context))
        try:
            return await self._end(context, await self._run(context))
        finally:
            keeper.cancel()

    async def _keep(self, context: Context) -> None:
        """Say that the rollout gets on while a step runs, or while one of its samples gets tokens and the others wait.
        Without it a tool that works for longer than progress_deadline_s is called again for ever."""
        seen: Any = None
        while True:
            await asyncio.sleep(self.host.run.settings.progress_deadline_s / 3)
            made = [one.made for one in (context, *context.forks)]
            stands = [(calls.number, calls.claim.n_tokens) for calls in made]
            if stands != seen or any(calls.running == "step" for calls in made):
                for calls in made:
                    if calls.claim.status in OPEN:
                        with contextlib.suppress(LeaseLost):  # its next call finds it out
                            await self.host.write(verbs.touch, calls.claim)
            seen = stands

    async def _run(self, context: Context) -> float | None:
        """Call the function. Returns the reward, if it gave one."""
        value: Any = None
        raised: BaseException | None = None
        try:
            value = await self.options.function(context)
        except (Exception, asyncio.CancelledError) as error:
            raised = error
        cut = await _stop_calls(context)
        self._raise_what_ended(context, cut)
        sample_id, names = self.claim.sample_id, ", ".join(f"ctx.{kind}" for kind in cut.values())
        if isinstance(raised, EpisodeTruncated):
            for one in cut:
                one.truncated = True
            context.truncated = context.truncated or raised.sample_id == sample_id
            # what it would have given, nobody knows: where nobody here scores, the stage would wait for ever
            kept = self.keep_stages
            return None if kept is True or (kept and verbs.REWARD in kept) else math.nan
        if raised is None and cut:
            raise EpisodeFailed(sample_id, f"it returned while {names} ran. Await every call, or a sample ends cut off")
        if isinstance(raised, LetGo | SampleStoreError):
            raise raised
        if raised is not None:
            raise EpisodeFailed(sample_id, describe(raised)) from raised
        return None if value is None else number(self.claim, value)

    def _raise_what_ended(self, context: Context, cut: Collection[Context]) -> None:
        """What no call can mend, also where the function caught it. cut: contexts whose calls were ended from here."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        for one in (context, *context.forks):
            if isinstance(one.over, LeaseLost) and one.over.id != self.claim.sample_id:
                raise LetGo("a sample that it forked was taken away") from one.over
            if isinstance(one.over, asyncio.CancelledError):
                if one in cut:
                    continue
                kind = f"ctx.{one.made.over_in} of sample {one.sample_id}"
                raise EpisodeFailed(
                    self.claim.sample_id,
                    f"it cancelled {kind}, as asyncio.wait_for and asyncio.timeout do. Limit a turn with "
                    "max_new_tokens, and a step with timeout_s",
                )
            if one.over is not None:
                raise one.over


async def _stop_calls(context: Context) -> dict[Context, str]:
    """The function has ended: calls that it left running in other tasks are cancelled, and no more are taken. Returns
    what ran."""
    ran, tasks = {}, set()
    for one in (context, *context.forks):
        one.made.closed = True
        if one.made.running and one.made.task is not None:
            ran[one] = one.made.running
            tasks.add(one.made.task)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=STOP_S)
    return ran


def _ending(turns: Turns, context: Context, reward: float | None) -> fanout.End:
    """How a sample ends whose calls are all made. Raises EpisodeDiverged where the record has more of them."""
    if context.unfinished and turns.record is not None:
        left = turns.record.calls[context.calls]
        told = f"{left.kind} {left.name}".strip()
        raise EpisodeDiverged(turns.claim.sample_id, context.calls, told, "the end of the function")
    status = SampleStatus.TRUNCATED if context.cut_off else SampleStatus.COMPLETED
    return turns.claim, status.value, "length" if context.cut_off else "stop", reward


def number(claim: Claim, value: Any) -> float:
    """The reward that an episode gives. Raises EpisodeFailed."""
    told = math.nan if isinstance(value, float) and math.isnan(value) else codec.reward(value)
    if told is None:
        raise EpisodeFailed(
            claim.sample_id, f"its reward is {value!r:.100}; an episode gives {codec.REWARDS}, NaN or None"
        )
    return told
