"""An engine that costs next to nothing: SGLang's native protocol from bytes that were made before.

It runs in a process of its own, so that what a client costs is not mixed with what the engine costs. Every stream
gets a chunk at the same tick, as a decoding batch does; a unary answer comes after as many ticks as its stream would
have had chunks. With `--interval-ms 0` everything is sent as fast as the client reads.

    python benchmarks/engine_paced.py --chunk 8 --interval-ms 20

prints `ready URL` and serves until SIGTERM. It speaks the incremental dialect: ids, text and log-probs are deltas,
completion_tokens is the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

LABEL = "default"
RID = "R" * 32  # stands in prepared bytes where the request's id goes; same length as the worker's
CONTEXT = 1_000_000
HIGH_WATER = 256 * 1024  # bytes that wait for a slow client; then its stream waits


@dataclass(frozen=True, slots=True)
class Script:
    """How the engine answers. chunk: tokens of a stream chunk; interval_s: between two chunks, 0: at full speed."""

    chunk: int
    interval_s: float


def entries(start: int, stop: int) -> list[list[Any]]:
    """Log-prob entries of the tokens at start..stop: ids of a large vocabulary, log-probs of full float32 length."""
    made = random.Random(start)
    return [[-round(made.expovariate(1.0), 16), made.randrange(100, 150_000), None] for _ in range(start, stop)]


def chunk_bytes(start: int, stop: int, total: int, prompt: int) -> bytes:
    """The tokens start..stop of an answer of `total`, as JSON."""
    some = entries(start, stop)
    meta: dict[str, Any] = {
        "id": RID, "finish_reason": {"type": "length", "length": total} if stop == total else None,
        "prompt_tokens": prompt, "weight_version": LABEL, "num_retractions": 0, "completion_tokens": stop,
        "cached_tokens": 0, "output_token_logprobs": some, "output_token_logprobs_length": stop, "dp_rank": None,
        "e2e_latency": 0.03,
    }  # fmt: skip
    if stop == total:
        meta["weight_versions"] = [{"version": LABEL, "start": 0, "end": total}]
    text = "word " * (stop - start)
    return json.dumps({"text": text, "output_ids": [e[1] for e in some], "meta_info": meta}).encode()


@functools.lru_cache(maxsize=64)
def stream_parts(total: int, chunk: int, prompt: int) -> list[tuple[bytes, bytes]]:
    """Each chunk of a stream as it goes over the wire (server-sent event in an HTTP chunk), cut where the rid goes."""
    parts = []
    for start in range(0, total, chunk):
        event = b"data: " + chunk_bytes(start, min(start + chunk, total), total, prompt) + b"\n\n"
        head, tail = event.split(RID.encode())
        parts.append((b"%x\r\n" % len(event) + head, tail + b"\r\n"))
    head, tail = parts[-1]
    parts[-1] = (head, tail + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    return parts


@functools.lru_cache(maxsize=64)
def unary_parts(total: int, prompt: int) -> tuple[bytes, bytes]:
    head, tail = chunk_bytes(0, total, total, prompt).split(RID.encode())
    length = len(head) + len(RID) + len(tail)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % length + head, tail


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(slots=True)
class Stream:
    """An answer on its way: what is still to be written, one part a tick."""

    peer: Peer
    rid: bytes
    parts: list[tuple[bytes, bytes]]
    wait: int = 0  # ticks before the first part
    at: int = 0

    def tick(self) -> bool:
        """Write the next part, or wait. Whether this was the last."""
        if self.wait:
            self.wait -= 1
            return False
        head, tail = self.parts[self.at]
        self.at += 1
        self.peer.transport.write(b"".join((head, self.rid, tail)))
        return self.at == len(self.parts)


@dataclass
class Engine:
    script: Script
    streams: dict[Peer, Stream] = field(default_factory=dict)
    served: int = 0
    generated: int = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            if self.script.interval_s:
                at = max(at + self.script.interval_s, loop.time())  # one that is late does not catch up in a burst
                await asyncio.sleep(at - loop.time())
            else:
                await asyncio.sleep(0 if self.streams else 0.001)
            for peer, stream in list(self.streams.items()):
                if not peer.full and stream.tick():
                    self.streams.pop(peer, None)


class Peer(asyncio.Protocol):
    """One connection. Speaks as much HTTP as an HTTP client of this machine needs, no more."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine, self.buffer, self.full = engine, b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.streams.pop(self, None)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].decode("latin-1")
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            stop = end + 4 + int(fields.get("content-length", 0))
            if len(self.buffer) < stop:
                return
            body, self.buffer = self.buffer[end + 4 : stop], self.buffer[stop:]
            self.answer(head.split(" ", 2)[1], body)

    def answer(self, path: str, body: bytes) -> None:
        if path == "/generate":
            return self.generate(json.loads(body))
        pages: dict[str, Any] = {
            "/health": {}, "/abort_request": {}, "/pause_generation": {}, "/continue_generation": {},
            "/model_info": {"model_path": "paced", "weight_version": LABEL},
            "/server_info": {"context_length": CONTEXT},
            "/served": {"requests": self.engine.served, "tokens": self.engine.generated},
        }  # fmt: skip
        status = b"200 OK" if path in pages else b"404 Not Found"
        told = json.dumps(pages.get(path, {"detail": "Not Found"})).encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(told), told)
        )

    def generate(self, body: dict[str, Any]) -> None:
        script, total, prompt = self.engine.script, body["sampling_params"]["max_new_tokens"], len(body["input_ids"])
        rid = str(body["rid"]).encode()
        if len(rid) != len(RID):
            raise ValueError(f"a rid of {len(rid)} bytes; prepared answers have room for {len(RID)}")
        self.engine.served += 1
        self.engine.generated += total
        if body.get("stream"):
            self.transport.write(STREAM_HEAD)
            stream = Stream(self, rid, stream_parts(total, script.chunk, prompt))
        else:
            wait = -(-total // script.chunk) if script.interval_s else 0
            stream = Stream(self, rid, [unary_parts(total, prompt)], wait)
        self.engine.streams[self] = stream


async def serve(run: Callable[[], Awaitable[None]], peer: Callable[[], asyncio.Protocol], port: int) -> None:
    """Print where it listens, and answer while `run` goes on. peer: makes what answers one connection."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(peer, "127.0.0.1", port, backlog=1024)
    print(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--chunk", type=int, default=8, help="tokens of a stream chunk")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="between two chunks; 0: full speed")
    given = parser.parse_args()
    engine = Engine(Script(given.chunk, given.interval_ms / 1000))
    asyncio.run(serve(engine.run, lambda: Peer(engine), given.port))


if __name__ == "__main__":
    main()
