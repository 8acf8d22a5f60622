"""Group commits of several workers, against reaps, refusals and waiters that go away."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store
from samplestore.errors import LeaseLost, SampleStoreError
from samplestore.models import Sample
from samplestore.verbs import appends, requests, samples
from samplestore.writer import Writer
from tests.races.together import DEADLINE_S, Held, threads
from tests.support import factory as f

SAMPLE = Sample.__table__

# -- E3


def test_group_commits_of_two_workers_against_reaps(store: Store) -> None:
    """Two writers on the same groups, failures and finishes among their writes, and a reaper: no error but a lost
    lease reaches a caller, and every acknowledged token is there."""
    run = f.make_run(store, prompts=6, samples_per_prompt=4, groups_per_step=3, max_attempts=50, stages=["reward"])
    workers = [f.register(run) for _ in range(2)]
    held: list[list[Any]] = [[], []]
    while got := run.claim(workers[len(held[0]) > len(held[1])], 1):
        held[got[0].owner == workers[1]].append(got[0])
    writers = [Writer(run), Writer(run)]
    stop = threading.Event()
    reaps, errors = [0], []

    def reaper() -> None:
        while not stop.is_set():
            try:
                run.reap()
                reaps[0] += 1
            except Exception as error:  # shown by the test
                errors.append(error)
                return

    def work(i: int) -> int:
        acknowledged = 0
        for round_ in range(6):
            order = held[i] if (i + round_) % 2 else held[i][::-1]  # submitted in opposite orders
            futures = [
                writers[i].submit(appends.append, c, c.seq + round_, f.ids_of(2), f.logprobs_of(2), 0) for c in order
            ]
            acknowledged += sum(future.result(DEADLINE_S) for future in futures)
        futures = [
            writers[i].submit(samples.fail, c, "again", 0.0) if c.index == 0 else writers[i].submit(samples.finish, c)
            for c in reversed(held[i])
        ]
        for future in futures:
            future.result(DEADLINE_S)
        return acknowledged

    reaping = threading.Thread(target=reaper)
    reaping.start()
    try:
        with threads(2) as together:
            done = together(work)
    finally:
        stop.set()
        reaping.join(DEADLINE_S)
        for writer in writers:
            writer.close()
    assert errors == [] and reaps[0] > 0
    assert done == [12 * len(h) for h in held]
    assert run.ledger()["generated"] == sum(done)
    assert sum(w.commits for w in writers) < 14 * len(held[0]), "writes shared commits"
    f.sound(run)


def test_a_reap_leaves_the_requests_of_samples_that_it_passes_over(postgres_url: str) -> None:
    """A worker that was stopped within an append still owns the sample when it goes on, as a reap passes over what is
    locked. With its request ended, the tokens would be refused as wrong."""
    with samplestore.open(postgres_url) as store:
        run = f.make_run(store, prompts=2)
        worker = f.register(run)
        held, free = run.claim(worker, 2)
        for claim, rid in ((held, "held"), (free, "free")):
            run.begin_request(claim, rid)
        locks = sa.update(SAMPLE).where(SAMPLE.c.id == held.sample_id).values(n_resumes=SAMPLE.c.n_resumes)
        stopped = Held(run, lambda tx: tx.execute(locks))
        f.silence(run, worker)
        assert run.reap().samples == 1
        stopped.let_go()
        assert run.append(held, [1, 2], [-0.5, -0.5], 0, rid="held") == 2
        assert run.reap().samples == 1
        ended = f.rows(run, "SELECT rid, finished_at FROM request ORDER BY rid")
        assert all(row["finished_at"] is not None for row in ended) and len(ended) == 2
        with pytest.raises(LeaseLost):
            run.append(held, [3], [-0.5], 0, rid="held")
        f.sound(run)


def test_one_refused_write_fails_alone(store: Store) -> None:
    run = f.make_run(store, prompts=4)
    claims = run.claim(f.register(run), 8)
    run.requeue([claims[3].sample_id], "away")
    writer = Writer(run)
    blocker = Held(run, lambda tx: tx.lock_groups([claims[0].group_id]))
    first = writer.submit(samples.finish, claims[0])  # keeps the writer busy while the others queue up
    futures = [writer.submit(appends.append, c, 0, f.ids_of(2), f.logprobs_of(2), 0) for c in claims[1:]]
    futures.append(writer.submit(appends.append, claims[1], 1, [1], [float("nan")], 0))
    blocker.let_go()
    assert isinstance(first.exception(DEADLINE_S), SampleStoreError)  # nothing generated
    told = [future.exception(DEADLINE_S) for future in futures]
    writer.close()
    assert [type(e).__name__ for e in told] == ["NoneType"] * 2 + ["LeaseLost"] + ["NoneType"] * 4 + ["InvalidSegment"]
    assert run.ledger()["generated"] == 12
    f.sound(run)


def test_a_writer_outlives_waiters_that_went_away(store: Store) -> None:
    run = f.make_run(store, prompts=2)
    a, b = run.claim(f.register(run), 2)
    writer = Writer(run)
    gone = writer.submit(appends.append, a, 0, [1], [-0.1], 0)
    gone.cancel()
    assert writer.submit(appends.append, b, 0, [1], [-0.1], 0).result(DEADLINE_S) == 1
    writer.close()
    assert f.sample(run, a.sample_id)["n_tokens"] == 1, "tokens of a cancelled task are kept"


def test_a_request_is_closed_after_the_appends_of_its_commit(store: Store) -> None:
    from samplestore.types import RequestInfo

    run = f.make_run(store, prompts=2)
    a, b = run.claim(f.register(run), 2)
    run.begin_request(a, "rid")
    writer = Writer(run)
    blocker = Held(run, lambda tx: tx.lock_groups([b.group_id]))
    busy = writer.submit(samples.finish, b)
    last = writer.submit(appends.append, a, 0, f.ids_of(3), f.logprobs_of(3), 0, rid="rid")
    ended = writer.submit(requests.end_request, RequestInfo("rid", generated_tokens=3))
    blocker.let_go()
    busy.exception(DEADLINE_S), last.result(DEADLINE_S), ended.result(DEADLINE_S)
    writer.close()
    (row,) = f.rows(run, "SELECT stored_tokens, lost_tokens FROM request")
    assert row == {"stored_tokens": 3, "lost_tokens": 0}
    f.sound(run)
