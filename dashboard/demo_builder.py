"""What writes the demo's run: workers, engines and a trainer that are made up, through the verbs that real ones use."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from samplestore.dashboard import demo_text
from samplestore.models import Sample
from samplestore.run import Run
from samplestore.tokenizers import Tokenizer
from samplestore.types import Claim, EngineFacts, Ids, RequestInfo
from samplestore.verbs import batches as batch_verbs
from samplestore.verbs import weights

RUN = "gsm8k-demo"
ENGINES = ("http://10.0.0.11:30000", "http://10.0.0.12:30000", "http://10.0.0.13:30000")
FLUSH = 24  # tokens of a segment
QUEUED = 0.05  # of a request's time, at the engine
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


@dataclass(slots=True)
class Call:
    """A request to an engine that is not over: `before` tokens were stored when it began."""

    claim: Claim
    rid: str
    engine: str
    before: int
    began: float


class Builder:
    """Writes what workers, engines and a trainer would, through the verbs that they use."""

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
        self.calls: list[Call] = []  # that are not over
        self.counted = dict.fromkeys(ENGINES, 0)  # tokens that each has generated

    def engines(self, behind: int = 0) -> None:
        """Engines report the label of the current version; the last `behind` of them that of the one before."""
        labels = {v.version: v.label for v in self.run.weight_versions()}
        for i, url in enumerate(ENGINES):
            label = labels[max(0, self.version - (i >= len(ENGINES) - behind))]
            running = sum(call.engine == url for call in self.calls)
            facts = EngineFacts(self.counted[url], 32_768, "0.5.23", running, queued=0)
            base = self.run.database.read(partial(weights.counter_base, url=url))
            self.run.transact(partial(weights.see_engine, url=url, label=label, facts=facts, counter_seen_at=base))

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

    def call(self, claim: Claim) -> Call:
        """Begin a request that goes on with what the claim has."""
        self.request += 1
        rid, engine = f"demo-{self.request:05d}", ENGINES[self.request % len(ENGINES)]
        self.run.begin_request(claim, rid, engine, 1.0, resumes=claim.n_tokens > 0)
        return Call(claim, rid, engine, claim.n_tokens, time.monotonic())

    def stream(self, call: Call, tokens: int, stopped: str | None = None, ends: str = "stop") -> str | None:
        """Up to `tokens` more under the current weights. Returns why the request is over: `ends` where the answer is
        complete, else `stopped`."""
        claim = call.claim
        left = self.text_of(claim)[claim.n_tokens :]
        part = left[:tokens]
        reason = ends if part.size == left.size else stopped
        for at in range(0, part.size, FLUSH):
            ids, last = part[at : at + FLUSH], at + FLUSH >= part.size
            self.run.append(
                claim, ids, self.logprobs(ids.size), self.version, reason if last else None, rid=call.rid,
                engine=call.engine,
            )  # fmt: skip
            self.counted[call.engine] += int(ids.size)
        return reason

    def hang_up(self, call: Call, reason: str) -> None:
        claim, took = call.claim, time.monotonic() - call.began
        lost = self.rng.randint(0, 3) if reason == "abort" else 0
        self.counted[call.engine] += lost
        self.run.end_request(
            RequestInfo(
                call.rid, call.engine, prompt_tokens=int(claim.prompt_ids.size) + call.before,
                cached_tokens=call.before, generated_tokens=claim.n_tokens - call.before + lost, finish_reason=reason,
                lost_reason="abort" if lost else None, temperature=1.0, queue_s=QUEUED * took, e2e_s=took,
            )
        )  # fmt: skip
        self.demo.responses[(claim.group_number, claim.index)] = [int(i) for i in self.text_of(claim)[: claim.n_tokens]]

    def generate(self, claim: Claim, tokens: int | None = None, ends: str = "stop") -> bool:
        """One request: up to `tokens` more tokens under the current weights. True when the answer is complete."""
        call = self.call(claim)
        reason = self.stream(call, self.text_of(claim).size if tokens is None else tokens, "abort", ends)
        self.hang_up(call, reason or "abort")
        return reason == ends

    def finish(self, claim: Claim, status: str | None = None) -> None:
        self.run.finish(claim, status)
        self.held.remove(claim)

    def release(self, claim: Claim, reason: str) -> None:
        self.run.release(claim, reason)
        self.held.remove(claim)

    def score(self, limit: int) -> None:
        for stage in self.run.claim_stages(self.workers[2], limit):
            self.run.score(stage, float(self.rng.random() < 0.62), elapsed_s=float(self.noise.uniform(0.002, 0.02)))

    def lease(self, step: int, groups: int) -> int | None:
        return self.run.transact(lambda tx: batch_verbs.lease(tx, self.trainer, step, groups, POLICY))

    def commit(self, leased: int) -> None:
        self.run.transact(lambda tx: batch_verbs.commit(tx, leased, self.trainer), durable=True)

    def publish(self, step: int) -> None:
        self.version = self.run.publish_weights(path=f"/checkpoints/step_{step:04d}", step=step).version
        self.held = [c for c in self.held if self.owned(c)]

    def owned(self, claim: Claim) -> bool:
        """Publishing may have closed the claim's group for good."""
        row = self.run.transact(lambda tx: tx.rows(_ATTEMPT, {"id": claim.sample_id}))[0]
        return bool(row.owner == claim.owner and row.attempt == claim.attempt)


_ATTEMPT = sa.select(Sample.owner, Sample.attempt).where(Sample.id == sa.bindparam("id"))
