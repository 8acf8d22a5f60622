"""SIGKILL at the named points of array files and imports: all of it or nothing, and no row without its file."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import samplestore
from samplestore import faults, retention

from ..support import factory as f
from ..support.processes import Processes

ATTACH = f"""
import sys, numpy as np, samplestore
from {f.__package__} import factory as f
with samplestore.open(sys.argv[1]) as store:
    run = store.existing_run("r")
    claim = run.claim(f.register(run), 1)[0]
    f.add(run, claim, 32)
    run.attach(claim, "values", np.ones(32, np.float32))
"""
IMPORT = """
import sys, samplestore
rows = [{"prompt_ids": [1, i], "response_ids": [7, 8], "log_probs": [-0.5, -0.5],
         "arrays": {"hidden": [[float(i)] * 8] * 2}} for i in range(250)]
with samplestore.open(sys.argv[1]) as store:
    print(store.existing_run("r").import_samples(rows).added)
"""


def test_killed_between_a_file_and_its_row(db_url: str, processes: Processes, tmp_path: Path) -> None:
    with samplestore.open(db_url) as store:
        run = f.make_run(store, prompts=1, samples_per_prompt=1, array_url=str(tmp_path / "a"), array_file_bytes=64)
        killed = processes.start(
            [sys.executable, "-c", ATTACH, db_url], name="attach", env={faults.VARIABLE: "filed=kill@1"}
        )
        assert killed.wait() == -signal.SIGKILL, killed.log()
        assert f.value(run, "SELECT count(*) FROM segment_array") == 0
        assert retention.sweep_files(run, grace_s=0.0).files == 1
        assert f.value(run, "SELECT n_tokens FROM sample") == 32, "what was acknowledged stays"
        f.sound(run)


def test_killed_in_the_middle_of_an_import(db_url: str, processes: Processes, tmp_path: Path) -> None:
    with samplestore.open(db_url) as store:
        run = store.run("r", samples_per_prompt=1, array_url=str(tmp_path / "a"), array_file_bytes=16)
        killed = processes.start(
            [sys.executable, "-c", IMPORT, db_url], name="import", env={faults.VARIABLE: "importing=kill@2"}
        )
        assert killed.wait() == -signal.SIGKILL, killed.log()
        assert f.value(run, "SELECT count(*) FROM sample_group") == f.value(run, "SELECT count(*) FROM prompt") == 0
        assert retention.sweep_files(run, grace_s=0.0).files == 200, "files that nobody names"
        again = processes.start([sys.executable, "-c", IMPORT, db_url], name="import")
        assert again.wait() == 0, again.log()
        assert f.states(run) == ["ready"] * 250
        f.sound(run)
