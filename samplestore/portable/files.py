"""Files of samples as exports write them, read back: Parquet folders, JSON lines, slime's debug rollouts.

Which it is, is told by the content. Samples come one group at a time; a row that can't be one is an InvalidRow, and a
file that can't be read at all raises PromptFileError or SlimeFileError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from samplestore.portable import manifests, parquet, slime_files
from samplestore.portable.rows import from_row
from samplestore.portable.samples import FORMAT, PortableSample
from samplestore.portable.slime_samples import from_slime
from samplestore.promptfiles import InvalidImport, InvalidRow, PromptFile, PromptFileError
from samplestore.rowvalues import BadValue
from samplestore.words import amount

MANIFEST, KIND = "_manifest.json", "samplestore export"
MAX_MANIFEST = 256 << 20
MAX_LINE = 1 << 30  # a sample with its arrays in base64
PART = re.compile(r"step=(?:none|\d{1,18})/part-\d{1,9}\.parquet")
OURS = {"id", "segments", "response_ids"}

Read: TypeAlias = "tuple[str, int, PortableSample] | InvalidRow"  # file, line or place, sample


def manifest_of(path: Path) -> Path:
    """Where the manifest of a file of JSON lines lies."""
    return path.with_name(f"{path.name}.manifest.json")


class PortableFile:
    """Samples of one export, readable as often as wanted. `manifest`: what it says of its run; None: there is none."""

    def __init__(self, name: str, rows: Callable[[], Iterator[Read]], manifest: dict[str, Any] | None) -> None:
        self.name, self._rows, self.manifest = name, rows, manifest

    def __iter__(self) -> Iterator[Read]:
        return self._rows()


def opened(path: Path, name: str) -> PortableFile | None:
    """What an export wrote at `path` (called `name` in messages); None where it is something else, such as rows of
    prompts and responses. Raises PromptFileError, SlimeFileError, MissingExtra."""
    if slime_files.FIELD in path.name:
        files = list(slime_files.numbered(str(path)))
        if not files:
            raise PromptFileError(name, "names no file. List them with: ls -l " + str(path.parent))
        return PortableFile(name, lambda: _all_slime(p for _, p in files), None)
    if path.is_dir():
        return _folder(path, name)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(4)
    if head == b"PAR1":
        if not _parquet(path, name, parquet.is_ours):
            return None
        above = path.parent.parent / MANIFEST
        about = _manifest(above) if above.is_file() else None
        return PortableFile(name, lambda: _of_run(_rows(path, name), about), about)
    if slime_files.is_one(path):
        return PortableFile(name, lambda: _all_slime([path]), None)
    first = next(iter(PromptFile(path, max_line_bytes=MAX_LINE)), None)
    if not isinstance(first, tuple) or not first[1].keys() >= OURS:
        return None
    beside = manifest_of(Path(name) if Path(name).is_file() else path)
    about = _manifest(beside) if beside.is_file() else None
    return PortableFile(name, lambda: _whole(_of_run(_lines(path, name), about), about, name, beside), about)


def _folder(path: Path, name: str) -> PortableFile:
    if not (path / MANIFEST).is_file():
        raise PromptFileError(name, f"is a folder without {MANIFEST}, so no export; name the files in it")
    about = _manifest(path / MANIFEST)
    files = _told(path / MANIFEST).get("files")
    if not isinstance(files, list) or not all(
        isinstance(f, Mapping) and isinstance(f.get("path"), str) and PART.fullmatch(f["path"]) for f in files
    ):
        raise PromptFileError(str(path / MANIFEST), "names files that an export does not have")

    def rows() -> Iterator[Read]:
        for file in files:
            part, n = path / file["path"], 0
            for row in _of_run(_rows(part, str(part)), about):
                n += 1
                yield row
            if n != file.get("rows"):
                raise PromptFileError(str(part), f"has {amount(n, 'row')}, and the manifest says {file.get('rows')}")

    return PortableFile(name, lambda: _whole(rows(), about, name, path / MANIFEST), about)


def _of_run(rows: Iterator[Read], about: Mapping[str, Any] | None) -> Iterator[Read]:
    """The rows; what the manifest says of weight versions is said of no other run."""
    for row in rows:
        if about is not None and not isinstance(row, InvalidRow) and row[2].run_uuid != about["run_uuid"]:
            why = f"is of another run than the manifest, which is of {about['run_uuid']}"
            yield InvalidRow(row[0], row[1], "run_uuid", why, str(row[2].run_uuid))
            continue
        yield row


def _whole(rows: Iterator[Read], about: Mapping[str, Any] | None, name: str, manifest: Path) -> Iterator[Read]:
    """The rows; PromptFileError at the end unless they are as many as the manifest says: an export that broke off
    between the two leaves rows beside the manifest of others."""
    samples = tokens = 0
    for row in rows:
        yield row
        if isinstance(row, InvalidRow):
            about = None  # nothing of it is stored anyway
        else:
            samples, tokens = samples + 1, tokens + row[2].response_ids.size
    if about is not None and about["counts"] != {"samples": samples, "tokens": tokens}:
        told = about["counts"]
        raise PromptFileError(
            name, f"has {amount(samples, 'sample')} with {amount(tokens, 'token')}, and {manifest} says "
            f"{told['samples']:,} with {told['tokens']:,}: they are of two exports. Write both again: samplestore "
            "export --to PATH --force",
        )  # fmt: skip


def recognised(path: Path) -> bool:
    """Whether a file is a manifest of an export."""
    try:
        _told(path)
    except PromptFileError:
        return False
    return True


def are_rows(path: Path) -> bool:
    """Whether a file is JSON lines of an export; also without any, where the manifest beside it says so."""
    if not path.stat().st_size:
        return recognised(manifest_of(path))
    try:
        with path.open("rb") as file:
            if file.read(1) not in (b"{", b"\x1f"):
                return False
        first = next(iter(PromptFile(path, max_line_bytes=MAX_LINE)), None)
    except PromptFileError:
        return False
    if first is None:  # of an empty file that is compressed
        return recognised(manifest_of(path))
    return isinstance(first, tuple) and first[1].keys() >= OURS


def _manifest(path: Path) -> dict[str, Any]:
    """See manifests.checked. Raises PromptFileError for what is no manifest, InvalidImport for a wrong one."""
    try:
        return manifests.checked(_told(path))
    except BadValue as error:
        raise InvalidImport(str(path), [_refused(str(path), 1, error)], 1) from error


def _told(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_MANIFEST:
            raise PromptFileError(str(path), f"has more than {MAX_MANIFEST:,} bytes")
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise PromptFileError(str(path), f"is no readable manifest: {str(error)[:200]}") from error
    if not isinstance(told, dict) or told.get("kind") != KIND:
        raise PromptFileError(str(path), "is no manifest of an export")
    if told.get("format") != FORMAT:
        raise PromptFileError(
            str(path), f"has format {str(told.get('format'))[:20]}, this samplestore reads {FORMAT}. "
            "Run: pip install -U samplestore",
        )  # fmt: skip
    return told


def _parquet(path: Path, name: str, look: Callable[[Path], Any]) -> Any:
    pa, _ = parquet.arrow()
    try:
        return look(path)
    except (pa.ArrowException, OSError) as error:
        raise PromptFileError(name, f"is no readable Parquet file: {str(error)[:200]}") from error


def _rows(path: Path, name: str) -> Iterator[Read]:
    pa, _ = parquet.arrow()
    place = 0
    try:
        for place, row in enumerate(parquet.read(path), 1):
            yield _sample(name, place, row)
    except (pa.ArrowException, OSError) as error:
        raise PromptFileError(name, f"is no readable Parquet file: {str(error)[:200]}") from error
    except (ValueError, RecursionError) as error:  # a column of JSON, or text that is not UTF-8
        raise PromptFileError(name, f"can't be read after row {place}: {str(error)[:200]}") from error


def _lines(path: Path, name: str) -> Iterator[Read]:
    file = PromptFile(path, max_line_bytes=MAX_LINE)
    file.name = name
    for given in file:
        yield given if isinstance(given, InvalidRow) else _sample(name, *given)


def _sample(name: str, place: int, row: dict[str, Any]) -> Read:
    try:
        return name, place, from_row(row)
    except BadValue as error:
        return _refused(name, place, error)


def _refused(name: str, place: int, error: BadValue) -> InvalidRow:
    return InvalidRow(name, place, error.field or "(row)", error.reason, error.shown)


def _all_slime(paths: Iterable[Path]) -> Iterator[Read]:
    """Samples of one group follow each other. slime numbers them within the rollout; here they are within the group."""
    for path in paths:
        _, given = slime_files.read(path)
        last, number, place = object(), -1, 0
        for count, values in enumerate(given, 1):
            at = values.get("group_index")
            this = (at if isinstance(at, int | str) else None, _prompt_of(values))
            number, place = (number, place + 1) if this == last else (number + 1, 0)
            last = this
            try:
                yield str(path), count, from_slime(values, group=number, sample=place)
            except BadValue as error:
                error.field = f"samples[{count - 1}].{error.field}" if error.field else f"samples[{count - 1}]"
                yield _refused(str(path), count, error)


def _prompt_of(values: Mapping[str, Any]) -> list[int] | None:
    """The tokens of slime's prompt, where they are some: what is none is refused later, and must compare before."""
    tokens, n = values.get("tokens"), values.get("response_length")
    if not isinstance(tokens, list) or not isinstance(n, int) or not set(map(type, tokens)) <= {int}:
        return None
    return tokens[: len(tokens) - n]


def groups(rows: Iterable[Read]) -> Iterator[list[tuple[str, int, PortableSample]] | InvalidRow]:
    """Samples that follow each other and are of one group."""
    waiting: list[tuple[str, int, PortableSample]] = []
    for row in rows:
        if isinstance(row, InvalidRow):
            yield row
            continue
        if waiting and not _together(waiting[-1], row):
            yield waiting
            waiting = []
        waiting.append(row)
    if waiting:
        yield waiting


def _together(a: tuple[str, int, PortableSample], b: tuple[str, int, PortableSample]) -> bool:
    one, other = a[2], b[2]
    return (one.run_uuid, one.group) == (other.run_uuid, other.group) and (one.run_uuid is not None or a[0] == b[0])
