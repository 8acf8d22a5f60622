"""Which engine a worker tells first of weights that may kill whoever loads them, and whom it tells then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samplestore import Store
from samplestore.run import Run
from samplestore.states import WeightUpdateMode
from samplestore.verbs import weights
from samplestore.workers.control import died_of
from samplestore.workers.engine_client import EngineClient
from samplestore.workers.updates import ANOTHER_S, Updates, why_not_yet
from tests.cli.test_engine_canary import LOAD, Make, engines, untouched
from tests.support import factory as f
from tests.support.scripted_engine import ScriptedEngine
from tests.worker.test_checkpoint_fits import MODEL, checkpoint

__all__ = ["engines"]


class Worker:
    """Drives the updates of these engines as a worker does, each round all of those that are behind."""

    def __init__(self, run: Run, client: EngineClient, told: list[ScriptedEngine]) -> None:
        self.run, self.told = run, told
        self.served: dict[str, str | None] = {one.url: "default" for one in told}
        self.id = f.register(run)
        self.updates = Updates(client, self.write, self.read, run.id, self.id, WeightUpdateMode.KEEP, None, 20.0)
        for one in told:
            run.transact(lambda tx, url=one.url: weights.see_engine(tx, url, "default"))

    async def write(self, verb: Any, *args: Any) -> Any:
        await asyncio.sleep(0)  # as a database lets others go on meanwhile
        return self.run.transact(lambda tx: verb(tx, *args))

    async def read(self, question: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(0)
        with self.run.database.reading() as connection:
            return question(connection)

    async def round(self) -> None:
        for one in self.told:
            await self.updates.follow(one.url, self.served, False)
        await asyncio.gather(*self.updates.running.values())

    def states(self) -> dict[str, str]:
        return {row["url"]: row["state"] for row in f.rows(self.run, "SELECT url, state FROM engine")}


async def test_weights_that_kill_are_told_to_one(
    store: Store, tmp_path: Path, engines: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """By two workers that see the same engines. The others go on, and get the next weights, which are sound."""
    run, told = f.make_run(store), engines(3, "/elsewhere/v0", dies=True)
    dead, *others = told
    run.publish_weights("/elsewhere/wide", step=1)
    async with EngineClient(20.0) as client:
        first, second = Worker(run, client, told), Worker(run, client, told)
        await asyncio.gather(first.round(), second.round())
        await second.round()
        assert all(untouched(one) for one in others)
        assert first.states() == {dead.url: "failed", others[0].url: "live", others[1].url: "live"}
        assert f"engine={others[0].url} is not told to load" in caplog.text
        assert f"{dead.url} {died_of('/elsewhere/wide')}" in caplog.text
        caplog.clear()
        await second.round()
        assert "is not told" not in caplog.text, "once is enough"
        f.execute(run, "UPDATE engine SET not_before = 0.5 WHERE not_before > 0")  # its back-off has passed
        for _ in range(2):
            await second.round()
        assert all(untouched(one) for one in others), "one that is away does not take back what it died of"
        made = run.publish_weights("/elsewhere/v2", step=2)
        for _ in range(3):
            await second.round()
    assert [one.label for one in others] == [made.label] * 2


async def test_two_looks_of_one_worker_tell_one(store: Store, engines: Make) -> None:
    run, told = f.make_run(store), engines(2, "/elsewhere/v0", dies=True)
    run.publish_weights("/elsewhere/wide", step=1)
    async with EngineClient(20.0) as client:
        worker = Worker(run, client, told)
        await asyncio.gather(worker.round(), worker.round())
    assert vars(told[0])["loads"] == [told[0].url] and untouched(told[1])


async def test_one_that_refuses_holds_up_nobody(store: Store, engines: Make) -> None:
    """It lives, and so will the next: the fault may be its own."""
    run, told = f.make_run(store), engines(3, "/elsewhere/v0")
    told[0].load_fails = 1
    made = run.publish_weights("/elsewhere/v1", step=1)
    async with EngineClient(20.0) as client:
        worker = Worker(run, client, told)
        for _ in range(3):
            await worker.round()
    assert [one.label for one in told[1:]] == [made.label] * 2 and not told[0].paused


async def test_where_shapes_can_be_compared_nobody_waits(store: Store, tmp_path: Path, engines: Make) -> None:
    run, told = f.make_run(store), engines(2, str(checkpoint(tmp_path / "v0", MODEL)))
    run.publish_weights(str(checkpoint(tmp_path / "v1", MODEL)), step=1)
    async with EngineClient(20.0) as client:
        worker = Worker(run, client, told)
        await worker.round()
    assert [[name for name, _ in one.calls].count(LOAD) for one in told] == [1, 1]


async def test_the_next_weights_of_a_trainer_are_told_to_all_at_once(store: Store, engines: Make) -> None:
    """One waits for the first weights that it can't see; those that follow from the same folder hold up nobody."""
    run, told = f.make_run(store), engines(2, "/elsewhere/v0")
    async with EngineClient(20.0) as client:
        worker = Worker(run, client, told)
        loads = []
        for step in (1, 2):
            run.publish_weights(f"/checkpoints/{step}", step=step)
            await worker.round()
            loads.append([[name for name, _ in one.calls].count(LOAD) for one in told])
            await worker.round()
    assert loads == [[1, 0], [2, 2]]


PATH = "/w/1"
DIED = f"engine unreachable: http://a:1 {died_of(PATH)} (reset). See"


def row(**changes: Any) -> Any:
    given = {"url": "http://a:1", "label": "old", "owner": None, "failures": 0, "error": None, "age": 1.0}
    return SimpleNamespace(**{"state": "live", **given, **changes})


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], None),
        ([row()], None),
        ([row(owner=7)], "is told first"),
        ([row(owner=7), row(label="new")], None),
        ([row(owner=7, state="failed")], "is told first"),
        ([row(owner=7, state="failed", label=None)], None),
        ([row(failures=1, error=DIED)], "died"),
        ([row(failures=1, error=DIED), row(label="new")], None),
        ([row(failures=1, error=DIED, age=ANOTHER_S + 1)], None),
        ([row(failures=1, error=DIED, age=ANOTHER_S + 1), row(failures=3, error=DIED, age=ANOTHER_S + 1)], "died"),
        ([row(failures=0, error=DIED)], None),
        ([row(failures=1, error=DIED.replace(PATH, "/w/12"))], None),
        ([row(failures=1, error="did not load")], None),
    ],
)
def test_whose_turn_it_is(others: list[Any], why: str | None) -> None:
    said = why_not_yet(others, "new", PATH)
    assert said is None if why is None else (died_of(PATH) if why == "died" else why) in str(said)
