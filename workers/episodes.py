"""Durable episodes: `async def episode(ctx)` for several turns, tools and agents.

Every call of `ctx` is recorded. After a crash, an abort or new weights the function runs again from its first line;
what is recorded is answered from the record, in order, without engine or tool, and it goes on live where that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from samplestore import codec
from samplestore.errors import EpisodeTruncated, InvalidSetting
from samplestore.queries.episodes import DONE, Record, RecordedCall
from samplestore.run import advance
from samplestore.types import Ids
from samplestore.verbs import appends
from samplestore.workers.chat import Conversation, TemplateChanged, after
from samplestore.workers.episode_calls import Call, Calls
from samplestore.workers.episode_steps import Replay, Steps, Unknown, bounded
from samplestore.workers.episode_values import Values

if TYPE_CHECKING:
    from samplestore.workers.episode_runs import Turns


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said in one turn.

    tokens   int32 [n], its end token included
    text     without control tokens; "" where the worker has no tokenizer
    finish_reason   "stop", or "length": its own limit or the room was used up
    start, stop     response positions
    """

    tokens: Ids
    text: str
    finish_reason: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """How a worker runs episodes.

    function         async def episode(ctx); what it returns is the reward, a number; NaN where none can be told (the
                     sample gets no advantage); or None, and it is scored like any other
    tokenizer        to make text tokens, and tokens text; None: the function works with token ids only
    max_calls        calls of ctx in one episode
    max_aborts       an episode that was aborted more often fails
    step_timeout_s   of a step that says nothing else
    """

    function: Callable[[Context], Any]
    tokenizer: Any = None
    max_calls: int = 1000
    max_aborts: int = 100
    step_timeout_s: float = 600.0


class Forked(Protocol):
    """Makes the sample that call `number` forks, or has forked: `child`."""

    async def __call__(
        self, number: int, key: str, asked: Any, upto: int | None, own_prompt: Ids | None, child: int | None
    ) -> Turns: ...


class Context:
    """What an episode's function is given: one call at a time, since a sample is one sequence of tokens.

    prompt, label, metadata, tools   of the prompt's row
    index        of the sample within its group
    truncated    some tokens had no room: the sample will be `truncated`
    reward       of a fork: set it to give it one of its own; NaN where none can be told
    """

    def __init__(
        self,
        turns: Turns,
        record: Record,
        options: EpisodeOptions,
        uuid: str,
        *,
        forked: Forked | None = None,
        at: int = 0,
    ) -> None:
        claim = turns.claim
        self._turns, self._claim, self._options, self._record, self._uuid = turns, claim, options, record, uuid
        self.sample_id, self.group_number, self.index = claim.sample_id, claim.group_number, claim.index
        self.prompt, self.label, self.metadata = claim.prompt, claim.label, claim.metadata
        self.tools, self.tokenizer = record.tools, options.tokenizer
        self.truncated = False
        self._calls = Calls(turns, record.calls, options.max_calls, uuid, at)
        self._last_reason: str | None = None  # of the last call, where that was a turn
        self._values = Values(claim.sample_id, options.tokenizer)
        self._steps = Steps(claim.sample_id, self._values, options.step_timeout_s)
        self._conversation: Conversation | None = None
        self._opening: Ids | None = claim.prompt_ids  # what the template has written of it; None: something else did
        self._shared: Ids = np.empty(0, np.int32)  # of a branch: the response that it goes on from
        self._forked = forked  # None: a fork's own context
        self.forks: list[Context] = []
        self.reward: float | None = None

    # -- what there is

    @property
    def prompt_ids(self) -> Ids:
        """int32 [p]"""
        return self._claim.prompt_ids

    @property
    def response_ids(self) -> Ids:
        """int32 [n]: everything up to here, turns and what was appended."""
        return self._claim.response_ids[: self._calls.at]

    @property
    def room(self) -> int:
        """Tokens that the response may still have: of its budget and of the model's context, whichever ends first."""
        return max(0, self._turns.room() + self._claim.n_tokens - self._calls.at)

    @property
    def replaying(self) -> bool:
        """Whether the next call is answered from the record."""
        return self._calls.replaying

    @property
    def calls(self) -> int:
        """Calls made so far, in this run of the function."""
        return self._calls.number

    @property
    def unfinished(self) -> bool:
        """Whether the record has calls that the function has not made."""
        return self.replaying

    @property
    def cut_off(self) -> bool:
        """Whether the sample ends truncated: something had no room, or its last turn was ended by its limit."""
        return self.truncated or self._last_reason == "length"

    @property
    def over(self) -> BaseException | None:
        """What has ended the episode before its function did."""
        return self._calls.over

    @property
    def made(self) -> Calls:
        """The calls, for who runs the function."""
        return self._calls

    # -- calls

    @contextlib.asynccontextmanager
    async def _one(self, kind: str) -> AsyncIterator[Call]:
        """The next call. That one had no room is remembered, also where the function catches it."""
        try:
            async with self._calls.one(kind) as call:
                yield call
        except EpisodeTruncated:
            self.truncated = True
            raise

    async def generate(self, *, max_new_tokens: int | None = None, sampling: Mapping[str, Any] | None = None) -> Turn:
        """One turn of the model, of at most `max_new_tokens`, clamped to the room that is left. sampling: parameters
        of the engine over those of the worker. Raises EpisodeTruncated where there is no room for a token."""
        if max_new_tokens is not None and max_new_tokens < 1:
            raise InvalidSetting("max_new_tokens", max_new_tokens, "a whole number above 0, or None")
        given = self._values.json("sampling", dict(sampling or {}))
        asked = {"max_new_tokens": max_new_tokens, "sampling": given}
        async with self._one("generate") as call:
            row = call.recorded("", asked)
            if row is None or row.state != DONE:
                row = await self._live_turn(call, row, asked)
            assert row.start is not None and row.stop is not None
            self._calls.at, self._last_reason = row.stop, row.result["finish_reason"]
            if self._last_reason == "length" and (max_new_tokens is None or row.stop - row.start < max_new_tokens):
                self.truncated = True  # by the room, not by a limit of its own: as a replay must find it too
            tokens = self._claim.response_ids[row.start : row.stop]
            text = "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)
            return Turn(tokens, text, row.result["finish_reason"], row.start, row.stop)

    async def _live_turn(self, call: Call, row: RecordedCall | None, asked: dict[str, Any]) -> RecordedCall:
        claim, start = self._claim, self._calls.at
        if row is None:
            if self.truncated or self.room <= 0:
                raise EpisodeTruncated(self.sample_id, claim.n_tokens)
            await call.begin("", asked)
        limit = asked["max_new_tokens"]
        reason = await self._turns.turn(call.number, start, limit, asked["sampling"])
        return RecordedCall(
            call.number, "generate", "", DONE, asked, {"finish_reason": reason}, start, claim.n_tokens, None
        )

    async def append(
        self, content: str | Sequence[int] | Ids, *, max_tokens: int | None = None, control: bool = False
    ) -> int:
        """Add tokens that the model has not made: a tool's output, a message. They carry no loss. Returns how many.

        content      text, or token ids. Text loses the names of control tokens (<|im_end|>), unless `control`
        max_tokens   longer content is cut there; the episode goes on
        What has no room is cut as well; then the sample is `truncated`, and the next turn raises EpisodeTruncated.
        """
        ids = self._values.ids(content, control)
        return await self._append(ids if max_tokens is None else ids[: max(0, max_tokens)])

    async def say(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Add chat messages after the model's turn, as the chat template writes them, and open its next one. Only what
        is new is rendered; that the rest stays as it was is checked. Raises TemplateChanged."""
        if self._conversation is None:
            self._conversation = self._begun()
        before = self.response_ids if self._calls.at else self._shared
        last = int(before[-1]) if before.size else None
        text = self._conversation.next(self._values.json("messages", [dict(m) for m in messages]))
        return await self._append(after(self._conversation.tokenizer, text, last))

    def _begun(self) -> Conversation:
        """The conversation as the prompt has begun it. Raises TemplateChanged where its tokens are others than the
        template's: of another tokenizer, or with what a processor has put in for images."""
        if not isinstance(self.prompt, list) or self._opening is None:
            allowed = "messages; ctx.append adds text to anything else"
            raise InvalidSetting("prompt", str(self.prompt)[:100], allowed)
        tokenizer = self._values.needs_tokenizer("ctx.say")
        begun = Conversation(tokenizer, self.prompt, self.tools, self._record.template_args)
        text = begun.prompt()
        if not np.array_equal(tokenizer.encode(text), self._opening):
            raise TemplateChanged(tokenizer.decode(self._opening)[-200:], text[-200:])
        return begun

    async def _append(self, ids: Ids) -> int:
        asked = {"tokens": int(ids.size), "sha256": hashlib.sha256(codec.ids_bytes(ids)).hexdigest()}
        async with self._one("append") as call:
            row = call.recorded("", asked)
            self._last_reason = None
            if row is not None:
                assert row.start is not None and row.stop is not None
                self._calls.at, self.truncated = row.stop, self.truncated or bool(row.result["cut"])
                return row.stop - row.start
            if self.truncated:
                raise EpisodeTruncated(self.sample_id, self._claim.n_tokens)
            kept = ids[: self.room]
            cut = int(ids.size - kept.size)
            await self._store(call, kept, asked, cut)
            self.truncated = cut > 0
            return int(kept.size)

    async def _store(self, call: Call, kept: Ids, asked: dict[str, Any], cut: int) -> None:
        """The tokens and their record, or neither."""
        claim, seq = self._claim, self._claim.seq
        stop = self._calls.at + int(kept.size)
        writes: list[Any] = []
        if kept.size:
            writes.append((appends.append, claim, seq, kept, None, None, None, "environment"))
        writes.append(call.noted(asked, {"cut": cut}, stop))
        await self._turns.host.write_together(writes)
        if kept.size:
            advance(claim, seq, int(kept.size), None)
            claim.response_ids = np.concatenate([claim.response_ids, kept])
        self._calls.at = stop

    async def step(
        self, function: Callable[..., Any], *args: Any, name: str | None = None, on_unknown: Unknown = "retry",
        replay: Replay = "recorded", timeout_s: float | None = None,
    ) -> Any:  # fmt: skip
        """Do something outside once: `function(*args)`, sync (in a thread) or async. Its result, JSON, is recorded, and
        answers replays. A keyword `idempotency_key` is given to it, if it takes one: the same for every try.

        on_unknown   a worker died in it, and nobody knows whether it was done: "retry" does it again with the same
                     key; "fail" raises OutcomeUnknown
        replay       "execute": a replay does it again, for an environment whose state is in this process, and holds the
                     result against the record
        Raises StepFailed if it raises or takes longer than `timeout_s`; a replay raises that again.
        """
        if on_unknown not in ("retry", "fail") or replay not in ("recorded", "execute"):
            raise InvalidSetting("on_unknown, replay", (on_unknown, replay), '"retry" | "fail", "recorded" | "execute"')
        called = str(name or getattr(function, "__name__", type(function).__name__))
        asked = {"args": bounded(self._values.json("arguments", list(args)))}
        async with self._one("step") as call:
            row = call.recorded(called, asked)
            self._last_reason = None
            return await self._steps.done(call, row, called, asked, function, args, on_unknown, replay, timeout_s)

    async def snapshot(self, save: Callable[[], Any], restore: Callable[[Any], Any]) -> None:
        """Keep the state of an environment that lives in this process: `save()` (JSON) is recorded now and with every
        step from here on, and a replay gives it to `restore(state)` instead of doing the steps."""
        async with self._one("snapshot") as call:
            row = call.recorded("", None)
            self._steps.environment = (save, restore)
            if row is None:
                await call.note({"state": self._values.json("state", save())})
            else:
                restore(row.result["state"])

    async def fork(
        self, *, prompt: str | Sequence[Mapping[str, Any]] | Sequence[int] | Ids | None = None, upto: int | None = None
    ) -> Context:
        """Another training sample of this rollout: a sub-agent, a branch, a context that was compacted. It is in the
        same group, and both share one weight in the loss. It is generated through the context that this returns, and
        ends with the episode; what its `reward` is set to is its reward, else it gets that of the episode.

        prompt   of its own: text, messages or token ids, without loss. Control tokens that contents spell are left out
        upto     without a prompt: it begins with this response, up to this position (all of it if left out), by
                 reference: shared tokens are trained on once, here
        """
        if self._forked is None:
            raise InvalidSetting("fork", self.sample_id, "the episode's own context: a fork is not forked again")
        own, said = (None, None) if prompt is None else self._values.prompt(prompt, self._record.template_args)
        at = None if own is not None else self._calls.at if upto is None else upto
        asked: dict[str, Any] = {"upto": at}
        if own is not None:
            asked = {"tokens": int(own.size), "sha256": hashlib.sha256(codec.ids_bytes(own)).hexdigest()}
        async with self._one("fork") as call:
            row = call.recorded("", asked)
            self._last_reason = None
            made = None if row is None else int(row.result["child"])
            child = await self._forked(call.number, call.key, asked, at, own, made)
            return self._opened(child, own, said, at)

    def _opened(self, turns: Turns, own: Ids | None, said: Any, at: int | None) -> Context:
        record = turns.record
        assert record is not None
        context = Context(turns, record, self._options, self._uuid, at=0 if own is None else int(own.size))
        if own is not None:
            context.prompt, context.tools, context._opening = said, None, own
        elif at == self._calls.at and at:  # it branches off here: what was said is the same up to here
            context._shared = self.response_ids
            if self._conversation is None:  # nothing was said yet, so an answer to the prompt stands before it
                context._opening = self._opening
            else:
                context._opening, context._conversation = None, self._conversation.copy()
        elif at:
            context._opening = None
        self.forks.append(context)
        return context
