"""Side-car files: large named arrays beside the database, under a folder or an fsspec URL.

A file's name is the sha256 of its bytes, in a folder of the run: URL/RUN_UUID/ab/abcdef... Equal arrays share a file,
and a damaged one shows. A restored copy has a folder of its own, URL/RUN_UUID-FOLDER: what it sweeps is never
what another database's rows name. A file is complete and on the disk before the row that names it,
so that a row without its file means damage. A file without a row is what a crash or a prune leaves; it is swept when
it is older than GRACE_S: whoever wrote it may be about to commit its row.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from samplestore import faults
from samplestore.arrays import Prepared
from samplestore.errors import ArrayFileError, MissingExtra
from samplestore.runsettings import RunSettings

GRACE_S = 3600.0
KEY = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def open_files(settings: RunSettings, run_uuid: str) -> ArrayFiles:
    """The side-car files of a run that has an array_url. Raises MissingExtra for a URL of another kind than file://
    without fsspec."""
    assert settings.array_url is not None
    url, path = settings.array_url, settings.array_url.removeprefix("file://")
    folder = run_uuid if settings.array_folder is None else f"{run_uuid}-{settings.array_folder}"
    return LocalFiles(Path(path) / folder) if "://" not in path else RemoteFiles(url, folder)


def keep(settings: RunSettings, files: Callable[[], ArrayFiles], made: Prepared) -> Prepared:
    """An array as the run keeps it: a large one in a side-car file, where it has a place for them. Raises
    ArrayFileError."""
    large = settings.array_url is not None and made.n_bytes >= settings.array_file_bytes
    return to_file(files(), made) if large else made


def to_file(files: ArrayFiles, made: Prepared) -> Prepared:
    """An array whose bytes lie in a file, which is on the disk when this returns."""
    if made.data is None:
        return made
    key = files.put(made.data)
    faults.reached("filed")
    return replace(made, data=None, sidecar=key)


class ArrayFiles(ABC):
    """What the kinds have in common. Keys are "ab/" and the sha256 in hex."""

    place: str

    def put(self, data: bytes) -> str:
        """Store the bytes, on the disk when this returns; their key. Raises ArrayFileError."""
        digest = hashlib.sha256(data).hexdigest()
        key = f"{digest[:2]}/{digest}"
        try:
            self._write(key, data)
        except OSError as error:
            raise ArrayFileError(self.place, f"cannot write {key}: {error.strerror or error}", "df -h") from error
        return key

    def get(self, key: str) -> bytes:
        """The bytes of a key. Raises ArrayFileError where they are not there, or are others."""
        if not KEY.fullmatch(key):
            raise ArrayFileError(self.place, f"{key[:80]!r} names no array file", "samplestore check")
        try:
            data = self._read(key)
        except OSError as error:
            raise ArrayFileError(
                self.place, f"cannot read {key}: {error.strerror or error}", "samplestore check"
            ) from error
        if hashlib.sha256(data).hexdigest() != key[3:]:
            raise ArrayFileError(self.place, f"{key} is damaged: its bytes are others", "samplestore check")
        return data

    def whole(self, key: str) -> bool:
        """Whether a file is there with the bytes that its name says."""
        try:
            self.get(key)
        except ArrayFileError:
            return False
        return True

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes of a file; None where there is none."""

    @abstractmethod
    def old(self, grace_s: float = GRACE_S) -> Iterator[tuple[str, int]]:
        """(key, bytes) of files that nobody can be about to name in a row any more."""

    @abstractmethod
    def remove(self, key: str, grace_s: float = GRACE_S) -> bool:
        """Remove a file, unless it was put again meanwhile."""

    @abstractmethod
    def _write(self, key: str, data: bytes) -> None:
        """Raises OSError."""

    @abstractmethod
    def _read(self, key: str) -> bytes:
        """Raises OSError."""


class LocalFiles(ArrayFiles):
    """In a folder of this machine, or one that it mounts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, str(folder)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """A put and a sweep of the same file must not cross: shared for puts, exclusive for removals."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)

    def _write(self, key: str, data: bytes) -> None:
        path = self.folder / key
        with self._locked(fcntl.LOCK_SH):
            if self.size(key) == len(data) and path.read_bytes() == data:  # a damaged one is replaced
                os.utime(path)  # it is wanted again: the sweep's clock starts anew
                return
            new = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}.partial")
            try:
                with part.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
            for folder in (path.parent, *(p.parent for p in new)):  # the names too must survive a power failure
                _sync_folder(folder)

    def _read(self, key: str) -> bytes:
        return (self.folder / key).read_bytes()

    def size(self, key: str) -> int | None:
        try:
            return (self.folder / key).stat().st_size
        except FileNotFoundError:
            return None

    def old(self, grace_s: float = GRACE_S) -> Iterator[tuple[str, int]]:
        for path in sorted(self.folder.glob("??/*")) if self.folder.is_dir() else []:
            try:
                told = path.stat()
            except FileNotFoundError:
                continue  # a put has given its .partial its name meanwhile, or another sweep was here
            if time.time() - told.st_mtime >= grace_s:
                if path.name.endswith(".partial"):  # of a process that was killed
                    path.unlink(missing_ok=True)
                else:
                    yield f"{path.parent.name}/{path.name}", told.st_size

    def remove(self, key: str, grace_s: float = GRACE_S) -> bool:
        path = self.folder / key
        with self._locked(fcntl.LOCK_EX):
            try:
                if time.time() - path.stat().st_mtime < grace_s:
                    return False
                path.unlink()
            except FileNotFoundError:
                return False
        return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteFiles(ArrayFiles):
    """Behind fsspec: an object store writes an object whole or not at all, and has it when the call returns."""

    def __init__(self, url: str, folder: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError:
            raise MissingExtra(f"array_url={url!r}", "arrays") from None
        self.place = f"{url.rstrip('/')}/{folder}"
        self.fs, self.root = fsspec.core.url_to_fs(self.place)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _write(self, key: str, data: bytes) -> None:
        # Always written, though it may be there: the sweep's clock starts anew.
        self.fs.makedirs(self._path(key[:2]), exist_ok=True)
        self.fs.pipe_file(self._path(key), data)

    def _read(self, key: str) -> bytes:
        return bytes(self.fs.cat_file(self._path(key)))

    def size(self, key: str) -> int | None:
        try:
            return int(self.fs.info(self._path(key))["size"])
        except FileNotFoundError:
            return None

    def old(self, grace_s: float = GRACE_S) -> Iterator[tuple[str, int]]:
        found: dict[str, Any] = self.fs.find(self.root, detail=True)
        for path, told in sorted(found.items()):
            key = "/".join(path.split("/")[-2:])
            try:
                old = KEY.fullmatch(key) is not None and self._age(path) >= grace_s
            except FileNotFoundError:
                continue  # another sweep was here
            if old:
                yield key, int(told["size"])

    def _age(self, path: str) -> float:
        return time.time() - float(self.fs.modified(path).timestamp())

    def remove(self, key: str, grace_s: float = GRACE_S) -> bool:
        try:
            if self._age(self._path(key)) < grace_s:
                return False
            self.fs.rm_file(self._path(key))
        except FileNotFoundError:
            return False
        return True
