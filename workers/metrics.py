"""What a worker process tells Prometheus: its own counters, and the numbers of its run.

Labels have few values: the run, and kinds and outcomes of a fixed list. Ids, engines and messages are no labels; they
stand in the database. prometheus_client is the extra `metrics`, and imported only where a port is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from samplestore.arrayfiles import ArrayFiles
from samplestore.errors import MissingExtra, SampleStoreError
from samplestore.queries.metric_names import NAMES, PREFIX
from samplestore.queries.metrics import why_lost
from samplestore.run import Run
from samplestore.verbs import appends, episodes, fanout, filters, requests, samples, stages, steps
from samplestore.verbs.tx import Tx

log = logging.getLogger("samplestore.metrics")

T = TypeVar("T")

READ_S = 5.0  # that a scrape waits for the run's numbers; without them it tells the worker's own
REASONS = ("stop", "length", "abort")
COMMIT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
WORKER, RUN = "samplestore_worker_", "samplestore_run_"


def gauge_of(name: str) -> str:
    """The Prometheus name of a number of `run.metrics()`."""
    return RUN + name.removeprefix(PREFIX).replace("/", "_")


class WorkerMetrics:
    """The counters of one worker. `wrote` is called in the event loop, after the database has acknowledged."""

    def __init__(self, run: Run, worker: Any) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
        except ImportError as error:
            raise MissingExtra("--metrics-port", "metrics") from error
        self.run = run
        self.registry = CollectorRegistry(auto_describe=False)
        self.numbers: dict[str, float] = {}  # of the run, as last read
        self._reading: asyncio.Task[None] | None = None

        def made(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(WORKER + name, text, ["run", *labels], registry=self.registry, **options)

        self.tokens = made(Counter, "tokens", "Response tokens stored", "kind")
        self.segments = made(Counter, "segments", "Segments stored")
        self.samples = made(Counter, "samples", "Samples let go of", "end")
        self.aborts = made(Counter, "aborts", "Samples interrupted at an engine")
        self.requests = made(Counter, "requests", "Requests to engines that ended", "outcome")
        self.prompt = made(Counter, "prompt_tokens", "Tokens that engines were given, resumed responses included")
        self.cached = made(Counter, "cached_tokens", "Of those, tokens from the engines' prefix caches")
        self.claims = made(Counter, "claims", "Samples and stages claimed", "what")
        self.stages = made(Counter, "stages", "Rewards, filters and other stages settled", "outcome")
        self.commits = made(Histogram, "commit_seconds", "Seconds of a transaction of the writer", buckets=COMMIT_S)
        self.refused = made(Counter, "refused_commits", "Transactions that were taken back")
        queue = made(Gauge, "writer_queue", "Writes that wait for the writer")
        queue.labels(run.name).set_function(lambda: worker.writer.queued if hasattr(worker, "writer") else 0)
        held = made(Gauge, "held", "Samples and stages that the worker holds", "what")
        for what in worker.holds():
            held.labels(run.name, what).set_function(lambda what=what: worker.holds()[what])
        ProcessCollector(registry=self.registry)
        self.registry.register(_RunNumbers(self))

    # -- counting

    def wrote(self, verb: Any, args: Sequence[Any], result: Any) -> None:
        """An acknowledged write: `verb(tx, *args)` gave `result`."""
        if (count := _COUNTED.get(verb)) is not None:
            count(self, args, result)

    def add(self, counter: Any, n: float = 1, *labels: str) -> None:
        if n > 0:
            counter.labels(self.run.name, *labels).inc(n)

    def _appended(self, args: Sequence[Any], result: Any) -> None:
        _, _, tokens, _, _, *more = args
        ended, kind = (*more, None, None)[:2]
        self.add(self.tokens, len(tokens), "environment" if kind == "environment" else "generated")
        self.add(self.segments)
        self.add(self.aborts, ended == "abort")

    def _ended(self, args: Sequence[Any], result: Any) -> None:
        info = args[0]
        outcome = info.finish_reason
        if outcome is None:
            outcome = f"lost_{why_lost(info.lost_reason)}" if info.lost_reason else "not_sent"
        self.add(self.requests, 1, outcome if outcome in REASONS or info.finish_reason is None else "other")
        self.add(self.prompt, info.prompt_tokens or 0)
        self.add(self.cached, info.cached_tokens or 0)

    def _stage_failed(self, args: Sequence[Any], result: Any) -> None:
        outcome = args[2] if len(args) > 2 else stages.VERIFIER_ERROR
        self.add(self.stages, 1, "timeout" if "timeout" in str(outcome) else "error")

    # -- telling

    async def page(self, accept: str) -> tuple[bytes, str]:
        """(the page, its content type). The run is read in another thread, and by one at a time however many ask."""
        from prometheus_client.exposition import choose_encoder

        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait([self._reading], timeout=READ_S)
        if not self._reading.done():
            self.numbers = {}  # old numbers would look like those of now
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encoder, content_type = choose_encoder("")
        return encoder(self.registry), content_type

    async def _read(self) -> None:
        try:
            self.numbers = await asyncio.to_thread(self.run.metrics)
        except Exception as error:  # whatever is wrong with the database: the worker's own counters are told
            self.numbers = {}
            log.warning("the numbers of run %s can't be read: %s", self.run.name, error)

    async def close(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=READ_S)


class _RunNumbers:
    """The run's numbers as gauges, those of the last reading."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        told, name = self.metrics.numbers, self.metrics.run.name
        for number, value in told.items():
            family = GaugeMetricFamily(gauge_of(number), NAMES[number.removeprefix(PREFIX)], labels=["run"])
            family.add_metric([name], value)
            yield family
        known = GaugeMetricFamily(f"{RUN}known", "1: the numbers of the run could be read", labels=["run"])
        known.add_metric([name], float(bool(told)))
        yield known


def _adds(counter: str, *labels: str) -> Any:
    return lambda m, args, result: m.add(getattr(m, counter), 1, *labels)


def _claimed(what: str) -> Any:
    return lambda m, args, result: m.add(m.claims, len(result), what)


_COUNTED: dict[Any, Callable[[WorkerMetrics, Sequence[Any], Any], None]] = {
    appends.append: WorkerMetrics._appended,
    appends.note_abort: _adds("aborts"),
    samples.finish: _adds("samples", "finished"),
    episodes.finish: _adds("samples", "finished"),
    fanout.end_all: lambda m, args, result: m.add(m.samples, len(args[1]), "finished"),
    samples.release: _adds("samples", "released"),
    samples.fail: lambda m, args, result: m.add(m.samples, 1, "failed" if result == "failed" else "to_be_retried"),
    requests.end_request: WorkerMetrics._ended,
    steps.claim: _claimed("samples"),
    stages.claim_stages: _claimed("stages"),
    stages.score: _adds("stages", "ok"),
    stages.score_group: _adds("stages", "ok"),
    stages.complete_stage: _adds("stages", "ok"),
    stages.unparsed: _adds("stages", "unparsed"),
    filters.filter_group: _adds("stages", "ok"),
    stages.fail_stage: WorkerMetrics._stage_failed,
}


class Timed:
    """A run whose transactions are timed, for a Writer."""

    def __init__(self, run: Run, metrics: WorkerMetrics) -> None:
        self._run, self._metrics = run, metrics
        self.database, self.id, self.uuid, self.name = run.database, run.id, run.uuid, run.name
        self.settings, self.tokenizer = run.settings, run.tokenizer

    def array_files(self) -> ArrayFiles:
        return self._run.array_files()

    def transact(self, work: Callable[[Tx], T], *, durable: bool = False) -> T:
        began = time.monotonic()
        try:
            result = self._run.transact(work, durable=durable)
        except BaseException:
            self._metrics.add(self._metrics.refused)
            raise
        self._metrics.commits.labels(self._run.name).observe(time.monotonic() - began)
        return result


@asynccontextmanager
async def serving(worker: Any) -> AsyncIterator[None]:
    """The worker's page at http://metrics_host:metrics_port/metrics, while it lives; nothing where it has no port.
    Raises SampleStoreError, before anything is claimed, where the port can't be had; MissingExtra."""
    config = worker.config
    if config.metrics_port is None:
        yield
        return
    metrics = worker.metrics = WorkerMetrics(worker.run, worker)

    async def answer(request: web.Request) -> web.Response:
        body, content_type = await metrics.page(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.metrics_host, config.metrics_port).start()
        except OSError as error:
            raise SampleStoreError(
                f"no metrics can be served at {config.metrics_host}:{config.metrics_port}: "
                f"{error.strerror or error}. Nothing was claimed. Say another port, 0 is a free one: --metrics-port 0"
            ) from error
        host, port, *_ = runner.addresses[0]
        log.info("metrics of run=%s at http://%s:%d/metrics", worker.run.name, host, port)
        yield
    finally:
        await runner.cleanup()
        await metrics.close()
