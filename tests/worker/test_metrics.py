"""`samplestore worker --metrics-port`: what Prometheus scrapes, from a real worker; and what the numbers say."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import samplestore
from samplestore import Store
from samplestore.errors import MissingExtra, SampleStoreError
from samplestore.queries.metric_names import NAMES, PREFIX
from samplestore.queries.metrics import why_lost
from samplestore.run import Run
from samplestore.verbs import stages
from samplestore.workers.metrics import WorkerMetrics, gauge_of, serving
from tests.docs.small_run import build
from tests.support import factory as f
from tests.support.processes import Process
from tests.support.scripted_engine import Script, wait_running
from tests.worker.conftest import Bench

ROOT = Path(__file__).parents[2]
FEW_VALUES = {
    "run",
    "kind",
    "end",
    "outcome",
    "what",
    "le",
    "implementation",
    "major",
    "minor",
    "patchlevel",
    "version",
}


def page_of(worker: Process) -> str:
    log = worker.wait_for_log("/metrics")
    (url,) = set(re.findall(r"http://127\.0\.0\.1:\d+/metrics", log))
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def scrape(worker: Process) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value by (name, labels without the run)."""
    told = {}
    for family in text_string_to_metric_families(page_of(worker)):
        for one in family.samples:
            assert set(one.labels) <= FEW_VALUES, one
            assert one.labels.get("run", "r") == "r"
            told[one.name, frozenset((k, v) for k, v in one.labels.items() if k != "run")] = one.value
    return told


def label(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_a_worker_is_scraped(any_bench: Bench) -> None:
    any_bench.make_run(samples_per_prompt=2)
    engine = any_bench.engine(lambda body, n: Script(stall_after=12 if n < 2 else None))
    worker = any_bench.worker(engine, metrics_port=0)
    wait_running([engine], 2)
    any_bench.wait_stored(8)
    held = scrape(worker)
    assert held[label("samplestore_worker_held", what="samples")] == 2
    assert held[label("samplestore_worker_claims_total", what="samples")] == 2
    assert held[label("samplestore_run_samples_in_flight")] == 2
    engine.release()
    any_bench.wait_all()
    any_bench.wait(lambda: scrape(worker)[label("samplestore_worker_held", what="samples")] == 0, "nothing is held")
    told = scrape(worker)
    assert told[label("samplestore_worker_tokens_total", kind="generated")] == 64
    assert told[label("samplestore_worker_samples_total", end="finished")] == 2
    assert told[label("samplestore_worker_requests_total", outcome="length")] == 2
    assert told[label("samplestore_worker_segments_total")] == len(f.rows(any_bench.run, "SELECT 1 FROM segment"))
    assert told[label("samplestore_worker_commit_seconds_count")] > 2
    assert told[label("samplestore_worker_writer_queue")] >= 0
    assert told[label("samplestore_run_known")] == 1
    assert told[label("samplestore_run_tokens_generated")] == 64
    assert told[label("samplestore_run_ledger_imbalance")] == 0
    assert any(name == "process_resident_memory_bytes" for name, _ in told)
    assert worker.terminate(20) == 0, worker.log()
    any_bench.sound()


def test_a_port_that_is_taken_ends_the_worker_before_it_claims(bench: Bench) -> None:
    bench.make_run()
    engine = bench.engine()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = bench.worker(engine, metrics_port=taken.getsockname()[1])
        assert worker.wait(60) == 1
    assert re.search(r"error: no metrics can be served at 127.0.0.1:\d+: .* --metrics-port 0$", worker.log().strip())
    assert not engine.requests and not f.rows(bench.run, "SELECT 1 FROM worker")


class Counted:
    """A worker that does nothing, with its metrics."""

    def __init__(self, run: Any) -> None:
        self.run, self.metrics = run, None
        self.config = SimpleNamespace(metrics_port=0, metrics_host="127.0.0.1")

    def holds(self) -> dict[str, int]:
        return {"stages": 3}


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, {"run": metrics.run.name, **labels}) or 0.0


def test_outcomes_have_few_names(store: Store) -> None:
    worker = Counted(f.make_run(store))
    metrics = WorkerMetrics(worker.run, worker)
    for outcome in ("verifier_timeout", "verifier_error", "a message of 300 words"):
        metrics.wrote(stages.fail_stage, (None, "said", outcome), "pending")
    assert value(metrics, "samplestore_worker_stages_total", outcome="timeout") == 1
    assert value(metrics, "samplestore_worker_stages_total", outcome="error") == 2
    metrics.wrote(lambda tx: None, (None,), None)  # what is not counted
    assert value(metrics, "samplestore_worker_held", what="stages") == 3
    told = [
        why_lost(r) for r in ("abort", "engine died", "stale cache", "lease lost", "worker dead", "refused: x", "?")
    ]
    assert told == ["aborted", "engine", "engine", "lease", "worker", "refused", "other"]


async def test_a_database_that_is_away_leaves_the_workers_own_counters(store: Store) -> None:
    run = f.make_run(store)

    def away() -> dict[str, float]:
        raise SampleStoreError("away")

    worker = Counted(SimpleNamespace(name=run.name, metrics=away))
    metrics = WorkerMetrics(worker.run, worker)
    body, content_type = await metrics.page("")
    assert content_type.startswith("text/plain")
    assert b'samplestore_run_known{run="r"} 0.0' in body and b"samplestore_worker_held" in body
    assert b"samplestore_run_tokens" not in body


@pytest.mark.parametrize("name", ['a"} 1\nsamplestore_run_evil{x="', "\\", "\n", "# HELP", "\u2603"])
async def test_a_name_is_one_label_however_it_is_written(store: Store, name: str) -> None:
    run = f.make_run(store, name)
    body, _ = await WorkerMetrics(run, Counted(run)).page("")
    found = [one for family in text_string_to_metric_families(body.decode()) for one in family.samples]
    assert {one.labels["run"] for one in found if "run" in one.labels} == {name}
    assert not any("evil" in one.name for one in found)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=one", "application/openmetrics-text;;="])
async def test_whatever_is_asked_for_there_is_a_page(store: Store, accept: str) -> None:
    run = f.make_run(store)
    body, content_type = await WorkerMetrics(run, Counted(run)).page(accept)
    assert content_type and b'samplestore_run_known{run="r"} 1.0' in body


async def test_a_slow_database_holds_up_neither_loop_nor_scrape(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask, one reads; who has waited long enough gets the worker's own counters."""
    monkeypatch.setattr("samplestore.workers.metrics.READ_S", 0.05)
    go, reads = threading.Event(), []

    def slow() -> dict[str, float]:
        reads.append(1)
        assert go.wait(60)
        return {f"{PREFIX}groups/ready": 4.0}

    worker = Counted(SimpleNamespace(name="r", metrics=slow))
    async with serving(worker):
        assert worker.metrics is not None
        pages = await asyncio.gather(*(worker.metrics.page("") for _ in range(5)))
        assert all(b'samplestore_run_known{run="r"} 0.0' in body for body, _ in pages)
        assert len(reads) == 1
        go.set()
        monkeypatch.setattr("samplestore.workers.metrics.READ_S", 60.0)
        body, _ = await worker.metrics.page("")
        assert b'samplestore_run_groups_ready{run="r"} 4.0' in body


# -- run.metrics()


def test_the_numbers_are_those_that_are_explained(db_url: str) -> None:
    build(db_url, steps=2)
    with samplestore.open(db_url) as store:
        run = store.existing_run("gsm8k")
        told = run.metrics()
        assert all(isinstance(v, float) and v == v for v in told.values())
        explained = {PREFIX + name for name in NAMES}
        assert set(told) <= explained
        assert {n.removeprefix(PREFIX) for n in explained - set(told)} == {
            "recent/cached_ratio", "engines/running", "engines/queued",
        }, "what nobody has told is left out"  # fmt: skip
        by_fate = run.ledger()["by_fate"]
        assert {f.removeprefix(f"{PREFIX}tokens/"): n for f, n in told.items() if f"{PREFIX}tokens/" in f} == {
            **by_fate, "generated": sum(by_fate.values()),
        }  # fmt: skip
        assert told[f"{PREFIX}groups/ready"] == told[f"{PREFIX}groups/ready_in_window"] == 3
        assert told[f"{PREFIX}staleness/ready_max"] == 2
        assert (told[f"{PREFIX}batch/step"], told[f"{PREFIX}batch/tokens"]) == (2, 11)
        assert told[f"{PREFIX}recent/failed_ratio"] == pytest.approx(1 / 12)
        assert told[f"{PREFIX}recent/lost_tokens/aborted"] == 2


def test_an_empty_run_has_numbers(store: Store) -> None:
    told = store.run("new").metrics()
    assert told[f"{PREFIX}groups/created"] == 0 and told[f"{PREFIX}recent/groups"] == 0
    assert f"{PREFIX}batch/step" not in told and f"{PREFIX}staleness/ready_max" not in told


def test_a_damaged_window_shows_in_the_numbers(store: Store) -> None:
    run = f.make_run(store)
    f.finish_all(run, f.register(run))
    assert run.metrics()[f"{PREFIX}ledger/imbalance"] == 0
    f.execute(run, "UPDATE segment SET n_tokens = n_tokens + 1 WHERE sample_id = 1")
    assert run.metrics()[f"{PREFIX}ledger/imbalance"] == 1


# -- documents


def exported(run: Run) -> set[str]:
    """Names that a worker exports, those with nothing counted yet too."""
    worker = Counted(run)
    metrics = WorkerMetrics(run, worker)
    names = {gauge_of(PREFIX + name) for name in NAMES} | {"samplestore_run_known"}
    for family in metrics.registry.collect():
        names |= {family.name, f"{family.name}_total", f"{family.name}_bucket", f"{family.name}_count"}
    return names


def test_every_metric_of_the_dashboard_exists(store: Store) -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    known, panels = exported(f.make_run(store)), [p for p in board["panels"] if p["type"] != "row"]
    assert len(panels) >= 10
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        for target in panel["targets"]:
            used = re.findall(r"\b(?:samplestore|process)_\w+", target["expr"])
            assert used and set(used) <= known, (panel["title"], set(used) - known)
            assert 'run=~"$run"' in target["expr"]
    assert {v["name"] for v in board["templating"]["list"]} == {"datasource", "run"}
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places) and len({p["id"] for p in board["panels"]}) == len(board["panels"])


def test_every_number_is_in_the_howto(store: Store) -> None:
    text = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9_/]+)` \| (.+?) \|$", text, re.MULTILINE)
    assert {name: said for name, said in rows if "/" in name} == NAMES
    own = {name for name in exported(f.make_run(store)) if name.startswith("samplestore_worker_")}
    listed = {name for name, _ in rows if name.startswith("samplestore_worker_")}
    assert listed <= own
    assert {n.removesuffix("_total").removesuffix("_bucket").removesuffix("_count") for n in own} == {
        n.removesuffix("_total") for n in listed
    }


def test_without_the_extra_it_says_what_to_install(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    run = f.make_run(store)
    with pytest.raises(MissingExtra, match=r"pip install 'samplestore\[metrics\]'"):
        WorkerMetrics(run, Counted(run))
