"""Modes and their counterfactual on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import samplestore
from samplestore import Store
from samplestore.verbs import steps
from tests.cli.conftest import Cli
from tests.contract.test_simulate import recorded
from tests.support import factory as f


def test_a_run_gets_its_mode_from_flags(cli: Cli, tmp_path: Path) -> None:
    rows, db = tmp_path / "p.jsonl", tmp_path / "r.db"
    rows.write_text(json.dumps({"prompt_ids": [1, 2]}) + "\n")
    given = ("--run", "a", "--db", db, "--mode", "partial", "--no-resume", "--set", "over_sampling_batch_size=16")
    assert cli("add-prompts", rows, *given).code == 0
    with samplestore.open(str(db)) as store:
        told = store.run("a").settings
    assert (told.mode, told.resume, told.over_sampling_batch_size, told.window_groups) == ("partial", False, 16, 16)
    refused = cli("add-prompts", rows, "--run", "b", "--db", db, "--mode", "partial", "--set", "max_staleness=0")
    assert refused.code != 0 and "at least 1 in mode partial" in refused.err
    unknown = cli("add-prompts", rows, "--run", "b", "--db", db, "--mode", "fast")
    assert unknown.code != 0 and "sync | partial | async" in unknown.err


def test_status_says_how_the_step_stands(cli: Cli, store: Store, db_url: str) -> None:
    run = f.make_run(store, mode="sync", groups_per_step=1)
    assert "mode        sync: a step is generated\n" in cli("status", "--db", db_url).out
    f.finish_all(run, f.register(run))
    assert run.transact(steps.tend)
    told = cli("status", "--db", db_url)
    assert "mode        sync: the step has its groups, and waits for new weights\n" in told.out
    assert cli("status", "--db", db_url, "--json").json["step_over"] is True


def test_simulate(cli: Cli, store: Store, db_url: str) -> None:
    recorded(store, [[[(0, 4)], [(0, 2)]], [[(0, 3), (1, 5)], [(1, 2)]], [[(0, 6)], [(1, 1), (2, 1)]]])
    told = cli("simulate", "r", "--db", db_url, "--max-staleness", 1)
    assert (told.code, told.err) == (0, "")
    assert "would be dropped" in told.out and "1 (33.3 %) of the groups, 8 (33.3 %) of the tokens" in told.out
    masked = cli("simulate", "--db", db_url, "--stale", "mask").out
    assert "would be masked" in masked and "6 (25.0 %) of the tokens" in masked
    assert cli("simulate", "--db", db_url, "--json").json["total"]["tokens_masked"] == 6
    wrong = cli("simulate", "--db", db_url, "--staleness-mode", "worst")
    assert wrong.code != 0 and "oldest | newest | mean" in wrong.err
    assert cli("simulate", "nobody", "--db", db_url).code != 0


def test_simulate_without_a_step_says_where_to_look(cli: Cli, store: Store, db_url: str) -> None:
    f.make_run(store)
    assert "samplestore why --run r" in cli("simulate", "--db", db_url).out
