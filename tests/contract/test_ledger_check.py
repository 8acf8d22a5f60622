"""The ledger and check(): they hold after real work, and they see what is broken on purpose."""

# ruff: noqa: E501 - SQL reads better in one line

from __future__ import annotations

import itertools

import pytest
import sqlalchemy as sa

from samplestore import Store, states
from samplestore.models import Base
from samplestore.run import Run
from samplestore.statements import ledger
from samplestore.types import RequestInfo

from ..support import factory as f


@pytest.fixture
def run(store: Store) -> Run:
    """A run with a group of every kind: consumed, leased, ready, scoring, open, dropped."""
    run = f.make_run(store, prompts=8, groups_per_step=4, max_attempts=1, stages=["reward"])
    worker, trainer = f.register(run), f.register(run, "trainer")
    claims = run.claim(worker, 12)
    for claim in claims[:10]:
        f.answer(run, claim, 3)
    for stage in run.claim_stages(worker, 6):
        run.score(stage, 1.0)
    batch = f.lease(run, trainer, 0, 1)
    assert batch is not None
    f.commit(run, batch, trainer)
    f.lease(run, trainer, 1, 1)
    f.add(run, claims[10], 4)
    run.fail(claims[10], "broken")
    late = run.claim(worker, 3)
    f.add(run, late[0], 5)
    run.begin_request(late[1], "rid")
    run.append(late[1], f.ids_of(2), f.logprobs_of(2), 0, rid="rid")
    run.end_request(RequestInfo("rid", generated_tokens=4, lost_reason="late"))
    run.release(late[1], "weights")
    run.drop([claims[8].group_id], "unwanted")
    f.sound(run)
    return run


def test_the_ledger_knows_where_every_token_is(run: Run) -> None:
    told = run.ledger(exact=True)
    assert {k: v for k, v in told["by_fate"].items() if v} == {
        "consumed": 6, "leased": 6, "ready": 6, "awaiting_stage": 6, "dropped": 6, "failed": 4, "in_flight": 5, "resumable": 2,
    }  # fmt: skip
    assert told["generated"] == told["recounted"] == 41
    assert told["dropped_by_reason"] == {"unwanted": 6}
    assert (told["requests"]["generated"], told["requests"]["stored"], told["requests"]["lost_by_reason"]) == (
        4,
        2,
        {"late": 2},
    )
    assert run.ledger()["closed"] is None


def flip(run: Run, where: str, payload: bytes) -> None:
    f.execute(run, f"UPDATE segment SET payload = :p WHERE {where}", p=payload)


ONE = "(sample_id, seq) = (SELECT min(sample_id), 0 FROM segment)"
BROKEN: dict[str, tuple[str, set[str], bool]] = {
    # SQL, findings that it must cause, whether the ledger must be open
    "a shorter payload": (f"UPDATE segment SET payload = substr(payload, 1, 17) WHERE {ONE}", {"segment_length", "ledger"}, True),
    "a payload with one byte more": (f"UPDATE segment SET payload = payload || :b1 WHERE {ONE}", {"segment_length", "ledger"}, True),
    "an unknown format": (f"UPDATE segment SET payload = :b1 || substr(payload, 2) WHERE {ONE}", {"segment_length", "ledger"}, True),
    "n_tokens of a segment": (f"UPDATE segment SET n_tokens = n_tokens + 1 WHERE {ONE}", {"segment_length", "sample_summary"}, False),
    "a segment that is gone": (f"DELETE FROM segment WHERE {ONE}", {"sample_summary", "ledger"}, True),
    "a gap": ("UPDATE segment SET seq = seq + 5", {"segment_gap"}, False),
    "n_tokens of a sample": ("UPDATE sample SET n_tokens = n_tokens + 1 WHERE id = 1", {"sample_summary"}, False),
    "an amount of the ledger": ("UPDATE ledger_total SET amount = amount + 1 WHERE fate = 'ready'", {"ledger"}, True),
    "a row of the ledger": ("DELETE FROM ledger_total WHERE fate = 'consumed'", {"ledger"}, True),
    "tokens moved to another fate": ("UPDATE ledger_total SET fate = 'stale' WHERE fate = 'consumed'", {"ledger"}, True),
    "n_open of a group": ("UPDATE sample_group SET n_open = n_open + 1 WHERE state = 'open'", {"group_counters"}, False),
    "n_unscored of a group": ("UPDATE sample_group SET n_unscored = 0 WHERE state = 'scoring'", {"group_counters", "group_stranded"}, False),
    "n_failed of a group": ("UPDATE sample_group SET n_failed = 1 WHERE state = 'ready'", {"group_counters"}, False),
    "a group that is ready too early": ("UPDATE sample_group SET state = 'ready' WHERE state = 'scoring'", {"group_stranded", "ledger"}, True),
    "a group consumed by nobody": (
        "UPDATE sample_group SET state = 'consumed' WHERE state = 'ready'", {"group_consumed_without_batch", "ledger"}, True,
    ),
    "a batch that forgot its group": ("DELETE FROM batch_group WHERE state = 'committed'", {"batch_size", "group_consumed_without_batch"}, False),
    "a batch that was committed alone": ("UPDATE batch SET state = 'released' WHERE state = 'leased'", {"batch_state"}, False),
    "a sample of a dead owner": ("UPDATE worker SET state = 'dead' WHERE kind = 'rollout'", {"sample_owner_gone"}, False),
    "a status nobody wrote": ("UPDATE sample SET status = 'truncated', owner = NULL WHERE owner IS NOT NULL", {"group_counters", "ledger"}, True),
    "a version that does not exist": (f"UPDATE segment SET version_min = 9 WHERE {ONE}", {"segment_version", "sample_versions", "ledger"}, True),
    "tokens of a request": ("UPDATE request SET stored_tokens = 3", {"request_stored", "request_unexplained", "request_total"}, True),
    "tokens lost without a reason": ("UPDATE request SET lost_reason = NULL", {"request_unexplained", "request_total"}, True),
    "a total of requests": ("UPDATE request_total SET resumed = resumed + 1", {"request_total"}, True),
    "totals of requests that are gone": ("DELETE FROM request_total", {"request_total"}, True),
    "a total of events": ("UPDATE event_total SET n = n + 1", {"event_total"}, False),
    "an event that is gone": ("DELETE FROM event", {"event_total"}, False),
}  # fmt: skip


def test_what_is_broken_is_found(run: Run) -> None:
    """Each break is made, seen, and taken back."""
    for name, (statement, codes, opens) in BROKEN.items():
        tables = (
            "segment sample_group sample ledger_total batch_group batch worker request request_total event_total event"
        ).split()
        with run.database.reading() as connection:
            saved = {
                t: [dict(r) for r in connection.execute(sa.select(Base.metadata.tables[t])).mappings()] for t in tables
            }
        f.execute(run, statement, **({"b1": b"\x07"} if ":b1" in statement else {}))
        found = {finding.code for finding in run.check()}
        assert codes <= found, f"{name}: {found}"
        assert (run.ledger(exact=True)["closed"] is False) == opens, name
        _restore(run, saved)
    f.sound(run)


def _restore(run: Run, saved: dict[str, list[dict[str, object]]]) -> None:
    with run.database.writing() as connection:
        for name, wanted in saved.items():
            table = Base.metadata.tables[name]
            keys = [c.name for c in table.primary_key]
            # keys that a break has changed (seq, fate) or removed: take such tables back whole
            if name in ("segment", "ledger_total", "batch_group", "request_total", "event_total", "event"):
                connection.execute(sa.delete(table))
                connection.execute(sa.insert(table), wanted)
            else:
                sets = (
                    "state",
                    "status",
                    "owner",
                    "n_tokens",
                    "n_open",
                    "n_unscored",
                    "n_failed",
                    "stored_tokens",
                    "lost_reason",
                )
                for row in wanted:
                    mine = [c for c in sets if c in row]
                    text = ", ".join(f"{c} = :{c}" for c in mine)
                    connection.execute(
                        sa.text(f"UPDATE {name} SET {text} WHERE {keys[0]} = :k"),
                        {**{c: row[c] for c in mine}, "k": row[keys[0]]},
                    )


def test_fate_is_one_rule_in_python_and_in_sql(store: Store) -> None:
    """All combinations of group state, sample status, ownership and incarnation, through the SQL CASE."""
    run = f.make_run(store, prompts=1)
    combinations = [
        (g, s, owned, old)
        for g, s, owned, old in itertools.product(states.GroupState, states.SampleStatus, (False, True), (False, True))
        if not owned or s in states.CLAIMABLE  # the database refuses the others, see below
    ]
    claim = run.claim(f.register(run), 1)[0]
    f.add(run, claim, 1)
    with run.database.writing() as connection:
        for g, s, owned, old in combinations:
            connection.execute(
                sa.text("UPDATE sample SET status = :s, owner = :o, incarnation = :i WHERE id = :id"),
                {"s": s.value, "o": 1 if owned else None, "i": int(old), "id": claim.sample_id},
            )
            connection.execute(sa.text("UPDATE sample_group SET state = :g, reason = 'why'"), {"g": g.value})
            (row,) = ledger.OF_SAMPLES.rows(connection, {"ids": [claim.sample_id]})
            expected = states.fate(g, s, owned, old)
            assert row.fate == expected, (g, s, owned, old)
            assert row.reason == ("why" if expected == states.Fate.DROPPED else ""), (g, s, owned, old)
    with pytest.raises(sa.exc.IntegrityError):
        f.execute(run, "UPDATE sample SET status = 'completed', owner = 1")


def test_transitions_name_every_state() -> None:
    for table, kind in (
        (states.SAMPLE_TRANSITIONS, states.SampleStatus),
        (states.GROUP_TRANSITIONS, states.GroupState),
    ):
        assert set(table) == set(kind)


def test_readers_write_nothing_and_see_whole_transactions(run: Run, store: Store) -> None:
    with pytest.raises(sa.exc.DBAPIError):
        with store.session() as session:
            session.execute(sa.text("UPDATE sample SET n_tokens = 0"))
    with run.database.reading() as connection:
        before = connection.execute(sa.text("SELECT count(*) FROM event")).scalar()
        run.abort_inflight("while somebody reads")  # is not blocked
        assert connection.execute(sa.text("SELECT count(*) FROM event")).scalar() == before
