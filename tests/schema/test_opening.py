"""Opening a database: one of another schema is refused with the cure, and one that is not there is made once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

import samplestore
from samplestore import migrations
from samplestore.engine import Database
from samplestore.errors import DatabaseMissing, SchemaMismatch
from tests.support import factory as f
from tests.support.processes import Processes


@pytest.mark.parametrize(
    ("found", "cure"), [("0000", "samplestore db upgrade"), ("9999", "pip install -U samplestore")]
)
def test_another_revision_is_refused_with_the_cure(db_url: str, found: str, cure: str) -> None:
    with samplestore.open(db_url) as store:
        f.execute(store, "UPDATE alembic_version SET version_num = :v", v=found)
    with pytest.raises(SchemaMismatch, match=cure) as caught:
        samplestore.open(db_url)
    assert found in str(caught.value) and migrations.REVISION in str(caught.value)


def test_a_database_without_schema_is_refused(postgres_empty_url: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match="samplestore db upgrade"):
        samplestore.open(postgres_empty_url)
    foreign = Database(f"sqlite:///{tmp_path}/foreign.db")
    with foreign.writing() as connection:
        connection.execute(sa.text("CREATE TABLE notes (id INTEGER)"))
    foreign.close()
    with pytest.raises(SchemaMismatch, match="samplestore db upgrade"):
        samplestore.open(str(tmp_path / "foreign.db"))


def test_reading_creates_no_file(tmp_path: Path) -> None:
    with pytest.raises(DatabaseMissing, match="samplestore db upgrade"):
        samplestore.open(str(tmp_path / "x.db"), create=False)
    assert [p.name for p in tmp_path.iterdir()] == []


CREATOR = """
import sys, samplestore
print("ready", flush=True)
with open(sys.argv[2]) as go: go.read()  # a pipe: opens when the test opens its other end
with samplestore.open(sys.argv[1]) as store:
    print("created", store.run("same").uuid, flush=True)
"""


def test_two_processes_create_the_same_file(tmp_path: Path, processes: Processes) -> None:
    pipes = [tmp_path / f"go{i}" for i in range(3)]
    for pipe in pipes:
        os.mkfifo(pipe)
    started = [
        processes.start([sys.executable, "-c", CREATOR, str(tmp_path / "new.db"), str(p)], name="creator")
        for p in pipes
    ]
    for process in started:
        process.wait_for_log("ready")
    for pipe in pipes:
        with pipe.open("w"):
            pass
    for process in started:
        assert process.wait(60) == 0, process.log()
    assert len({process.log().split("created ")[1].strip() for process in started}) == 1


def test_a_file_that_is_being_created_is_waited_for(tmp_path: Path) -> None:
    """The file is there and in WAL mode, its tables are not yet committed: what a second process sees."""
    database = Database(f"sqlite:///{tmp_path}/new.db")
    with database.writing():
        pass
    database.close()
    assert (tmp_path / "new.db").stat().st_size > 0
    with samplestore.open(str(tmp_path / "new.db")) as store:
        assert store.run_names() == []
