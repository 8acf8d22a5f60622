"""One claimed sample, from its claim to its end: finished, given back, or failed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np

from samplestore.errors import InvalidSegment, LeaseLost, SampleStoreError
from samplestore.queries.episodes import has_calls
from samplestore.types import Claim, StageClaim
from samplestore.verbs import samples
from samplestore.words import amount
from samplestore.workers.dispatch import Target
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.fleet import Fleet
from samplestore.workers.generation import Outcome, Request
from samplestore.workers.images import ImageData, known_prompt, require_kept, require_places
from samplestore.workers.limits import CONTEXT_MARGIN, GRAMMARS, Limits
from samplestore.workers.replies import EngineError, PromptRefused, refuses_prompt
from samplestore.writer import Call

log = logging.getLogger("samplestore.worker")

VOCAB_BOUND = 2**31  # of engines that tell no vocabulary; prompts were held against their tokenizer's when they came in
MAX_CUTS = 5  # requests in a row that died without a token, after which a sample is given back
BACKOFF_S = 0.25


class Host(Protocol):
    """What a trajectory needs of the worker that runs it."""

    client: EngineClient
    limits: Limits
    fleet: Fleet
    current_label: tuple[str, str | None] | None
    may_abort_all: bool  # the run's consent

    async def write(self, verb: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any: ...

    async def write_together(self, calls: Sequence[Call]) -> list[Any]: ...

    async def read(self, question: Any) -> Any: ...

    async def version_of(self, label: str | None) -> int | None: ...

    def give_up(self, error: EngineError) -> None: ...

    @property
    def images(self) -> ImageData: ...

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...


class LetGo(Exception):
    """Generation ends, and the sample goes back, for the reason given."""


class Trajectory:
    """A claimed sample and the task that generates it.

    keep_stages   its rewards are scored by this worker: `run` returns them
    """

    def __init__(self, claim: Claim, host: Host, keep_stages: samples.Kept) -> None:
        self.claim, self.host, self.keep_stages = claim, host, keep_stages
        self.request: Request | None = None  # the running one
        self.asked = "none"  # the engine, or the router, that had the last one
        self.told: str | None = None  # why it is to stop and go back
        self.task: asyncio.Task[None] | None = None
        self.limits = host.limits.over(claim.sampling, claim.max_new_tokens)  # of the requests that are made now
        self.image_data: list[str] = []  # data URLs
        self.turn_start = 0  # response position where the running turn began; a single turn is the whole response

    async def run(self) -> list[StageClaim]:
        """Generate until the sample ends; its stages, if it was finished here. Whatever happens, the sample does not
        stay with a worker that does nothing for it."""
        claim, write = self.claim, self.host.write
        try:
            done = await self._generate()
            if done is None:
                done = await write(*self._finish(claim.finish_reason))
            return done
        except LetGo as reason:
            await self._give_back(str(reason))
        except asyncio.CancelledError:
            await self._give_back(self.told or "request cut off")
            raise
        except LeaseLost as error:
            log.warning("sample=%d %s", claim.sample_id, error)
        except EngineError as error:
            if error.kind == "setup":  # no sample's fault, and no other sample would fare better
                await self._give_back("worker set up wrongly")
                self.host.give_up(error)
            else:
                await self._failed(error)
        except SampleStoreError as error:
            await self._failed(error)
        except Exception as error:  # nobody else would ever let go of the sample: it must count as a failure
            log.exception("engine=%s sample=%d failed unexpectedly", self.asked, claim.sample_id)
            await self._failed(error)
        return []

    @property
    def generating(self) -> bool:
        """Whether a request of it runs."""
        return self.request is not None

    @property
    def sample_ids(self) -> list[int]:
        """The samples that this worker owns for it."""
        return [self.claim.sample_id]

    def tell(self, reason: str) -> None:
        """Stop at the next chance and go back; the first reason counts."""
        self.told = self.told or reason

    async def abort(self, timeout_s: float) -> None:
        """Abort the running request at the engines; the partial comes back through the open call. Said again until it
        does: an abort that overtakes its request is not heard, and one that comes during a pause may be lost for good.
        One whose reply is complete is left alone: cut while its end is stored, its stages would belong to nobody.
        Then everything that its engine runs is aborted, if the run consents: they are this run's, and resumable. In the
        end the call is cut: an engine that sees its client go stops too."""
        request, task = self.request, self.task
        if request is None or task is None:
            return
        fleet, all_told = self.host.fleet, not self.host.may_abort_all
        end = time.monotonic() + timeout_s
        while not task.done() and self.request is request and not request.complete:
            if time.monotonic() >= end:
                if all_told:
                    log.warning("rid=%s abort was not answered; closing its connection", request.rid)
                    task.cancel()
                    return
                log.warning("rid=%s abort was not answered; aborting all that its engine runs", request.rid)
                await fleet.abort_all(request.engine)
                all_told, end = True, time.monotonic() + timeout_s
            await fleet.abort(request.rid, request.engine)
            await asyncio.wait([task], timeout=max(0.01, min(1.0, end - time.monotonic())))

    def _finish(self, reason: str | None) -> Call:
        return samples.finish, self.claim, None, reason, self.keep_stages

    async def _generate(self) -> list[StageClaim] | None:
        """Requests, one after the other, until the sample ends: it is resumed from its stored tokens whenever a
        request ends early. The budget is what is left of max_new_tokens, counted from stored tokens. Returns its stages
        where the last request has finished it, None where that is still to be done."""
        claim = self.claim
        if claim.n_tokens and claim.finish_reason not in (None, "abort", "length"):
            return None  # complete, and its worker died before it could say so: another token would be one too many
        if claim.attempt > 1:  # somebody had it before
            await self._require_no_episode()
        return await self._turn()

    async def _require_no_episode(self) -> None:
        """One turn more would end a sample that its episode has not ended. Raises EngineError("setup")."""
        claim = self.claim
        if await self.host.read(lambda c: has_calls(c, claim.sample_id, claim.incarnation)):
            raise EngineError(
                "setup", f"sample {claim.sample_id} was begun by an episode. Start this worker with the same: --episode"
            )

    async def _turn(self) -> list[StageClaim] | None:
        claim = self.claim
        if claim.images and not self.image_data:
            self.image_data = await self.host.images.urls(claim.images)
        self._check_vocabulary()
        self._check_sampling()
        resumes, idle = claim.n_tokens > self.turn_start, 0
        while True:
            self._check_told()
            budget = self._budget()
            if claim.n_tokens > self.turn_start and self._ends_with(int(claim.response_ids[-1])):
                claim.finish_reason = "stop"
                return None
            if budget <= 0:
                self._out_of_room()
                return None
            request, outcome = await self._ask(budget, resumes)
            if request.finished is not None:
                return request.finished
            resumes = outcome != Outcome.FINISHED and request.stored > 0  # one that was refused resumed nothing
            idle = 0 if request.stored else idle + 1
            self._check_told()
            if outcome in (Outcome.ABORTED, Outcome.CUT) and claim.n_tokens and not self.limits.resumes:
                raise LetGo("cut short, and the run does not resume")  # its next claim starts it from the prompt
            if outcome == Outcome.CUT and idle >= MAX_CUTS:
                if request.error is not None and _own_failure(request):
                    raise request.error  # engines that are well answer this sample, and only this one, so
                raise LetGo("engine unreachable")
            if outcome in (Outcome.CUT, Outcome.BUSY) or idle:
                # min: after an hour without engines 2**idle would be no float any more
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(5.0, BACKOFF_S * 2 ** min(idle, 8)))

    def _ends_with(self, token: int) -> bool:
        """Whether this token ends the response. An abort can come at the moment at which a request ends: its reply
        says "abort" and has the end token. Resumed, the sample would go on after its end."""
        sampling = self.limits.sampling
        ids = set() if sampling.get("ignore_eos") else set(self.host.fleet.members.stop_ids)
        ids.update(id for id in sampling.get("stop_token_ids") or () if isinstance(id, int))
        return token in ids

    def _closing(self, budget: int) -> Callable[[int, str, int], Call | None]:
        """What a request of so much budget asks when its reply is complete: the write that ends the sample, or None
        where only a slice has ended."""
        limits = self.limits

        def closing(made: int, reason: str, last: int) -> Call | None:
            if reason == "length" and self._ends_with(last):
                return self._finish("stop")  # its end came with the last token that it was given
            sliced = limits.mode == "sliced" and reason == "length" and limits.slice_tokens <= made < budget
            return None if sliced else self._finish(reason)

        return closing

    def _check_vocabulary(self) -> None:
        """One token outside the vocabulary kills a whole SGLang server: it never gets there."""
        size = self.host.fleet.members.vocab_size
        for what, ids in (("prompt", self.claim.prompt_ids), ("response", self.claim.response_ids)):
            wrong = np.flatnonzero((ids < 0) | (ids >= (size or VOCAB_BOUND)))
            if wrong.size:
                at = int(wrong[0])
                known = f"0 to {size - 1:,}" if size else f"0 to {VOCAB_BOUND - 1:,}"
                said = f"{what} token {int(ids[at])} at position {at} is outside the vocabulary ({known})"
                raise PromptRefused(said) if what == "prompt" else EngineError("refused", said)

    def _check_sampling(self) -> None:
        """One call makes one sample, a grammar is that of one call, and with seeds SGLang has no way to draw with
        min_p: the whole server dies. Raises EngineError."""
        sampling, engine = self.limits.sampling, self.host.fleet.members.deterministic
        said = None
        if sampling.get("n", 1) != 1:
            said = f"n={sampling['n']!r}: one call makes one sample. Leave n out: samples_per_prompt says how many"
        elif self.limits.may_be_cut and (grammar := next((name for name in GRAMMARS if sampling.get(name)), None)):
            said = (
                f"{grammar} begins anew with each request, also with one that goes on in the middle of a response. "
                "Make the run with resume=False, and start the worker with --mode stream"
            )
        elif sampling.get("min_p") and engine is not None:
            said = (
                f"min_p kills an engine that was started with --enable-deterministic-inference, as {engine} was. Leave "
                "min_p out, or start it without that flag"
            )
        if said is not None:
            own = self.limits is not self.host.limits  # the sample's own sampling, as an evaluation has it
            raise EngineError("refused" if own else "setup", said)

    async def _check_images(self) -> int | None:
        """Tokens that the engine must make of prompt and images, where that is known. Raises EngineError."""
        claim, fleet = self.claim, self.host.fleet
        require_kept(fleet, claim, self.limits)
        require_places(claim, fleet.members.image_token)
        return await self.host.read(lambda c: known_prompt(c, claim)) if claim.n_tokens else None

    def _new_request(self, target: Target, budget: int, prompt_tokens: int | None) -> Request:
        host, fleet = self.host, self.host.fleet

        def labels() -> set[str | None]:
            return {fleet.engines.get(url) for url in ([target.engine] if target.engine else fleet.fit)}

        def cache_label() -> str | None:
            """None while an engine may be on its way to other weights."""
            current = host.current_label[0] if host.current_label else None
            return current if labels() == {current} else None

        return Request(
            self.claim, host.client, host.write, host.write_together, self.limits, self._closing(budget),
            host.version_of, labels(), self._why_aborted, None if host.fleet.flushes else cache_label,
            self.image_data, prompt_tokens, self.turn_start,
        )  # fmt: skip

    async def _ask(self, budget: int, resumes: bool) -> tuple[Request, str]:
        """One request, and its outcome. Whatever ends it but its own last word, the engine is told to stop: some go on
        after their client has gone."""
        fleet = self.host.fleet
        prompt_tokens = await self._check_images() if self.image_data else None
        if not fleet.fit:
            raise LetGo("no engine is fit")
        began, outcome = time.monotonic(), Outcome.CUT
        with fleet.place(self.claim.group_id) as target:
            request = self.request = self._new_request(target, budget, prompt_tokens)
            try:
                outcome = await request.run(target, budget, resumes)
            except (EngineError, InvalidSegment) as error:
                # one log-prob that is no number after many that are: the weights may have changed in between
                if isinstance(error, EngineError) and not self.claim.n_tokens and refuses_prompt(error):
                    raise PromptRefused(f"the engine refused the prompt: {error.message}", error.status) from error
                kind = error.kind if isinstance(error, EngineError) else error.field
                if kind not in ("unfit", "logprobs"):
                    raise
                if await fleet.unfit_after(request.engine, self.claim.prompt_ids, began, error):
                    raise LetGo("engine unfit") from error
                raise
            finally:
                self.request, self.asked = None, request.engine or target.base
                if outcome == Outcome.CUT:
                    self.host.spawn(fleet.abort(request.rid, request.engine))
            if outcome == Outcome.CUT and not _own_failure(request):
                fleet.suspect(target, request.error)
        return request, outcome

    def _budget(self) -> int:
        claim, room = self.claim, self.host.fleet.members.context_length
        budget = claim.budget(self.limits.max_new_tokens)
        if room is None:
            return budget
        return min(budget, room - int(claim.prompt_ids.size) - claim.n_tokens - CONTEXT_MARGIN)

    def _out_of_room(self) -> None:
        """The budget is used up: the sample is truncated, without another request."""
        if self.claim.n_tokens == 0:
            n, room = self.claim.prompt_ids.size, self.host.fleet.members.context_length
            raise PromptRefused(f"a prompt of {amount(n, 'token')} leaves no room in a context of {room:,}")
        self.claim.finish_reason = "length"

    def _why_aborted(self, label: str | None) -> str:
        if self.told is not None:
            return self.told
        current = self.host.current_label[0] if self.host.current_label else None
        return "weight update" if label != current else "engine"

    def _check_told(self) -> None:
        if self.told is not None:
            raise LetGo(self.told)

    async def _give_back(self, reason: str) -> None:
        try:
            await asyncio.shield(self.host.write(samples.release, self.claim, reason))
        except LeaseLost as error:
            log.warning("sample=%d %s", self.claim.sample_id, error)

    async def _failed(self, error: Exception) -> None:
        claim = self.claim
        log.error("engine=%s sample=%d attempt=%d %s", self.asked, claim.sample_id, claim.attempt, error)
        try:
            await self.host.write(
                samples.fail, claim, str(error) or type(error).__name__, prompt_refused=isinstance(error, PromptRefused)
            )
        except LeaseLost as lost:
            log.warning("sample=%d %s", claim.sample_id, lost)


def _own_failure(request: Request) -> bool:
    """Whether an engine that is there failed at this very request: by its own word, or, where no router stands in
    between, by an answer of HTTP 5xx."""
    error = request.error
    if error is None:
        return False
    answered = request.direct and error.status is not None and error.status >= 500
    return error.kind in ("error", "stale") or answered
