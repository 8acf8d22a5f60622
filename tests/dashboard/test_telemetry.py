"""What the overview's ledger tells of the engines' own counts."""

from __future__ import annotations

import samplestore
from samplestore.dashboard import overview_parts, overview_source
from samplestore.run import Run
from samplestore.types import EngineFacts
from samplestore.verbs import weights
from tests.support import factory

URL = "http://127.0.0.1:9"


def see(run: Run, counter: int, seen_at: float | None) -> float | None:
    told = EngineFacts(counter=counter)
    row = run.transact(lambda tx: weights.see_engine(tx, URL, "default", facts=told, counter_seen_at=seen_at))
    return row["counter_at"]


def drawn(run: Run) -> str:
    return overview_parts.token_ledger(overview_source.Overview("db", {}, {}, run.ledger(), {}, [], {}, {}))


def test_the_ledger_tells_what_engines_counted(store: samplestore.Store) -> None:
    run = factory.make_run(store)
    assert "engines counted" not in drawn(run)
    at = see(run, 100, None)
    see(run, 142, at)
    assert "engines counted 42 tokens, 42 more than the requests of this run that ended" in drawn(run)
    run.begin_request(run.claim(factory.register(run), 1)[0], "open")
    assert "engines counted 42 tokens, about 42 more than" in drawn(run)
