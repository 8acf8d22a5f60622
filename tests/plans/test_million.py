"""With a million samples behind it a run's verbs, and every question of the dashboard and the command line, cost with
the window and not with the history. What counts history is named, and may read it once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore.queries import aborts, browse, group_list, inspect, ledger, status, trajectory, why
from samplestore.queries.group_list import GroupFilter
from samplestore.run import Run
from samplestore.verbs import batches, liveness, prompts, samples, stages, weights
from samplestore.verbs.tx import Tx
from tests.conftest import BACKENDS
from tests.plans.meter import LARGE, Reading, measured
from tests.plans.million import GROUPS, PER_GROUP, build
from tests.plans.test_plans import full_scans, plans
from tests.support import factory as f

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLES = GROUPS * PER_GROUP
# Of one question. The window has 32 groups of 4 samples; a page has up to 500 rows.
BOUND = {"sqlite": 200_000, "postgres": 20_000}
# What counts the history reads it once: so much for each sample behind the run.
TOTALS = {"sqlite": 60 * SAMPLES, "postgres": 5 * SAMPLES}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(backend: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if backend == "sqlite":
        template: Path = request.getfixturevalue("sqlite_template")
        path = tmp_path_factory.mktemp("million") / "million.db"
        shutil.copyfile(template, path)
        yield f"sqlite:///{path}"
        path.unlink()
        return
    server = request.getfixturevalue("postgres_server")
    name = server.create(template=request.getfixturevalue("postgres_template"), prefix="million")
    yield server.url(name)
    server.drop(name)


@pytest.fixture(scope="module")
def run(backend: str, url: str) -> Iterator[Run]:
    with samplestore.open(url) as store:
        began = time.monotonic()
        run = build(store)
        assert f.value(run, "SELECT count(*) FROM sample WHERE run_id = :r", r=run.id) > SAMPLES
        print(f"\n{backend}: a million samples in {time.monotonic() - began:.0f} s")
        worker = f.register(run)
        for claim in run.claim(worker, 48):
            f.answer(run, claim, version=run.current_version)
        for stage in run.claim_stages(worker, 40):
            run.score(stage, 1.0)
        yield run


def read(backend: str, run: Run, name: str, question: Callable[[], Any]) -> Reading:
    began = time.monotonic()
    question()
    took = time.monotonic() - began
    with measured(run.database) as reading:
        question()
    print(f"{backend}: {name}: {1e3 * took:.0f} ms, {reading.work} {'instructions' if backend == 'sqlite' else 'rows'}")
    return reading


def questions(run: Run) -> dict[str, Callable[[], Any]]:
    """Everything that the dashboard and the lists of the command line ask, but for totals."""
    db, id, last = run.database, run.id, GROUPS + 5
    old = f.value(run, "SELECT min(id) FROM sample WHERE run_id = :r", r=id)
    return {
        "why": lambda: why.why(db, id, run.settings),
        "why of a masked mean": lambda: why.why(db, id, run.settings, 8, 0, "mean", "mask"),
        "recent samples": lambda: browse.recent(db, id, 8),
        "newest groups": lambda: browse.groups(db, id),
        "old groups": lambda: browse.groups(db, id, below=1000, limit=500),
        "groups of a state": lambda: browse.groups(db, id, state="ready"),
        "groups of a rare state": lambda: browse.groups(db, id, state="superseded"),
        "samples of a group": lambda: browse.samples(db, id, 100),
        "a trajectory": lambda: trajectory.read(db, id, last, 0),
        "an old trajectory": lambda: trajectory.read(db, id, 100, 1),
        "runs": lambda: inspect.runs(db),
        "groups for the command line": lambda: group_list.page(db, id, GroupFilter(), limit=100),
        "groups of a state there": lambda: group_list.page(db, id, GroupFilter(states=("leased",)), limit=100),
        "metrics": run.metrics,
        "aborts": lambda: aborts.read(db, id, 3600.0),
        "engines": lambda: inspect.engines(db),
        "silent workers": lambda: inspect.silent_workers(db),
        "samples by id": lambda: inspect.samples_by_id(db, [old, old + 5]),
        "a sample by place": lambda: inspect.sample_at(db, 77, 1, run_id=id),
        "groups by id": lambda: inspect.groups_by_id(db, [1, 2]),
        "requests of a sample": lambda: inspect.requests(db, old, 0, 100),
    }


def test_no_question_reads_the_history(backend: str, run: Run) -> None:
    wrong = []
    for name, question in questions(run).items():
        told = read(backend, run, name, question)
        wrong += [f"{name}: {line}" for line in told.whole_tables()]
        if told.work > BOUND[backend]:
            wrong.append(f"{name} reads {told.work}\n" + "\n".join(f"{s[:300]}\n{p}" for s, p in told.plans))
    assert not wrong, "\n".join(wrong)


def test_totals_read_the_history_once(backend: str, run: Run) -> None:
    """`status` and the ledger count samples, requests and aborts of the whole run. They take a fraction of a second for
    each million; nothing in the loop of a worker or trainer asks them."""
    for name, question in {
        "status": lambda: status.status(run.database, run.id),
        "ledger": lambda: ledger.read(run.database, run.id, False),
    }.items():
        told = read(backend, run, name, question)
        assert told.work < TOTALS[backend], "\n".join(f"{s[:300]}\n{p}" for s, p in told.plans)


def test_no_verb_reads_the_history(backend: str, run: Run) -> None:
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims: list[Any] = []
    found: list[Any] = []
    verbs: dict[str, Callable[[Tx], Any]] = {
        "admit": prompts.admit,
        "claim": lambda tx: claims.extend(samples.claim(tx, worker, 8)),
        "append": lambda tx: samples.append(tx, claims[0], 0, [1], [-0.5], 0),
        "finish": lambda tx: samples.finish(tx, claims[0]),
        "release": lambda tx: samples.release(tx, claims[1], "x"),
        "fail": lambda tx: samples.fail(tx, claims[2], "x"),
        "claim_stages": lambda tx: found.extend(stages.claim_stages(tx, worker, 4)),
        "score": lambda tx: stages.score(tx, found[0], 1.0),
        "heartbeat": lambda tx: liveness.heartbeat(tx, worker),
        "disown": lambda tx: liveness.disown(tx, worker, [c.sample_id for c in claims], []),
        "reap": liveness.reap,
        "lease": lambda tx: batches.lease(tx, trainer, 10**6, 2, f.POLICY),
        "lease by mean": lambda tx: batches.lease(tx, trainer, 10**6 + 1, 2, {**f.POLICY, "staleness": "mean"}),
        "lease and expire": lambda tx: batches.lease(tx, trainer, 10**6 + 2, 90, {**f.POLICY, "stale": "expire"}),
        "publish": lambda tx: weights.publish(tx, "/w", 10**6),
        "goodbye": lambda tx: liveness.goodbye(tx, worker),
    }
    wrong = []
    for name, verb in verbs.items():
        began = time.monotonic()
        told = plans(run, verb)
        print(f"{backend}: {name}: {1e3 * (time.monotonic() - began):.0f} ms with its plans")
        for statement, plan in told:
            for table in (*LARGE, "worker"):
                wrong += [f"{name}: {line.strip()}\n    {statement[:400]}" for line in full_scans(plan, table)]
    assert not wrong, "\n".join(wrong)


def test_a_batch_is_read_without_the_history(backend: str, run: Run) -> None:
    trainer = f.register(run, "trainer")
    made = f.lease(run, trainer, 2 * 10**6, 2)
    assert made is not None
    batch = f.batch_of(run, made, trainer)
    with measured(run.database) as reading:
        assert len(batch.samples) == 2 * PER_GROUP
    assert reading.whole_tables() == []
    assert reading.work < BOUND[backend]
    with measured(run.database) as reading:
        run.replay(77)
    assert reading.whole_tables() == []
    assert reading.work < BOUND[backend]


def test_what_reads_everything_is_found(backend: str, run: Run) -> None:
    """The meter and the guard can fail."""
    import sqlalchemy as sa

    def everything() -> None:
        with run.database.reading() as connection:
            connection.execute(sa.text("SELECT sum(n_tokens + n_segments) FROM sample")).scalar()

    told = read(backend, run, "everything", everything)
    assert told.work > BOUND[backend]
    assert told.whole_tables()
