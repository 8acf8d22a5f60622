"""Totals of requests and events say what the rows say, whoever ends a request, when, and how often."""

from __future__ import annotations

import math
import random
import string
import threading
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import Store
from samplestore.errors import InvalidSegment
from samplestore.run import Run
from samplestore.statements.totals import MAX_REASONS, OTHER
from samplestore.states import WorkerState
from samplestore.types import RequestInfo
from samplestore.verbs import appends, prune, requests, weights
from samplestore.verbs.recount import recount
from samplestore.verbs.tx import Contested, Tx

from ..support import factory as f
from ..support.processes import wait_until

URL = "http://e"


@pytest.fixture
def run(store: Store) -> Run:
    return f.make_run(store)


def kept(run: Run) -> dict[str, int]:
    told = run.ledger()["requests"]
    return {name: told[name] for name in ("finished", "generated", "stored", "worker_died_before_it_knew", "in_flight")}


def test_the_last_end_is_that_of_a_request_and_not_of_a_worker(run: Run) -> None:
    worker = f.register(run)
    (claim, other) = run.claim(worker, 2)
    run.begin_request(claim, "a", URL)
    f.add(run, claim, 3, rid="a")
    run.end_request(RequestInfo("a", generated_tokens=3))
    last = f.value(run, "SELECT max(finished_at) FROM request")
    run.begin_request(claim, "b", URL, resumes=True)
    run.transact(lambda tx: weights.see_engine(tx, URL, "default"))
    assert run.ledger()["requests"]["last_finished_at"] == last, "a resume that began is no end"
    run.end_request(RequestInfo("b", generated_tokens=0))
    last = f.value(run, "SELECT max(finished_at) FROM request")
    run.begin_request(other, "c", URL)
    run.end_request(RequestInfo("c", generated_tokens=0))
    last = f.value(run, "SELECT max(finished_at) FROM request")
    run.transact(lambda tx: f.liveness.goodbye(tx, worker))
    assert f.value(run, "SELECT sum(ended) FROM request_total WHERE worker_id = 0") == 3, "they were folded"
    assert run.ledger()["requests"]["last_finished_at"] == last
    f.sound(run)


def test_an_end_that_comes_after_its_worker_was_given_up_counts_once(run: Run) -> None:
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    run.begin_request(claim, "a", URL)
    f.execute(run, "UPDATE worker SET heartbeat = 0 WHERE id = :w", w=worker)
    assert run.reap().workers == [worker]
    assert kept(run)["worker_died_before_it_knew"] == 1
    f.sound(run)
    for generated in (None, 7, 9):  # what is known stays
        run.end_request(RequestInfo("a", generated_tokens=generated, lost_reason="late"))
        f.sound(run)
    assert kept(run) == {
        "finished": 1, "generated": 7, "stored": 0, "worker_died_before_it_knew": 0, "in_flight": 0,
    }  # fmt: skip
    assert run.ledger()["requests"]["lost_by_reason"] == {"late": 7}


def test_one_request_told_twice_in_one_commit(run: Run) -> None:
    worker = f.register(run)
    for rid, told in (("a", (None, 4)), ("b", (4, None))):
        (claim,) = run.claim(worker, 1)
        run.begin_request(claim, rid, URL)
        calls = [((RequestInfo(rid, generated_tokens=n, lost_reason="late"),), {}) for n in told]
        assert run.transact(lambda tx, calls=calls: requests.end_many(tx, calls)) == [None, None]
    assert kept(run)["finished"] == 2 and kept(run)["generated"] == 8
    f.sound(run)


def test_a_long_reason_and_seconds_that_are_none(run: Run) -> None:
    (claim,) = run.claim(f.register(run), 1)
    run.begin_request(claim, "a", URL)
    reason = "".join(random.Random(5).choices(string.ascii_letters, k=9000))
    run.end_request(
        RequestInfo(
            "a", generated_tokens=3, lost_reason=reason, queue_s=math.inf, e2e_s=math.nan, spec={"k": [1, None]}
        )
    )
    assert f.rows(run, "SELECT queue_s, e2e_s FROM request") == [{"queue_s": None, "e2e_s": None}]
    ((kept_reason, n),) = run.ledger()["requests"]["lost_by_reason"].items()
    assert kept_reason[:100] == reason[:100] and len(kept_reason) <= 200 and n == 3
    f.sound(run)


def test_totals_that_are_off_are_found_and_made_anew(run: Run) -> None:
    (claim,) = run.claim(f.register(run), 1)
    run.begin_request(claim, "a", URL)
    f.add(run, claim, 3, rid="a")
    run.end_request(RequestInfo("a", generated_tokens=3))
    run.release(claim, "x")
    before = [f.rows(run, f"SELECT sum(n) AS n FROM {t}") for t in ("event_total",)]
    f.execute(run, "INSERT INTO event (run_id, at, kind) VALUES (:r, 1.0, 'publish')", r=run.id)  # as older code would
    f.execute(run, "UPDATE request SET generated_tokens = 5, lost_tokens = 2, lost_reason = 'late'")
    assert {finding.code for finding in run.check()} == {"event_total", "request_total"}
    told = run.ledger(exact=True)
    assert not told["closed"] and {one["of"] for one in told["request_differences"]} == {
        "ended", "generated", "stored", "lost",
    }  # fmt: skip
    run.transact(recount)
    f.sound(run)
    assert before[0][0]["n"] + 1 == f.value(run, "SELECT sum(n) FROM event_total")


def test_a_worker_that_is_gone_leaves_its_totals_to_all(run: Run) -> None:
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    run.begin_request(claim, "a", URL)
    run.end_request(RequestInfo("a", generated_tokens=0))
    assert f.value(run, "SELECT worker_id FROM request_total WHERE ended > 0") == worker, "its own row, no other's"
    run.transact(lambda tx: f.liveness.goodbye(tx, worker))
    with run.database.reading() as connection:
        left = connection.execute(sa.text("SELECT count(*) FROM request_total WHERE worker_id <> 0")).scalar()
    assert left == 0 and f.value(run, "SELECT state FROM worker") == WorkerState.GONE
    f.sound(run)


def test_reasons_that_are_all_different_do_not_make_the_totals_grow(run: Run) -> None:
    """A worker's and those of all; what was told apart before goes on to be."""
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    run.release(claim, "usual")

    def stop(n: int) -> None:
        (claim,) = run.claim(worker, 1)
        run.begin_request(claim, f"rid {n}", URL)
        f.add(run, claim, 1, rid=f"rid {n}")
        run.transact(lambda tx: appends.note_abort(tx, claim, f"because of {n}"))
        run.end_request(RequestInfo(f"rid {n}", generated_tokens=3, lost_reason=f"refused: {n}"))
        run.release(claim, f"free text {n}")

    for n in range(MAX_REASONS + 10):
        stop(n)
    (claim,) = run.claim(worker, 1)
    run.release(claim, "usual")
    run.release(run.claim(worker, 1)[0], "free text 0")

    def of(kind: str) -> dict[str, int]:
        found = f.rows(run, "SELECT reason, sum(n) AS n FROM event_total WHERE kind = :k GROUP BY reason", k=kind)
        return {row["reason"]: int(row["n"]) for row in found}

    for _ in range(2):
        assert of("release")["usual"] == 2 and of("release")["free text 0"] == 2
        assert of("release")[OTHER] == 10 + 1 and len(of("release")) == MAX_REASONS + 1
        assert of("abort")[OTHER] == 10 and len(of("abort")) == MAX_REASONS + 1
        lost = run.ledger()["requests"]["lost_by_reason"]
        assert lost[OTHER] == 20 and len(lost) == MAX_REASONS + 1 and sum(lost.values()) == 2 * (MAX_REASONS + 10)
        f.sound(run)
        run.transact(lambda tx: f.liveness.goodbye(tx, worker))
    f.execute(run, "UPDATE request SET lost_tokens = 9, generated_tokens = 10 WHERE rid IN ('rid 58', 'rid 59')")
    run.transact(recount)
    f.sound(run)
    # Counted at once, those with the most have their names, and of equals the first by name.
    assert of("release")["usual"] == 2 and of("release")["free text 0"] == 2 and "free text 9" not in of("release")
    assert of("release")[OTHER] == 10 + 1 and len(of("release")) == len(of("abort")) == MAX_REASONS + 1
    lost = run.ledger()["requests"]["lost_by_reason"]
    assert lost["refused: 58"] == lost["refused: 59"] == 9 and lost[OTHER] == 20 and len(lost) == MAX_REASONS + 1
    f.execute(run, "UPDATE event_total SET n = n + 1 WHERE kind = 'abort' AND reason = :r", r=OTHER)
    f.execute(run, "UPDATE request_total SET lost = lost + 1 WHERE reason = :r", r=OTHER)
    assert {finding.code for finding in run.check()} == {"event_total", "request_total"}
    run.transact(recount)
    f.sound(run)


def test_a_request_that_has_ended_takes_no_more_tokens(run: Run) -> None:
    """Alone, and beside others in one commit."""
    one, other = run.claim(f.register(run), 2)
    for claim, rid in ((one, "a"), (other, "b")):
        run.begin_request(claim, rid, URL)
    f.add(run, one, 3, rid="a")
    run.end_request(RequestInfo("a", generated_tokens=5, lost_reason="late"))
    before = f.snapshot(run)
    with pytest.raises(InvalidSegment, match="request 'a' has ended"):
        f.add(run, one, 2, rid="a")
    calls = [((c, c.seq, f.ids_of(2), f.logprobs_of(2), 0, None, "generated", None, rid), {})
             for c, rid in ((one, "a"), (other, "b"))]  # fmt: skip
    with pytest.raises(Contested):
        run.transact(lambda tx: appends.append_many(tx, calls))
    assert f.snapshot(run) == before
    f.add(run, other, 2, rid="b")
    f.add(run, one, 2, rid="never begun")
    f.sound(run)


def test_an_end_that_comes_while_its_group_is_removed(store: Store, run: Run) -> None:
    worker = f.register(run)
    (claim,) = run.claim(worker, 1)
    run.begin_request(claim, "a", URL)
    f.kill(run, worker)
    counted, ended = threading.Event(), threading.Event()
    real = Tx.recount

    def late() -> None:
        counted.wait(30)
        with samplestore.open(store.database.url.render_as_string(hide_password=False)) as again:
            mine = again.existing_run(run.name)
            mine.end_request(RequestInfo("a", generated_tokens=7, lost_reason="late"))
        ended.set()

    def slow(tx: Tx, **what: Any) -> None:
        real(tx, **what)
        counted.set()
        wait_for_lock(tx)

    def wait_for_lock(tx: Tx) -> None:
        """Until the other has ended, or waits for us."""
        if tx.connection.dialect.name == "postgresql":
            waits = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                            "AND wait_event_type = 'Lock'")  # fmt: skip
            look = partial(run.database.read, lambda c: c.execute(waits).scalar())
            wait_until(lambda: ended.is_set() or look(), what="an end that waits")

    thread = threading.Thread(target=late)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tx, "recount", slow)
        run.transact(lambda tx: prune.remove_groups(tx, [claim.group_id], run.name))
    thread.join(60)
    assert ended.is_set()
    f.sound(run)
