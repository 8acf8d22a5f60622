"""Ranks of a trainer: rank 0 is killed and comes back with another world; records and commits meet."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import samplestore
from samplestore import Store, arrays
from samplestore.errors import SampleStoreError, StepHeld
from samplestore.verbs import batches as verbs
from tests.races.together import DEADLINE_S, Held, waiting_for_locks
from tests.support import factory as f
from tests.support.processes import Processes, wait_until

ROOT = Path(__file__).parent.parent.parent
RANK_0 = """
import sys, threading, samplestore
run = samplestore.open(sys.argv[1]).existing_run("r")
batch = run.batch(1, 2, rank=0, world=2, timeout=60)
print("leased", batch.id, flush=True)
threading.Event().wait()
"""


def test_a_killed_rank_0_comes_back_with_another_world(processes: Processes, db_url: str) -> None:
    with samplestore.open(db_url) as store:
        run = f.make_run(store, prompts=4, max_staleness=3)
        worker = f.register(run)
        claims = run.claim(worker, 100)
        for claim in claims[2:]:
            f.answer(run, claim)
        process = processes.start([sys.executable, "-c", RANK_0, db_url], name="rank-0", cwd=ROOT)
        process.wait_for_log("leased", timeout=60)
        before = run.batch(1, 2, rank=1, world=2, timeout=60)
        held = f.groups_of(run, before.id)
        for claim in claims[:2]:  # an older group is ready when the next life leases
            f.answer(run, claim)
        process.kill()
        owner = f.value(run, "SELECT owner FROM batch")
        with pytest.raises(StepHeld):
            f.lease(run, f.register(run, "trainer"), 1)
        f.kill(run, owner)  # what would happen by itself, once its time to live is over
        zero = run.batch(1, 2, rank=0, world=3, timeout=60)
        rest = [run.batch(1, 2, rank=rank, world=3, timeout=60) for rank in (1, 2)]
        assert zero.id != before.id and f.groups_of(run, zero.id) == held == [1, 2]
        read = sorted(sample.sample_id for batch in (zero, *rest) for sample in batch.samples)
        assert read == sorted(claim.sample_id for claim in claims[2:6])
        zero.commit()
        assert f.states(run) == ["ready", "consumed", "consumed", "ready"]
        f.sound(run)


def test_what_is_recorded_is_recorded_before_the_commit(postgres: Store) -> None:
    """Where PostgreSQL alone has two writers at once: one held open, the other waits for it."""
    run = f.make_run(postgres, prompts=2, groups_per_step=1)
    f.finish_all(run, f.register(run))
    trainer = f.register(run, "trainer")
    for step, first in enumerate(("record", "commit")):
        batch = f.batch_of(run, f.lease(run, trainer, step, 1) or 0, trainer)
        made = {s.sample_id: arrays.prepare(arrays.TRAINER, s.logprobs) for s in batch.samples}
        writes = {
            "record": lambda tx, b=batch, m=made: verbs.record(tx, b.id, m),
            "commit": lambda tx, b=batch: verbs.commit(tx, b.id, trainer),
        }
        second = writes.pop("commit" if first == "record" else "record")
        held = Held(run, writes[first])
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(run.transact, second)
            wait_until(lambda: waiting_for_locks(run), what="the second write waits")
            held.let_go()
            if first == "record":
                other.result(DEADLINE_S)
                assert run.replay(step).mismatch().abs_diff == 0
            else:
                with pytest.raises(SampleStoreError, match="is committed"):
                    other.result(DEADLINE_S)
    f.sound(run)
