"""A folder beside a place, where what will lie there is made before it gets its name. It is gone at the end; what a
killed process has left of one is gone when the next comes to the same place."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RANDOM = "[a-z0-9_]{8}"  # what tempfile makes names of
ASIDE = "before"  # in a room: what lay in the place and makes way


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, locked as long as this process lives. At its end, what was moved to its ASIDE
    is in its place again if that is empty, and the folder is gone. Raises OSError."""
    clear(target)
    room, lock = _made(target)
    try:
        yield room
    finally:
        try:
            _remove(room, target)
        finally:
            os.close(lock)


def clear(target: Path) -> None:
    """Remove what killed processes have left beside `target`; what they had moved aside gets its place back."""
    name = re.compile(rf"\.{re.escape(target.name)}\.{RANDOM}\.partial")
    with suppress(OSError):  # no such folder, or none of ours: whoever writes there is told
        for left in [path for path in target.parent.iterdir() if name.fullmatch(path.name)]:
            if (lock := _lock(left)) is not None:
                try:
                    _remove(left, target)
                finally:
                    os.close(lock)


def _made(target: Path) -> tuple[Path, int]:
    while True:
        room = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        if (lock := _lock(room)) is not None:  # else somebody clears it already
            return room, lock


def _lock(room: Path) -> int | None:
    """A descriptor that holds the room's lock; None: somebody else is at work in it, or it is no folder of ours."""
    try:
        lock = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.lstat(room)):
            return lock
    except OSError:  # held, or removed meanwhile
        pass
    os.close(lock)
    return None


def _remove(room: Path, target: Path) -> None:
    before = room / ASIDE
    if os.path.lexists(before) and not os.path.lexists(target):
        before.rename(target)
    shutil.rmtree(room, ignore_errors=True)
