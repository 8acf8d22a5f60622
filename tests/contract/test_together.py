"""The writes of one commit are done together: with the same outcome as one by one, in few statements."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from samplestore import Store, codec
from samplestore.errors import InvalidSegment, LeaseLost
from samplestore.run import Run
from samplestore.types import Claim, RequestInfo
from samplestore.verbs import appends, requests, samples
from samplestore.verbs.together import Write, perform
from samplestore.verbs.tx import Contested, Tx
from samplestore.writer import Writer

from ..support import factory as f


def write(verb: Any, claim: Claim, *args: Any, **kwargs: Any) -> Write:
    return Write(verb, ((claim, *args), kwargs), claim.group_id, claim.sample_id)


def append(claim: Claim, seq: int, n: int = 3, **more: Any) -> Write:
    return write(appends.append, claim, seq, f.ids_of(n), f.logprobs_of(n), 0, **more)


def ended(rid: str, generated: int) -> Write:
    return Write(requests.end_request, ((RequestInfo(rid, generated_tokens=generated),), {}), 0, 0)


def mixed(claims: list[Claim]) -> list[Write]:
    """A whole life of some samples, half of one of others, an abort, and tokens of an environment."""
    done: list[Write] = []
    for i, claim in enumerate(claims):
        rid = f"r{i}"
        done += [
            write(requests.begin_request, claim, rid, "engine", 1.0, False),
            append(claim, 0, 3 + i, rid=rid),
            write(appends.append, claim, 1, [7, 8], None, 0, kind="environment"),
            append(
                claim, 2, 2, rid=rid, finish_reason=("stop", "length", "abort", None)[i % 4], abort_reason="weights"
            ),
            ended(rid, 5 + i),
        ]
        if i % 4 < 2:
            done.append(write(samples.finish, claim))
        elif i % 4 == 2:
            done.append(write(samples.release, claim, "weights"))
    return done


def test_together_is_the_same_as_one_by_one(store: Store) -> None:
    outcomes = []
    for name in ("together", "alone"):
        run = f.make_run(store, name, prompts=4)
        claims = run.claim(f.register(run), 8)
        if name == "together":
            run.transact(lambda tx, claims=claims: perform(tx, mixed(claims)))
        else:
            for one in mixed(claims):
                run.transact(lambda tx, one=one: perform(tx, [one]))
        f.sound(run)
        fates = f.fates(run)
        states = f.states(run)
        rows = [f.sample(run, claim.sample_id) for claim in claims]
        kept = (
            "status",
            "n_tokens",
            "n_segments",
            "n_aborts",
            "n_loss_tokens",
            "logprob_sum",
            "finish_reason",
            "let_go",
        )
        stored = [
            [(s["start"], s["n_tokens"], s["kind"], bytes(s["payload"])) for s in f.segments(run, claim.sample_id)]
            for claim in claims
        ]
        requests = f.rows(
            run, "SELECT rid, stored_tokens, generated_tokens, lost_tokens FROM request WHERE run_id = :r ORDER BY rid",
            r=run.id,
        )  # fmt: skip
        aborts = Counter((e["reason"], e["tokens"]) for e in f.events(run, "abort"))
        outcomes.append((fates, states, [{k: row[k] for k in kept} for row in rows], stored, requests, aborts))
        f.execute(run, "UPDATE request SET rid = rid || :n", n=name)  # request ids are of the whole store
    assert outcomes[0] == outcomes[1]


def test_results_come_in_the_order_of_the_writes(store: Store) -> None:
    run = f.make_run(store)
    claims = run.claim(f.register(run), 4)
    writes = [append(claim, 0, n) for n, claim in enumerate(reversed(claims), 3)] + [append(claims[0], 1, 9)]
    assert run.transact(lambda tx: perform(tx, writes)) == [3, 4, 5, 6, 9]
    assert [s["start"] for s in f.segments(run, claims[0].sample_id)] == [0, 6]


def test_one_refused_by_the_database_takes_all_back(store: Store) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    claims = run.claim(worker, 3)
    run.release(claims[1], "given back")
    before = f.snapshot(run)
    for verb in (
        lambda c: append(c, 0),
        lambda c: write(requests.begin_request, c, f"r{c.sample_id}", None, None, False),
    ):
        with pytest.raises(Contested):
            run.transact(lambda tx, verb=verb: perform(tx, [verb(claim) for claim in claims]))
        assert f.snapshot(run) == before
    for claim in (claims[0], claims[2]):
        f.add(run, claim)
    before = f.snapshot(run)
    with pytest.raises(Contested):
        run.transact(lambda tx: perform(tx, [write(samples.finish, claim) for claim in claims]))
    assert f.snapshot(run) == before


def test_the_writer_fails_only_the_refused_ones(store: Store) -> None:
    """One lost its lease, one repeats what is stored, one is malformed: the others are stored."""
    run = f.make_run(store)
    claims = run.claim(f.register(run), 6)
    run.release(claims[1], "given back")
    f.add(run, claims[2], 3)
    writer = Writer(run)
    with run.database.writing():  # so that all wait for one commit
        futures = [writer.submit(appends.append, c, 0, f.ids_of(3), f.logprobs_of(3), 0) for c in claims[:5]]
        futures.append(writer.submit(appends.append, claims[5], 0, [1, 2], [0.0], 0))
    writer.close()
    assert [type(future.exception(1)) for future in futures] == [
        type(None), LeaseLost, type(None), type(None), type(None), InvalidSegment,
    ]  # fmt: skip
    assert [len(f.segments(run, claim.sample_id)) for claim in claims] == [1, 0, 1, 1, 1, 0]
    f.sound(run)


def statements(run: Run, work: Any) -> list[str]:
    sent: list[str] = []

    def listen(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        sent.append(statement)

    sa.event.listen(run.database.writer, "before_cursor_execute", listen)
    try:
        run.transact(work)
    finally:
        sa.event.remove(run.database.writer, "before_cursor_execute", listen)
    return [s for s in sent if not s.startswith(("BEGIN", "COMMIT", "PRAGMA"))]


def test_a_commit_of_many_costs_the_statements_of_few(store: Store) -> None:
    """What makes group commit fast: the number of statements does not grow with the number of samples. (SQLite takes
    lists in powers of two, so that it knows few statements.)"""
    run = f.make_run(store, prompts=16, groups_per_step=9)
    claims = run.claim(f.register(run), 18)

    def of(part: list[Claim]) -> Any:
        def work(tx: Tx) -> None:
            perform(tx, [write(requests.begin_request, c, f"r{c.sample_id}", None, None, False) for c in part])
            perform(tx, [append(c, 0, rid=f"r{c.sample_id}") for c in part])
            perform(tx, [append(c, 1) for c in part])

        return work

    few, many = statements(run, of(claims[:2])), statements(run, of(claims[2:]))
    assert len(claims) == 18 and len(many) == len(few) <= 8, many


def test_a_lock_order_for_samples(postgres_url: str) -> None:
    """Two commits whose verbs meet the same samples in another order don't deadlock: both lock them sorted first."""
    import samplestore

    with samplestore.open(postgres_url) as store:
        run = f.make_run(store, prompts=2)
        claims = run.claim(f.register(run), 4)
        mixed_verbs = [append(claims[3], 0), write(requests.begin_request, claims[0], "r", None, None, False)]
        sent = statements(run, lambda tx: perform(tx, mixed_verbs))
        assert "FOR NO KEY UPDATE" in sent[0] and "ORDER BY sample.id" in sent[0], sent[0]


def test_a_write_without_a_group_waits_for_what_was_asked_before(store: Store) -> None:
    """Else a worker's goodbye could overtake the last tokens of its samples."""
    run = f.make_run(store)
    claims = run.claim(f.register(run), 4)
    assert len({claim.group_id % 2 for claim in claims}) == 2, "some of each lane"
    writer, go, done = Writer(run), threading.Event(), []

    def held(tx: Tx, claim: Claim) -> None:
        assert go.wait(30)
        done.append(claim.sample_id)

    before = [writer.submit(held, claim) for claim in claims]
    after = writer.submit(lambda tx, _: done.append("goodbye"), None)
    with pytest.raises(TimeoutError):
        after.result(0.5)
    go.set()
    after.result(30)
    assert len(done) == len(claims) + 1 and done[-1] == "goodbye"
    for future in before:
        future.result(30)
    writer.close()


def test_groups_are_written_side_by_side_on_postgresql(postgres_url: str) -> None:
    import samplestore

    with samplestore.open(postgres_url) as store:
        run = f.make_run(store)
        claims = run.claim(f.register(run), 4)
        slow = claims[0]
        other = next(claim for claim in claims if claim.group_id % 2 != slow.group_id % 2)
        writer, go = Writer(run), threading.Event()
        waits = writer.submit(lambda tx, claim: go.wait(30), slow)
        assert writer.submit(appends.append, other, 0, f.ids_of(3), f.logprobs_of(3), 0).result(20) == 3
        assert not waits.done()
        go.set()
        assert waits.result(30)
        writer.close()
        f.sound(run)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lane_that_died_holds_up_nobody(postgres_url: str) -> None:
    """Its event loop was closed under it: what waits for it goes on, and so does the writer's end."""
    import samplestore

    with samplestore.open(postgres_url) as store:
        run = f.make_run(store)
        odd = next(claim for claim in run.claim(f.register(run), 4) if claim.group_id % 2)
        loop = asyncio.new_event_loop()
        writer = Writer(run, loop=loop)
        loop.close()
        writer.submit(appends.append, odd, 0, f.ids_of(3), f.logprobs_of(3), 0)
        writer.submit(lambda tx, _: None, None)
        ends = threading.Thread(target=writer.close, daemon=True)
        ends.start()
        ends.join(30)
        assert not ends.is_alive()


def test_writes_together_tell_the_first_that_is_refused(store: Store) -> None:
    """That the lease is lost, before what is wrong with a segment: a worker blames its engine for that."""
    run = f.make_run(store)
    claim, other = run.claim(f.register(run), 2)
    run.release(claim, "given back")
    writer = Writer(run)
    good, bad = (appends.append, claim, 0, [1], [-0.5], 0), (appends.append, claim, 1, [1], [float("nan")], 0)
    with run.database.writing():  # so that all wait for one commit
        futures = [writer.submit_together(calls) for calls in ([good, bad], [bad, good])]
        fine = writer.submit(appends.append, other, 0, [1], [-0.5], 0)
    assert [type(future.exception(30)) for future in futures] == [LeaseLost, InvalidSegment]
    assert fine.result(30) == 1
    writer.close()
    assert f.segments(run, claim.sample_id) == []
    f.sound(run)


@pytest.mark.parametrize("n", [1, 3])
def test_segments_are_looked_through_before_the_transaction(
    store: Store, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """On SQLite all other processes wait for a transaction: four of them wrote a fifth less while each checked and
    encoded its tokens in it."""
    run = f.make_run(store)
    claims, order = run.claim(run.register(), n), []
    transact, encode = run.transact, codec.encode_many

    def transacted(work: Any, **more: Any) -> Any:
        order.append("transaction")
        done = transact(work, **more)
        order.append("committed")
        return done

    def encoded(*given: Any) -> Any:
        order.append("encoded")
        return encode(*given)

    monkeypatch.setattr(run, "transact", transacted)
    monkeypatch.setattr(codec, "encode_many", encoded)
    run.append(claims[0], [1, 2], [-0.5, -0.5], 0)
    assert order == ["encoded", "transaction", "committed"]
    order.clear()
    writer = Writer(run)
    done = writer.submit_together([(appends.append, c, c.seq, [3], [-0.5], 0) for c in claims])
    assert done.result(30) == [1] * n
    writer.close()
    assert order == ["encoded", "transaction", "committed"]
