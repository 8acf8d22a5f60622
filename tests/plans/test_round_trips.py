"""What a commit costs over a network: how often PostgreSQL is asked and waited for."""

from __future__ import annotations

import contextlib
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import samplestore
from samplestore.errors import LeaseLost
from tests.support import factory as f


class Wire:
    """A proxy before a server; counts how often the client sends after it was answered."""

    def __init__(self, url: sa.URL, folder: Path) -> None:
        self.turns = 0
        host, port = str(url.query.get("host") or url.host), int(str(url.query.get("port") or url.port or 5432))
        self._target: Any = (host, port)
        self._family = socket.AF_INET
        if host.startswith("/"):
            self._family, self._target = socket.AF_UNIX, f"{host}/.s.PGSQL.{port}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / f".s.PGSQL.{port}"))
        self._listener.listen()
        self.url = url.set(host=None, port=None, query={"host": str(folder), "port": str(port)})
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(self._family)
                server.connect(self._target)
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        answered = True
        with client, server, contextlib.suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is client:
                        self.turns += answered
                    answered = source is server
                    (server if source is client else client).sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def wire(postgres_url: str) -> Iterator[tuple[Wire, samplestore.Store]]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        wire = Wire(sa.make_url(postgres_url), Path(folder))
        with samplestore.open(wire.url.render_as_string(hide_password=False)) as store:
            yield wire, store
        wire.close()


def test_an_append_is_two_round_trips(wire: tuple[Wire, samplestore.Store]) -> None:
    """BEGIN goes with the first statement, the ledger with COMMIT. With four of them, a database in another building
    would let a worker store half as much."""
    counted, store = wire
    run = f.make_run(store, prompts=1)
    claim, other = run.claim(f.register(run), 2)
    f.add(run, claim)  # the connection, and what it prepares
    counted.turns = 0
    for _ in range(3):
        f.add(run, claim)
    assert counted.turns == 6
    run.drop([claim.group_id], "unwanted")
    with pytest.raises(LeaseLost):
        f.add(run, other)
    f.sound(run)
