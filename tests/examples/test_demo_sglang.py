"""`samplestore demo --engine sglang`, as a user types it: real engines, a real router, weights loaded at every step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from samplestore.workers.sglang.machine import home_folder
from samplestore.workers.sglang.releases import NEWEST
from tests.support.processes import Processes
from tests.support.sglang import require_sglang


@pytest.mark.sglang
@pytest.mark.timeout(1500)
def test_the_demo_keeps_its_promises_on_sglang(tmp_path: Path, processes: Processes) -> None:
    require_sglang(NEWEST)
    told = tmp_path / "demo.json"
    demo = processes.start(
        [sys.executable, "-m", "samplestore.cli", "demo", "--engine", "sglang", "--db", tmp_path / "rollouts.db",
         "--json", told],
        name="demo", env={"SAMPLESTORE_SGLANG_HOME": str(home_folder())}, cwd=tmp_path,
    )  # fmt: skip
    assert demo.wait(1400) == 0, demo.log()
    summary = json.loads(told.read_text())
    assert summary["ok"] and summary["killed"] == ["worker-0"], summary
    assert summary["samples_resumed"] > 0, "no sample was resumed under new weights"
    told_to_load = (tmp_path / "rollouts-files" / "engine-0.log").read_text().count("POST /update_weights_from_disk")
    assert told_to_load > 10, "SGLang did not load what was trained"
