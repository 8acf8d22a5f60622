"""samplestore engines: many engines at once, one that hangs or fails among them, with and without a run."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import samplestore
from samplestore.models import Event
from samplestore.verbs import weights
from samplestore.workers import engine_calls
from tests.cli.conftest import ENGINE, Cli, Small
from tests.support.processes import Processes, wait_until
from tests.support.router import Router
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def two() -> Iterator[list[ScriptedEngine]]:
    made = [ScriptedEngine(label="default"), ScriptedEngine(label="default")]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def silent() -> Iterator[str]:
    """An engine that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def flags(*urls: str) -> list[str]:
    return [word for url in urls for word in ("--engine", url)]


def events(small: Small) -> list[tuple[str, str | None, dict[str, object]]]:
    with samplestore.open(small.url) as store, store.database.reading() as connection:
        table = Event.__table__
        rows = connection.execute(
            sa.select(table.c.kind, table.c.reason, table.c.details)
            .where(table.c.kind.like("engine%"))
            .order_by(table.c.id)
        )
        return [(row.kind, row.reason, row.details) for row in rows]


def in_run(small: Small, *engines: ScriptedEngine) -> None:
    """The run knows these engines, and not the one that it was made with."""
    with samplestore.open(small.url) as store:
        run = store.existing_run("small")
        run.transact(lambda tx: weights.forget_engine(tx, ENGINE))
        for engine in engines:
            run.transact(lambda tx, url=engine.url: weights.see_engine(tx, url, "default"))


# -- pause, continue, abort


def test_pause_and_continue_all_engines_of_a_run(cli: Cli, small: Small, two: list[ScriptedEngine]) -> None:
    in_run(small, *two)
    answer = cli("engines", "pause", "--mode", "retract", "--db", small.url)
    assert (answer.code, answer.err) == (0, "")
    assert all(engine.calls == [("pause_generation", {"mode": "retract"})] for engine in two)
    assert all(engine.url in answer.out for engine in two)
    assert cli("engines", "continue", "--db", small.url, "--run", "small").code == 0
    assert all(engine.calls[-1] == ("continue_generation", {}) for engine in two)
    assert sorted((kind, details["url"], details["ok"]) for kind, _, details in events(small)) == sorted(
        (f"engine_{what}", engine.url, True) for what in ("pause", "continue") for engine in two
    )


def test_an_engine_that_hangs_does_not_hold_the_others(
    cli: Cli, small: Small, two: list[ScriptedEngine], silent: str
) -> None:
    urls = [silent, two[0].url, two[1].url]
    answer = cli("engines", "pause", *flags(*urls), "--run", "small", "--db", small.url, "--timeout", "0.3", "--json")
    assert answer.code == 4
    told = {one["url"]: one for one in answer.json["engines"]}
    assert [told[url]["ok"] for url in urls] == [False, True, True]
    assert "1 of 3 engines did not do it" in answer.err and silent in answer.err
    assert answer.err.rstrip().endswith("samplestore engines list --live")
    failed = [(reason, details["url"]) for kind, reason, details in events(small) if not details["ok"]]
    assert len(failed) == 1 and failed[0][1] == silent and failed[0][0]


def test_pause_warns_where_the_health_check_generates(
    cli: Cli, two: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_calls, "HEALTH_S", 0.2)

    async def generates(request: object) -> object:
        await asyncio.sleep(20)

    monkeypatch.setattr(ScriptedEngine, "_health", lambda self, request: generates(request))
    slow = ScriptedEngine()
    monkeypatch.undo()
    monkeypatch.setattr(engine_calls, "HEALTH_S", 0.2)
    try:
        answer = cli("engines", "pause", *flags(slow.url, two[0].url))
    finally:
        slow.close()
    assert answer.code == 0 and "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0" in answer.err
    lines = {line.split()[0]: line for line in answer.out.splitlines()[1:]}
    assert "health check fails" in lines[slow.url] and "health" not in lines[two[0].url]


def test_abort_one_or_all(cli: Cli, two: list[ScriptedEngine]) -> None:
    assert cli("engines", "abort", "--rid", "r1", *flags(two[0].url, two[1].url)).code == 0
    assert [engine.aborts for engine in two] == [["r1"], ["r1"]]
    refused = cli("engines", "abort", "--all", *flags(two[0].url))
    assert refused.code == 2 and refused.err.rstrip().endswith("samplestore engines abort --all --yes")
    assert cli("engines", "abort", *flags(two[0].url)).code == 2
    assert cli("engines", "abort", "--all", "--rid", "x", "--yes", *flags(two[0].url)).code == 2
    assert len(two[0].calls) == 1
    assert cli("engines", "abort", "--all", "--yes", *flags(two[0].url)).code == 0
    assert two[0].calls[-1] == ("abort_request", {"rid": "", "abort_all": True})


def test_resume_memory_is_asked_for(cli: Cli, two: list[ScriptedEngine]) -> None:
    """An engine that has released nothing dies of it."""
    answer = cli("engines", "resume-memory", *flags(two[0].url))
    assert answer.code == 2 and answer.err.rstrip().endswith("samplestore engines resume-memory --yes")
    assert two[0].calls == []
    asked = cli("engines", "resume-memory", "--yes", "--tag", "weights", *flags(two[0].url), "--json")
    assert asked.code == 4 and "404" in asked.json["engines"][0]["said"], "a scripted engine has no such call"


# -- update


@pytest.mark.parametrize("mode", ["abort", "keep", "drain"])
def test_update_tells_every_engine_and_the_run(
    cli: Cli, small: Small, two: list[ScriptedEngine], checkpoint: Path, mode: str
) -> None:
    in_run(small, *two)
    with samplestore.open(small.url) as store:
        version = store.existing_run("small").publish_weights(path=str(checkpoint), step=1)
    arguments = ("--path", checkpoint, "--label", version.label, "--mode", mode, "--db", small.url)
    answer = cli("engines", "update", *arguments)
    assert (answer.code, answer.err) == (0, "")
    assert [engine.label for engine in two] == [version.label] * 2
    listed = cli("engines", "list", "--db", small.url, "--json").json["engines"]
    assert [one["up_to_date"] for one in listed] == [True, True]
    assert [kind for kind, _, _ in events(small)] == ["engine_update"] * 2


def test_update_to_what_the_run_is_not_at_says_that_it_will_not_last(
    cli: Cli, small: Small, two: list[ScriptedEngine], checkpoint: Path
) -> None:
    in_run(small, *two)
    answer = cli("engines", "update", "--path", checkpoint, "--label", "other", "--db", small.url)
    assert answer.code == 0 and "run.publish_weights(" in answer.err


def test_one_engine_that_fails_its_update(cli: Cli, two: list[ScriptedEngine], checkpoint: Path) -> None:
    shutil.copytree(checkpoint, served := checkpoint.with_name("served"))  # that it fits can be seen
    two[0].model_path = two[1].model_path = str(served)
    two[0].load_fails = 1
    answer = cli("engines", "update", "--path", checkpoint, "--label", "v1", *flags(two[0].url, two[1].url), "--json")
    assert answer.code == 4
    told = {one["url"]: one for one in answer.json["engines"]}
    assert (told[two[0].url]["ok"], told[two[1].url]["ok"]) == (False, True)
    assert "no such checkpoint" in told[two[0].url]["said"] and two[1].label == "v1"


def break_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:20])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "x": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("damage", [break_config, break_weights, cut, cut_header, empty, lose_a_shard])
def test_no_engine_hears_of_an_incomplete_checkpoint(
    cli: Cli, two: list[ScriptedEngine], checkpoint: Path, damage: object
) -> None:
    damage(checkpoint)
    answer = cli("engines", "update", "--path", checkpoint, "--label", "v1", *flags(two[0].url))
    assert answer.code == 1 and "no complete checkpoint" in answer.err
    assert two[0].calls == []


# -- list


def test_list_live_asks_each_engine(cli: Cli, small: Small, two: list[ScriptedEngine], silent: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(engine_calls, "LOOK_S", 0.5)
    in_run(small, *two)
    answer = cli("engines", "list", "--live", "--db", small.url, "--json")
    assert answer.code == 0 and answer.json["router"] is None
    assert [(e["url"], e["run"], e["health"], e["label"]) for e in answer.json["engines"]] == sorted(
        (engine.url, "small", "ok", "default") for engine in two
    )
    with samplestore.open(small.url) as store:
        store.existing_run("small").transact(lambda tx: weights.see_engine(tx, silent, None))
    answer = cli("engines", "list", "--live", "--db", small.url)
    assert answer.code == 4 and f"1 of 3 engines is not well; {silent}" in answer.err


def test_engines_of_a_router(cli: Cli, processes: Processes, two: list[ScriptedEngine]) -> None:
    router = Router.start(processes, [engine.url for engine in two])
    told = cli("engines", "list", "--router", router.url, "--json")
    assert told.code == 0
    assert told.json["router"]["kind"] == "sglang-router" and "return_routed_experts" in told.json["router"]["drops"]
    assert {e["url"] for e in told.json["engines"]} == {engine.url for engine in two}
    shown = cli("engines", "list", "--router", router.url).out
    assert shown.startswith(f"sglang-router at {router.url}; drops from requests: cache_salt")
    assert cli("engines", "continue", "--router", router.url + "/").code == 0
    assert all(engine.calls == [("continue_generation", {})] for engine in two)


def test_unlist_takes_one_out_of_a_router(cli: Cli, processes: Processes, two: list[ScriptedEngine]) -> None:
    stays, goes = two
    router = Router.start(processes, [engine.url for engine in two])
    told = cli("engines", "unlist", goes.url + "/", "--router", router.url)
    assert (told.code, told.err) == (0, "")
    wait_until(lambda: [w["url"] for w in router.workers()] == [stays.url], what="it is out")
    again = cli("engines", "unlist", goes.url, "--router", router.url)
    assert again.code == 1 and f"does not list {goes.url}. See: samplestore engines list --router" in again.err
    assert cli("engines", "unlist", "nonsense", "--router", router.url).code == 2
    assert cli("engines", "unlist", goes.url, "--router", "http://127.0.0.1:9").code == 1


def test_wrong_targets_are_told(cli: Cli, small: Small, two: list[ScriptedEngine]) -> None:
    for arguments, code, told in (
        (["continue", "--engine", "file:///etc/passwd"], 2, "engines --help"),
        (["continue", "--router", two[0].url], 1, f"Say --engine {two[0].url}"),
        (["pause", "--mode", "freeze", "--engine", two[0].url], 2, "engines pause --help"),
        (["continue", "--run", "other", "--db", small.url], 1, "samplestore add-prompts"),
    ):
        answer = cli("engines", *arguments)
        assert answer.code == code and told in answer.err, answer
    with samplestore.open(small.url) as store:
        store.run("second")
    answer = cli("engines", "continue", "--db", small.url)
    assert answer.code == 2 and answer.err.rstrip().endswith("samplestore runs")
    assert cli("engines", "continue", "--run", "second", "--db", small.url).code == 1


def test_doctor_needs_no_database_for_a_router(cli: Cli, two: list[ScriptedEngine]) -> None:
    answer = cli("doctor", "--router", two[0].url, "--json")
    assert answer.code == 4
    assert [check["check"] for check in answer.json["checks"]] == ["router"]
    assert cli("doctor", "--router", "file:///etc/passwd").code == 2
