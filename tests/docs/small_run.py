"""A run "gsm8k" in which everything happened once: what the cookbook's questions and the README's examples look at."""

from __future__ import annotations

import samplestore
from samplestore.types import RequestInfo
from samplestore.verbs import weights
from tests.support import factory

ENGINE = "http://127.0.0.1:30001"


def build(url: str, steps: int = 0) -> None:
    """Six groups of two samples: interrupted, resumed, failed and scored ones. `steps` batches of one group are
    committed, each followed by new weights; the other groups are ready, as far as they did not fail."""
    with samplestore.open(url) as store:
        run = store.run(
            "gsm8k", samples_per_prompt=2, groups_per_step=2, max_staleness=2, stages=("reward",), max_attempts=1,
            epochs=1,
        )  # fmt: skip
        run.add_prompts(
            [{"prompt_ids": [1, 2, i], "label": str(i), "metadata": {"task": f"t{i % 2}"}} for i in range(6)]
        )
        run.admit()
        run.transact(lambda tx: weights.see_engine(tx, ENGINE, "default"))
        worker, trainer = run.register("rollout"), run.register("trainer")
        claims = run.claim(worker, 100)
        _interrupt(run, claims[0])
        claims[0] = run.claim(worker, 1)[0]
        for number, claim in enumerate(claims):
            if number == len(claims) - 1 and steps:
                run.fail(claim, "engine refused: too long")
                continue
            factory.add(run, claim, 3 + number, 0, "stop")
            run.finish(claim)
        for stage in run.claim_stages(worker, 100):
            # Group 1 has equal rewards.
            run.score(stage, 1.0 if stage.group_number == 1 else float(stage.index))
        for step in range(1, steps + 1):
            batch = factory.lease(run, trainer, step, 1, max_staleness=2)
            assert batch is not None, run.why()
            factory.commit(run, batch, trainer)
            run.publish_weights(path=f"/checkpoints/{step}", step=step)
        if steps:
            _spanning(run, worker)
        factory.sound(run)


def _interrupt(run: samplestore.store.Run, claim: samplestore.Claim) -> None:
    run.begin_request(claim, "r0", ENGINE, 1.0)
    factory.add(run, claim, 4, 0, "abort", rid="r0", engine=ENGINE)
    run.end_request(RequestInfo("r0", ENGINE, generated_tokens=6, lost_reason="abort", finish_reason="abort"))
    run.release(claim, "weight update")
    worker = claim.owner
    (again,) = run.claim(worker, 1)
    run.begin_request(again, "r1", ENGINE, 1.0, resumes=True)
    run.end_request(RequestInfo("r1", ENGINE, generated_tokens=0))
    run.release(again, "shutdown")


def _spanning(run: samplestore.store.Run, worker: int) -> None:
    """A sample that two weight versions wrote."""
    run.add_prompts([{"prompt_ids": [9, 9, 9], "metadata": {"task": "t9"}}])
    run.admit()
    claim = run.claim(worker, 1)[0]
    factory.add(run, claim, 3, run.current_version - 1, "abort")
    factory.add(run, claim, 3, run.current_version, "stop")
    run.finish(claim)
