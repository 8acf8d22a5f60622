"""A paced engine whose answers are as long as a distribution says: the long tail of real rollouts, in accelerated time.

    python benchmarks/engine_tailed.py --lengths lognormal --slots 64 --chunk 32 --interval-ms 50

prints `ready URL` and serves until SIGTERM. At every tick each running request gets a chunk; at most `slots` run and
the others wait in a queue, as in a decoding batch. It heeds aborts, pauses and weight updates as SGLang does.

The length of an answer follows from its prompt, and from how many answers to that prompt were begun before: it is the
same in every mode. Length and number stand in the first two tokens, so that a request that goes on from stored tokens
is answered to the length that its sample had from the start, and a token that is made once more is noticed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine_paced import STREAM_HEAD, Peer, serve

CODED = 1_000_000  # the first two tokens say CODED + length, CODED + number of the answer
LONGEST = 4096
LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "lognormal": lambda dice: dice.lognormvariate(5.545, 1.0),  # median 256, mean 422
    "pareto": lambda dice: 96 * dice.paretovariate(1.1),  # minimum 96, median 180; one in 62 is cut off at 4096
    "constant": lambda dice: 512,
}


def length_of(shape: str, prompt: list[int], answer: int) -> int:
    """Tokens of the answer-th answer to a prompt."""
    return max(2, min(LONGEST, int(LENGTHS[shape](random.Random(f"{shape} {prompt} {answer}")))))


@dataclass(slots=True)
class Running:
    peer: TailedPeer
    rid: str
    prompt: int
    at: int  # tokens of the sample that are there
    total: int
    stop: int  # this request's last token, by its budget
    answer: tuple[int, ...]  # which one: its prompt, and its number
    begun: int = 0
    aborted: bool = False


@dataclass
class Tailed:
    shape: str
    slots: int
    chunk: int
    interval_s: float
    prompt_tokens: int
    label: str = "default"
    paused: bool = False
    running: dict[str, Running] = field(default_factory=dict)
    waiting: deque[Running] = field(default_factory=deque)
    begun: Counter[str] = field(default_factory=Counter)
    generated: int = 0
    again: int = 0  # of these, tokens that were made before
    made: Counter[tuple[int, ...]] = field(default_factory=Counter)  # of each answer, how far it ever came

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            at = max(at + self.interval_s, loop.time())
            await asyncio.sleep(at - loop.time())
            if not self.paused:
                while self.waiting and len(self.running) < self.slots:
                    one = self.waiting.popleft()
                    self.running[one.rid] = one
                for one in list(self.running.values()):
                    self.step(one)

    def step(self, one: Running) -> None:
        stop = min(one.at + self.chunk, one.total, one.stop)
        ids = [self.token(one, place) for place in range(one.at, stop)]
        self.generated += len(ids)
        self.again += max(0, min(self.made[one.answer], stop) - one.at)
        self.made[one.answer] = max(self.made[one.answer], stop)
        one.at = stop
        kind = "stop" if stop == one.total else "length" if stop == one.stop else None
        self.send(one, ids, kind)

    def token(self, one: Running, place: int) -> int:
        if place < 2:
            return CODED + (one.answer[-1] if place else one.total)
        return 10 + place * 7 % 50_000

    def send(self, one: Running, ids: list[int], kind: str | None) -> None:
        made = one.at - one.begun
        meta = {
            "id": one.rid, "finish_reason": None if kind is None else {"type": kind}, "prompt_tokens": one.prompt,
            "cached_tokens": 0, "completion_tokens": made, "weight_version": self.label,
            "output_token_logprobs": [[-0.5, id, None] for id in ids],
        }  # fmt: skip
        if kind is not None:
            meta["weight_versions"] = [{"version": self.label, "start": 0, "end": made}] if made else []
            self.running.pop(one.rid, None)
        one.peer.chunk({"text": "", "output_ids": ids, "meta_info": meta}, last=kind is not None)

    def abort(self, rid: str | None) -> None:
        for one in [*self.running.values(), *self.waiting]:
            if rid is None or one.rid == rid:
                if one in self.waiting:
                    self.waiting.remove(one)
                self.send(one, [], "abort")

    def drop(self, peer: Any) -> None:
        """A client has gone."""
        self.waiting = deque(one for one in self.waiting if one.peer is not peer)
        for rid in [rid for rid, one in self.running.items() if one.peer is peer]:
            del self.running[rid]


class TailedPeer(Peer):
    """One connection."""

    tailed: Tailed

    def __init__(self, tailed: Tailed) -> None:
        super().__init__(tailed)  # type: ignore[arg-type] - nothing of the other engine is used
        self.tailed = tailed

    def connection_lost(self, exc: Exception | None) -> None:
        self.tailed.drop(self)

    def answer(self, path: str, body: bytes) -> None:
        told = json.loads(body) if body else {}
        engine = self.tailed
        if path == "/generate":
            return self.generate(told)
        if path == "/abort_request":
            engine.abort(None if told.get("abort_all") else told["rid"])
        elif path == "/pause_generation":
            engine.paused = True
            if told["mode"] == "abort":
                engine.abort(None)
        elif path == "/continue_generation":
            engine.paused = False
        elif path == "/update_weights_from_disk":
            engine.label = told["weight_version"]
        pages: dict[str, Any] = {
            "/health": {}, "/abort_request": {}, "/pause_generation": {}, "/continue_generation": {},
            "/update_weights_from_disk": {"success": True, "message": ""},
            "/model_info": {"model_path": "tailed", "weight_version": engine.label},
            "/server_info": {"context_length": 2 * LONGEST, "incremental_streaming_output": True},
            "/generated": {"tokens": engine.generated, "again": engine.again},
        }  # fmt: skip
        status = b"200 OK" if path in pages else b"404 Not Found"
        page = json.dumps(pages.get(path, {"detail": "Not Found"})).encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(page), page)
        )

    def generate(self, body: dict[str, Any]) -> None:  # type: ignore[override]
        engine, ids = self.tailed, body["input_ids"]
        prompt, there = ids[: engine.prompt_tokens], len(ids) - engine.prompt_tokens
        if there:
            total, number = ids[engine.prompt_tokens] - CODED, ids[engine.prompt_tokens + 1] - CODED
        else:
            number = engine.begun[str(prompt)]
            total = length_of(engine.shape, prompt, number)
            engine.begun[str(prompt)] += 1
        self.transport.write(STREAM_HEAD)
        stop = there + body["sampling_params"]["max_new_tokens"]
        engine.waiting.append(Running(self, body["rid"], len(ids), there, total, stop, (*prompt, number), begun=there))

    def chunk(self, told: dict[str, Any], last: bool) -> None:
        event = b"data: " + json.dumps(told).encode() + b"\n\n"
        tail = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" if last else b""
        self.transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, tail))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--lengths", choices=LENGTHS, default="lognormal")
    parser.add_argument("--slots", type=int, default=64, help="requests that run at once")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of each request at a tick")
    parser.add_argument("--interval-ms", type=float, default=50.0, help="of a tick")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    given = parser.parse_args()
    engine = Tailed(given.lengths, given.slots, given.chunk, given.interval_ms / 1000, given.prompt_tokens)
    asyncio.run(serve(engine.run, lambda: TailedPeer(engine), given.port))


if __name__ == "__main__":
    main()
