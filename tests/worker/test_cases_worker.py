"""The cases of public bug reports that a worker decides: real workers, scripted engines, both databases."""

from __future__ import annotations

import pytest

from samplestore.types import Claim
from tests.support import factory
from tests.support.scripted_engine import Script, logprob_at, token_at
from tests.worker.conftest import PROMPT_TOKENS, Bench


def append(bench: Bench, claim: Claim, n: int, reason: str | None = "abort") -> None:
    """What a scripted engine would have generated next."""
    places = range(PROMPT_TOKENS + claim.n_tokens, PROMPT_TOKENS + claim.n_tokens + n)
    bench.run.append(claim, [token_at(p) for p in places], [logprob_at(p) for p in places], 0, reason)


def partial(bench: Bench, *parts: int) -> None:
    """Another worker has left every sample of the run with these aborted segments."""
    other = bench.run.register()
    for claim in bench.run.claim(other, 100):
        for n in parts:
            append(bench, claim, n)
        bench.run.release(claim, "worker left")


def test_case_resume_budget(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=1, max_new_tokens=100)
    partial(any_bench, 60)
    engine = any_bench.engine()
    worker = any_bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.requests] == [40]
    assert engine.requests[0]["input_ids"][PROMPT_TOKENS:] == [token_at(PROMPT_TOKENS + i) for i in range(60)]
    any_bench.exact(100)
    any_bench.sound()


def test_case_resume_budget_exhausted(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=1, max_new_tokens=100)
    partial(any_bench, 60, 40)
    engine = any_bench.engine()
    worker = any_bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert any_bench.statuses() == ["truncated"]
    assert engine.requests == []
    any_bench.exact(100)
    any_bench.sound()


def test_case_abort_while_queued(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=2, max_new_tokens=32)
    other = any_bench.run.register()
    begun, _ = any_bench.run.claim(other, 2)
    append(any_bench, begun, 5)
    any_bench.run.goodbye(other)
    engine = any_bench.engine(Script(queued=True))
    before = [(row["status"], row["n_tokens"]) for row in any_bench.samples()]
    worker = any_bench.worker(engine)
    any_bench.wait(lambda: len(engine.requests) >= 4, "both were asked for, and again")
    assert worker.terminate() == 0, worker.log()
    assert [(row["status"], row["n_tokens"]) for row in any_bench.samples()] == before
    assert sum(len(factory.segments(any_bench.run, row["id"])) for row in any_bench.samples()) == 1
    assert [row["failures"] for row in any_bench.samples()] == [0, 0]
    assert len(any_bench.run.claim(any_bench.run.register(), 10)) == 2, "claimable again"
    any_bench.sound()


REFUSED: list[tuple[str, str, Script, str]] = [
    (
        "tokens_without_logprobs", "stream",
        Script(raw=[{"text": "ab", "output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "stop"}}}]),
        "output_token_logprobs is missing",
    ),
    ("null_logprob", "stream", Script(tokens=3, wrong={1: None}), "position 1"),
    ("null_logprob", "unary", Script(tokens=3, wrong={1: None}), "position 1"),
    ("nan_logprob", "stream", Script(tokens=2, wrong={1: float("nan")}), "position 1"),
    ("nan_logprob", "unary", Script(tokens=2, wrong={1: "NaN"}), "position 1"),
]  # fmt: skip


def refused(bench: Bench, mode: str, script: Script, said: str) -> None:
    """The reply is refused with its reason, nothing of it is stored, and the sample is claimed and answered again."""
    bench.make_run(samples_per_prompt=1)
    engine = bench.engine(lambda body, n: script if n == 0 else Script())
    worker = bench.worker(engine, mode=mode, exit_when_done=True)
    bench.wait(lambda: bench.samples()[0]["failures"] == 1, "the reply is refused")
    row = bench.samples()[0]
    assert said in row["error"], row["error"]
    assert (row["n_segments"], row["status"]) == (0, "pending")
    assert worker.wait(40) == 0, worker.log()
    bench.exact(32)
    assert bench.statuses() == ["truncated"]
    bench.sound()


@pytest.mark.parametrize("mode", ["stream", "unary"])
def test_case_tokens_without_logprobs(any_bench: Bench, mode: str) -> None:
    _, _, script, said = REFUSED[0]
    refused(any_bench, mode, script, said)


@pytest.mark.parametrize(("mode", "script", "said"), [case[1:] for case in REFUSED if case[0] == "null_logprob"])
def test_case_null_logprob(any_bench: Bench, mode: str, script: Script, said: str) -> None:
    refused(any_bench, mode, script, said)


@pytest.mark.parametrize(("mode", "script", "said"), [case[1:] for case in REFUSED if case[0] == "nan_logprob"])
def test_case_nan_logprob(any_bench: Bench, mode: str, script: Script, said: str) -> None:
    refused(any_bench, mode, script, said)


def test_case_one_aborted_of_eight(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=8, max_new_tokens=50)
    other = any_bench.run.register()
    *seven, last = any_bench.run.claim(other, 8)
    for claim in seven:
        append(any_bench, claim, 20, "stop")
        any_bench.run.finish(claim)
    append(any_bench, last, 30)
    any_bench.run.release(last, "worker left")
    engine = any_bench.engine()
    worker = any_bench.worker(engine, exit_when_done=True)
    assert worker.wait(40) == 0, worker.log()
    assert [len(body["input_ids"]) for body in engine.requests] == [PROMPT_TOKENS + 30]
    assert sum(request["generated_tokens"] for request in any_bench.requests()) == 20, "nothing is generated twice"
    assert factory.states(any_bench.run) == ["ready"]
    any_bench.exact()
    any_bench.sound()


@pytest.mark.parametrize(
    ("policy", "state", "statuses"),
    [
        ("wait", "open", ["completed"] * 7 + ["pending"]),
        ("drop", "dropped", ["completed"] * 7 + ["failed"]),
        ("short", "ready", ["completed"] * 7 + ["failed"]),
    ],
)
def test_case_straggler(any_bench: Bench, policy: str, state: str, statuses: list[str]) -> None:
    any_bench.make_run(
        samples_per_prompt=8, on_straggler=policy, group_deadline_s=1, heartbeat_ttl_s=2, max_new_tokens=40
    )
    other = any_bench.run.register()
    for claim in any_bench.run.claim(other, 7):
        append(any_bench, claim, 20, "stop")
        any_bench.run.finish(claim)
    any_bench.run.goodbye(other)
    engine = any_bench.engine(Script(stall_after=0))
    any_bench.worker(engine)
    any_bench.wait(lambda: factory.events(any_bench.run, "straggler"), "the straggler is told")
    assert len(factory.events(any_bench.run, "straggler")) == 1
    assert factory.states(any_bench.run) == [state]
    assert sorted(any_bench.statuses()) == statuses
    if policy != "wait":  # whoever still generates for it learns so at its next word to the store
        engine.release()
        any_bench.wait(engine.idle, "the engine has nothing running")
    any_bench.sound()
