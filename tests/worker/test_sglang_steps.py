"""Mode partial on real SGLang: what the end of a step aborts goes on under the next weights, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from samplestore.verbs import steps
from tests.support import factory
from tests.support.models import build_model
from tests.support.processes import Processes
from tests.support.sglang import chosen_releases, start_sglang
from tests.worker import recompute
from tests.worker.conftest import Bench

STEPS = 2
LABEL = "v0"  # of the server's first weights
WAIT_S = 300.0
NO_EOS = -1  # samples end by their budget alone
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.mark.parametrize("release", chosen_releases())
def test_the_end_of_a_step_on_sglang(release: str, bench: Bench, processes: Processes, tmp_path: Path) -> None:
    """Every log-prob is that of the weights that its segment names, across the abort."""
    folders = [build_model(tmp_path / f"v{seed}", seed + 1, "llama") for seed in range(STEPS + 1)]
    engine = start_sglang(processes, folders[0], release=release)
    run = bench.make_run(
        prompts=16, samples_per_prompt=2, groups_per_step=1, max_new_tokens=400, mode="partial",
        over_sampling_batch_size=3, max_staleness=4, heartbeat_ttl_s=600,
        sampling={"temperature": 1.0, "ignore_eos": True},
    )  # fmt: skip
    run.describe_first_weights(str(folders[0]), LABEL)
    trainer, holder = factory.register(run, "trainer"), run.register()
    later = run.claim(holder, 6)
    for claim in later[:2]:
        run.release(claim, "the first group goes first")
    worker = bench.worker(engine, concurrency=6, flush_tokens=24, flush_seconds=0.5)
    ahead = "SELECT max(n_tokens) FROM sample"
    bench.wait(lambda: factory.value(run, ahead) >= 100, "the first group is ahead", WAIT_S)
    for claim in later[2:]:  # else all would end together, and nothing would be left to abort
        run.release(claim, "now the others")
    for step in range(STEPS):
        batch = bench.wait(
            lambda step=step: factory.lease(run, trainer, step, groups=1), f"step {step} is ready", WAIT_S
        )
        factory.commit(run, batch, trainer)
        run.publish_weights(str(folders[step + 1]), step=step)
    bench.wait(lambda: len(factory.events(run, "step_over")) == STEPS + 1, "the last step is over", WAIT_S)
    assert worker.terminate() == 0, worker.log()
    assert steps.OVER in {event["reason"] for event in factory.events(run, "abort")}
    assert factory.value(run, "SELECT count(*) FROM sample WHERE version_min < version_max") >= 2
    models = {version: recompute.load(folder) for version, folder in enumerate(folders)}
    assert recompute.problems(run, models, NO_EOS) == []
    assert sum(request["lost_tokens"] or 0 for request in bench.requests()) == 0
    assert factory.fates(run).get("superseded", 0) == 0
    factory.sound(run)
