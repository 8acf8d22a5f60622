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
    assert f"{path}:2: log_probs: 2 tokens but 1 log-prob" in done.err
    assert "nothing of it was stored" in done.err
    told = done.err.splitlines()
    assert told[1].startswith(f"  {path}:2: log_probs: ") and told[2].startswith("Correct the file"), "a row, a line"
    missing = cli("import-samples", "nowhere.jsonl", "--run", "d", "--db", str(tmp_path / "none.db"))
    assert missing.code == 1 and "no such file" in missing.err
    assert not (tmp_path / "none.db").exists()


def test_a_field_that_is_none_is_told_those_that_are(cli: Any, tmp_path: Path) -> None:
    """All that a row of this command may have, and no option that the command has not."""
    path = tmp_path / "bad.jsonl"
    rows = [{**ROW, "rewrd": 1.0}, {"prompt_ids": [1], "samples": [{"response_ids": [2], "promt": 1}]}, {**ROW, "x": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = cli("import", path, "--run", "d", "--db", tmp_path / "d.db").err.splitlines()
    assert told[1].startswith(f"  {path}:1: rewrd: is not one of prompt, text, messages, prompt_ids, label, ")
    assert told[1].endswith(", reward, status, samples. Did you mean 'reward'? (got 1.0)")
    assert told[2].startswith(f"  {path}:2: samples[0].promt: is not one of response_ids, tokens, ")
    assert told[2].endswith(", reward, status (got 1)"), "a response has no prompt"
    assert told[3].endswith(", status, samples (got 1)") and "--" not in "".join(told[1:4])
