"""A reap costs with what is owned, never with all the samples that a run ever had. On SQLite, without statistics, as
in a database that nobody has analysed; PostgreSQL keeps them by itself, and test_million.py has its plans."""

from __future__ import annotations

import re

import samplestore
from samplestore.verbs import liveness
from tests.plans.test_plans import plans
from tests.support import factory as f

ELSEWHERE = re.compile(r"(SEARCH|SCAN) sample($| USING (?!INDEX ix_sample_owned|INTEGER PRIMARY KEY))", re.MULTILINE)


def test_a_reap_finds_owned_samples_by_their_index(sqlite_url: str) -> None:
    with samplestore.open(sqlite_url) as store:
        run = f.make_run(store, prompts=8)
        worker = f.register(run)
        run.claim(worker, 3)
        f.silence(run, worker)
        told = plans(run, liveness.reap)
        assert any("ix_sample_owned" in plan for _, plan in told)
        wrong = [f"{statement}\n{plan}" for statement, plan in told if ELSEWHERE.search(plan)]
        assert not wrong, "\n\n".join(wrong)
