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
from samplestore.queries import (
    abort_list,
    aborts,
    batch_list,
    browse,
    data_page,
    determinism,
    episodes,
    evaluation,
    fleet,
    group_list,
    group_page,
    inspect,
    ledger,
    sample_page,
    status,
    trajectory,
    why,
)
from samplestore.queries import (
    stages as stage_queries,
)
from samplestore.queries.events import Follower
from samplestore.queries.group_list import LOOK, LOOK_SPREAD, LOOK_TEXT, GroupFilter
from samplestore.run import Run
from samplestore.states import GroupState
from samplestore.verbs import appends, batches, liveness, prompts, samples, stages, weights
from samplestore.verbs.tx import Tx
from tests.conftest import BACKENDS
from tests.plans.million import GROUPS, PER_GROUP, build
from tests.plans.test_plans import full_scans, plans
from tests.support import factory as f
from tests.support.meter import LARGE, Reading, measured

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
    old_group = f.value(run, "SELECT group_id FROM sample WHERE id = :s", s=old)
    follower = Follower(db, id)
    follower.newest(20)
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
        "ledger": lambda: ledger.read(db, id, False),
        "aborts": lambda: aborts.read(db, id, 3600.0),
        "engines": lambda: inspect.engines(db),
        "silent workers": lambda: inspect.silent_workers(db),
        "samples by id": lambda: inspect.samples_by_id(db, [old, old + 5]),
        "a sample by place": lambda: inspect.sample_at(db, 77, 1, run_id=id),
        "groups by id": lambda: inspect.groups_by_id(db, [1, 2]),
        "requests of a sample": lambda: inspect.requests(db, old, 0, 100),
        "calls of an episode": lambda: db.read(lambda c: episodes.record(c, old, 0)),
        "stages of a sample": lambda: db.read(lambda c: stage_queries.of_sample(c, old, old_group, 0)),
        "can a sample be generated again": lambda: determinism.of_sample(db, id, old),
        "data sets for evaluation": lambda: evaluation.datasets(db, id),
        "newest events": lambda: Follower(db, id).newest(20),
        "newest events of a kind": lambda: Follower(db, id, ["publish"]).newest(20),
        "newest events of a kind that never was": lambda: Follower(db, id, ["rewind"]).newest(20),
        "events since": lambda: follower.more(),
        **pages(run, old, old_group),
    }


def pages(run: Run, old: int, old_group: int) -> dict[str, Callable[[], Any]]:
    """What the dashboard's pages ask beside what the command line asks too."""
    db, id, last = run.database, run.id, GROUPS + 5
    newest = f.value(run, "SELECT max(id) FROM batch WHERE run_id = :r", r=id)
    first = f.value(run, "SELECT min(id) FROM batch WHERE run_id = :r", r=id)
    t = trajectory.read(db, id, 100, 1)
    assert t is not None
    return {
        "a group": lambda: group_page.read(db, id, last),
        "an old group": lambda: group_page.read(db, id, 100),
        "evidence of an old sample": lambda: sample_page.evidence(db, old, old_group, 0),
        "the least likely token": lambda: sample_page.least_likely(db, id, 100, 1, None),
        "all ids of a sample": lambda: sample_page.response_ids(db, id, 100, 1, None),
        "an array of a sample": lambda: sample_page.array_window(db, id, t, "entropy", lambda: run.array_files()),
        "staleness of versions": lambda: sample_page.staleness_of(db, id, [1, 500, 1999]),
        "staleness of ready groups": lambda: db.read(lambda c: status.staleness_histogram(c, id, GroupState.READY)),
        "interruptions over time": lambda: abort_list.over_time(db, id, 3600.0),
        "latest interruptions": lambda: abort_list.latest(db, id),
        "latest interruptions of a kind": lambda: abort_list.latest(db, id, kind="release"),
        "latest interruptions of a kind that never was": lambda: abort_list.latest(db, id, kind="reap"),
        "old interruptions": lambda: abort_list.latest(db, id, before=(1000.0, 10**6)),
        "resumed after": lambda: abort_list.resumed_after(db, id, 3600.0),
        "batches": lambda: batch_list.page(db, id, limit=41),
        "old batches": lambda: batch_list.page(db, id, below=first + 100, limit=41),
        "groups of a batch": lambda: batch_list.groups(db, id, newest),
        "timelines": lambda: batch_list.timelines(db, id),
        "workers": lambda: fleet.workers(db, id),
        "workers that ended long ago": lambda: fleet.workers(db, id, ended_below=100),
        "engines of a run": lambda: fleet.engines(db, id),
        "sizes": lambda: data_page.sizes(db, id),
        "groups of two states": lambda: group_list.page(db, id, GroupFilter(states=("ready", "open"))),
        "old groups of a state": lambda: group_list.page(db, id, GroupFilter(states=("consumed",)), after="1000"),
    }


# What looks through a stretch of group numbers: (question, groups of the stretch, rows that each of them may cost on
# PostgreSQL; the page and its count both read them, and a bitmap counts as a scan of its own).
Stretch = tuple[Callable[[], Any], int, int]
INSTRUCTIONS = 20  # of SQLite for such a row


def stretches(run: Run) -> dict[str, Stretch]:
    db, id = run.database, run.id

    def asked(where: GroupFilter, groups: int, rows: int, **more: Any) -> Stretch:
        return lambda: group_list.page(db, id, where, **more), groups, rows

    widest = f"0.5~{GROUPS - 1000}"
    return {
        "groups whose rewards are equal": asked(GroupFilter(zero_std=True), LOOK, 5),
        "groups by reward": asked(GroupFilter(reward_min=0.9), LOOK, 5),
        "groups by staleness": asked(GroupFilter(staleness_min=5000), LOOK, 7),
        "groups of an age": asked(GroupFilter(since=1e12), LOOK, 5),
        "groups of a data set": asked(GroupFilter(dataset="nowhere"), LOOK, 5),
        "groups with a version": asked(GroupFilter(version=1), LOOK, 5 + 2 * PER_GROUP),
        "groups of a worker": asked(GroupFilter(worker=10**6), LOOK, 5 + 2 * PER_GROUP),
        "groups with a text": asked(GroupFilter(text="no such text"), LOOK_TEXT, 5),
        "old groups with a text": asked(GroupFilter(text="no such text"), LOOK_TEXT, 5, after="9000"),
        "widest spread": asked(GroupFilter(), LOOK_SPREAD, 5, order="spread"),
        "widest spread, further on": asked(GroupFilter(), LOOK_SPREAD, 5, order="spread", after=widest),
    }


def test_a_filter_looks_through_a_stretch_and_no_further(backend: str, run: Run) -> None:
    wrong = []
    for name, (question, groups, rows) in stretches(run).items():
        told = read(backend, run, name, question)
        wrong += [f"{name}: {line}" for line in told.whole_tables()]
        each = rows * (INSTRUCTIONS if backend == "sqlite" else 1)
        bound = groups * each + BOUND[backend]
        assert 2 * bound < GROUPS * each, "the bound can be broken"
        if told.work > bound:
            wrong.append(f"{name} reads {told.work} > {bound}\n" + "\n".join(f"{s[:300]}\n{p}" for s, p in told.plans))
    assert not wrong, "\n".join(wrong)


def test_no_question_reads_the_history(backend: str, run: Run) -> None:
    wrong = []
    for name, question in questions(run).items():
        told = read(backend, run, name, question)
        wrong += [f"{name}: {line}" for line in told.whole_tables()]
        if told.work > BOUND[backend]:
            wrong.append(f"{name} reads {told.work}\n" + "\n".join(f"{s[:300]}\n{p}" for s, p in told.plans))
    assert not wrong, "\n".join(wrong)


def test_totals_read_the_history_once(backend: str, run: Run) -> None:
    """`status` counts the samples of the whole run: a tenth of a second for each million. Nothing in the loop of a
    worker or trainer asks it."""
    told = read(backend, run, "status", lambda: status.status(run.database, run.id))
    assert told.work < TOTALS[backend], "\n".join(f"{s[:300]}\n{p}" for s, p in told.plans)


def test_no_verb_reads_the_history(backend: str, run: Run) -> None:
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims: list[Any] = []
    found: list[Any] = []
    verbs: dict[str, Callable[[Tx], Any]] = {
        "admit": prompts.admit,
        "claim": lambda tx: claims.extend(samples.claim(tx, worker, 8)),
        "append": lambda tx: appends.append(tx, claims[0], 0, [1], [-0.5], 0),
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
