"""A trainer whose weights are the list of groups that it was trained on. It saves every few steps, before the commit,
and after a death goes back to its newest checkpoint, as docs/howto/trainer.md tells it to."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import samplestore
from samplestore import faults
from samplestore.errors import LeaseLost
from samplestore.models import BatchRow
from samplestore.run import Run
from samplestore.store import Store
from tests.crash.journal import Journal
from tests.support.scripted_engine import logprob_at, token_at

BATCH_TIMEOUT_S = 120.0


@dataclass
class Checkpoint:
    step: int = 0
    groups: list[int] = field(default_factory=list)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.json"


def save(folder: Path, state: Checkpoint) -> None:
    """Complete on disk, or absent."""
    partial = folder / "partial"
    with partial.open("w") as file:
        json.dump({"step": state.step, "groups": state.groups}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path_of(folder, state.step))


def load(folder: Path, at_most: int) -> Checkpoint:
    """The newest at or before a step. Those after it belong to batches that were never committed: they are discarded,
    or their groups would be trained on twice."""
    best = Checkpoint()
    for path in sorted(folder.glob("step-*.json")):
        saved = json.loads(path.read_text())
        if saved["step"] > at_most:
            path.unlink()
        elif saved["step"] > best.step:
            best = Checkpoint(**saved)
    return best


def train(
    url: str, folder: Path, journal: Journal, *, steps: int, groups: int, every: int, weights: str, exact: bool
) -> None:
    """Train run "r" up to `steps`. `weights` is the path that is published; `exact`: the tokens are a scripted
    engine's."""
    with samplestore.open(url, create=False) as store:
        run = store.existing_run("r")
        while True:
            state = _restored(store, run, folder, journal, weights)
            print("ready", flush=True)  # from here on it outlives a server that is away
            try:
                for step in range(state.step + 1, steps + 1):
                    with run.batch(step=step, groups=groups, timeout=BATCH_TIMEOUT_S) as batch:
                        _read(batch, exact)
                        ids = [group.group_id for group in batch.groups]
                        state = Checkpoint(step, [*state.groups, *ids])
                        if step % every == 0 or step == steps:
                            save(folder, state)
                        faults.reached("saved")
                    journal.write(commit={"step": step, "batch": batch.id, "groups": ids})
                    run.publish_weights(path=weights, step=step)
                return
            except LeaseLost as lost:  # it was suspended for longer than its time to live
                print(f"back to the newest checkpoint: {lost}", flush=True)


def _restored(store: Store, run: Run, folder: Path, journal: Journal, weights: str) -> Checkpoint:
    _wait_until_alone(store, run)
    query = sa.select(sa.func.max(BatchRow.step)).where(BatchRow.run_id == run.id, BatchRow.state == "committed")
    with store.session() as session:
        committed = int(session.scalar(query) or 0)
    state = load(folder, committed)
    if committed > state.step:
        journal.write(rewind={"step": state.step, "from": committed})
        run.rewind(state.step)
    if state.step:
        run.publish_weights(path=weights, step=state.step)
    return state


def _wait_until_alone(store: Store, run: Run) -> None:
    """A lease of this trainer's last life ends when that one is reaped."""
    held = sa.select(sa.func.count()).select_from(BatchRow).where(BatchRow.run_id == run.id, BatchRow.state == "leased")
    while True:
        run.reap()
        with store.session() as session:
            if not session.scalar(held):
                return
        time.sleep(0.1)


def _read(batch: Any, exact: bool) -> None:
    """The training: every token of the batch is looked at. Raises AssertionError where one is wrong."""
    arrays = batch.arrays()
    assert arrays["tokens"].size, "an empty batch"
    for sample in batch.samples:
        n = len(sample.response_ids)
        assert n == len(sample.logprobs) == len(sample.loss_mask) and n > 0
        if exact:
            places = range(len(sample.prompt_ids), len(sample.prompt_ids) + n)
            assert sample.response_ids.tolist() == [token_at(p) for p in places], f"sample {sample.sample_id}"
            assert sample.logprobs.tolist() == [logprob_at(p) for p in places], f"sample {sample.sample_id}"
