"""Miles' buffer of finished groups: its calls, and what is left of it after a crash."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from samplestore import Store
from samplestore.slime import StoreDataBuffer

from ..support import factory as f
from .standin import args_of, close_all, process_died
from .test_slime_generates import generated


@dataclass(frozen=True)
class DataBufferInput:
    source: Any
    group: Any
    weight_update_epoch: int = 0


@pytest.fixture(autouse=True)
def closed(store: Store) -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def miles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Miles ran in this process: the modules whose classes are looked up."""
    from samplestore.slime.objects import PlainSample

    for name, content in {
        "miles": {}, "miles.utils": {}, "miles.rollout": {}, "miles.utils.types": {"Sample": PlainSample},
        "miles.rollout.fully_async_data_buffer": {"DataBufferInput": DataBufferInput},
    }.items():  # fmt: skip
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def group_of(number: int, **more: Any) -> DataBufferInput:
    return DataBufferInput([f"prompt {number}"], [generated(number, 2 * number + i, **more) for i in range(2)])


def buffer_of(url: str, **more: Any) -> tuple[StoreDataBuffer, list[Any], list[Any]]:
    unused: list[Any] = []
    discarded: list[Any] = []
    args = args_of(url, "miles", async_data_buffer_capacity_factor=1.0, max_weight_staleness=2, **more)
    given = SimpleNamespace(args=args, unused_handler_fn=unused.append, discard_handler_fn=discarded.append)
    return StoreDataBuffer(given), unused, discarded


def not_first(args: Any, group: list[Any]) -> bool:
    return bool(group[0].group_index != 0)


async def test_the_calls_that_miles_makes(store: Store, db_url: str) -> None:
    buffer, unused, discarded = buffer_of(db_url, dynamic_sampling_filter_path=f"{__name__}.not_first")
    await buffer.put(group_of(0))
    await buffer.put(group_of(1, status="aborted"))
    assert (unused, discarded) == ([["prompt 1"]], [["prompt 0"]])
    two, three, four = (group_of(n, weight_versions=["1"]) for n in (2, 3, 4))
    await buffer.put(two)
    await buffer.put(three)
    run = store.existing_run("miles")
    assert f.states(run) == ["ready", "ready"]
    waiting = asyncio.create_task(buffer.put(four))  # two groups fit
    assert await buffer.get(current_version=2) is two
    await waiting
    assert f.states(run) == ["consumed", "ready", "ready"]
    assert await buffer.get(current_version=3) is three
    verdict = buffer.validate_final_admission([two, three], current_weight_update_epoch=1, current_version=4)
    assert verdict == (0, 1), "both are three versions behind by now"
    told = buffer.get_metrics()
    assert told["rollout/fully_async/queue_size"] == 1 and told["rollout/fully_async/aborted_groups_filtered"] == 1
    assert buffer.get_metrics() == {"rollout/fully_async/queue_size": 1.0}
    stale = asyncio.create_task(buffer.get(current_version=9))
    await buffer.put(five := group_of(5, weight_versions=["8"]))
    assert await stale is five and unused[-1] == ["prompt 4"]
    assert await buffer.discard_all(discarded.append) is None
    f.sound(run)


async def test_finished_groups_survive_a_crash(store: Store, db_url: str, miles: None) -> None:
    first, _, _ = buffer_of(db_url)
    await first.put(group_of(0))
    await first.put(group_of(1))
    assert (await first.get()).source == ["prompt 0"]
    process_died()
    again, _, _ = buffer_of(db_url)
    left = await again.get()
    assert [s.tokens for s in left.group] == [[1, 2, 1, *f.ids_of(3)]] * 2
    assert [(s.status.value, s.tokens) for s in left.source] == [("pending", [])] * 2
    assert f.states(store.existing_run("miles")) == ["consumed"] * 2


async def test_a_get_that_fails_or_is_cancelled_loses_nothing(
    store: Store, db_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, _, _ = buffer_of(db_url)
    given = [group_of(0), group_of(1)]
    for one in given:
        await buffer.put(one)
    run = store.existing_run("miles")
    consume, begun, go_on = buffer._consume, threading.Event(), threading.Event()

    def away(ids: list[int]) -> None:
        raise ConnectionError("the database is away")

    def slow(ids: list[int]) -> None:
        begun.set()
        assert go_on.wait(60)
        consume(ids)

    monkeypatch.setattr(buffer, "_consume", away)
    with pytest.raises(ConnectionError):
        await buffer.get()
    monkeypatch.setattr(buffer, "_consume", slow)
    waiting = asyncio.create_task(buffer.get())
    assert await asyncio.to_thread(begun.wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    again = asyncio.create_task(buffer.get())
    go_on.set()
    assert await asyncio.wait_for(again, 60) is given[0] and f.states(run) == ["consumed", "ready"]
    assert await asyncio.wait_for(buffer.get(), 60) is given[1] and f.states(run) == ["consumed"] * 2
    f.sound(run)


async def test_identical_groups(store: Store, db_url: str) -> None:
    buffer, _, _ = buffer_of(db_url)
    for index in (0, 1, 1):  # the last is a repetition
        one = group_of(0)
        for sample in one.group:
            sample.group_index = index
        await buffer.put(one)
        await buffer.get()
    assert f.states(store.existing_run("miles")) == ["consumed"] * 2


async def test_a_process_that_was_away_hands_out(store: Store, db_url: str) -> None:
    buffer, _, _ = buffer_of(db_url)
    run = store.existing_run("miles")
    for number in range(2):
        await buffer.put(group_of(number))
        await buffer.get()
        for trainer in f.rows(run, "SELECT id FROM worker WHERE kind = 'trainer' AND state = 'live'"):
            f.kill(run, trainer["id"])
    assert f.states(run) == ["consumed"] * 2
