"""A small, realistic run, written through the real verbs: to try the dashboard without engines, and for its tests.

`samplestore dashboard --demo` shows a longer one of these. Weights 0 to 4 are published while samples are half
written, so that trajectories span versions; some are consumed, some failed, dropped, stale, in flight, waiting to be
resumed. Texts include what a hostile model could write.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

import samplestore
from samplestore.dashboard import demo_text
from samplestore.engine import Database
from samplestore.models import Base
from samplestore.run import Run
from samplestore.tokenizers import Tokenizer, load_tokenizer
from samplestore.types import Claim, Ids, RequestInfo
from samplestore.verbs import batches as batch_verbs
from samplestore.verbs import weights

RUN = "gsm8k-demo"
ENGINES = ("http://10.0.0.11:30000", "http://10.0.0.12:30000", "http://10.0.0.13:30000")
FLUSH = 24  # tokens of a segment
POLICY = {"max_staleness": 2, "staleness": "oldest", "stale": "skip", "advantages": "grpo", "need_logprobs": True}


@dataclass
class Demo:
    """What was written. A sample is named by (group number, index)."""

    url: str
    run: str = RUN
    tokenizer: Path | None = None
    spanning: tuple[int, int] = (-1, -1)
    hostile: tuple[int, int] = (-1, -1)
    with_tool: tuple[int, int] = (-1, -1)
    requeued: tuple[int, int] = (-1, -1)
    responses: dict[tuple[int, int], list[int]] = field(default_factory=dict)


class _Builder:
    def __init__(self, run: Run, tokenizer: Tokenizer, demo: Demo, seed: int, long: bool) -> None:
        self.run, self.tokenizer, self.demo = run, tokenizer, demo
        self.answer = demo_text.long_answer if long else demo_text.answer
        self.rng, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.workers = [
            run.register("rollout", "rollout-node1"),
            run.register("rollout", "rollout-node2"),
            run.register("reward", "reward-<img src=x onerror=alert(9)>"),
        ]
        self.trainer = run.register("trainer", "trainer-0")
        self.version, self.request = 0, 0
        self.texts: dict[int, Ids] = {}
        self.held: list[Claim] = []

    def engines(self, behind: int = 0) -> None:
        """Engines report the label of the current version; the last `behind` of them that of the one before."""
        labels = {v.version: v.label for v in self.run.weight_versions()}
        for i, url in enumerate(ENGINES):
            label = labels[max(0, self.version - (i >= len(ENGINES) - behind))]
            self.run.transact(partial(weights.see_engine, url=url, label=label))

    def text_of(self, claim: Claim) -> Ids:
        """What the model is going to say for this sample, int32 [n]."""
        if claim.sample_id not in self.texts:
            meta = claim.metadata
            if meta.get("hostile"):
                text = demo_text.HOSTILE_ANSWER + demo_text.answer(self.rng, "Mallory", 2, 2, 0)
                self.demo.hostile = (claim.group_number, 0)
            else:
                text = self.answer(self.rng, meta["name"], meta["apples"], meta["boxes"], meta["eaten"])
            self.texts[claim.sample_id] = self.tokenizer.encode(text)
        return self.texts[claim.sample_id]

    def logprobs(self, n: int) -> Any:
        """float32 [n]: mostly sure, sometimes not, as a language model is."""
        sure = -self.noise.exponential(0.08, n)
        return np.where(self.noise.random(n) < 0.14, -self.noise.exponential(1.6, n), sure).astype(np.float32)

    def claim(self, limit: int) -> list[Claim]:
        self.run.admit()
        claims = self.run.claim(self.workers[self.rng.randrange(2)], limit)
        self.held.extend(claims)
        return claims

    def generate(self, claim: Claim, tokens: int | None = None, ends: str = "stop") -> bool:
        """One request: up to `tokens` more tokens under the current weights. True when the answer is complete."""
        ids = self.text_of(claim)[claim.n_tokens :]
        wanted = ids if tokens is None else ids[:tokens]
        done = wanted.size == ids.size
        self.request += 1
        rid, engine = f"demo-{self.request:05d}", ENGINES[self.request % len(ENGINES)]
        before = claim.n_tokens
        self.run.begin_request(claim, rid, engine, 1.0, resumes=before > 0)
        last = ends if done else "abort"
        for at in range(0, wanted.size, FLUSH):
            part = wanted[at : at + FLUSH]
            reason = last if at + FLUSH >= wanted.size else None
            self.run.append(claim, part, self.logprobs(part.size), self.version, reason, rid=rid, engine=engine)
        lost = 0 if done else self.rng.randint(0, 3)
        self.run.end_request(
            RequestInfo(
                rid, engine, prompt_tokens=int(claim.prompt_ids.size) + before, cached_tokens=before,
                generated_tokens=int(wanted.size) + lost, finish_reason=last, lost_reason="abort" if lost else None,
                temperature=1.0, queue_s=0.02, e2e_s=0.4,
            )
        )  # fmt: skip
        self.demo.responses[(claim.group_number, claim.index)] = [int(i) for i in self.text_of(claim)[: claim.n_tokens]]
        return done

    def finish(self, claim: Claim, status: str | None = None) -> None:
        self.run.finish(claim, status)
        self.held.remove(claim)

    def release(self, claim: Claim, reason: str) -> None:
        self.run.release(claim, reason)
        self.held.remove(claim)

    def score(self, limit: int) -> None:
        for stage in self.run.claim_stages(self.workers[2], limit):
            self.run.score(stage, float(self.rng.random() < 0.62))

    def step(self, step: int, groups: int) -> bool:
        leased = self.run.transact(lambda tx: batch_verbs.lease(tx, self.trainer, step, groups, POLICY))
        if leased is not None:
            self.run.transact(lambda tx: batch_verbs.commit(tx, leased, self.trainer), durable=True)
        return leased is not None

    def publish(self, step: int) -> None:
        self.version = self.run.publish_weights(path=f"/checkpoints/step_{step:04d}", step=step).version
        self.held = [c for c in self.held if self.owned(c)]

    def owned(self, claim: Claim) -> bool:
        """Publishing may have closed the claim's group for good."""
        row = self.run.transact(lambda tx: tx.rows(_ATTEMPT, {"id": claim.sample_id}))[0]
        return bool(row.owner == claim.owner and row.attempt == claim.attempt)


def _attempt() -> Any:
    import sqlalchemy as sa

    from samplestore.models import Sample

    return sa.select(Sample.owner, Sample.attempt).where(Sample.id == sa.bindparam("id"))


_ATTEMPT = _attempt()


def build(
    url: str, folder: Path, *, seed: int = 3, heartbeat_ttl_s: float = 30.0, steps: int = 4, lasted_s: float = 0.0
) -> Demo:
    """Write the run into the (migrated) database at `url` and its tokenizer into `folder`.

    steps      of the trainer; from 5 on the lengths of answers are long-tailed
    lasted_s   then times are stretched, as if the run had begun so many seconds ago; 0 leaves them
    """
    demo = Demo(url, tokenizer=demo_text.build_tokenizer(folder))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    with samplestore.open(url) as store:
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
        builder = _Builder(run, tokenizer, demo, seed, long=steps > 4)
        _train(builder, steps)
        _leave_in_the_middle(builder)
        if lasted_s:
            _stretch(store.database, lasted_s)
    return demo


def _train(b: _Builder, steps: int) -> None:
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
        b.step(step, 3 if step == 0 else 4)
        for claim in b.claim(3):
            name = (claim.group_number, claim.index)
            if step == 2 and b.demo.spanning[0] < 0 and b.text_of(claim).size > 90 and not claim.n_tokens:
                b.demo.spanning = name  # it is written under three versions
            if not (step == 3 and name == b.demo.spanning):
                b.generate(claim, b.rng.randint(25, 40))
            b.release(claim, "weight update")
        b.publish(step)
        b.engines(behind=step % 2)


def _tool_use(b: _Builder) -> None:
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


def _trouble(b: _Builder) -> None:
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


def _leave_in_the_middle(b: _Builder) -> None:
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
            b.generate(claim, b.rng.randint(5, 40))
            # still held: its stored tokens are in flight
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

    database.write(write)
