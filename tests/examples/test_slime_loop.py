"""The example for users of slime: its loop on a store, killed and started again, by either side's generation."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore.examples import slime_loop
from samplestore.examples.slime_loop import GROUPS, OURS, SAMPLES
from tests.interop.standin import close_all, process_died
from tests.support import factory as f


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    random.seed(0)
    yield
    close_all()


def begun(db: Path, rollouts: int, **more: Any) -> Any:
    args = slime_loop.arguments(str(db), rollouts=rollouts, **more)
    slime_loop.prepare(args)
    return slime_loop.Manager(args)


def test_it_learns_and_nothing_is_trained_on_twice_whenever_it_dies(tmp_path: Path) -> None:
    db = tmp_path / "slime.db"
    first = begun(db, 8).train()
    told = [next(first), next(first)]
    process_died()  # after the checkpoint of rollout 1
    broken = begun(db, 8)
    broken.data_source.save = lambda rollout_id: None  # killed between the checkpoint and this
    told.append(next(broken.train()))
    process_died()
    told += begun(db, 8).train()
    assert [one.rollout_id for one in told] == list(range(8))
    assert sum(one.resumed for one in told) >= SAMPLES, "what was aborted goes on with its tokens"
    assert told[-1].reward > 2 * told[0].reward
    with samplestore.open(str(db)) as store:
        run = store.existing_run("slime-loop")
        steps = f.rows(run, "SELECT step FROM batch WHERE state = 'committed' ORDER BY step")
        assert [row["step"] for row in steps] == list(range(8))
        assert f.states(run).count("consumed") == 8 * GROUPS
        assert run.current_version >= 7, "each rollout had weights of its own"
        f.sound(run)


def test_with_samplestores_workers(tmp_path: Path) -> None:
    db = tmp_path / "slime.db"
    manager = begun(db, 2, rollout_function=OURS)
    with samplestore.open(str(db)) as store:
        run = store.existing_run("slime-loop")
        run.admit()
        f.finish_all(run, run.register("rollout", "stand-in"), n=4)
        told = list(manager.train())
        assert [(one.rollout_id, one.reward) for one in told] == [(0, 1.0), (1, 1.0)]
        assert [v.label for v in run.weight_versions()][1:] == ["1", "2"]
        assert f.states(run).count("consumed") == 2 * GROUPS


def test_as_it_is_typed_and_killed(tmp_path: Path) -> None:
    typed = [sys.executable, "-m", "samplestore.examples.slime_loop", "--db", "s.db", "--rollouts"]
    with subprocess.Popen([*typed, "50"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as loop:
        assert loop.stdout is not None
        seen = [loop.stdout.readline() for _ in range(2)]
        loop.send_signal(signal.SIGKILL)
        loop.wait(60)
        seen += loop.stdout.readlines()
    done = len(seen)
    ended = subprocess.run([*typed, str(done + 2)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith(("rollout", "look")) and lines[-2].startswith(f"rollout {done + 1}: mean reward 0.")
    assert lines[-1] == "look at it with: samplestore status --db s.db --run slime-loop"
