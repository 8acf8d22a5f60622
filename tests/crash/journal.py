"""What was acknowledged, written by the process that heard it, before it goes on: the store is held against it."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from samplestore.verbs import appends
from samplestore.writer import Writer


class Journal:
    """Lines of JSON. One write call each: what is killed leaves whole lines, and the page cache keeps them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, **line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Reader:
    """Reads the lines of all journals of a folder that came since the last look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*.journal")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            lines += [json.loads(line) for line in whole.splitlines()]
        return lines


def checksum(ids: Any, logprobs: Any) -> int:
    """Of token ids and log-probs, as bytes of int32 and float32."""
    import numpy as np

    return zlib.crc32(np.asarray(ids, "<i4").tobytes() + np.asarray(logprobs, "<f4").tobytes())


class JournaledWriter(Writer):
    """A worker's writer that notes every append before the worker hears of its acknowledgement."""

    journal: Journal

    def submit(self, verb: Any, claim: Any, *args: Any, **kwargs: Any) -> Any:
        done = super().submit(verb, claim, *args, **kwargs)
        if verb is appends.append:
            seq, ids, probs = args[:3]
            line = {
                "sample": claim.sample_id, "incarnation": claim.incarnation, "attempt": claim.attempt, "seq": seq,
                "n": len(ids), "crc": checksum(ids, probs),
            }  # fmt: skip
            # First in the future's list: it runs in the writer's thread, before the event loop is told.
            done.add_done_callback(lambda f: None if f.exception() else self.journal.write(append=line))
        return done
