"""samplestore import-samples and the stages that status tells of, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROW = {"prompt_ids": [1, 2], "response_ids": [7, 8], "log_probs": [-0.5, -0.5]}


def test_a_file_comes_in_once(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps({**ROW, "label": i}) + "\n" for i in range(3)))
    args = ("import-samples", str(path), "--run", "d", "--db", str(tmp_path / "d.db"), "--set", 'stages=["judge"]')
    first = cli(*args)
    assert first.code == 0 and first.out == f"{path}: 3 groups added, 0 already there (run d)\n", first.err
    assert cli(*args, "--json").json == {"schema_version": 1, "run": "d", "added": 0, "existing": 3}
    told = cli("status", "--db", str(tmp_path / "d.db"))
    assert "stages" in told.out and "judge 3" in told.out
    why = cli("why", "--db", str(tmp_path / "d.db"))
    assert "3 stages (rewards) are not done: judge 3; nobody serves judge (samplestore reward --reward" in why.out


def test_what_is_refused_is_named(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "log_probs": [-0.5]}) + "\n")
    done = cli("import-samples", str(path), "--run", "d", "--db", str(tmp_path / "d.db"))
    assert done.code == 1
    assert f"{path}:2: log_probs: 2 tokens but 1 log-probs" in done.err
    assert "nothing of it was stored" in done.err
    told = done.err.splitlines()
    assert told[1].startswith(f"  {path}:2: log_probs: ") and told[2].startswith("Correct the file"), "a row, a line"
    missing = cli("import-samples", "nowhere.jsonl", "--run", "d", "--db", str(tmp_path / "none.db"))
    assert missing.code == 1 and "no such file" in missing.err
    assert not (tmp_path / "none.db").exists()
