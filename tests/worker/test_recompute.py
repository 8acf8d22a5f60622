"""Finished samples of the demo model, recomputed with the weights that their segments name: across aborts, resumes,
version changes and the death of a worker, behind the real router."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore import codec
from samplestore.examples import tiny_model
from samplestore.run import Run
from samplestore.verbs import steps
from tests.engine.conftest import RunningEngine, start_engine
from tests.support import factory
from tests.support.processes import Processes
from tests.support.router import Router
from tests.worker import recompute
from tests.worker.conftest import Bench, made_bench

VERSIONS = 4
NEW_TOKENS = 96
Fleet = tuple[Router, list[RunningEngine]]
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The weights of versions 0, 1, ...: the same architecture from different seeds."""
    root = tmp_path_factory.mktemp("weights")
    for seed in range(VERSIONS):
        tiny_model.build(root / f"v{seed}", seed)
    return [root / f"v{seed}" for seed in range(VERSIONS)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> dict[int, Any]:
    return {version: recompute.load(folder) for version, folder in enumerate(folders)}


@pytest.fixture(scope="module")
def fleet(
    folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Router, list[RunningEngine]]]:
    """Two embedded engines behind a real router; 10 ms a step, chunks of 3 tokens."""
    processes = Processes(tmp_path_factory.mktemp("fleet"))
    engines: list[RunningEngine] = []
    try:
        for flags in (["--incremental-streaming-output"], []):  # one of each dialect
            engines.append(
                start_engine(
                    folders[0], "--weight-version", "default", "--max-running", "8", "--decode-interval", "0.01",
                    "--stream-interval", "3", *flags,
                )
            )  # fmt: skip
        yield Router.start(processes, [engine.url for engine in engines]), engines
    finally:
        processes.close()
        for engine in engines:
            engine.process.kill()
            engine.process.wait()


def tell(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def start_over(fleet: Fleet, folders: list[Path]) -> None:
    for engine in fleet[1]:
        body = {"model_path": str(folders[0]), "weight_version": "default", "abort_all_requests": True}
        assert tell(engine.url, "/update_weights_from_disk", body)["success"]


def publish_amid(bench: Bench, folder: Path, version: int) -> None:
    """Publish when enough was generated under the version before, and wait until both engines serve it."""
    run, stored = bench.run, "SELECT coalesce(sum(n_tokens), 0) FROM sample"
    bench.wait(lambda: factory.value(run, stored) >= version * 220, "tokens are stored under the version before", 60)
    assert run.publish_weights(str(folder), step=version).version == version
    served = "SELECT version FROM engine"
    bench.wait(
        lambda: [row["version"] for row in factory.rows(run, served)] == [version, version],
        f"both engines serve version {version}", 60,
    )  # fmt: skip


def scenario(bench: Bench, fleet: Fleet, folders: list[Path], mode: str, temperature: float) -> Run:
    """32 samples, two workers, three publishes while they are in flight; in mode abort one worker is killed and all
    that is in flight is aborted, too."""
    start_over(fleet, folders)
    run = bench.make_run(
        prompts=8, samples_per_prompt=4, groups_per_step=8, max_staleness=VERSIONS, epochs=1, heartbeat_ttl_s=2,
        max_new_tokens=NEW_TOKENS, sampling={"temperature": temperature}, weight_update=mode,
    )  # fmt: skip
    run.describe_first_weights(str(folders[0]))
    workers = [
        bench.worker(
            router=fleet[0].url, concurrency=8, flush_tokens=12, flush_seconds=0.2, exit_when_done=True,
        )
        for _ in range(2)
    ]  # fmt: skip

    for version in range(1, VERSIONS):
        publish_amid(bench, folders[version], version)
        if version == 2 and mode == "abort":
            workers[0].kill()  # -9, in the middle of its requests
            run.abort_inflight("look at it")
    for worker in workers[1:] if mode == "abort" else workers:
        assert worker.wait(120) == 0, worker.log()
    return run


def spanning(run: Run) -> int:
    return int(factory.value(run, "SELECT count(*) FROM sample WHERE version_min < version_max"))


def assert_proven(run: Run, models: dict[int, Any]) -> None:
    assert {row["status"] for row in factory.rows(run, "SELECT status FROM sample")} <= set(recompute.FINISHED)
    assert spanning(run) >= 4, "too few samples span versions for this to be a test"
    assert recompute.problems(run, models, tiny_model.EOS_ID) == []
    factory.sound(run)


@pytest.fixture(scope="module")
def finished(
    fleet: Fleet, folders: list[Path], sqlite_template: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    """The database after the scenario in mode abort, with a killed worker and an abort of everything."""
    folder = tmp_path_factory.mktemp("finished")
    path = folder / "rollouts.db"
    shutil.copyfile(sqlite_template, path)
    (folder / "logs").mkdir()
    processes = Processes(folder / "logs")
    try:
        with made_bench(f"sqlite:///{path}", processes, folder) as bench:
            scenario(bench, fleet, folders, "abort", 1.0)
    finally:
        processes.close()
    return path


def test_every_logprob_after_aborts_resumes_and_a_killed_worker(finished: Path, models: dict[int, Any]) -> None:
    with samplestore.open(str(finished)) as store:
        run = store.existing_run("r")
        assert_proven(run, models)
        assert factory.value(run, "SELECT count(*) FROM sample WHERE n_resumes > 0") >= 4
        reasons = {event["reason"] for event in factory.events(run, "abort")}
        assert {"weight update", "look at it"} <= reasons
        assert factory.events(run, "reap"), "the killed worker held samples"
        assert len({r["status"] for r in factory.rows(run, "SELECT status FROM sample")}) == 2, "both ways to end"


def test_every_logprob_in_mode_keep(bench: Bench, fleet: Fleet, folders: list[Path], models: dict[int, Any]) -> None:
    run = scenario(bench, fleet, folders, "keep", 0.7)
    assert_proven(run, models)
    assert factory.value(run, "SELECT sum(n_aborts) FROM sample") == 0, "nothing is aborted in mode keep"
    across = factory.rows(
        run, "SELECT request_rid FROM segment GROUP BY request_rid HAVING min(version_min) < max(version_min)"
    )
    assert len(across) >= 4, "requests lived through changes of weights"


@pytest.mark.slow
def test_every_logprob_on_postgres(
    postgres_url: str, processes: Processes, tmp_path: Path, fleet: Fleet,
    folders: list[Path], models: dict[int, Any],
) -> None:  # fmt: skip
    with made_bench(postgres_url, processes, tmp_path) as bench:
        assert_proven(scenario(bench, fleet, folders, "abort", 0.7), models)


def test_case_publish_does_not_abort(bench: Bench, fleet: Fleet, folders: list[Path], models: dict[int, Any]) -> None:
    """16 requests live through a publish in mode keep."""
    start_over(fleet, folders)
    run = bench.make_run(
        prompts=4, samples_per_prompt=4, groups_per_step=4, max_staleness=1, epochs=1, max_new_tokens=160,
        sampling={"temperature": 1.0, "ignore_eos": True}, weight_update="keep",
    )  # fmt: skip
    run.describe_first_weights(str(folders[0]))
    worker = bench.worker(router=fleet[0].url, concurrency=16, flush_tokens=12, exit_when_done=True)
    bench.wait_stored(10)
    assert len([row for row in bench.samples() if row["owner"] and row["n_tokens"] < 100]) == 16, "all are in flight"
    run.publish_weights(str(folders[1]), step=1)
    assert worker.wait(60) == 0, worker.log()
    assert sum(row["n_aborts"] for row in bench.samples()) == 0
    assert factory.events(run, "abort") == []
    assert len(bench.requests()) == 16, "one call each"
    assert spanning(run) == 16
    for row in bench.samples():
        assert [s["version_min"] for s in factory.segments(run, row["id"])] in ordered(row["n_segments"])
    factory.sound(run)


def ordered(n: int) -> list[list[int]]:
    """Version 0 for a while, then version 1."""
    return [[0] * k + [1] * (n - k) for k in range(1, n)]


# -- what the check is worth: each of these mutations of the stored data must fail it


def _rewrite(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    payload = codec.encode(np.asarray(ids, dtype="<i4"), np.asarray(probs, dtype="<f4"))
    factory.execute(
        run, "UPDATE segment SET payload = :p, n_tokens = :n WHERE sample_id = :s AND seq = :q AND incarnation = :i",
        p=payload, n=len(ids), s=part["sample_id"], q=part["seq"], i=part["incarnation"],
    )  # fmt: skip


def _resize(run: Run, part: dict[str, Any], by: int) -> None:
    """Make all columns agree with a segment that became longer by `by`: only the log-probs can tell then."""
    where = {"n": by, "s": part["sample_id"], "q": part["seq"]}
    factory.execute(run, "UPDATE segment SET start = start + :n WHERE sample_id = :s AND seq > :q", **where)
    factory.execute(run, "UPDATE sample SET n_tokens = n_tokens + :n WHERE id = :s", n=by, s=part["sample_id"])


def shift_logprobs(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    _rewrite(run, part, ids, np.roll(probs, 1))


def other_version(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    factory.execute(
        run, "UPDATE segment SET version_min = :v, version_max = :v WHERE sample_id = :s AND seq = :q",
        v=(part["version_min"] + 1) % VERSIONS, s=part["sample_id"], q=part["seq"],
    )  # fmt: skip


def lose_a_token(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    _rewrite(run, part, np.delete(ids, 1), np.delete(probs, 1))
    _resize(run, part, -1)


def repeat_a_token(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    _rewrite(run, part, np.insert(ids, 1, ids[1]), np.insert(probs, 1, probs[1]))
    _resize(run, part, 1)


def another_token(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    """What retokenising text can do: the same length, another id."""
    changed = ids.copy()
    changed[0] = 7 if ids[0] != 7 else 8
    _rewrite(run, part, changed, probs)


def lose_a_segment(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    key = {"s": part["sample_id"], "q": part["seq"]}
    _resize(run, part, -len(ids))
    factory.execute(run, "DELETE FROM segment WHERE sample_id = :s AND seq = :q", **key)
    factory.execute(run, "UPDATE segment SET seq = -seq WHERE sample_id = :s AND seq > :q", **key)
    factory.execute(run, "UPDATE segment SET seq = -seq - 1 WHERE sample_id = :s AND seq < 0", s=part["sample_id"])


def go_on_after_the_end(run: Run, part: dict[str, Any], ids: Any, probs: Any) -> None:
    factory.execute(run, "UPDATE sample SET status = 'truncated' WHERE status = 'completed'")


MUTATIONS = (
    shift_logprobs, other_version, lose_a_token, repeat_a_token, another_token, lose_a_segment, go_on_after_the_end,
)  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_the_check_can_fail(finished: Path, models: dict[int, Any], tmp_path: Path, mutate: Any) -> None:
    copy = tmp_path / "mutated.db"
    shutil.copyfile(finished, copy)
    with samplestore.open(str(copy)) as store:
        run = store.existing_run("r")
        parts = factory.rows(
            run,
            "SELECT g.* FROM segment g JOIN sample s ON s.id = g.sample_id WHERE s.version_min < s.version_max "
            "AND g.seq = 1 AND g.n_tokens >= 4 AND s.n_segments >= 3 ORDER BY g.sample_id",
        )
        assert recompute.problems(run, models, tiny_model.EOS_ID) == []
        mutate(run, parts[0], *codec.decode(parts[0]["payload"]))
        assert recompute.problems(run, models, tiny_model.EOS_ID), f"{mutate.__name__} went unseen"


@pytest.mark.parametrize("mode", ["partial", pytest.param("sync", marks=pytest.mark.slow)])
def test_every_logprob_of_a_run_in_steps(
    mode: str, bench: Bench, fleet: Fleet, folders: list[Path], models: dict[int, Any]
) -> None:
    """Three steps with new weights after each. partial: what the end of a step aborted at real engines goes on under
    the next weights, and no token is generated twice. sync: nothing is aborted, and no sample spans versions."""
    start_over(fleet, folders)
    rules = {"over_sampling_batch_size": 8, "max_staleness": 4} if mode == "partial" else {"max_staleness": 0}
    run = bench.make_run(
        prompts=40, samples_per_prompt=2, groups_per_step=3, epochs=1, max_new_tokens=NEW_TOKENS, mode=mode, **rules
    )
    run.describe_first_weights(str(folders[0]))
    trainer = factory.register(run, "trainer")
    worker = bench.worker(router=fleet[0].url, concurrency=16, flush_tokens=12, flush_seconds=0.2)
    for step in range(VERSIONS - 1):
        batch = bench.wait(lambda step=step: factory.lease(run, trainer, step, groups=3), f"step {step} is ready")
        factory.commit(run, batch, trainer)
        run.publish_weights(str(folders[step + 1]), step=step)
    bench.wait(lambda: len(factory.events(run, "step_over")) == VERSIONS, "the last step is over")
    assert worker.terminate() == 0, worker.log()
    assert recompute.problems(run, models, tiny_model.EOS_ID) == []
    factory.sound(run)
    assert {e["reason"] for e in factory.events(run, "abort")} <= {steps.OVER, "worker got SIGTERM"}
    assert sum(r["lost_tokens"] or 0 for r in bench.requests()) == 0
    assert factory.fates(run).get("superseded", 0) == factory.fates(run).get("stale", 0) == 0
    if mode == "partial":
        assert spanning(run) >= 2 and factory.events(run, "abort_inflight")
    else:
        assert spanning(run) == 0 and factory.events(run, "abort_inflight") == []
