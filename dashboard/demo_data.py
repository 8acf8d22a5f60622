"""A small, realistic run, written through the real verbs: to try the dashboard without engines, and for its tests.

`samplestore dashboard --demo` shows a longer one of these, which goes on (demo_live.py). Weights 0 to 4 are published
while samples are half written, so that trajectories span versions; some are consumed, some failed, dropped, stale, in
flight, waiting to be resumed. Texts include what a hostile model could write.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

import samplestore
from samplestore.dashboard import demo_text
from samplestore.dashboard.demo_builder import ENGINES, QUEUED, RUN, Builder, Demo
from samplestore.engine import Database
from samplestore.models import Base
from samplestore.tokenizers import load_tokenizer

__all__ = ["Builder", "Demo", "begin", "build"]


def build(
    url: str, folder: Path, *, seed: int = 3, heartbeat_ttl_s: float = 30.0, steps: int = 4, lasted_s: float = 0.0
) -> Demo:
    """Write the run into the (migrated) database at `url` and its tokenizer into `folder`.

    steps      of the trainer; from 5 on the lengths of answers are long-tailed
    lasted_s   then times are stretched, as if the run had begun so many seconds ago; 0 leaves them
    """
    with samplestore.open(url) as store:
        return begin(store, url, folder, seed, heartbeat_ttl_s, steps, lasted_s).demo


def begin(
    store: samplestore.Store, url: str, folder: Path, seed: int, heartbeat_ttl_s: float, steps: int, lasted_s: float
) -> Builder:
    """`build`, in a store that is open: whoever gets the builder can go on."""
    demo = Demo(url, tokenizer=demo_text.build_tokenizer(folder))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    run = store.run(
        RUN, samples_per_prompt=4, groups_per_step=4, max_staleness=2, stages=("reward",), max_attempts=2,
        seed=seed, heartbeat_ttl_s=heartbeat_ttl_s, sampling={"temperature": 1.0, "top_p": 0.95},
    )  # fmt: skip
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = [{"prompt": demo_text.HOSTILE_PROMPT, "label": "4", "metadata": {"hostile": True}}]
    for i in range(23):
        text, name, apples, boxes, eaten = demo_text.question(rng, i)
        known = {"name": name, "apples": apples, "boxes": boxes, "eaten": eaten}
        rows.append({"prompt": text, "label": str(apples * boxes - eaten), "metadata": known})
    run.add_prompts(rows, tokenizer=tokenizer)
    run.describe_first_weights("/checkpoints/base")
    builder = Builder(run, tokenizer, demo, seed, long=steps > 4)
    _train(builder, steps)
    _leave_in_the_middle(builder)
    builder.engines(behind=(steps - 1) % 2)  # as the last step left them, with what they have counted since
    if lasted_s:
        _stretch(store.database, lasted_s)
    return builder


def _train(b: Builder, steps: int) -> None:
    """Some steps. Before each, samples are aborted half-way by the weight update and resumed under the new weights."""
    b.engines()
    for step in range(steps):
        for claim in b.claim(28 if step == 0 else 20):
            spanning = (claim.group_number, claim.index) == b.demo.spanning
            if b.generate(claim, 30 if spanning else None if b.rng.random() < 0.8 else b.rng.randint(30, 60)):
                b.finish(claim, "truncated" if b.rng.random() < 0.06 else None)
            else:
                b.release(claim, "weight update")
        if step == 0:
            _tool_use(b)
        if step == 1:
            _trouble(b)
        b.score(200)
        if (leased := b.lease(step, 3 if step == 0 else 4)) is not None:
            b.commit(leased)
        for claim in b.claim(3):
            name = (claim.group_number, claim.index)
            if step == 2 and b.demo.spanning[0] < 0 and b.text_of(claim).size > 90 and not claim.n_tokens:
                b.demo.spanning = name  # it is written under three versions
            if not (step == 3 and name == b.demo.spanning):
                b.generate(claim, b.rng.randint(25, 40))
            b.release(claim, "weight update")
        b.publish(step)
        b.engines(behind=step % 2)


def _tool_use(b: Builder) -> None:
    """A sample that calls a calculator: the tool's words are stored, and not trained on."""
    (claim,) = b.claim(1)
    b.generate(claim, 40)
    b.run.append(claim, b.tokenizer.encode('\n<tool>{"result": 42.0}</tool>\n'), None, None, kind="environment")
    tail = b.tokenizer.encode("\nThe calculator says 42.\nThe answer is 42.<|end|>")
    b.run.append(claim, tail, b.logprobs(tail.size), b.version, "stop", engine=ENGINES[0])
    # As the trainer computes them: close to the engine's, but not the same.
    noise = np.random.default_rng(11)
    b.run.attach(claim, "trainer_log_probs", -noise.exponential(0.3, tail.size).astype(np.float32))
    b.run.attach(claim, "entropy", noise.exponential(0.5, tail.size).astype(np.float32))
    b.demo.with_tool = (claim.group_number, claim.index)
    b.demo.responses.pop(b.demo.with_tool)
    b.finish(claim)


def _trouble(b: Builder) -> None:
    """An engine that times out twice, an operator who drops a group, a sample that is started afresh."""
    (claim,) = b.claim(1)
    b.generate(claim, 30)
    b.run.fail(claim, "engine timed out after 600 s: <b>http://10.0.0.12:30000</b>", backoff_s=0.0)
    again = next(c for c in b.claim(4) if c.sample_id == claim.sample_id)
    b.run.fail(again, "engine timed out after 600 s: <b>http://10.0.0.12:30000</b>", backoff_s=0.0)
    for other in [c for c in b.held if b.owned(c)]:
        b.release(other, "engine restart")
    b.held.clear()
    (claim,) = b.claim(1)
    b.generate(claim, 45)
    b.run.requeue([claim.sample_id], "tool gave a wrong answer")
    b.demo.requeued = (claim.group_number, claim.index)
    b.held.clear()
    (claim,) = [c for c in b.claim(6) if c.n_tokens == 0][-1:]
    b.generate(claim, 20)
    b.run.drop([claim.group_id], "zero reward variance")
    for other in [c for c in b.held if b.owned(c)]:
        b.release(other, "rebalance")
    b.held.clear()


def _leave_in_the_middle(b: Builder) -> None:
    """Now: some are being generated, some wait for a reward, the spanning sample goes on under the newest weights."""
    claims = b.claim(24)
    for i, claim in enumerate(claims):
        name = (claim.group_number, claim.index)
        if name == b.demo.spanning or i < 13:
            if b.generate(claim):
                b.finish(claim)
        elif i < 16:
            b.generate(claim, 20)
            b.release(claim, "weight update")
        elif i < 19:
            b.calls.append(b.call(claim))
            b.stream(b.calls[-1], b.rng.randint(5, 40))
    b.score(18)
    for worker in (*b.workers, b.trainer):
        b.run.heartbeat(worker)


def _stretch(database: Database, lasted_s: float) -> None:
    """The demo takes a second; its times are drawn out, so that charts over time have something to show."""
    columns = [
        column
        for table in Base.metadata.sorted_tables
        for column in table.c
        if column.name == "at" or (column.name.endswith("_at") and isinstance(column.type, sa.Double))
    ]

    def write(c: sa.Connection) -> None:
        run = Base.metadata.tables["run"]
        begun = float(c.execute(sa.select(sa.func.min(run.c.created_at))).scalar_one())
        event = Base.metadata.tables["event"]
        now = float(c.execute(sa.select(sa.func.max(event.c.at))).scalar_one())
        factor = lasted_s / max(now - begun, 1e-3)
        for column in columns:
            c.execute(
                sa.update(column.table).where(column.is_not(None)).values({column.name: now - (now - column) * factor})
            )
        request = Base.metadata.tables["request"].c
        took = request.finished_at - request.started_at  # told in more than one place: they agree
        c.execute(sa.update(request.id.table).values(e2e_s=took, queue_s=QUEUED * took))

    database.write(write)
