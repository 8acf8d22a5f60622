"""slime's training loop on a store, without slime: run it, kill it, run it again.

    pip install 'samplestore[prompts]'
    python -m samplestore.examples.slime_loop --db slime.db --rollouts 8

What is slime's own is played here, as far as a plug-in sees it: `Manager` loads a data source and a rollout function
by their paths and calls them in slime's order, `stock_rollout` is a rollout function that asks for more groups than it
needs and aborts the rest, and `Engine` is its engines and its model at once: it writes letters, and learns. The plug-
ins are the real ones, with the flags that slime would be given (docs/from-slime.md). The task is that of tiny_task.py.

Where samplestore's workers generate instead, start an engine and a worker on the run, and add

    --rollout-function-path samplestore.slime.generate_rollout
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import samplestore
from samplestore.examples import tiny_model, tiny_task
from samplestore.slime import publish_weights, settings
from samplestore.slime.objects import tokenizer_of, train_output
from samplestore.slime.rollout import load

GROUPS, SAMPLES = 4, 2  # --rollout-batch-size, --n-samples-per-prompt
OVER_SAMPLING = GROUPS + 1  # --over-sampling-batch-size
RESPONSE = 32  # --rollout-max-response-len
STOCK, OURS = "samplestore.examples.slime_loop.stock_rollout", "samplestore.slime.generate_rollout"
LETTERS = {letter: tiny_model.vocabulary()[letter] for letter in tiny_task.LETTERS}


def arguments(db: str, run: str = "slime-loop", rollouts: int = 8, rollout_function: str = STOCK) -> SimpleNamespace:
    """slime's `args`, as far as they matter here. `engine` stands for --sglang-router-ip, by which a rollout function
    finds engines; the last three come from the file of --custom-config-path."""
    folder = Path(f"{db}.slime")
    return SimpleNamespace(
        rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, over_sampling_batch_size=OVER_SAMPLING,
        num_rollout=rollouts, rollout_max_response_len=RESPONSE, reward_key=None, rollout_global_dataset=True,
        hf_checkpoint=str(folder / "tokenizer"), save=str(folder / "checkpoint.json"),
        data_source_path="samplestore.slime.StoreDataSource", rollout_function_path=rollout_function,
        rollout_all_samples_process_path="samplestore.slime.observe_all",
        engine=Engine(), samplestore_db=db, samplestore_run=run, samplestore_timeout_s=600,
    )  # fmt: skip


def prepare(args: Any) -> None:
    """The run and its prompts, and a tokenizer, unless they are there: what `samplestore add-prompts` does."""
    folder = Path(args.hf_checkpoint)
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        tiny_model.write_tokenizer(folder)
    with samplestore.open(args.samplestore_db) as store:
        run = store.run(
            args.samplestore_run, samples_per_prompt=SAMPLES, groups_per_step=GROUPS, max_staleness=2,
            stages=["reward"], sampling={"temperature": 1.0}, max_new_tokens=RESPONSE,
        )  # fmt: skip
        run.add_prompts(tiny_task.prompts(64, seed=0), tokenizer=str(folder))


class Engine:
    """Writes the letter that it is asked for with probability `skill`, else any. A good answer raises it."""

    def __init__(self, skill: float = 0.1, version: int = 0) -> None:
        self.skill, self.version = skill, version

    def generate(self, sample: Any, tokenizer: Any, room: int) -> None:
        """Up to `room` tokens more, into the sample, as slime's generate function leaves them there."""
        if not sample.tokens:  # else it goes on where it was aborted
            sample.tokens, sample.rollout_log_probs = tokenizer.encode(sample.prompt).tolist(), []
        room = min(room, RESPONSE - sample.response_length)
        others, right = (1 - self.skill) / len(LETTERS), LETTERS[sample.label]
        for _ in range(room):
            token = right if random.random() < self.skill else random.choice([*LETTERS.values()])
            sample.tokens.append(token)
            sample.rollout_log_probs.append(math.log(others + (self.skill if token == right else 0.0)))
        sample.response_length += room
        sample.response = tokenizer.decode(sample.tokens[-sample.response_length :])
        sample.weight_versions = [*(sample.weight_versions or ()), str(self.version)]
        done = sample.response_length >= RESPONSE
        sample.status = sample.Status.TRUNCATED if done else sample.Status.ABORTED
        sample.reward = tiny_task.reward(sample) if done else None

    def train(self, samples: list[Any]) -> None:
        best = max(s.reward for s in samples)
        self.skill = min(0.95, self.skill + 0.25 * best)


def stock_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """As slime's own: groups are asked for until enough are finished; what is under way then is aborted, and given back
    with its tokens (--partial-rollout)."""
    tokenizer = tokenizer_of(args)
    done: list[list[Any]] = []
    while len(done) < args.rollout_batch_size:
        for group in data_source.get_samples(args.over_sampling_batch_size - len(done)):
            enough = len(done) == args.rollout_batch_size
            for sample in group:
                if sample.status not in (sample.Status.COMPLETED, sample.Status.TRUNCATED):
                    args.engine.generate(sample, tokenizer, random.randint(1, RESPONSE - 1) if enough else RESPONSE)
            if enough:
                data_source.add_samples([group])
            else:
                done.append(group)
    load(args.rollout_all_samples_process_path)(args, done, data_source)
    return train_output(done, {})


@dataclass(frozen=True, slots=True)
class Told:
    """Of a rollout: the mean reward, and how many samples went on from tokens of older weights."""

    rollout_id: int
    reward: float
    resumed: int


class Manager:
    """slime's RolloutManager and its train.py: what they call, in their order."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.data_source = load(args.data_source_path)(args)
        self.generate_rollout = load(args.rollout_function_path)

    def train(self) -> Iterator[Told]:
        start = self._load()
        for rollout_id in range(start, self.args.num_rollout):
            output = self.generate_rollout(self.args, rollout_id, self.data_source, evaluation=False)
            samples = [sample for group in output.samples for sample in group]
            self.args.engine.train(samples)
            self._save(rollout_id)  # the checkpoint first: killed before the next line, the store is told at the start
            self.data_source.save(rollout_id)
            self.args.engine.version += 1
            if self.args.rollout_function_path == OURS:  # else the engines report their version with each answer
                publish_weights(self.args, rollout_id, label=str(self.args.engine.version))
            resumed = sum(len(s.weight_versions) > 1 for s in samples)
            yield Told(rollout_id, sum(s.reward for s in samples) / len(samples), resumed)

    def _load(self) -> int:
        """The rollout to begin with, by the checkpoint."""
        path = Path(self.args.save)
        state = json.loads(path.read_text()) if path.exists() else {"rollout_id": -1, "skill": self.args.engine.skill}
        self.args.engine.skill, self.args.engine.version = state["skill"], state["rollout_id"] + 1
        self.data_source.load(state["rollout_id"])  # what the checkpoint has not seen is ready again
        return int(state["rollout_id"]) + 1

    def _save(self, rollout_id: int) -> None:
        path = Path(self.args.save)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"rollout_id": rollout_id, "skill": self.args.engine.skill}))
        os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="slime's loop on a store, without slime.")
    parser.add_argument("--db", default="slime.db")
    parser.add_argument("--run", default="slime-loop")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--rollout-function-path", default=STOCK)
    given = parser.parse_args()
    args = arguments(given.db, given.run, given.rollouts, given.rollout_function_path)
    prepare(args)
    for told in Manager(args).train():
        print(f"rollout {told.rollout_id}: mean reward {told.reward:.2f}, {told.resumed} samples resumed", flush=True)
    settings.store_at(args.samplestore_db).close()  # leave in order: leases are given back now, and not by a reap
    print(f"look at it with: samplestore status --db {given.db} --run {given.run}")


if __name__ == "__main__":
    main()
