"""samplestore engines update where this machine can't see whether the checkpoint fits: one engine is told first, since
a tensor of another shape kills whoever loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from samplestore import Store
from tests.cli.conftest import Cli
from tests.support import factory as f
from tests.support.scripted_engine import ScriptedEngine
from tests.worker.test_checkpoint_fits import MODEL, checkpoint, with_norm

LOAD = "update_weights_from_disk"


class Watched(ScriptedEngine):
    """Puts its loads into a list that it shares with others, and may die of one as SGLang does: its connections break,
    and it listens no more."""

    def __init__(self, loads: list[str], dies: bool = False) -> None:
        self.loads, self.dies = loads, dies
        super().__init__(label="default")

    async def _control(self, request: web.Request) -> web.Response:
        loads = request.path == f"/{LOAD}"
        if loads:
            self.loads.append(self.url)
        if not (loads and self.dies):
            return await super()._control(request)
        self._stop.set()
        assert request.transport is not None
        request.transport.abort()
        raise web.HTTPInternalServerError


Make = Callable[..., list[ScriptedEngine]]


@pytest.fixture
def engines() -> Iterator[Make]:
    """`engines(n, model_path, dies=False)`: in the order of their URLs; `dies`: the first, and only that one."""
    made: list[ScriptedEngine] = []

    def make(n: int, model_path: str, dies: bool = False) -> list[ScriptedEngine]:
        loads: list[str] = []
        some = sorted((Watched(loads) for _ in range(n)), key=lambda one: one.url)
        some[0].dies = dies
        for one in some:
            one.model_path = model_path
        made.extend(some)
        return list(some)

    yield make
    for one in made:
        one.close()


def update(cli: Cli, path: Path | str, told: list[ScriptedEngine], *more: str) -> Any:
    flags = [word for one in told for word in ("--engine", one.url)]
    return cli("engines", "update", "--path", path, "--label", "v1", *flags, *more)


def untouched(engine: ScriptedEngine) -> bool:
    return engine.calls == [] and engine.label == "default" and not engine.paused


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_the_one_that_is_told_first_dies_alone(cli: Cli, tmp_path: Path, engines: Make, mode: str) -> None:
    told = engines(2, "/elsewhere/v0", dies=True)
    answer = update(cli, checkpoint(tmp_path / "v1", MODEL), told, "--mode", mode)
    assert answer.code == 4 and f"{told[0].url} broke off while it loaded" in answer.err
    assert untouched(told[1])


def test_the_run_hears_who_died_of_it(cli: Cli, store: Store, db_url: str, tmp_path: Path, engines: Make) -> None:
    """The error names it; the others are neither told nor paused nor counted as failed."""
    run = f.make_run(store)
    told = engines(3, "/elsewhere/v0", dies=True)
    dead, *others = told
    path = checkpoint(tmp_path / "v1", MODEL)
    answer = update(cli, path, told, "--mode", "keep", "--run", "r", "--db", db_url)
    assert answer.code == 4
    assert f"{dead.url} did not take" in answer.err and "broke off while it loaded" in answer.err
    assert "2 others were not told, and serve what they did" in answer.err
    assert all(untouched(one) for one in others)
    rows = {row["url"]: row for row in f.rows(run, "SELECT * FROM engine")}
    assert rows[dead.url]["state"] == "failed" and {rows[one.url]["state"] for one in others} == {"live"}
    assert {row["owner"] for row in rows.values()} == {None} and {rows[one.url]["failures"] for one in others} == {0}
    assert f.events(run, "weight_update") == [] and f.value(run, "SELECT current_version FROM run") == 0
    [event] = f.events(run, "engine_update")
    assert dead.url in str(event["details"])


def test_the_others_follow_when_it_serves_the_weights(cli: Cli, tmp_path: Path, engines: Make) -> None:
    told = engines(3, "/elsewhere/v0")
    first, *others = told
    served_then: list[str] = []
    for one in others:
        one.on_load = lambda: served_then.append(first.label)
    answer = update(cli, checkpoint(tmp_path / "v1", MODEL), told, "--json")
    assert answer.code == 0 and {one["said"] for one in answer.json["engines"]} == {"serves v1"}
    assert served_then == ["v1", "v1"] and [one.label for one in told] == ["v1"] * 3


def test_one_that_refuses_is_woken_and_the_others_are_left_alone(cli: Cli, tmp_path: Path, engines: Make) -> None:
    told = engines(2, "/elsewhere/v0")
    told[0].load_fails = 1
    answer = update(cli, checkpoint(tmp_path / "v1", MODEL), told, "--mode", "keep", "--json")
    said = {one["url"]: one for one in answer.json["engines"]}
    assert answer.code == 4 and not said[told[1].url]["ok"] and "not told" in said[told[1].url]["said"]
    assert "default" in said[told[1].url]["said"] and "no such checkpoint" in said[told[0].url]["said"]
    assert not told[0].paused and untouched(told[1])


def test_a_folder_that_only_engines_see(cli: Cli, tmp_path: Path, engines: Make) -> None:
    """It can't be looked at from here, so one engine says whether it can be loaded. A path that is no whole one means
    nothing on another machine."""
    told = engines(2, "/elsewhere/v0")
    answer = update(cli, "/elsewhere/v1", told)
    assert answer.code == 0 and [one.model_path for one in told] == ["/elsewhere/v1"] * 2
    assert "can't be seen from this machine" in answer.err
    refused = update(cli, "elsewhere/v2", told)
    assert refused.code == 1 and "no folder on this machine" in refused.err


def test_where_shapes_can_be_compared_all_are_told_at_once(cli: Cli, tmp_path: Path, engines: Make) -> None:
    """One that does not fit is not told, and holds up nobody; so does one that does not answer."""
    served, path = checkpoint(tmp_path / "v0", MODEL), checkpoint(tmp_path / "v1", MODEL)
    told = engines(3, str(served))
    told[0].model_path = str(checkpoint(tmp_path / "wide", with_norm("F32", [6])))
    told[1].close()
    answer = update(cli, path, told)
    assert answer.code == 4 and "model.norm.weight is F32 [4], and there F32 [6]" in answer.err
    assert untouched(told[0]) and told[2].label == "v1"
    assert "2 of 3 engines did not do it" in answer.err


def test_who_is_told_first_is_one_that_answers(cli: Cli, tmp_path: Path, engines: Make) -> None:
    """One that is away says nothing about the checkpoint."""
    told = engines(3, "/elsewhere/v0")
    told[0].close()
    answer = update(cli, checkpoint(tmp_path / "v1", MODEL), told)
    assert answer.code == 4 and [one.label for one in told[1:]] == ["v1", "v1"]
