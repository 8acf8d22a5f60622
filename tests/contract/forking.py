"""Short words for tests of episodes: fork a sample, end one, and a run with one to fork."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplestore import Store
from samplestore.run import Run
from samplestore.types import Claim
from samplestore.verbs import fanout

from ..support import factory as f

PROMPT = np.array([40, 41, 42, 43], np.int32)


def fork(run: Run, claim: Claim, number: int, place: int, upto: int | None = None, prompt: Any = None) -> Claim:
    return run.transact(lambda tx: fanout.fork(tx, claim, number, f"k{number}", {"n": number}, place, upto, prompt))


def end(run: Run, claim: Claim, reward: float | None = None) -> None:
    run.transact(lambda tx: fanout.end(tx, claim, "completed", "stop", False, reward))


def opened(store: Store, **settings: Any) -> tuple[Run, Claim]:
    """A run with one open sample, of which five tokens are stored."""
    run = f.make_run(store, prompts=1, samples_per_prompt=1, groups_per_step=1, max_staleness=0, **settings)
    (claim,) = run.claim(f.register(run), 10)
    f.add(run, claim, 5)
    claim.response_ids = np.array(f.ids_of(5), np.int32)
    return run, claim
