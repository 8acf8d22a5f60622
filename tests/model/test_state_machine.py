"""All verbs in any order, by several workers and trainers, on both databases, against a plain model in memory. After
every step samples, stages, groups, batches, requests, engines and the ledger must be what the model says; every few
steps check() and the exact ledger too.

SAMPLESTORE_MODEL_EXAMPLES=10000 pytest tests/model      runs as many, at random; `make test-nightly` does that."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from samplestore import Store
from samplestore.run import Run
from tests.model.rules_control import ControlRules
from tests.model.rules_samples import SampleRules
from tests.model.rules_stages import StageRules
from tests.model.rules_training import TrainingRules

EXAMPLES = os.environ.get("SAMPLESTORE_MODEL_EXAMPLES")
FEW = {True: 150, False: 60}  # of the everyday run, always the same: on SQLite, on PostgreSQL
STEPS = int(os.environ.get("SAMPLESTORE_MODEL_STEPS", "40"))
SHRINK = os.environ.get("SAMPLESTORE_MODEL_SHRINK", "1") == "1"  # 0: say at once what fails, as it was found


class StoreMachine(SampleRules, StageRules, ControlRules, TrainingRules):
    """Rules that move everything on, whatever others are left out of an example."""

    def begin(self) -> None:
        self.admit()
        self.claim(0, 5)
        for pick in (0, 1, 2):
            self.append(pick, 2, 0, "generated", None)

    @rule(n=st.integers(1, 6))
    def work(self, n: int) -> None:
        """Up to n samples are answered, and all that can be scored is."""
        self.admit()
        self.claim(0, n)
        for s in self.m.held()[:n]:
            if s.claim is not None:
                self.append(self.m.held().index(s), 2, 0, "generated", None)
                self.finish(self.m.held().index(s), False, None)
        self.claim_stages(1, 20)
        while self.held_stages():
            self.score(0, 1.0)

    @rule()
    def train(self) -> None:
        """One step of training, if there is a group for it."""
        self.lease(0, 1, "oldest", 1, "expire")
        while self.m.leases():
            self.commit(0)
        self.publish(True)


def test_every_public_verb_is_driven() -> None:
    rules = "".join(inspect.getsource(c) for c in StoreMachine.__mro__ if c.__module__.startswith("tests.model"))
    verbs = {name for name, member in vars(Run).items() if not name.startswith("_") and callable(member)}
    elsewhere = {
        "batch": "waits; what it does is lease, commit and release",
        "batch_async": "so, too",
        "mismatch": "reads what a trainer records; tests/contract/test_record_logprobs.py",
        "images": "reads what add_prompts stores; tests/prompts",
        "determinism": "reads what requests tell; tests/worker",
        "check": "by factory.sound, every few steps",
        "ledger": "so, too",
        "filter_group": "the machine's run has no filters, which would hold back every group; test_filters.py",
        "start_evaluation": "its groups go before all others; tests/contract/test_evaluation.py",
        "evaluate": "start_evaluation, and waits",
        "evaluations": "reads",
        "routed_experts": "reads what attach stores; tests/contract",
        "array": "so, too; tests/contract/test_arrays",
        "array_files": "files, not the database; tests/contract/test_arrays",
        "prepare_array": "the first half of attach",
        "score_group": "the machine's run has no stages of groups; tests/contract/test_stages",
        "export": "reads; tests/contract/test_export.py",
        "import_samples": "its prompts would come among the machine's; tests/contract/test_imports",
        "simulate": "reads what was committed; tests/contract/test_simulate.py",
        "metrics": "reads; tests/cli/test_looks.py and tests/plans/test_metrics_plan.py",
    }
    assert verbs - set(re.findall(r"self\.run\.(\w+)", rules)) == set(elsewhere)


def test_the_store_does_what_the_model_says(store: Store) -> None:
    StoreMachine.store = store
    few = {"max_examples": FEW[store.database.is_sqlite], "derandomize": True}
    profile: dict[str, Any] = {"max_examples": int(EXAMPLES)} if EXAMPLES else few
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            stateful_step_count=STEPS, deadline=None, database=None, print_blob=True,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink][: 1 + SHRINK], **profile,
        ),
    )  # fmt: skip
