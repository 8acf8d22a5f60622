"""Fewer round trips to PostgreSQL: BEGIN goes with the first statement of a transaction, COMMIT with its last ones.

psycopg's own BEGIN and COMMIT are a round trip each, also in its pipeline mode. So the writer's connections are in
autocommit mode, and both are sent here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


def owe_begin(raw: Any) -> None:
    """The next statement on this psycopg connection begins a transaction."""
    raw.samplestore_owes = True


def forget_begin(raw: Any) -> None:
    """Nothing was sent, so nothing began."""
    raw.samplestore_owes = False


@cache
def cursor_class() -> Any:
    """The class of cursors for connections that owe_begin is used on."""
    import psycopg

    class Cursor(psycopg.Cursor[Any]):
        def execute(self, *args: Any, **kwargs: Any) -> Any:
            with _begun(self.connection):
                return super().execute(*args, **kwargs)

        def executemany(self, *args: Any, **kwargs: Any) -> Any:
            with _begun(self.connection):
                return super().executemany(*args, **kwargs)

    @contextmanager
    def _begun(raw: Any) -> Iterator[None]:
        if not getattr(raw, "samplestore_owes", False):
            yield
            return
        raw.samplestore_owes = False
        with raw.pipeline():
            psycopg.Cursor(raw).execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            yield

    return Cursor


@contextmanager
def committed(raw: Any) -> Iterator[None]:
    """What the block sends goes with the COMMIT, in one round trip; it reads no answer."""
    with raw.pipeline():
        yield
        if not getattr(raw, "samplestore_owes", False):  # else nothing was sent
            raw.cursor().execute("COMMIT")
