"""samplestore engines update beside a worker's update, or another one: one of them drives an engine, and the other is
told who."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import EngineInUse, EngineUpdating, WorkerDead
from samplestore.run import Run
from samplestore.verbs import weights
from samplestore.workers import engine_telling
from tests.cli.conftest import Cli
from tests.support import factory as f
from tests.support.scripted_engine import ScriptedEngine

URLS = ["http://a:1", "http://b:1"]


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    made = ScriptedEngine(label="default")
    yield made
    made.close()


def claim(run: Run, worker: int, urls: list[str]) -> list[dict[str, Any]]:
    return run.transact(lambda tx: weights.claim_engines(tx, worker, urls))


def owners(run: Run) -> dict[str, int | None]:
    return {row["url"]: row["owner"] for row in f.rows(run, "SELECT url, owner FROM engine")}


def test_all_or_none(store: Store) -> None:
    run = f.make_run(store)
    first, second = f.register(run), f.register(run)
    claim(run, first, URLS[1:])
    with pytest.raises(EngineUpdating) as told:
        claim(run, second, URLS)
    assert told.value.url == URLS[1] and told.value.worker[0] == first and f"worker {first} (" in str(told.value)
    assert owners(run).get(URLS[0]) is None, "the one that was free stays so"
    assert claim(run, first, URLS), "said again, its own are its own"


def test_what_a_worker_drives_and_what_is_driven_by_hand_exclude_each_other(store: Store) -> None:
    run = f.make_run(store)
    worker, tool = f.register(run), f.register(run, "tool")
    run.transact(lambda tx: weights.see_engine(tx, URLS[0], "default"))
    run.publish_weights("/weights/1", step=1)
    held = run.transact(lambda tx: weights.claim_engine(tx, worker, URLS[0]))
    assert held is not None
    with pytest.raises(EngineUpdating):
        claim(run, tool, URLS)
    run.transact(lambda tx: weights.engine_updated(tx, held, held["label"]))
    run.publish_weights("/weights/2", step=2)
    [mine, _] = claim(run, tool, URLS)
    assert run.transact(lambda tx: weights.claim_engine(tx, worker, URLS[0])) is None
    run.transact(lambda tx: weights.engine_updated(tx, mine, "by hand"))
    assert run.transact(lambda tx: weights.claim_engine(tx, worker, URLS[0])) is not None, "and back to the run's"


def test_the_dead_do_not_hold_an_engine(store: Store) -> None:
    run = f.make_run(store)
    first, second = f.register(run, "tool"), f.register(run, "tool")
    claim(run, first, URLS)
    f.kill(run, first)
    assert {one["owner"] for one in claim(run, second, URLS)} == {second}
    with pytest.raises(WorkerDead):
        claim(run, first, URLS)


def test_an_engine_of_another_run(store: Store) -> None:
    other, run = f.make_run(store, "other"), f.make_run(store)
    claim(other, f.register(other), URLS[1:])
    with pytest.raises(EngineInUse):
        claim(run, f.register(run), URLS)
    assert URLS[0] not in owners(run), "none was taken"


def test_two_commands_at_once(store: Store, checkpoint: Path, engine: ScriptedEngine) -> None:
    """The second is refused while the first loads, and its engine hears of one update alone."""
    run = f.make_run(store)
    loading, go_on = threading.Event(), threading.Event()

    def load() -> None:
        loading.set()
        assert go_on.wait(60)

    engine.on_load = load
    details = {"path": str(checkpoint), "label": "first", "mode": "abort"}
    first = threading.Thread(target=_update, args=(run, engine.url, checkpoint, details))
    first.start()
    assert loading.wait(60)
    with pytest.raises(EngineUpdating) as told:
        _update(run, engine.url, checkpoint, {**details, "label": "second"})
    assert told.value.worker[1] == "engines update" and "samplestore engines list" in str(told.value)
    go_on.set()
    first.join(60)
    assert [body["weight_version"] for name, body in engine.calls if name == "update_weights_from_disk"] == ["first"]
    [row] = f.rows(run, "SELECT * FROM engine")
    assert (row["label"], row["owner"], row["state"]) == ("first", None, "live")
    assert f.value(run, "SELECT count(*) FROM worker WHERE state = 'live'") == 0, "both have left"


def _update(run: Run, url: str, path: Path, details: dict[str, Any]) -> None:
    from samplestore.states import WeightUpdateMode
    from samplestore.workers import control

    async def call(client: Any, at: str) -> str:
        await control.change_weights(client, at, str(path), details["label"], WeightUpdateMode.ABORT)
        return "done"

    engine_telling.tell_run(engine_telling.UPDATE, call, run, [url], 60.0, details)


def test_one_that_fails_is_recorded_with_what_it_serves(
    cli: Cli, store: Store, db_url: str, checkpoint: Path, engine: ScriptedEngine
) -> None:
    run, engine.load_fails = f.make_run(store), 1
    answer = cli("engines", "update", "--path", checkpoint, "--label", "v1", "--run", "r", "--engine", engine.url,
                 "--db", db_url)  # fmt: skip
    assert answer.code == 4
    [row] = f.rows(run, "SELECT * FROM engine")
    assert (row["label"], row["version"], row["owner"], row["state"]) == ("default", 0, None, "failed")
    assert "no such checkpoint" in row["error"]
    again = cli("engines", "update", "--path", checkpoint, "--label", "v1", "--run", "r", "--engine", engine.url,
                "--db", db_url)  # fmt: skip
    assert again.code == 0 and f.value(run, "SELECT state FROM engine") == "live"
