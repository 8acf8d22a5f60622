"""What engines tell of themselves: counters read by many, restarts, unfit engines, and the ledger's other end."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from samplestore import Store
from samplestore.errors import InvalidSetting, LeaseLost
from samplestore.run import Run
from samplestore.types import EngineFacts, RequestInfo
from samplestore.verbs import requests, weights
from samplestore.verbs.tx import Contested
from samplestore.writer import Writer

from ..support import factory as f

URL = "http://127.0.0.1:3000"


@pytest.fixture
def run(store: Store) -> Run:
    return f.make_run(store)


def base(run: Run, url: str = URL) -> float | None:
    with run.database.reading() as connection:
        return weights.counter_base(connection, url)


def tell(run: Run, counter: int | None, seen_at: float | None, url: str = URL, **facts: Any) -> dict[str, Any]:
    told = EngineFacts(counter=counter, **facts)
    return run.transact(lambda tx: weights.see_engine(tx, url, "default", facts=told, counter_seen_at=seen_at))


def look(run: Run, counter: int, url: str = URL) -> int:
    """One undisturbed reading; the tokens that are known of by now."""
    return int(tell(run, counter, base(run, url), url)["generated_tokens"])


def broken(run: Run, error: str = "NaN", label: str | None = None, url: str = URL) -> bool:
    return run.transact(lambda tx: weights.engine_broken(tx, 1, url, error, label))


def failed(run: Run) -> list[str]:
    with run.database.reading() as connection:
        return weights.failed_engines(connection, run.id)


# -- counters


def test_the_first_reading_is_the_base_and_later_ones_add_up(run: Run) -> None:
    assert base(run) is None
    assert [look(run, n) for n in (1000, 1000, 1007, 1300)] == [0, 0, 7, 300]


def test_a_counter_that_fell_is_a_new_process(run: Run) -> None:
    assert [look(run, n) for n in (1000, 1100, 30, 50, 0, 5)] == [0, 100, 130, 150, 150, 155]


def test_of_two_readings_on_one_base_one_counts(run: Run) -> None:
    look(run, 100)
    first, second = base(run), base(run)
    assert tell(run, 150, first)["generated_tokens"] == 50
    assert tell(run, 150, second)["generated_tokens"] == 50, "the same tokens, read by another worker"
    assert tell(run, 170, second)["counter"] == 150, "newer, but on a base that is gone: the next reading has it"
    assert look(run, 170) == 70


def test_a_slow_reading_is_no_restart(run: Run) -> None:
    """It was asked first and came last: a lower number that must not be taken for a counter that began again."""
    look(run, 100)
    slow = base(run)
    look(run, 500)
    assert tell(run, 120, slow)["generated_tokens"] == 400
    assert look(run, 510) == 410


def test_two_first_readings_make_one_base(run: Run) -> None:
    tell(run, 100, None)
    assert tell(run, 900, None)["counter"] == 100
    assert look(run, 900) == 800


def test_readings_of_one_instant_differ(run: Run) -> None:
    """Also where the clock has gone back: equal times would let two readings count on one base."""
    look(run, 100)
    f.execute(run, "UPDATE engine SET counter_at = counter_at + 1000")
    ahead = base(run)
    look(run, 150)
    assert ahead is not None and (now := base(run)) is not None and now > ahead
    assert tell(run, 150, ahead)["generated_tokens"] == 50
    assert look(run, 151) == 51


def test_a_forgotten_engine_begins_anew(run: Run) -> None:
    look(run, 100)
    old = base(run)
    look(run, 130)
    run.transact(lambda tx: weights.forget_engine(tx, URL))
    assert base(run) is None
    assert tell(run, 200, old)["counter"] is None, "a reading on the base of the row that is gone"
    assert look(run, 200) == 0
    assert f.value(run, "SELECT sum(generated_tokens) FROM engine") == 30


@pytest.mark.parametrize("restarts", [False, True])
def test_readings_in_any_order_never_count_a_token_twice(run: Run, restarts: bool) -> None:
    """Four workers take a base, ask, and write in any order, while the engine generates and is restarted."""
    chance = random.Random(7)
    counter = made = before = 0
    known = look(run, counter)
    bases: dict[int, float | None] = {}
    answers: dict[int, int] = {}
    for turn in range(200):
        more, worker = chance.randrange(30), turn * chance.randrange(1, 9) % 4
        counter, made = counter + more, made + more
        if worker in answers:
            known = int(tell(run, answers.pop(worker), bases.pop(worker))["generated_tokens"])
            assert before <= known <= made
            before = known
        elif worker in bases:
            answers[worker] = counter
        else:
            bases[worker] = base(run)
        if restarts and turn % 40 == 20:
            counter = 0
    known = look(run, counter)
    assert known == made if not restarts else made / 2 < known <= made


def test_many_workers_that_read_at_once(run: Run) -> None:
    """Real transactions: what is known at the end is what the engine made."""
    counted, guard, made = [0], threading.Lock(), 8 * 15 * 10

    def work(_: int) -> None:
        for _ in range(15):
            seen_at = base(run)
            with guard:
                counted[0] += 10
                now = counted[0]
            tell(run, now, seen_at)

    look(run, 0)
    together(8, work)
    assert look(run, counted[0]) == made


def together(n: int, work: Any) -> list[Any]:
    barrier, results = threading.Barrier(n), [None] * n

    def one(i: int) -> None:
        barrier.wait()
        results[i] = work(i)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_an_engine_that_many_see_first_is_one_row(run: Run) -> None:
    rows = together(6, lambda i: tell(run, 100, None))
    assert {row["id"] for row in rows} == {rows[0]["id"]}
    assert (rows[0]["label"], rows[0]["version"], rows[0]["counter"], rows[0]["generated_tokens"]) == (
        "default", 0, 100, 0,
    )  # fmt: skip


# -- other facts


def test_what_is_not_told_is_kept(run: Run) -> None:
    told = {"context_length": 2048, "release": "0.5.23", "running": 3, "queued": 0}
    assert told.items() <= tell(run, 5, None, **told).items()
    assert {**told, "running": 1}.items() <= tell(run, None, None, running=1).items()
    assert told["release"] == run.transact(lambda tx: weights.see_engine(tx, URL, "default"))["release"]
    assert "\x00" not in tell(run, None, None, release="\x00" + "x" * 999)["release"]


@pytest.mark.parametrize("facts", [{"counter": -1}, {"counter": 2**60}, {"counter": 1.5}, {"running": 2**40}])
def test_impossible_facts_are_refused(run: Run, facts: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(facts))):
        tell(run, facts.get("counter"), None, **{k: v for k, v in facts.items() if k != "counter"})
    assert f.rows(run, "SELECT * FROM engine") == []


# -- engines that are unfit


def test_a_broken_engine_is_one_failure_however_many_samples_find_it(run: Run) -> None:
    tell(run, None, None)
    assert together(6, lambda _: broken(run, "all log-probs are null\x00")).count(True) == 1
    (row,) = f.rows(run, "SELECT state, failures, error, not_before > updated_at AS waits FROM engine")
    assert (row["state"], row["failures"], bool(row["waits"])) == ("failed", 1, True)
    assert "\x00" not in row["error"]
    (event,) = f.events(run, "engine_failed")
    assert event["worker_id"] == 1 and event["version"] == 0
    assert failed(run) == [URL]
    tell(run, None, None)
    assert failed(run) == [URL], "to be seen again is no proof"


def test_a_broken_engine_comes_back_by_a_probe(run: Run) -> None:
    tell(run, None, None)
    recover = lambda: run.transact(lambda tx: weights.engine_recovered(tx, URL))  # noqa: E731
    assert not recover()
    broken(run)
    assert recover() and not recover()
    assert f.rows(run, "SELECT state, error FROM engine") == [{"state": "live", "error": None}]
    assert failed(run) == [] and len(f.events(run, "engine_recovered")) == 1
    assert broken(run), "and may fail again"


def test_a_broken_engine_comes_back_by_an_update(run: Run) -> None:
    tell(run, None, None)
    broken(run)
    run.publish_weights(path="/w/1", step=1)
    f.execute(run, "UPDATE engine SET not_before = 0")
    worker = f.register(run)
    held = run.transact(lambda tx: weights.claim_engine(tx, worker, URL))
    assert held is not None
    run.transact(lambda tx: weights.engine_updated(tx, held, held["label"]))
    assert f.rows(run, "SELECT state, failures, error FROM engine") == [{"state": "live", "failures": 0, "error": None}]


def test_what_was_seen_under_other_weights_is_no_reason(run: Run) -> None:
    """A reply that was under way when the weights changed must not fail an engine that is fit by now."""
    tell(run, None, None)
    assert not broken(run, label="v7")
    assert failed(run) == []
    assert broken(run, label="default")


def test_an_engine_that_fails_under_new_weights_too_is_a_new_failure(run: Run) -> None:
    tell(run, None, None)
    run.publish_weights(step=1, label="one")
    broken(run)
    assert not broken(run, "again")
    run.transact(lambda tx: weights.see_engine(tx, URL, "one"))
    assert f.rows(run, "SELECT state, failures, not_before FROM engine") == [
        {"state": "failed", "failures": 0, "not_before": 0.0}
    ]
    assert broken(run, "again") and not broken(run, "again")
    assert [(e["version"], e["reason"]) for e in f.events(run, "engine_failed")] == [(0, "NaN"), (1, "again")]


def test_the_engine_of_another_run_is_left_alone(run: Run, store: Store) -> None:
    other = f.make_run(store, "other")
    tell(other, None, None)
    assert not broken(run)
    broken(other)
    assert not run.transact(lambda tx: weights.engine_recovered(tx, URL))
    assert (failed(run), failed(other)) == ([], [URL])


# -- the ledger's other end


def generate(run: Run, n: int, stored: int, rid: str) -> None:
    """A request that made n tokens, of which the last were lost."""
    (claim,) = run.claim(f.register(run), 1)
    run.begin_request(claim, rid, URL, 1.0)
    f.add(run, claim, stored, 0, "stop", rid=rid)
    run.end_request(RequestInfo(rid, generated_tokens=n, lost_reason="late" if n > stored else None))
    run.finish(claim)


def test_engines_generated_more_than_requests_were_told(run: Run) -> None:
    look(run, 1000)
    generate(run, 10, 8, "a")
    look(run, 1030)  # 10 for the request, 20 that a router threw away
    told = run.ledger()["engines"]
    assert told == {
        "engines": 1, "counted": 1, "generated": 30, "requests_generated": 10, "stored": 8,
        "lost_by_reason": {"late": 2}, "unaccounted": 20, "inexact": [],
    }  # fmt: skip


def inexact(run: Run) -> str:
    return "; ".join(run.ledger()["engines"]["inexact"])


def test_what_makes_the_difference_inexact_is_said(run: Run) -> None:
    assert inexact(run) == "no engine is known"
    assert run.ledger()["engines"]["unaccounted"] is None
    run.transact(lambda tx: weights.see_engine(tx, URL, "default"))
    assert inexact(run) == f"no counter is told by {URL}"
    look(run, 0)
    assert inexact(run) == ""
    generate(run, 5, 5, "a")
    assert inexact(run) == f"not read since the last request ended: {URL}"
    look(run, 5)
    assert inexact(run) == "" and run.ledger()["engines"]["unaccounted"] == 0
    (claim,) = run.claim(f.register(run), 1)
    run.begin_request(claim, "b")
    assert inexact(run) == "1 request is in flight"
    run.end_request(RequestInfo("b", lost_reason="worker dead"))
    look(run, 5)
    assert inexact(run) == "of 1 request nobody knows how much was generated"


def test_engines_of_other_runs_are_not_counted(run: Run, store: Store) -> None:
    other = f.make_run(store, "other")
    look(other, 0)
    look(other, 50)
    assert run.ledger()["engines"]["generated"] is None
    assert other.ledger()["engines"]["generated"] == 50


# -- why


def test_why_tells_first_that_all_engines_failed(run: Run) -> None:
    f.register(run)
    tell(run, None, None)
    tell(run, None, None, "http://127.0.0.1:3001")
    broken(run, "every log-prob is null")
    run.pause()
    assert [code for code, _ in run.why().reasons][:2] == ["run_not_running", "failed_engines"], "one still works"
    assert run.why().reasons[1][1] == f"1 of 2 engines failed; the last, {URL}: every log-prob is null"
    broken(run, "no such file", url="http://127.0.0.1:3001")
    assert run.why().reasons[:2] == [
        ("failed_engines", "2 of 2 engines failed; the last, http://127.0.0.1:3001: no such file"),
        ("run_not_running", "the run is paused (samplestore resume)"),
    ]
    assert [code for code, _ in run.why().reasons].count("failed_engines") == 1


# -- a request's name


def counted(run: Run) -> list[dict[str, Any]]:
    told = "SELECT rid, sample_id, stored_tokens, generated_tokens, lost_tokens FROM request ORDER BY rid"
    return f.rows(run, told)


def test_a_rid_is_of_one_call(run: Run, store: Store) -> None:
    """What another call stored under it would be taken for lost: the ledger would not close."""
    other = f.make_run(store, "other")
    a, b = run.claim(f.register(run), 2)
    (theirs,) = other.claim(f.register(other), 1)
    run.begin_request(a, "r1")
    before = f.snapshot(run)
    for taker, claim in ((run, b), (other, theirs)):
        with pytest.raises(InvalidSetting, match="rid='r1' is not allowed; use a new name for every request"):
            taker.begin_request(claim, "r1")
    run.begin_request(a, "r1")
    assert f.snapshot(run) == before
    run.begin_request(b, "r2")
    f.add(run, a, 2, rid="r1")
    f.add(run, b, 3, rid="r2")
    run.begin_request(b, "r2")
    for rid, n in (("r1", 2), ("r2", 3)):
        run.end_request(RequestInfo(rid, generated_tokens=n))
    assert [(r["stored_tokens"], r["lost_tokens"]) for r in counted(run)] == [(2, 0), (3, 0)]
    run.begin_request(b, "r2")
    f.sound(run)


@pytest.mark.parametrize("kept", [False, True], ids=["claimed again", "in one claim"])
def test_a_resume_needs_a_rid_of_its_own(run: Run, kept: bool) -> None:
    (claim,) = run.claim(f.register(run), 1)
    run.begin_request(claim, "r1")
    f.add(run, claim, 2, 0, "abort", rid="r1")
    run.end_request(RequestInfo("r1", generated_tokens=2))
    again = claim
    if not kept:
        run.release(claim, "weights")
        (again,) = run.claim(f.register(run), 1)
    assert again.n_tokens == 2
    before = f.snapshot(run)
    with pytest.raises(InvalidSetting, match="rid"):
        run.begin_request(again, "r1", resumes=True)
    assert f.snapshot(run) == before
    run.begin_request(again, "r2", resumes=True)
    run.begin_request(again, "r2", resumes=True)
    assert f.sample(run, claim.sample_id)["n_resumes"] == 1
    if not kept:
        run.begin_request(claim, "r1")  # its acknowledgement was lost, and it comes late
        with pytest.raises(LeaseLost):
            run.begin_request(claim, "r2", resumes=True)
    f.sound(run)


def test_one_rid_twice_in_one_commit(run: Run) -> None:
    """One of them begins, the other is refused alone."""
    claims = run.claim(f.register(run), 3)
    writer = Writer(run)
    told = [
        writer.submit(requests.begin_request, c, rid, None, None, False) for c, rid in zip(claims, "xxy", strict=True)
    ]
    errors = [future.exception(30) for future in told]
    writer.close()
    assert [type(error) for error in errors] == [type(None), InvalidSetting, type(None)]
    assert [r["sample_id"] for r in counted(run)] == [claims[0].sample_id, claims[2].sample_id]
    many = lambda tx: requests.begin_many(tx, [((c, "z", None, None, False), {}) for c in claims[:2]])  # noqa: E731
    with pytest.raises(Contested):
        run.transact(many)
    assert len(counted(run)) == 2
    f.sound(run)


def test_one_rid_of_two_samples_at_once(run: Run) -> None:
    """Real transactions: the second sees what the first committed meanwhile."""
    claims = run.claim(f.register(run), 6)

    def begin(i: int) -> str | None:
        try:
            run.begin_request(claims[i], "same")
        except InvalidSetting as error:
            return error.name
        return None

    assert sorted(map(str, together(6, begin))) == ["None", *["rid"] * 5]
    assert len(counted(run)) == 1
