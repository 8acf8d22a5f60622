"""The proof on real SGLang: every stored log-prob is what the weights that its segment names give that token, through
aborts, retractions and changes of weights while requests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from samplestore.run import Run
from tests.support import factory
from tests.support.models import EXPERTS, LAYERS, TOP_K, build_model
from tests.support.processes import Processes
from tests.support.sglang import SGLang, chosen_releases, start_sglang
from tests.worker import phases, recompute
from tests.worker.conftest import Bench
from tests.worker.test_recompute import tell

VERSIONS = 3
# So much that both updates come amid it where the engine is five times as fast, or the test stalls for a second.
PROMPTS, NEW_TOKENS = 16, 240
LABEL = "v0"  # of the server's first weights
WAIT_S = 300.0
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


class Served:
    """A server, its releases' name, and the weights it can be told to serve."""

    def __init__(self, engine: SGLang, kind: str, folders: list[Path]) -> None:
        self.engine, self.kind, self.folders = engine, kind, folders
        self.models = {version: recompute.load(folder) for version, folder in enumerate(folders)}

    def start_over(self) -> None:
        body = {"model_path": str(self.folders[0]), "weight_version": LABEL, "abort_all_requests": True}
        assert tell(self.engine.url, "/update_weights_from_disk", body)["success"]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3_moe"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The newest release that is tested, with a model of each family: dense without and with biases, and a mixture of
    experts that tells its routing."""
    kind = request.param
    root = tmp_path_factory.mktemp(kind)
    folders = [build_model(root / f"v{seed}", seed + 1, kind) for seed in range(VERSIONS)]
    processes = Processes(root)
    flags = ["--enable-return-routed-experts"] if kind == "qwen3_moe" else []
    try:
        yield Served(start_sglang(processes, folders[0], *flags, release=chosen_releases()[0]), kind, folders)
    finally:
        processes.close()


def scenario(bench: Bench, served: Served, mode: str, temperature: float, amid: Callable[[int], None]) -> Run:
    """64 samples, two publishes while they are in flight; `amid(version)` happens before each."""
    served.start_over()
    run = bench.make_run(
        prompts=PROMPTS, samples_per_prompt=4, groups_per_step=PROMPTS, max_staleness=VERSIONS,
        max_new_tokens=NEW_TOKENS, sampling={"temperature": temperature}, weight_update=mode,
    )  # fmt: skip
    run.describe_first_weights(str(served.folders[0]), LABEL)
    experts = {"routed_experts": True, "tokenizer": str(served.folders[0])} if served.kind == "qwen3_moe" else {}
    worker = bench.worker(
        served.engine, concurrency=12, flush_tokens=24, flush_seconds=0.5, exit_when_done=True, **experts
    )
    stored = "SELECT coalesce(sum(n_tokens), 0) FROM sample"
    for version in range(1, VERSIONS):
        bench.wait(lambda v=version: factory.value(run, stored) >= v * 900, "tokens are stored", WAIT_S)
        amid(version)
        run.publish_weights(str(served.folders[version]), step=version)
        bench.wait(lambda v=version: factory.value(run, "SELECT version FROM engine") == v, "it is served", WAIT_S)
    assert worker.wait(WAIT_S) == 0, worker.log()
    assert set(bench.statuses()) <= {"completed", "truncated"}
    return run


def spanning(run: Run) -> int:
    return int(factory.value(run, "SELECT count(*) FROM sample WHERE version_min < version_max"))


def assert_experts(run: Run, served: Served, all_rows: bool) -> None:
    """Rows, layers, top-k and values, against the routing of a forward pass; ties within rounding are rare."""
    compared = wrong = 0
    for sample in factory.rows(run, "SELECT * FROM sample WHERE status IN ('completed', 'truncated')"):
        stored, present = run.routed_experts(sample["id"])
        calls = phases.calls_of(run, sample)
        assert stored.shape == (len(calls[-1].prefix) + len(calls[-1].ids) - 1, LAYERS, TOP_K)
        assert stored.dtype == np.uint8 and stored.max() < EXPERTS
        if all_rows:
            assert present.all()
        for number, call in enumerate(calls):
            rows = phases.recompute(call, served.models)[1]
            first = 0 if number == 0 else len(call.prefix) - 1  # what an earlier request told stays as it was
            for row in range(first, len(rows)):
                if not present[row]:
                    continue
                compared += 1
                wrong += np.sort(stored[row], axis=-1).tolist() != rows[row]
    assert compared > 2000 and wrong <= compared // 500, (wrong, compared)


def test_aborting_updates_retractions_and_aborts(bench: Bench, served: Served) -> None:
    """Temperature 1. Between publishes: all is retracted and goes on; while it is, samples are aborted in the queue."""

    def amid(version: int) -> None:
        tell(served.engine.url, "/pause_generation", {"mode": "retract"})
        if version == 2:
            begun = [row["id"] for row in bench.samples() if row["owner"] is not None and row["n_tokens"]]
            bench.run.abort_inflight("look at it", samples=begun[:4], wait_s=WAIT_S)
        tell(served.engine.url, "/continue_generation", {})

    run = scenario(bench, served, "abort", 1.0, amid)
    error, n = phases.worst(run, served.models)
    print(f"{served.kind}: {n} log-probs, largest error {error:.1e}")
    assert spanning(run) >= 4, "too few samples span versions for this to be a test"
    assert recompute.problems(run, served.models, 1) == []
    assert {"weight update", "look at it"} <= {event["reason"] for event in factory.events(run, "abort")}
    assert factory.value(run, "SELECT coalesce(sum(retractions), 0) FROM request") > 0
    if served.kind == "qwen3_moe":
        assert_experts(run, served, False)  # engines drop those of retracted requests that are aborted
    factory.sound(run)


def test_updates_in_place(bench: Bench, served: Served) -> None:
    """Temperature 0.7. Requests live through changes of weights, on the keys and values that they have."""
    run = scenario(bench, served, "keep", 0.7, lambda version: None)
    error, n = phases.worst(run, served.models)
    print(f"{served.kind}: {n} log-probs, largest error {error:.1e}")
    assert factory.value(run, "SELECT sum(n_aborts) FROM sample") == 0, "nothing is aborted in mode keep"
    across = factory.rows(
        run, "SELECT request_rid FROM segment GROUP BY request_rid HAVING min(version_min) < max(version_min)"
    )
    assert len(across) >= 4, "requests lived through changes of weights"
    if served.kind == "qwen3_moe":
        assert_experts(run, served, True)
    factory.sound(run)


def test_the_proof_can_fail(bench: Bench, served: Served) -> None:
    """The same numbers held against other weights, or at another temperature, do not pass."""
    served.start_over()
    run = bench.make_run(samples_per_prompt=2, max_new_tokens=40, sampling={"temperature": 0.7})
    run.describe_first_weights(str(served.folders[0]), LABEL)
    worker = bench.worker(served.engine, exit_when_done=True)
    assert worker.wait(WAIT_S) == 0, worker.log()
    assert phases.worst(run, served.models)[1] > 2
    [call, *_] = phases.calls_of(run, bench.samples()[0])
    for wrong in ({"versions": [1] * len(call.ids)}, {"temperature": 1.0}):
        other = phases.Call(call.rid, call.temperature, call.prefix)
        other.ids, other.logprobs, other.versions = call.ids, call.logprobs, call.versions
        for name, value in wrong.items():
            setattr(other, name, value)
        off = np.abs(phases.recompute(other, served.models)[0] - np.asarray(call.logprobs))
        assert off.max() > phases.TOLERANCE, wrong
