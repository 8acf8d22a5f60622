"""Routed experts: stored row for row, or refused, and never a silent gap."""

from __future__ import annotations

import pytest

from tests.support.router import Router
from tests.support.scripted_engine import Script, expert_at, wait_running
from tests.worker.conftest import PROMPT_TOKENS, Bench


@pytest.mark.parametrize("files", [False, True])
def test_routed_experts_are_stored_row_for_row(bench: Bench, files: bool) -> None:
    """Also those of a sample that was aborted and resumed: each request adds the rows of its own tokens. In the
    database, or in side-car files."""
    folder = bench.folder / "arrays"
    bench.make_run(
        samples_per_prompt=2, max_new_tokens=32, array_url=str(folder) if files else None, array_file_bytes=16
    )  # fmt: skip
    (bench.folder / "config.json").write_text(
        '{"vocab_size": 64, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}'
    )
    engine = bench.engine(lambda body, n: Script(stall_after=12) if n < 2 else Script())
    engine.experts = (3, 2)
    worker = bench.worker(engine, routed_experts=True, tokenizer=str(bench.folder), exit_when_done=True)
    wait_running([engine], 2)
    bench.wait_stored(8)
    bench.run.abort_inflight("look at it")
    assert worker.wait(40) == 0, worker.log()
    assert [body["routed_experts_start_len"] for body in engine.requests] == [0, 0, 14, 14]
    for row in bench.samples():
        experts, present = bench.run.routed_experts(row["id"])
        assert experts.shape == (PROMPT_TOKENS + 32 - 1, 3, 2) and experts.dtype == "uint8"
        assert present.all()
        for r in range(len(experts)):
            assert experts[r].tolist() == [[expert_at(r, layer, k) for k in range(2)] for layer in range(3)]
    assert bool(list(folder.glob("*/??/*"))) is files
    bench.sound()


def test_routed_experts_that_are_missing_or_wrong(bench: Bench) -> None:
    """An engine that does not tell them, though it did not say that it would not, ends the worker: no silent gap."""
    bench.make_run(samples_per_prompt=1)
    (bench.folder / "config.json").write_text('{"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}')
    worker = bench.worker(bench.engine(), routed_experts=True, tokenizer=str(bench.folder))
    assert worker.wait(60) != 0
    assert "--enable-return-routed-experts" in worker.log()


def test_routed_experts_that_are_no_experts_are_a_failure(bench: Bench) -> None:
    """Never a finished sample with a gap: the reply's last tokens are not stored, and it is asked for again."""
    bench.make_run(samples_per_prompt=1, max_attempts=2)
    (bench.folder / "config.json").write_text('{"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2}')
    engine = bench.engine()
    engine.experts = (3, 2)  # of 8
    worker = bench.worker(engine, routed_experts=True, tokenizer=str(bench.folder), exit_when_done=True)
    assert worker.wait(60) == 0, worker.log()
    [row] = bench.samples()
    assert row["status"] == "failed" and "the model has 0 to 3" in row["error"]


def test_routed_experts_through_a_router_that_drops_them(bench: Bench) -> None:
    bench.make_run(samples_per_prompt=1)
    (bench.folder / "config.json").write_text('{"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}')
    engine = bench.engine()
    router = Router.start(bench.processes, [engine.url])
    worker = bench.worker(router=router.url, routed_experts=True, tokenizer=str(bench.folder))
    assert worker.wait(60) != 0
    assert "drops return_routed_experts" in worker.log() and "--dispatch direct" in worker.log()
    assert engine.requests == []
