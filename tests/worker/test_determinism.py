"""Seeded and greedy samples come out the same again on the same engine, also when they were interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore.examples import tiny_model
from samplestore.run import Run
from samplestore.types import RequestInfo
from tests.engine.conftest import RunningEngine, start_engine
from tests.support import factory
from tests.support.processes import Processes
from tests.worker.conftest import Bench, made_bench

NEW_TOKENS = 60


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """The embedded one, 10 ms a step."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model.build(folder, 0)
    flags = ("--weight-version", "default", "--decode-interval", "0.01", "--stream-interval", "2")
    started = start_engine(folder, *flags, "--incremental-streaming-output")
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(10)


def responses(bench: Bench, run: Run) -> list[list[int]]:
    return [bench.tokens(row["id"])[0] for row in bench.samples()]


def generate(url: str, processes: Processes, folder: Path, engine: Any, *, aborts: int, **settings: Any) -> Any:
    """(tokens of two samples, what is told of each) of a run of its own database."""
    from samplestore import migrations

    migrations.upgrade(url)
    folder.mkdir(exist_ok=True)
    with made_bench(url, processes, folder) as bench:
        run = bench.make_run(max_new_tokens=NEW_TOKENS, **settings)
        worker = bench.worker(engine.url, exit_when_done=True)
        for n in range(aborts):
            bench.wait_stored(8 * (n + 1))
            run.abort_inflight("in the middle", wait_s=20)
        assert worker.wait(60) == 0, worker.log()
        bench.sound()
        return responses(bench, run), [run.determinism(row["id"]) for row in bench.samples()]


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling_seed": 7, "sampling": {"temperature": 1.0, "ignore_eos": True}},
        {"sampling": {"temperature": 0.0, "ignore_eos": True}},
    ],
    ids=["seeded", "greedy"],
)
def test_the_same_again(engine: RunningEngine, processes: Processes, tmp_path: Path, settings: dict[str, Any]) -> None:
    first, told = generate(
        f"sqlite:///{tmp_path}/1.db", processes, tmp_path / "1", engine, aborts=0, **settings
    )  # fmt: skip
    again, told_again = generate(
        f"sqlite:///{tmp_path}/2.db", processes, tmp_path / "2", engine, aborts=2, **settings
    )  # fmt: skip
    assert first == again and {len(ids) for ids in first} == {NEW_TOKENS}
    assert all(one.holds and one.resumed == 0 for one in told)
    assert all(one.holds and one.resumed >= 1 for one in told_again)
    if "sampling_seed" in settings:
        assert first[0] != first[1], "each sample of a group has a seed of its own"


def test_an_unseeded_run_says_so(engine: RunningEngine, processes: Processes, tmp_path: Path) -> None:
    _, told = generate(f"sqlite:///{tmp_path}/3.db", processes, tmp_path / "3", engine, aborts=0)
    assert [one.reasons for one in told] == [["an engine drew without a seed"]] * 2


@pytest.mark.parametrize(
    ("settings", "told", "complaint"),
    [
        ({"sampling_seed": 7}, False, "ignores sampling_seed"),
        ({"sampling": {"sampling_seed": 7}}, False, "ignores sampling_seed"),
        ({"sampling_seed": 7}, True, None),
        ({"sampling_seed": 7}, None, None),
        ({"sampling_seed": 7, "sampling": {"temperature": 0}}, False, None),
        ({}, False, None),
        ({"sampling": {"min_p": 0.1}}, True, "min_p kills an engine"),
        ({"sampling": {"min_p": 0.0}}, True, None),
        ({"sampling": {"min_p": 0.1}}, False, None),
    ],
)
def test_engines_that_cannot_do_it_are_told_at_once(
    bench: Bench, settings: dict[str, Any], told: bool | None, complaint: str | None
) -> None:
    """An SGLang without --enable-deterministic-inference draws without seeds and does not say so; one with it dies of
    min_p."""
    bench.make_run(**settings)
    engine = bench.engine()
    if told is not None:
        engine.server["enable_deterministic_inference"] = told
    worker = bench.worker(engine, exit_when_done=True)
    code = worker.wait(60)
    if complaint is None:
        assert code == 0 and len(engine.requests) == 2, worker.log()
        return
    assert code != 0 and complaint in worker.log() and "--enable-deterministic-inference" in worker.log()
    assert engine.requests == [] and {s["failures"] for s in bench.samples()} == {0}


def test_what_breaks_it(sqlite_url: str) -> None:
    """Other weights, another engine, an engine that nobody knows."""
    with samplestore.open(sqlite_url) as store:
        run = factory.make_run(store, prompts=1, samples_per_prompt=3, groups_per_step=1)
        claims = run.claim(factory.register(run), 3)
        for n, engines in enumerate((["a", "a"], ["a", "b"], [None])):
            for i, engine in enumerate(engines):
                rid = f"{n}/{i}"
                claim = claims[n]
                run.transact(lambda tx, c=claim, r=rid, e=engine: _begin(tx, c, r, e))
                factory.add(run, claim, 2, 0, rid=rid)
                run.end_request(RequestInfo(rid, engine, generated_tokens=2))
        told = [run.determinism(claim.sample_id) for claim in claims]
        assert told[0].holds and told[0].resumed == 1
        assert told[1].reasons == ["2 engines made it"]
        assert told[2].reasons == ["the router did not tell which engine answered"]
        run.publish_weights()
        factory.add(run, claims[0], 2, 1)
        assert run.determinism(claims[0].sample_id).reasons == ["weights changed from version 0 to 1"]
        with pytest.raises(samplestore.errors.NotInRun):
            run.determinism(10**6)


@pytest.mark.parametrize(("greedy", "reasons"), [(False, ["its requests drew at temperatures 0.5, 1.5"]), (True, [])])
def test_another_temperature_draws_other_tokens(sqlite_url: str, greedy: bool, reasons: list[str]) -> None:
    with samplestore.open(sqlite_url) as store:
        run = factory.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1)
        (claim,) = run.claim(factory.register(run), 1)
        for i, temperature in enumerate((0.5, 1.5)):
            run.transact(lambda tx, r=f"{i}", t=temperature: _begin(tx, claim, r, "a", t, greedy))
            factory.add(run, claim, 2, 0, rid=f"{i}")
        told = run.determinism(claim.sample_id)
        assert (told.holds, told.reasons) == (not reasons, reasons)


def _begin(tx: Any, claim: Any, rid: str, engine: str | None, temperature: float = 1.0, greedy: bool = False) -> None:
    from samplestore.verbs import requests

    requests.begin_request(tx, claim, rid, engine, temperature, False, 7, greedy)
