"""A trainer outlives a database server that is killed: at every question it asks, it waits until the server is back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

import samplestore
from samplestore import migrations
from samplestore.errors import BatchTimeout
from samplestore.run import Run
from tests.support import factory as f
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until


def wait_in_vain(run: Run) -> None:
    with pytest.raises(BatchTimeout):
        run.batch(9, groups=9, timeout=0.01)


ASKS: dict[str, Callable[[Run, Any], Any]] = {
    "lease": lambda run, batch: run.batch(3).release("only asked"),
    "read": lambda run, batch: [len(sample.response_ids) for sample in batch.samples] == [3] * 4 or pytest.fail("lost"),
    "replay": lambda run, batch: run.replay(1).groups,
    "why": lambda run, batch: wait_in_vain(run),
    "version": lambda run, batch: run.current_version,
    "versions": lambda run, batch: run.weight_versions(),
    "commit": lambda run, batch: batch.commit(),
    "publish": lambda run, batch: run.publish_weights(step=2),
}


def test_every_question_of_a_trainer_waits_for_the_server(postgres_crash_server: PostgresServer) -> None:
    server = postgres_crash_server
    url = server.url(server.create())
    migrations.upgrade(url)
    with samplestore.open(url) as store:
        run = f.make_run(store, prompts=6, max_staleness=2)
        f.finish_all(run, f.register(run))
        with run.batch(1):
            pass
        batch = run.batch(2)
        for name, ask in ASKS.items():
            server.kill()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask, run, batch)
                wait_until(lambda asked=asked: asked.running() or asked.done(), what=f"{name} is asked")  # type: ignore[misc]
                server.start()
                try:
                    asked.result(60)
                except OperationalError as error:
                    pytest.fail(f"{name}: {error}")
        assert f.states(run) == ["consumed"] * 4 + ["ready"] * 2
        f.sound(run)
