"""Kills, lost answers and comparisons, for tests of merges and forks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from samplestore import faults
from samplestore.run import Run

from ..support import factory as f
from .exporting import told


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def lay_down(run: Run) -> Run:
    """Everybody goes: then it may be merged."""
    f.execute(run, "UPDATE worker SET heartbeat = heartbeat - 1000000")
    return run


def all_of(run: Run) -> list[dict[str, Any]]:
    """What an export says, with what a copy keeps; owners, of whom none is here."""
    rows = told(run)
    for row in rows:
        row["status"] = "pending or aborted" if row["status"] in ("pending", "aborted") else row["status"]
        del row["n_aborts"]
    return rows


def kill_after(monkeypatch: pytest.MonkeyPatch, n: int) -> list[int]:
    """Raise at the n-th transaction of a copy."""
    passed: list[int] = []

    def reached(where: str) -> None:
        if where == "copying":
            passed.append(1)
            if len(passed) == n:
                raise Killed

    monkeypatch.setattr(faults, "reached", reached)
    return passed


def during(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Any], n: int = 1) -> None:
    """Let something happen once, after the n-th transaction of a copy."""
    passed: list[int] = []

    def reached(where: str) -> None:
        if where == "copying":
            passed.append(1)
            if len(passed) == n:
                happens()

    monkeypatch.setattr(faults, "reached", reached)


def lose_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each transaction is committed, its caller hears that the connection broke, and repeats it."""
    lost: list[str] = []

    def reached(where: str) -> None:
        if where == "committed":
            lost.append(where)
            if len(lost) % 2:
                raise sa.exc.OperationalError("COMMIT", None, ConnectionError("broke"), connection_invalidated=True)

    monkeypatch.setattr(faults, "reached", reached)
    return lost


def go_on(run: Run, step: int) -> None:
    """Another step of training, and more answers with its weights."""
    worker, trainer = f.register(run), f.register(run, "trainer")
    batch = f.lease(run, trainer, step, max_staleness=9)
    assert batch is not None
    f.commit(run, batch, trainer)
    run.publish_weights(f"/w/{step + 1}", step=step)
    run.add_prompts([{"prompt_ids": [7, 7, i], "label": "more", "dataset": "more"} for i in range(2)])
    run.admit()
    f.finish_all(run, worker)


def counts(run: Run) -> dict[str, int]:
    of_sample = ("segment", "segment_array", "episode_step")
    tables = ("prompt", "sample_group", "sample", "stage", "request", "batch", "event", "weight_version", "timeline")
    found = {t: f.value(run, f"SELECT count(*) FROM {t} WHERE run_id = :r", r=run.id) for t in tables}
    for t in of_sample:
        of_run = f"SELECT count(*) FROM {t} x JOIN sample s ON s.id = x.sample_id WHERE run_id = :r"
        found[t] = f.value(run, of_run, r=run.id)
    return found
