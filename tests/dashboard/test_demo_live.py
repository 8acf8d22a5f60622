"""The demo goes on: what its pages say of it is true at every moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import samplestore
from samplestore.dashboard import demo_data, demo_live
from samplestore.dashboard.demo_builder import Builder
from samplestore.models import Request, Worker
from samplestore.queries import fleet, trajectory
from samplestore.run import Run
from tests.support import factory as f


@pytest.fixture
def builder(db_url: str, tmp_path: Path) -> Iterator[Builder]:
    with samplestore.open(db_url) as store:
        yield demo_data.begin(store, db_url, tmp_path / "tokenizer", demo_live.SEED, demo_live.TTL_S, 3, 600.0)


def beats(run: Run) -> list[float]:
    return [w["heartbeat_age_s"] for w in fleet.workers(run.database, run.id)["live"]]


def test_heartbeats_are_fresh_and_tokens_come(builder: Builder) -> None:
    run, living = builder.run, demo_live.Living(builder)
    f.execute(run, "UPDATE worker SET heartbeat = heartbeat - 25")
    before = run.ledger()["generated"]
    assert min(beats(run)) >= 25
    living.tick()
    assert len(beats(run)) == 4 and max(beats(run)) < 20
    assert run.ledger()["generated"] > before
    running = [e["running"] for e in fleet.engines(run.database, run.id)]
    assert sum(running) == len(builder.calls) > 0


def test_it_trains_and_publishes_and_its_engines_follow(builder: Builder) -> None:
    run, living, first = builder.run, demo_live.Living(builder), builder.version
    behind, leased = set(), 0
    for _ in range(3 * demo_live.STEP_TICKS):
        living.tick()
        leased += living.leased is not None
        behind.add(sum(e["version"] != builder.version for e in fleet.engines(run.database, run.id)))
    assert builder.version >= first + 2 and behind == {0, 1} and leased >= 2 * demo_live.TRAIN_TICKS
    assert run.check() == [] and run.ledger(exact=True)["closed"]
    assert not run.why().as_json()["reasons"], "a step can be taken: a healthy run"


def test_engines_count_what_they_generate(builder: Builder) -> None:
    """Beside what the requests that ended were told, their counters have what is in flight, and nothing else."""
    run, living = builder.run, demo_live.Living(builder)
    run.drop([builder.calls[0].claim.group_id], "by hand")
    first, living.ticks = builder.version, demo_live.STEP_TICKS - demo_live.TRAIN_TICKS - 1
    while builder.version == first:
        living.tick()
        told = run.ledger()["engines"]
        in_flight = sum(call.claim.n_tokens - call.before for call in builder.calls)
        assert told["unaccounted"] == in_flight and told["counted"] == 3
    assert all(e["generated_tokens"] > 50 for e in fleet.engines(run.database, run.id))


def test_what_an_operator_takes_away_is_let_go(builder: Builder) -> None:
    run, living = builder.run, demo_live.Living(builder)
    run.drop([call.claim.group_id for call in builder.calls], "by hand")
    for _ in range(3):
        living.tick()
    assert builder.calls and run.check() == []


def test_a_rewind_does_not_end_it(builder: Builder) -> None:
    run, living = builder.run, demo_live.Living(builder)
    while living.leased is None:
        living.tick()
    restored = run.rewind(builder.version - 2)
    for _ in range(2 * demo_live.STEP_TICKS):
        living.tick()
    assert run.current_version > restored.version and run.check() == []


def test_how_long_a_request_took_is_the_same_everywhere(builder: Builder) -> None:
    run = builder.run
    with run.database.reading() as c:
        ended = c.execute(
            sa.select(Request.e2e_s, Request.queue_s, Request.finished_at - Request.started_at).where(
                Request.finished_at.is_not(None)
            )
        ).fetchall()
    assert len(ended) > 50
    assert all(abs(told - took) < 1e-3 and 0 <= queued <= told for told, queued, took in ended)


def test_a_page_of_the_demo_has_its_workers_alive_for_as_long_as_they_say(builder: Builder) -> None:
    """No time to live that hides a worker which is dead."""
    with builder.run.database.reading() as c:
        assert set(c.execute(sa.select(Worker.ttl_s)).scalars()) == {demo_live.TTL_S} == {30.0}


def test_the_process_ends_with_the_dashboard(sqlite_url: str, tmp_path: Path) -> None:
    living = demo_live.start(sqlite_url, tmp_path / "tokenizer", 3, 60.0)
    assert living is not None and living.stdin is not None and living.stdout is not None
    try:
        with samplestore.open(sqlite_url) as store:
            run = store.existing_run()
            (pid,) = {w["pid"] for w in fleet.workers(store.database, run.id)["live"]}
            assert pid == living.pid
            assert trajectory.read(store.database, run.id, 0, 0) is not None
        living.stdin.close()
        assert living.wait(30) == 0
    finally:
        living.kill()
        living.wait()
        living.stdout.close()


def test_a_demo_that_can_not_be_written_is_no_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo_live.start(f"sqlite:///{tmp_path / 'no' / 'x.db'}", tmp_path / "tokenizer", 3, 60.0) is None
    assert capfd.readouterr().err
