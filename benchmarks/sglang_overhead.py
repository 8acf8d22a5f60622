"""The worker on real SGLang: does it keep the engine as busy as a bare client loop, and what do sticky groups save?

    python benchmarks/sglang_overhead.py                    a tiny model; needs `make sglang`
    python benchmarks/sglang_overhead.py --engine URL URL --in-flight 256 --tokens 2048 --vocabulary 150000
                                                            engines that run already, such as those of a GPU machine

    python benchmarks/sglang_overhead.py --pin --repeat 12   # on two cores: the engine has one, the clients the other

Two tables: tokens/s of a bare aiohttp loop and of the worker, taking turns on one engine; and the share of prompt
tokens that came from the prefix cache, over two engines, by how requests are spread. Run from the repository's root.

"lost" is the mean of pairs of neighbouring turns, with its 95 % interval. A shared machine scatters by ten per cent
from turn to turn, so what scatters less is told too: how many tokens the engine made in each of its steps. An engine
that is busy all the time makes as many steps a second for one client as for another; what a client can lose is by not
having the next request there when there is room. Answers end where the model says so, so that room comes at all times.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from clients import GROUP, Work  # noqa: E402 - a file beside this one, not an installed package
from worker_overhead import run_client, table  # noqa: E402

from tests.support.models import VOCAB, build_model  # noqa: E402
from tests.support.processes import Process, Processes  # noqa: E402
from tests.support.router import Router  # noqa: E402
from tests.support.sglang import start_sglang  # noqa: E402

ALLOWED = 0.02  # tokens/s that the worker may lose where the engine is the bottleneck


Engine = tuple[str, Process | None]  # its URL; its process where it is ours
STEP = "Decode batch"  # what an engine logs of each step
CLIENTS = ("bare", "worker")


def engines(given: Sequence[str], processes: Processes, folder: Path, n: int) -> list[Engine]:
    """Engines that run already, or `n` of our own with a tiny model."""
    if given:
        return [(url, None) for url in given]
    model = build_model(folder / "model", 0, "qwen2", context=2048)
    # the label that a new run knows: others get no requests
    flags = ("--weight-version", "default", "--decode-log-interval", "1")
    started = [start_sglang(processes, model, *flags) for _ in range(n)]
    return [(engine.url, engine.process) for engine in started]


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started here stays on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def spent(engine: Process | None) -> tuple[float, float]:
    """What it has cost so far: CPU seconds, decode steps. NaN where it is not ours."""
    return (math.nan, math.nan) if engine is None else (cpu_s(engine.pid), engine.log().count(STEP))


def cpu_s(pid: int) -> float:
    """CPU of a process and all that it started and that lives."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")).split()
    own = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_s(int(child)) for child in children)


def flush(urls: Sequence[str]) -> None:
    """Empty the prefix caches: what one client left there must not help the next."""
    for url in urls:
        urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=30).close()  # noqa: S310


def throughput(engine: Engine, given: argparse.Namespace) -> Iterator[list[str]]:
    """tokens/s of both clients; they take turns, and the order of a pair changes."""
    url, process = engine
    for mode in ("stream", "unary"):
        told: dict[str, list[Turn]] = {name: [] for name in CLIENTS}
        for turn in range(-1, given.repeat):  # the first is not counted: it compiles and allocates
            for client in CLIENTS if turn % 2 == 0 else CLIENTS[::-1]:
                flush([url])
                before = spent(process)
                done = run_client(work_of(client, url, given, mode=mode, groups=given.groups, vary=True))
                cpu, steps = (after - was for after, was in zip(spent(process), before, strict=True))
                if turn >= 0:
                    told[client].append(Turn(done["tokens"] / done["wall_s"], done["tokens"], cpu, steps))
        bare, worker = (told[name] for name in CLIENTS)
        yield [
            mode, f"{given.in_flight}",
            *(f"{statistics.median(turn.rate for turn in turns):,.0f}" for turns in (bare, worker)),
            percent([1 - own.rate / plain.rate for plain, own in zip(bare, worker, strict=True)]),
            *(f"{statistics.mean(turn.a_step for turn in turns):.2f}" for turns in (bare, worker)),
            percent([1 - own.a_step / plain.a_step for plain, own in zip(bare, worker, strict=True)]),
            f"{100 * statistics.median(turn.busy for turn in bare + worker):.0f} %",
        ]  # fmt: skip


class Turn(NamedTuple):
    rate: float  # tokens/s
    tokens: float
    cpu_s: float  # of the engine
    steps: float  # that the engine made

    @property
    def a_step(self) -> float:
        return self.tokens / self.steps

    @property
    def busy(self) -> float:
        """The engine's cores."""
        return self.cpu_s * self.rate / self.tokens


def percent(shares: Sequence[float]) -> str:
    """Mean and its 95 % interval."""
    mean = 100 * statistics.mean(shares)
    if len(shares) < 3:
        return f"{mean:+.1f} %"
    around = 196 * statistics.stdev(shares) / math.sqrt(len(shares))
    return f"{mean:+.1f} % ({mean - around:+.1f} to {mean + around:+.1f})"


HEAD = (
    "mode | in flight | bare tokens/s | worker tokens/s | lost | bare tokens a step | worker tokens a step | "
    "lost by that | engine busy, of a core"
)


def stickiness(urls: Sequence[str], processes: Processes, given: argparse.Namespace) -> Iterator[list[str]]:
    """Prefix-cache hits of the worker over all engines, by who spreads the requests and how."""
    ways = [
        ("router, manual: a group stays together", "manual"),
        ("router, round_robin: it does not", "round_robin"),
        ("worker, direct: a group stays together", None),
    ]
    for name, policy in ways:
        flush(urls)
        router = None if policy is None else Router.start(processes, urls, policy=policy)
        url = ",".join(urls) if router is None else router.url
        told = run_client(
            work_of("worker", url, given, groups=given.groups, router=router is not None, tokens=64, prompt=512)
        )
        share = told["cached_tokens"] / told["prompt_tokens"]
        yield [name, f"{told['prompt_tokens']:,.0f}", f"{told['cached_tokens']:,.0f}", f"{100 * share:.1f} %"]
        if router is not None:
            router.process.kill_tree()


def work_of(client: str, url: str, given: argparse.Namespace, *, groups: int, **more: object) -> Work:
    asked = {"mode": "stream", "tokens": given.tokens, "prompt": 64, **more}
    return Work(
        client=client, url=url, in_flight=given.in_flight, samples=groups * GROUP, vocabulary=given.vocabulary, **asked,
    )  # type: ignore[arg-type] # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", default=[], help="URLs of engines that run already")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8, help=f"prompts, {GROUP} samples each")
    parser.add_argument("--tokens", type=int, default=256, help="of a sample")
    parser.add_argument("--vocabulary", type=int, default=VOCAB)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pin", action="store_true", help="engines on the first core, clients on the others")
    parser.add_argument("--no-cache", action="store_true", help="leave out the second table: one engine is started")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if given.pin and (given.engine or len(cores) < 2):
        parser.error("--pin is for engines of our own, on two cores or more")
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        try:
            with on_cores({cores[0]} if given.pin else set(cores)):
                served = engines(given.engine, processes, Path(folder), 1 if given.no_cache else 2)
            with on_cores(set(cores[1:]) if given.pin else set(cores)):
                table(HEAD, throughput(served[0], given))
            if not given.no_cache:
                print()
                urls = [url for url, _ in served]
                head = "requests are spread by | prompt tokens | from the cache | share"
                table(head, stickiness(urls, processes, given))
        finally:
            processes.close()


if __name__ == "__main__":
    main()
