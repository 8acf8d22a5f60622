"""What an episode's function gives is bounded and checked before anything is done with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samplestore.errors import EpisodeLimit, InvalidSetting, StepFailed
from samplestore.examples import tiny_model
from samplestore.queries.episodes import Record
from samplestore.tokenizers import load_tokenizer
from samplestore.workers.chat import TemplateChanged
from samplestore.workers.episode_values import MAX_APPEND_BYTES, MAX_RESULT_BYTES, Values
from samplestore.workers.episodes import Context, EpisodeOptions


class Host:
    """Takes every write, and stores nothing."""

    def __init__(self) -> None:
        self.writes: list[Any] = []

    async def write(self, verb: Any, *args: Any) -> None:
        self.writes.append((verb.__name__, *args))

    async def write_together(self, calls: Any) -> None:
        self.writes += [(call[0].__name__, *call[1:]) for call in calls]


def context(prompt: Any = "", ids: Any = (1, 2), tokenizer: Any = None, **options: Any) -> Any:
    claim = SimpleNamespace(
        sample_id=1, group_number=0, index=0, incarnation=0, prompt=prompt, label=None, metadata={}, seq=0, n_tokens=0,
        prompt_ids=np.array(ids, np.int32), response_ids=np.empty(0, np.int32), finish_reason=None,
    )  # fmt: skip
    turns: Any = SimpleNamespace(claim=claim, host=Host(), check=lambda: None, room=lambda: 100 - claim.n_tokens)
    chosen = EpisodeOptions(function=lambda ctx: None, tokenizer=tokenizer, **options)
    return Context(turns, Record([], 0, None, None, []), chosen, "uuid")


def run(work: Any) -> Any:
    return asyncio.run(work)


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes", {1: 2}, "a\x00b", {"deep": {"set": {1}}}])
def test_what_json_cannot_hold(value: Any) -> None:
    """As an argument it is refused before the step is begun; as a result the step has failed, and says why."""
    ctx = context()
    with pytest.raises(InvalidSetting, match="JSON"):
        run(ctx.step(str, value))
    assert ctx._turns.host.writes == []
    with pytest.raises(StepFailed, match="JSON"):
        run(ctx.step(lambda: value, name="tool"))
    assert [write[0] for write in ctx._turns.host.writes] == ["begin", "settle"]


def test_sizes() -> None:
    ctx = context()
    with pytest.raises(StepFailed, match=f"{MAX_RESULT_BYTES:,}"):
        run(ctx.step(lambda: "x" * (MAX_RESULT_BYTES + 1), name="tool"))
    with pytest.raises(EpisodeLimit):
        Values(1, SimpleNamespace(control_names=[])).ids("x" * (MAX_APPEND_BYTES + 1))


def test_too_many_calls() -> None:
    ctx = context(max_calls=2)
    for _ in range(2):
        run(ctx.append([5]))
    with pytest.raises(EpisodeLimit, match="--episode-max-calls"):
        run(ctx.append([5]))
    with pytest.raises(EpisodeLimit):
        run(ctx.generate())


def test_a_step_that_takes_too_long() -> None:
    ctx = context(step_timeout_s=0.01)

    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StepFailed, match="too long"):
        run(ctx.step(forever))


def test_one_call_at_a_time() -> None:
    """A sample is one sequence: two turns at once would have no order."""
    ctx = context()

    async def both() -> None:
        began = asyncio.Event()

        async def slow() -> None:
            began.set()
            await asyncio.Event().wait()

        first = asyncio.create_task(ctx.step(slow))
        await began.wait()
        with pytest.raises(InvalidSetting, match="await the first"):
            await ctx.append([5])
        first.cancel()

    run(both())


def test_say_needs_the_prompt_of_its_template(tmp_path: Path) -> None:
    """Tokens that the template would not have written: of another tokenizer, or with images expanded."""
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "go"}]
    right = tokenizer.encode(tokenizer.render(messages)).tolist()
    ctx = context(messages, right, tokenizer)
    assert run(ctx.say([{"role": "user", "content": "on"}])) > 0
    with pytest.raises(TemplateChanged):
        run(context(messages, [*right, 7], tokenizer).say([{"role": "user", "content": "on"}]))
    with pytest.raises(InvalidSetting, match=r"ctx\.append"):
        run(context("go", right, tokenizer).say([{"role": "user", "content": "on"}]))
    with pytest.raises(InvalidSetting, match="--tokenizer"):
        run(context(messages, right).say([{"role": "user", "content": "on"}]))
