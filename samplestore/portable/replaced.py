"""What an export may replace: an earlier one, known by its content. A mistyped path must not cost anybody a file."""

from __future__ import annotations

import os
from pathlib import Path

from samplestore.engine import Database
from samplestore.errors import SampleStoreError
from samplestore.portable import files as portablefiles
from samplestore.portable import slime_files
from samplestore.portable.files import MANIFEST, PART, manifest_of

THERE = "is there already. Replace it with: {command} --force"
NO_EXPORT = "is no export, and is not replaced. Name another place with: --to PATH"
OTHERS = "has {name} in it, which is of no export, and is not replaced. Name another place with: --to PATH"
DATABASE = "is where the database is. Name another place with: --to PATH"
BESIDE = ("", "-wal", "-shm", "-journal", ".gate")  # files of a database of SQLite


class ExportExists(SampleStoreError):
    """Something is where the export would go. Nothing was written."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{path} {why}")


def require_free(target: Path, format: str, force: bool, database: Database, command: str) -> None:
    """That nothing is at `target`, and with `force` nothing but an export of this format. command: what somebody would
    type for this export. Raises ExportExists."""
    targets = [target, manifest_of(target)] if format == "jsonl" else [target]
    for one in targets:
        if database.is_sqlite and _is_of(one, database.path):
            raise ExportExists(str(one), DATABASE)
    there = [one for one in targets if os.path.lexists(one)]
    for one in there:
        if why := _no_export(one, "manifest" if one != target else format):
            raise ExportExists(str(one), why)
    if there and not force:
        raise ExportExists(str(there[0]), THERE.format(command=command))


def _is_of(path: Path, database: Path) -> bool:
    files = [database.with_name(database.name + end) for end in BESIDE]
    return path.resolve() in [file.resolve() for file in files] or any(
        path.exists() and file.exists() and path.samefile(file) for file in files
    )


def _no_export(path: Path, format: str) -> str | None:
    """Why this is not replaced; None for an export of ours."""
    if path.is_symlink():
        return NO_EXPORT
    if format == "parquet":
        return _no_folder(path) if path.is_dir() else NO_EXPORT
    if not path.is_file():
        return NO_EXPORT
    if format == "slime":
        return None if slime_files.is_ours(path) else NO_EXPORT
    ours = portablefiles.recognised if format == "manifest" else portablefiles.are_rows
    return None if ours(path) else NO_EXPORT


def _no_folder(folder: Path) -> str | None:
    inside = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    if inside and not portablefiles.recognised(folder / MANIFEST):
        return NO_EXPORT
    for name in inside:
        path = folder / name
        part = path.is_dir() if PART.fullmatch(f"{name}/part-0.parquet") else PART.fullmatch(name) and path.is_file()
        if name != MANIFEST and (path.is_symlink() or not part):
            return OTHERS.format(name=name)
    return None
