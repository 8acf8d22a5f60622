"""The worker on real SGLang: does it keep the engine as busy as a bare client loop, and what do sticky groups save?

    python benchmarks/sglang_overhead.py                    a tiny model; needs `make sglang`
    python benchmarks/sglang_overhead.py --engine URL URL --in-flight 256 --tokens 2048 --vocabulary 150000
                                                            engines that run already, such as those of a GPU machine

Two tables: tokens/s of a bare aiohttp loop and of the worker, taking turns on one engine; and the share of prompt
tokens that came from the prefix cache, over two engines, by how requests are spread. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from clients import GROUP, Work  # noqa: E402 - a file beside this one, not an installed package
from worker_overhead import run_client, table  # noqa: E402

from tests.support.models import VOCAB, build_model  # noqa: E402
from tests.support.processes import Processes  # noqa: E402
from tests.support.router import Router  # noqa: E402
from tests.support.sglang import start_sglang  # noqa: E402

ALLOWED = 0.02  # tokens/s that the worker may lose where the engine is the bottleneck


@contextmanager
def engines(given: Sequence[str], processes: Processes, folder: Path, n: int = 2) -> Iterator[list[str]]:
    """Engines that run already, or `n` of our own with a tiny model."""
    if given:
        yield list(given)
        return
    model = build_model(folder / "model", 0, "qwen2", context=2048)
    # the label that a new run knows: others get no requests
    yield [start_sglang(processes, model, "--weight-version", "default").url for _ in range(n)]


def flush(urls: Sequence[str]) -> None:
    """Empty the prefix caches: what one client left there must not help the next."""
    for url in urls:
        urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=30).close()  # noqa: S310


def throughput(url: str, given: argparse.Namespace) -> Iterator[list[str]]:
    """tokens/s of both clients; they take turns, and the order of a pair changes."""
    for mode in ("stream", "unary"):
        rates: dict[str, list[float]] = {"bare": [], "worker": []}
        for turn in range(given.repeat):
            for client in ("bare", "worker") if turn % 2 == 0 else ("worker", "bare"):
                flush([url])
                told = run_client(work_of(client, url, given, mode=mode, groups=given.groups))
                rates[client].append(told["tokens"] / told["wall_s"])
        bare, worker = (statistics.median(rates[name]) for name in ("bare", "worker"))
        yield [mode, f"{given.in_flight}", f"{bare:,.0f}", f"{worker:,.0f}", f"{100 * (1 - worker / bare):+.1f} %"]


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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        try:
            with engines(given.engine, processes, Path(folder)) as urls:
                table("mode | in flight | bare tokens/s | worker tokens/s | lost", throughput(urls[0], given))
                print()
                table(
                    "requests are spread by | prompt tokens | from the cache | share",
                    stickiness(urls, processes, given),
                )
        finally:
            processes.close()


if __name__ == "__main__":
    main()
