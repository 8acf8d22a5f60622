"""A trainer on samplestore, written to be read. The loop is in `train`; the algorithm is in grpo.py.

    python -m samplestore.examples.trainer --db demo.db --run demo --model MODEL --checkpoints CHECKPOINTS --steps 60

The order of things in a step is what makes a crash harmless:

    1. lease a batch        a crash from here on gives its groups back
    2. update the weights
    3. save a checkpoint    complete or absent, see checkpoints.py
    4. commit the batch     its groups are settled
    5. publish              engines load the new weights while samples are in flight

Killed between 3 and 4, there is a checkpoint whose batch was never settled; it is discarded, or those groups would be
trained on twice. Killed between 4 and 5, the weights are published at the next start. If checkpoints are saved more
rarely than every step, or are lost, the store is ahead of the newest one, and `run.rewind` gives back the groups that
it has not seen. See `resume`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch
import transformers

import samplestore
from samplestore.errors import SampleStoreError, StepHeld
from samplestore.examples import checkpoints
from samplestore.examples.grpo import GrpoConfig, reward_rise, staleness, train_step
from samplestore.models import BatchGroup, BatchRow, Sample

log = logging.getLogger("samplestore.examples.trainer")


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """steps: train until this step is done (an earlier start continues). groups, max_staleness: None takes the run's.
    keep: checkpoints to keep; engines may still be loading one that is a few versions old. timeout_s: for a batch."""

    model: Path
    checkpoints: Path
    steps: int = 60
    groups: int | None = None
    max_staleness: int | None = None
    learning_rate: float = 3e-3
    keep: int = 6
    timeout_s: float = 300.0
    grpo: GrpoConfig = field(default_factory=GrpoConfig)


def train(store: Any, run: Any, config: TrainerConfig) -> Iterator[dict[str, float]]:
    """Train `run` up to `config.steps`; yields the numbers of each step. Can be killed anywhere and started again."""
    model, optimizer, done = resume(store, run, config)
    root = config.checkpoints.resolve()  # engines have another working directory
    for step in range(done + 1, config.steps + 1):
        with run.batch(
            step=step, groups=config.groups, max_staleness=config.max_staleness, timeout=config.timeout_s
        ) as batch:
            tensors = batch.tensors(layout="padded")
            ages = staleness(tensors["weight_versions"], tensors["loss_mask"], batch.current_version)
            metrics = train_step(model, optimizer, tensors, config.grpo)
            path = checkpoints.save(root, step, model, optimizer, config.model)
        # The batch is committed here. Publishing before that could show engines weights that are then discarded.
        version = run.publish_weights(path=str(path), step=step)
        checkpoints.prune(root, config.keep)
        stale = {f"staleness_{name}": float(value) for name, value in ages.items()}
        yield {"step": step, "version": version.version, **metrics, **stale}


def resume(store: Any, run: Any, config: TrainerConfig) -> tuple[Any, torch.optim.Optimizer, int]:
    """(model, optimizer, last step done), from the newest checkpoint that store and disk agree on.

    The checkpoint of step 0 is the untrained model. Afterwards the run's current weights are those of the checkpoint.
    """
    wait_until_alone(store, run)
    root, committed = config.checkpoints.resolve(), last_committed_step(store, run)
    if committed == 0 and not checkpoints.saved_steps(root):
        model = checkpoints.load_model(config.model)
        checkpoints.save(root, 0, model, new_optimizer(model, config), config.model)
    for step in checkpoints.discard_after(root, committed):
        log.warning("discarded the checkpoint of step %d: its batch was never committed", step)
    steps = checkpoints.saved_steps(root)
    if not steps:
        # Beginning again from the untrained model would undo the whole run because of one mistyped folder.
        raise checkpoints.CheckpointError(
            f"run {run.name!r} has committed step {committed}, but {root} holds no checkpoint at or before it. "
            "Give the right folder with --checkpoints, or start another run with --run"
        )
    done = steps[-1]
    model, state = checkpoints.load(root, done)
    optimizer = new_optimizer(model, config)
    checkpoints.restore_optimizer(model, optimizer, state)
    path = str(checkpoints.folder(root, done))
    if committed == 0:
        run.describe_first_weights(path)  # version 0: what the engines started with
    if committed > done:
        restored = run.rewind(step=done)
        log.warning("step %d was committed, step %d is saved: rewound, version %d", committed, done, restored.version)
    if done > 0:
        run.publish_weights(path=path, step=done)  # does nothing if they are the current weights already
    return model, optimizer, done


def wait_until_alone(store: Any, run: Any) -> None:
    """Wait for the lease of a trainer that was killed to end. One that lives may have saved a checkpoint that it has
    not committed yet: discarding that would take it from under the weights that it publishes next.
    Raises StepHeld if the lease does not end."""
    end = time.monotonic() + 3 * run.settings.heartbeat_ttl_s
    query = sa.select(BatchRow).where(BatchRow.run_id == run.id, BatchRow.state == "leased")
    while True:
        run.reap()
        with store.session() as session:
            held = session.scalars(query).first()
        if held is None:
            return
        if time.monotonic() > end:
            raise StepHeld(held.step, held.id, held.owner)
        time.sleep(0.2)


def new_optimizer(model: Any, config: TrainerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def last_committed_step(store: Any, run: Any) -> int:
    """The newest step whose batch is settled (rewound ones are not); 0 if there is none."""
    query = sa.select(sa.func.max(BatchRow.step)).where(BatchRow.run_id == run.id, BatchRow.state == "committed")
    with store.session() as session:
        return int(session.scalar(query) or 0)


def consumed_group_means(store: Any, run: Any) -> list[float]:
    """Mean reward of every trained group, in the order of consumption: what `reward_rise` wants."""
    query = (
        sa.select(sa.func.avg(Sample.reward))
        .join(BatchGroup, BatchGroup.group_id == Sample.group_id)
        .join(BatchRow, BatchRow.id == BatchGroup.batch_id)
        .where(BatchRow.run_id == run.id, BatchRow.state == "committed", Sample.reward.is_not(None))
        .group_by(BatchRow.step, BatchGroup.position)
        .order_by(BatchRow.step, BatchGroup.position)
    )
    with store.session() as session:
        return [float(mean) for mean in session.scalars(query)]


def main() -> None:
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(arguments.threads)
    config = TrainerConfig(
        model=arguments.model,
        checkpoints=arguments.checkpoints,
        steps=arguments.steps,
        groups=arguments.groups,
        max_staleness=arguments.max_staleness,
        learning_rate=arguments.lr,
        timeout_s=arguments.timeout,
        grpo=GrpoConfig(epochs=arguments.epochs, micro_batch=arguments.micro_batch, temperature=arguments.temperature),
    )
    try:
        _run(arguments, config)
    except (SampleStoreError, checkpoints.CheckpointError) as error:
        sys.exit(f"trainer: {error}")


def _run(arguments: argparse.Namespace, config: TrainerConfig) -> None:
    with samplestore.open(arguments.db, create=False) as store:
        run = store.existing_run(arguments.run)
        for numbers in train(store, run, config):
            shown = ("reward", "loss", "kl", "clipped", "entropy", "staleness_mean", "staleness_mixed")
            told = " ".join(f"{name}={numbers[name]:.3f}" for name in shown)
            print(f"step={numbers['step']} version={numbers['version']} {told}", flush=True)
        means = consumed_group_means(store, run)
        if len(means) >= 10:
            first, last, error = reward_rise(means)
            print(
                f"mean reward of the first fifth {first:.3f}, of the last fifth {last:.3f}, standard error {error:.4f}"
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model on the batches of a samplestore run with GRPO.")
    parser.add_argument("--db", required=True, help="SQLite file or postgresql:// URL")
    parser.add_argument("--run", default=None, help="name of the run (default: the only one)")
    parser.add_argument("--model", type=Path, required=True, help="folder of the untrained model and its tokenizer")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=None, help="groups a step (default: the run's)")
    parser.add_argument("--max-staleness", type=int, default=None, help="versions (default: the run's)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=1, help="optimizer steps on each batch")
    parser.add_argument("--micro-batch", type=int, default=0, help="samples per forward pass (default: all)")
    parser.add_argument("--temperature", type=float, default=1.0, help="the one that the samples are drawn with")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a batch")
    parser.add_argument("--threads", type=int, default=1, help="of torch; engines on the same machine need theirs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
