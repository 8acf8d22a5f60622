"""A reap costs with what is owned, never with all the samples that a run ever had. On SQLite, without statistics, as
in a database that nobody has analysed; PostgreSQL keeps them by itself, and test_million.py has its plans."""

from __future__ import annotations

import re

import samplestore
from samplestore.verbs import liveness
from tests.plans.test_plans import plans
from tests.support import factory as f

FOUND = r"INDEX ix_\2_owned|INTEGER PRIMARY KEY|INDEX \w+ \(group_id=\?\)"
ELSEWHERE = re.compile(rf"(SEARCH|SCAN) (sample|batch)($| USING (?!{FOUND}))", re.MULTILINE)


def test_a_reap_finds_what_is_owned_by_its_index(sqlite_url: str) -> None:
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=8)
        worker, trainer = f.register(run), f.register(run, "trainer")
        for claim in run.claim(worker, 4):
            f.answer(run, claim)
        assert f.lease(run, trainer, 0) and run.claim(worker, 3)
        f.silence(run, worker)
        f.silence(run, trainer)
        told = plans(run, liveness.reap)
        assert all(any(f"ix_{table}_owned" in plan for _, plan in told) for table in ("sample", "batch"))
        wrong = [f"{statement}\n{plan}" for statement, plan in told if ELSEWHERE.search(plan)]
        assert not wrong, "\n\n".join(wrong)
