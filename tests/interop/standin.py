"""What slime does with a plug-in, as its documentation and contract tests have it, with no line of slime.

Manager is its RolloutManager: built from args alone, it loads the data source and the rollout function by their paths,
calls them in one order, and turns samples into training data.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from samplestore import Store
from samplestore.slime import settings
from samplestore.slime.rollout import load

SOURCE, ROLLOUT = "samplestore.slime.StoreDataSource", "samplestore.slime.generate_rollout"


def args_of(url: str, run: str = "r", **more: Any) -> SimpleNamespace:
    """slime's args, with what a --custom-config-path file puts into them."""
    given = {
        "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_global_dataset": True, "reward_key": None,
        "data_source_path": SOURCE, "rollout_function_path": ROLLOUT, "rollout_sample_filter_path": None,
        "samplestore_db": url, "samplestore_run": run, "samplestore_timeout_s": 20, **more,
    }  # fmt: skip
    return SimpleNamespace(**given)


_dead: list[Store] = []


def process_died() -> None:
    """The next Manager is one of a new process: nothing of this one is known to it, and nobody said goodbye."""
    _dead.extend(settings._stores.values())
    settings._stores.clear()


def close_all() -> None:
    """At the end of a test: its hearts beat no more."""
    process_died()
    while _dead:
        _dead.pop().close()


class Manager:
    def __init__(self, args: Any) -> None:
        self.args = args
        self.data_source = load(args.data_source_path)(args)
        self.rollout_function = load(args.rollout_function_path)

    def generate(self, rollout_id: int) -> dict[str, list[Any]]:
        output = self.rollout_function(self.args, rollout_id, self.data_source, evaluation=False)
        samples = [s for group in output.samples for s in group]
        self.samples = samples
        return train_data(self.args, samples)

    def eval(self, rollout_id: int) -> dict[str, Any]:
        found: dict[str, Any] = self.rollout_function(self.args, rollout_id, self.data_source, evaluation=True).data
        return found

    def save(self, rollout_id: int) -> None:
        self.data_source.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self.data_source.load(rollout_id)


def reward_of(args: Any, sample: Any) -> Any:
    """slime's get_reward_value: what is no object has no key."""
    return sample.reward if not args.reward_key else sample.reward[args.reward_key]


def train_data(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    """The keys of slime's training data, with the checks that it makes on the way."""
    for s in samples:
        assert isinstance(s.tokens, list) and all(type(t) is int for t in s.tokens)
        assert isinstance(s.response, str) and isinstance(s.response_length, int)
        assert reward_of(args, s) is not None
        assert len(s.loss_mask) == len(s.rollout_log_probs) == s.response_length < len(s.tokens)
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [reward_of(args, s) for s in samples],
        "truncated": [int(s.status.value == "truncated") for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_ids": [s.rollout_id for s in samples],
        "loss_masks": [[0] * s.response_length if s.remove_sample else s.loss_mask for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
    }


def signature_matches(function: Any, *names: str, **defaults: Any) -> None:
    """As slime's contract test compares a rollout function with its own: names, kinds and defaults."""
    parameters = inspect.signature(function).parameters
    assert tuple(parameters) == names
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default == defaults.get(name, inspect.Parameter.empty)
