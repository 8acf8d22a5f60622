"""Totals that something else than this release has left behind are found, named, and made anew."""

from __future__ import annotations

from pathlib import Path

import samplestore
from samplestore import Store
from samplestore.copies import runs as copies
from tests.cli.conftest import Cli
from tests.support import factory as f


def drifted(store: Store) -> samplestore.run.Run:
    run = f.make_run(store)
    f.execute(run, "INSERT INTO event (run_id, at, kind) VALUES (:r, 1.0, 'publish')", r=run.id)
    return run


def test_check_names_the_cure_and_the_cure_works(cli: Cli, store: Store) -> None:
    drifted(store)
    url = store.database.url.render_as_string(hide_password=False)
    found = cli("check", "--db", url)
    assert found.code == 5 and "samplestore check --recount" in found.out
    assert cli("check", "--db", url, "--recount").code == 0
    assert cli("check", "--db", url).code == 0


def test_a_run_with_old_totals_can_be_merged_and_restored(
    cli: Cli, store: Store, sqlite_template: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source.db"
    source.write_bytes(sqlite_template.read_bytes())
    with samplestore.open(str(source)) as opened:
        drifted(opened)
    assert len(copies.merge(store, str(source))) == 1
    f.sound(store.existing_run("r"))
    assert cli("backup", tmp_path / "backup.db", "--db", source).code == 0
    restored = cli("restore", tmp_path / "backup.db", "--db", tmp_path / "restored.db")
    assert restored.code == 0, restored.err
    with samplestore.open(str(tmp_path / "restored.db")) as opened:
        f.sound(opened.existing_run("r"))
