"""What is written wrongly in the first hour: each is refused at once, by an error that says what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

import samplestore
from samplestore.cli import exits
from samplestore.cli.retention import _told
from samplestore.errors import (
    BatchTimeout,
    DatabaseUnusable,
    InvalidSetting,
    LeaseLost,
    SampleStoreError,
    StoreUnavailable,
)
from samplestore.retention import Pruned
from tests.support import factory as f


def test_a_path_names_a_database(tmp_path: Path) -> None:
    with samplestore.open(tmp_path / "a.db") as store:
        assert store.database.path == tmp_path / "a.db"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite://a.db", "Use --db sqlite:///a.db$"),
        ("sqlite://folder/a.db", "Use --db sqlite:///folder/a.db$"),
        ("sqlite://", "name a file: --db rollouts.db$"),
        (7, "Name one: "),
    ],
)
def test_a_url_of_nothing(url: Any, told: str) -> None:
    with pytest.raises(SampleStoreError, match=told):
        samplestore.open(url)


def test_a_server_that_is_away_is_told_at_once() -> None:
    with pytest.raises(
        StoreUnavailable, match=r"^postgresql://u@127\.0\.0\.1:1/d .*pg_isready -h 127\.0\.0\.1 -p 1$"
    ) as it:
        samplestore.open("postgresql://u@127.0.0.1:1/d")
    assert exits.exit_code(it.value) == exits.DATABASE


def test_a_missing_database_is_told_by_its_name(postgres_url: str) -> None:
    with pytest.raises(DatabaseUnusable, match=r"^postgresql://.* createdb nowhere$"):
        samplestore.open(make_url(postgres_url).set(database="nowhere").render_as_string(hide_password=False))


@pytest.mark.parametrize("rows", ["rows.jsonl", Path("rows.jsonl"), {"prompt_ids": [1]}])
def test_rows_that_are_no_rows(store: Any, rows: Any) -> None:
    run = f.make_run(store)
    with pytest.raises(InvalidSetting, match=f"samplestore add-prompts FILE --run {run.name}"):
        run.add_prompts(rows)


@pytest.mark.parametrize("timeout", ["10", float("nan"), True])
def test_a_timeout_that_is_no_number(store: Any, timeout: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^timeout=.* seconds"):
        f.make_run(store).batch(step=1, timeout=timeout)


def test_a_claim_of_a_sample_is_no_stage(store: Any) -> None:
    run = f.make_run(store, stages=("reward",))
    claim = run.claim(f.register(run), 1)[0]
    with pytest.raises(InvalidSetting, match=r"run\.claim_stages"):
        run.score(claim, 1.0)


def test_a_settled_batch_is_not_released(store: Any) -> None:
    run = f.make_run(store)
    f.finish_all(run, f.register(run))
    batch = run.batch(step=1, timeout=60)
    batch.commit()
    with pytest.raises(LeaseLost, match=r"committed, given back or reaped\. .* run\.batch\(step\)$"):
        batch.release("too late")


def test_a_batch_that_was_forgotten_is_named(store: Any) -> None:
    run = f.make_run(store, max_staleness=0)
    f.finish_all(run, f.register(run))
    run.batch(step=1, timeout=60)
    with pytest.raises(BatchTimeout, match="held by a trainer's batch, which is neither committed nor given back"):
        run.batch(step=2, timeout=0)


def test_a_prune_that_gives_little_back_names_no_wrong_cause(capsys: pytest.CaptureFixture[str]) -> None:
    _told(Pruned(3, 2, 9, 5000, 8192, 8192, 1, 0.1), "r", "a.db", 8192, True, 20)
    said = capsys.readouterr().out
    assert "a page goes back when all of it is free" in said
    assert "--keep-steps 20 --full" in said
