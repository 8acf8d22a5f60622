"""samplestore eval: what a user sees, in a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import samplestore
from samplestore.run import Run
from tests.cli.conftest import Cli
from tests.support import factory as f


@pytest.fixture
def run(sqlite_url: str) -> Run:
    return f.make_run(samplestore.open(sqlite_url), stages=["reward"])


def add(cli: Cli, url: str, tmp_path: Path, name: str = "test", *flags: str) -> None:
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": [7, i]}) + "\n" for i in range(2)))
    answer = cli("add-prompts", file, "--run", "r", "--db", url, "--dataset", name, *(flags or ("--eval",)))
    assert answer.code == 0, answer.err


def score(run: Run, rewards: list[float]) -> None:
    worker = f.register(run)
    for claim in run.claim(worker, len(rewards)):
        f.answer(run, claim, version=run.current_version)
    for stage, reward in zip(run.claim_stages(worker, 9), rewards, strict=True):
        run.score(stage, reward)


def test_from_the_start_to_the_table(cli: Cli, run: Run, sqlite_url: str, tmp_path: Path) -> None:
    add(cli, sqlite_url, tmp_path)
    begun = cli("eval", "--db", sqlite_url, "--samples", 2, "--no-wait", "--json", "--sampling", '{"top_p": 0.5}')
    (told,) = begun.json["evaluations"]
    assert (told["dataset"], told["done"], told["sampling"]) == ("test", False, {"top_p": 0.5})
    score(run, [1.0, 0.0, 0.0, 0.0])
    done = cli("eval", "test", "--db", sqlite_url, "--samples", 2, "--sampling", '{"top_p": 0.5}', "--json")
    (told,) = done.json["evaluations"]
    assert (told["id"], told["done"], told["pass_at"]) == (1, True, {"1": 0.25, "2": 0.5})
    run.publish_weights(step=0)
    assert cli("eval", "test", "--db", sqlite_url, "--samples", 2, "--no-wait").code == 0
    score(run, [1.0, 1.0, 0.0, 1.0])
    table = cli("eval", "--db", sqlite_url, "--list")
    assert table.code == 0 and "pass@1" in table.out and "pass@2" in table.out
    lines = [line.split() for line in table.out.splitlines() if line.lstrip().startswith("test")]
    assert [line[1:3] for line in lines] == [["0", "done"], ["1", "done"]]
    assert "0.25" in lines[0] and "0.75" in lines[1]


def test_what_a_user_is_told_when_something_is_missing(cli: Cli, run: Run, sqlite_url: str, tmp_path: Path) -> None:
    nothing = cli("eval", "--db", sqlite_url)
    assert nothing.code == 1 and "samplestore add-prompts FILE --run r --dataset NAME --eval" in nothing.err
    assert "Start one with: samplestore eval DATASET --run r" in cli("eval", "--db", sqlite_url, "--list").out
    add(cli, sqlite_url, tmp_path, "a")
    add(cli, sqlite_url, tmp_path, "b")
    several = cli("eval", "--db", sqlite_url)
    assert several.code == 2 and "samplestore eval a --run r" in several.err
    wrong = cli("eval", "default", "--db", sqlite_url)
    assert wrong.code == 1 and "a, b" in wrong.err
    for text in ("{", "[1]"):
        assert cli("eval", "a", "--db", sqlite_url, "--sampling", text).code == 2
    late = cli("eval", "a", "--db", sqlite_url, "--timeout", 0)
    assert late.code == 1 and "samplestore eval --list" in late.err and "no rollout worker" in late.err
    both = tmp_path / "a.jsonl"
    refused = cli("add-prompts", both, "--run", "r", "--db", sqlite_url, "--dataset", "a")
    assert refused.code == 1 and "there for eval" in refused.err


def test_status_tells_of_data_sets_and_evaluations(cli: Cli, run: Run, sqlite_url: str, tmp_path: Path) -> None:
    add(cli, sqlite_url, tmp_path)
    cli("eval", "--db", sqlite_url, "--no-wait")
    told = cli("status", "--db", sqlite_url, "--json").json
    assert [(d["name"], d["purpose"], d["prompts"], d["served"]) for d in told["datasets"]] == [
        ("default", "train", 4, 4), ("test", "eval", 2, 0),
    ]  # fmt: skip
    assert told["groups"]["open"] == 4, "those of the evaluation are not among them"
    assert "test: 2 prompts to evaluate on" in cli("status", "--db", sqlite_url).out
    assert "2 groups of evaluations are under way" in cli("why", "--db", sqlite_url).out


def test_samples_that_all_failed_are_no_success(cli: Cli, sqlite_url: str, tmp_path: Path) -> None:
    run = f.make_run(samplestore.open(sqlite_url), stages=["reward"], max_attempts=1)
    add(cli, sqlite_url, tmp_path)
    asked = ("eval", "test", "--db", sqlite_url, "--sampling", '{"top_p": 0.5}', "--max-new-tokens", 9)
    cli(*asked, "--no-wait")
    for claim in run.claim(f.register(run), 2):
        run.fail(claim, "engine refused: \x1b[31mtoo long")
    answer = cli(*asked)
    assert answer.code == 1 and "all 2 samples failed" in answer.err and "--again" in answer.err
    assert "engine refused: \\x1b[31mtoo long" in answer.err and "\x1b" not in answer.err
    again = cli(*asked, "--no-wait", "--again", "--json")
    assert again.code == 0 and not again.json["evaluations"][0]["done"]
    listed = cli("eval", "--db", sqlite_url, "--list")
    assert listed.code == 0 and '{"top_p": 0.5}' in listed.out and "max new tokens" in listed.out
