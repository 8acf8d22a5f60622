"""What an export leaves on the disk: Parquet by step, JSON lines, or slime's debug rollouts, and a manifest.

Everything is written under another name beside its place, and gets its own when all of it is there and the place is
still free: who reads the place finds the whole export or none. The same rows give the same bytes.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from samplestore import faults, rooms
from samplestore.errors import InvalidSetting
from samplestore.portable import exports, parquet, replaced, slime_files
from samplestore.portable.exports import Part, Selection
from samplestore.portable.files import KIND, MANIFEST, manifest_of
from samplestore.portable.samples import FORMAT, PortableSample, to_row
from samplestore.portable.slime_samples import to_slime
from samplestore.tokenizers import Tokenizer
from samplestore.verbs.tx import Transactor

FORMATS = ("parquet", "jsonl", "slime")
PART_ROWS = 50_000  # of a Parquet file

Progress = Callable[[int, int], None]  # groups done, of how many
Free = Callable[[Path], None]  # raises ExportExists unless this may be written


@dataclass(slots=True)
class Exported:
    """What was written. pruned: groups of which `prune` took the tokens; they are left out."""

    format: str
    paths: list[str]
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    pruned: int = 0
    steps: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def export(
    run: Transactor,
    to: str | Path,
    *,
    format: str,
    selection: Selection,
    tokenizer: Tokenizer | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the samples that `selection` names. See Run.export."""
    if format not in FORMATS:
        raise InvalidSetting("format", format, " | ".join(FORMATS))
    found = exports.parts(run, selection)
    if format == "slime":
        found = [part for part in found if part.step is not None]
        if not found:
            raise exports.NothingToExport(run.name, "no committed step, and a debug rollout is one step")
        targets = [slime_files.path_of(str(to), part.step or 0) for part in found]
    else:
        targets = [Path(to)]
    typed = _typed(run, to, format, selection, tokenizer)
    free = partial(replaced.require_free, format=format, force=force, database=run.database, command=typed)
    for target in targets:
        rooms.clear(target)
        free(target)
    done = Exported(format, [str(t) for t in targets], steps=[p.step for p in found if p.step is not None])
    rows = _Rows(run, selection, tokenizer, done, sum(len(p.groups) for p in found), progress)
    if format == "parquet":
        _parquet(targets[0], found, rows, free)
    elif format == "jsonl":
        _jsonl(targets[0], found, rows, free)
    else:
        torch = slime_files.torch_module()
        for target, part in zip(targets, found, strict=True):
            with placed(target, free=free) as [path]:
                slime_files.write(path, part.step or 0, (to_slime(one, torch=torch) for one in rows.of(part)))
    return done


def _typed(run: Transactor, to: str | Path, format: str, wanted: Selection, tokenizer: Tokenizer | None) -> str:
    """The command that writes the same."""
    given = [("--run", run.name), ("--db", run.database.shown_url), ("--to", str(to)), ("--format", format)]
    if wanted.steps is not None:
        given.append(("--steps", "{}:{}".format(*wanted.steps)))
    given += [("--status", status) for status in wanted.statuses] + [("--arrays", name) for name in wanted.arrays]
    if tokenizer is not None:
        given.append(("--tokenizer", tokenizer.source))
    return shlex.join(["samplestore", "export", *(word for pair in given for word in pair)])


@dataclass(slots=True)
class _Rows:
    """The samples of parts, counted on their way."""

    run: Transactor
    selection: Selection
    tokenizer: Tokenizer | None
    done: Exported
    total: int
    progress: Progress | None
    passed: int = 0

    def of(self, part: Part) -> Iterator[PortableSample]:
        seen: set[int] = set()
        for one in exports.samples(self.run, self.run.uuid, part, self.selection, self.tokenizer, self._advance):
            seen.add(one.group)
            self.done.samples += 1
            self.done.tokens += int(one.response_ids.size)
            yield one
        self.done.groups += len(seen)

    def manifest(self, **more: Any) -> dict[str, Any]:
        """To be asked for after the rows: weights may be published meanwhile, and it must know every version that they
        have."""
        counts = {name: getattr(self.done, name) for name in ("groups", "samples", "tokens", "pruned")}
        return {
            "kind": KIND, "format": FORMAT, "rows": self.done.format, **exports.origin(self.run),
            "selection": self.selection.as_json(), "counts": counts, **more,
        }  # fmt: skip

    def _advance(self, groups: int, pruned: int) -> None:
        self.passed += groups
        self.done.pruned += pruned
        if self.progress is not None:
            self.progress(self.passed, self.total)


def _parquet(target: Path, found: list[Part], rows: _Rows, free: Free) -> None:
    files = []
    with placed(target, free=free) as [folder]:
        folder.mkdir()
        for part in found:
            inside = folder / f"step={'none' if part.step is None else part.step}"
            left = (to_row(one) for one in rows.of(part))
            number = 0
            while first := next(left, None):
                inside.mkdir(exist_ok=True)
                path = inside / f"part-{number}.parquet"
                n = parquet.write(path, _chain(first, islice(left, PART_ROWS - 1)))
                files.append({"path": f"{inside.name}/{path.name}", "step": part.step, "rows": n})
                number += 1
        _write_manifest(folder / MANIFEST, rows.manifest(files=files))


def _chain(first: dict[str, Any], rest: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield first
    yield from rest


def _jsonl(target: Path, found: list[Part], rows: _Rows, free: Free) -> None:
    with placed(target, manifest_of(target), free=free) as [path, beside]:
        with path.open("wb") as raw:
            # no name and no time in the header: the same rows are the same bytes
            out: Any = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if target.suffix == ".gz" else raw
            for part in found:
                for one in rows.of(part):
                    out.write(line(one))
            if out is not raw:
                out.close()
        _write_manifest(beside, rows.manifest())


def line(sample: PortableSample) -> bytes:
    """A sample as a line of JSON."""
    # ASCII only: some readers end lines at U+2028 too
    return json.dumps(to_row(sample), allow_nan=False, default=_jsonable).encode() + b"\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(type(value).__name__)


def _write_manifest(path: Path, told: dict[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def placed(target: Path, *beside: Path, free: Free) -> Iterator[list[Path]]:
    """Paths to write a file or folder under, and files that lie beside it; they get their names at the end, and are
    gone if there is an error. What stood there is replaced, if `free` still allows it: an export takes hours, and
    somebody may have put something there. Raises OSError, ExportExists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with rooms.beside(target) as room:
        made = [room / path.name for path in (target, *beside)]
        yield made
        for path in made:
            _to_disk(path)
        faults.reached("exporting")
        free(target)
        if target.is_dir():  # a folder can't be replaced in one step
            target.rename(room / rooms.ASIDE)
            faults.reached("replacing")
        for path in reversed(made):
            os.replace(path, target.with_name(path.name))


def _to_disk(made: Path) -> None:
    """A name must not survive a power failure that its bytes do not."""
    for path in [made, *made.rglob("*")] if made.is_dir() else [made]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
