"""A commit that succeeds but whose acknowledgement is lost: the verb runs again, and that must be harmless.

Database.write is replaced by one that runs and commits the closure and then runs and commits it once more, as it does
itself after a connection that broke during COMMIT. The test does the same work in two runs of one database, with and
without the fault; afterwards nothing but ids, times and uuids may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from samplestore import Store
from samplestore.engine import Database
from samplestore.errors import LeaseLost
from samplestore.run import Run
from samplestore.types import RequestInfo
from samplestore.verbs import appends, weights

from ..support import factory as f


@contextmanager
def lost_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    original, repeated = Database.write, [0]

    def write(self: Database, work: Callable[[Any], Any], **how: Any) -> Any:
        original(self, work, **how)
        repeated[0] += 1
        return original(self, work, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", write)
        yield repeated


def prepare(store: Store, name: str) -> Run:
    return f.make_run(store, name, prompts=3, stages=["a", "b"], max_attempts=2, on_failed="short", groups_per_step=2)


class Script:
    """One run's work. Every method is one verb; what it needs was made before, without faults."""

    def __init__(self, run: Run) -> None:
        self.run, self.worker = run, f.register(run)
        self.claims = run.claim(self.worker, 100)
        self.trainer = f.register(run, "trainer")
        self.stages: list[Any] = []
        self.batch: int | None = None

    def append(self) -> None:
        for claim in self.claims:
            f.add(self.run, claim, 3, finish_reason="abort")

    def append_again(self) -> None:
        f.add(self.run, self.claims[0], 2, 0, "length")

    def begin_request(self) -> None:
        self.run.begin_request(self.claims[0], f"{self.run.name}-rid", resumes=True)

    def append_of_request(self) -> None:
        self.run.append(self.claims[0], [1, 2], [-0.5, -0.5], 0, rid=f"{self.run.name}-rid")

    def end_request(self) -> None:
        self.run.end_request(RequestInfo(f"{self.run.name}-rid", generated_tokens=5, lost_reason="late"))

    def attach(self) -> None:
        self.run.attach(self.claims[0], "values", [0.5, 0.25])

    def finish(self) -> None:
        for claim in self.claims[:2]:
            self.run.finish(claim)

    def finish_and_keep(self) -> None:
        self.kept = self.run.finish(self.claims[2], keep_stages=True)
        assert [s.name for s in self.kept] == ["a", "b"]

    def release(self) -> None:
        self.run.release(self.claims[3], "weights")

    def fail(self) -> None:
        assert self.run.fail(self.claims[4], "first", backoff_s=0.0) == "aborted"

    def score(self) -> None:
        for stage in self.kept:
            self.run.score(stage, 0.5, {"k": 1})

    def fail_stage(self) -> None:
        assert self.run.fail_stage(self.stages[0], "boom", backoff_s=0.0) == "pending"

    def release_stage(self) -> None:
        self.run.release_stage(self.stages[1])

    def add_prompts(self) -> None:
        self.run.add_prompts([{"prompt_ids": [8, 8]}])

    def admit(self) -> None:
        self.run.admit()

    def publish(self) -> None:
        assert self.run.publish_weights(path="/w/1", step=1).version == 1

    def see_engine(self) -> None:
        self.run.transact(lambda tx: weights.see_engine(tx, f"http://{self.run.name}", "default"))

    def drop(self) -> None:
        assert self.run.drop([self.claims[4].group_id], "unwanted") == 1

    def reap(self) -> None:
        self.run.reap()

    def goodbye(self) -> None:
        self.run.goodbye(self.worker)

    def work_off(self) -> None:
        """Not a fault's place: everything that is left is finished and scored."""
        me = f.register(self.run)
        for _ in range(3):
            f.finish_all(self.run, me)
            f.execute(self.run, "UPDATE stage SET not_before = 0")

    def lease(self) -> None:
        self.batch = f.lease(self.run, self.trainer, 0, 1)
        assert self.batch is not None

    def give_back(self) -> None:
        f.release(self.run, self.batch or 0, self.trainer)

    def lease_again(self) -> None:
        self.lease()

    def commit(self) -> None:
        f.commit(self.run, self.batch or 0, self.trainer)


STEPS = (
    "append", "append_again", "begin_request", "append_of_request", "end_request", "attach", "finish",
    "finish_and_keep",
    "release", "fail", "score", "fail_stage", "release_stage", "see_engine", "add_prompts", "admit", "publish", "drop",
    "reap", "goodbye", "work_off", "lease", "give_back", "lease_again", "commit",
)  # fmt: skip
VOLATILE = {"uuid", "label", "name", "url", "rid", "request_rid", "settings"}


REFERS = {
    "owner": "worker", "finished_by": "worker", "worker_id": "worker", "sample_id": "sample",
    "group_id": "sample_group",
    "batch_id": "batch", "prompt_id": "prompt",
}  # fmt: skip


def picture(run: Run) -> dict[str, list[Any]]:
    """Everything of a run, ids replaced by their rank within it and times by 'a time'."""
    found = f.snapshot(run, leave_out=("run",))
    mine = {table: [r for r in rows if r.get("run_id", run.id) == run.id] for table, rows in found.items()}
    rank = {t: {r["id"]: n for n, r in enumerate(rows)} for t, rows in mine.items() if rows and "id" in rows[0]}
    for table in ("segment", "segment_array", "episode_step"):
        mine[table] = [r for r in mine[table] if r["sample_id"] in rank["sample"]]
    mine["batch_group"] = [r for r in mine["batch_group"] if r["batch_id"] in rank.get("batch", {})]

    def shown(table: str, key: str, value: Any) -> Any:
        if isinstance(value, float) and value > 1e9:
            return "a time"
        if (table == "event" and key == "details") or key == "not_before":
            return bool(value)
        return rank[REFERS[key]][value] if key in REFERS and value else value

    dull = {*VOLATILE, "id", "run_id"}
    return {t: [{k: shown(t, k, v) for k, v in r.items() if k not in dull} for r in rows] for t, rows in mine.items()}


def test_every_verb_may_run_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, faulty = Script(prepare(store, "plain")), Script(prepare(store, "faulty"))
    for step in STEPS:
        getattr(plain, step)()
        if step == "work_off":
            faulty.work_off()
        else:
            with lost_acknowledgements(monkeypatch) as repeated:
                getattr(faulty, step)()
            assert repeated[0] > 0, step
        if step == "finish":
            for script in (plain, faulty):
                script.stages = script.run.claim_stages(script.worker, 3)
        a, b = picture(plain.run), picture(faulty.run)
        for table in a:
            assert b[table] == a[table], (step, table)
        f.sound(faulty.run)
    assert f.value(plain.run, "SELECT count(*) FROM batch WHERE state = 'committed'") == 2


def test_a_claim_whose_answer_was_lost_is_disowned(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    with lost_acknowledgements(monkeypatch):
        known = run.claim(worker, 2)
    assert f.value(run, "SELECT count(*) FROM sample WHERE owner IS NOT NULL") == 4
    assert run.disown(worker, [c.sample_id for c in known]) == 2
    f.sound(run)


def test_a_group_commit_may_run_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from samplestore.verbs import samples
    from samplestore.writer import Writer

    run = f.make_run(store)
    claims = run.claim(f.register(run), 8)
    with lost_acknowledgements(monkeypatch):
        writer = Writer(run)
        futures = [writer.submit(appends.append, c, 0, f.ids_of(2), f.logprobs_of(2), 0) for c in claims]
        futures += [writer.submit(samples.finish, c) for c in claims]
        for future in futures:
            future.result(30)
        writer.close()
    assert f.states(run) == ["ready"] * 4
    assert run.ledger()["generated"] == 16
    f.sound(run)


def test_an_engine_update_may_be_ended_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f.make_run(store)
    worker = f.register(run)
    run.transact(lambda tx: weights.see_engine(tx, "http://e", "default"))
    label = run.publish_weights(path="/w/1", step=1).label
    with lost_acknowledgements(monkeypatch):
        held = run.transact(lambda tx: weights.claim_engine(tx, worker, "http://e"))
        assert held is not None, "its own claim again"
        run.transact(lambda tx: weights.engine_updated(tx, held, label))
    assert [r["version"] for r in f.rows(run, "SELECT version FROM engine WHERE owner IS NULL")] == [1]
    assert len(f.events(run, "weight_update")) == 1
    run.transact(lambda tx: weights.forget_engine(tx, "http://e"))
    with pytest.raises(LeaseLost):
        run.transact(lambda tx: weights.engine_updated(tx, held, label))


@pytest.mark.parametrize("ended", ["stop", "abort"])
def test_the_end_of_a_reply_may_be_written_twice(store: Store, monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    """Its last segment, its request's end and its sample's, as one write: as a worker sends them."""
    from samplestore.verbs import requests, samples
    from samplestore.writer import Writer

    run = f.make_run(store, stages=["a"])
    claim = run.claim(f.register(run), 1)[0]
    run.begin_request(claim, "rid")
    calls: list[tuple[Any, ...]] = [
        (appends.append, claim, 0, f.ids_of(3), f.logprobs_of(3), 0, "stop", "generated", None, "rid"),
        (requests.end_request, RequestInfo("rid", generated_tokens=3, finish_reason=ended)),
        (samples.finish, claim, None, "stop", True),
    ]
    if ended == "abort":  # everything was stored before: nothing but the abort itself is to be told
        run.append(claim, f.ids_of(3), f.logprobs_of(3), 0, rid="rid")
        calls = [(appends.note_abort, claim, "late", "rid"), calls[1]]
    writer = Writer(run)
    with lost_acknowledgements(monkeypatch):
        results = writer.submit_together(calls).result(30)
    writer.close()
    [row] = f.rows(run, "SELECT * FROM sample WHERE id = :i", i=claim.sample_id)
    assert row["n_tokens"] == 3 and f.value(run, "SELECT lost_reason FROM request") is None
    if ended == "stop":
        assert [stage.name for stage in results[-1]] == ["a"] and row["status"] == "completed"
    else:
        assert row["n_aborts"] == 1 and len(f.events(run, "abort")) == 1
    f.sound(run)
