"""How runs, databases and groups are named: in what is typed, in what is shown, and when a name is almost right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import samplestore
from samplestore import errors
from samplestore.cli.common import complete_run
from tests.cli.conftest import Cli, Small
from tests.support import factory as f

ODD = 'it\'s "odd"; $(id)'


@pytest.fixture
def two(store: samplestore.Store, db_url: str) -> str:
    """A run "r" of three consumed groups, and a newer run "s" without anything."""
    run = f.make_run(store, prompts=3)
    worker, trainer = run.register(), run.register("trainer")
    f.finish_all(run, worker)
    for step in (0, 1):
        batch = f.lease(run, trainer, step, 1)
        assert batch is not None
        f.commit(run, batch, trainer)
        run.publish_weights(path="/w", step=step)
    f.kill(run, worker)
    f.kill(run, trainer)
    f.make_run(store, "s", prompts=1)
    return db_url


# -- the run


@pytest.mark.parametrize("named", [("--run", "r"), ("r",), ("r", "--run", "r")], ids=["option", "place", "both"])
def test_a_run_is_named_with_run_everywhere(cli: Cli, two: str, tmp_path: Path, named: tuple[str, ...]) -> None:
    out = tmp_path / "out.jsonl"
    exported = cli("export", *named, "--to", out, "--format", "jsonl", "--db", two)
    assert exported.out.endswith("(run r)\n"), exported.err
    assert cli("simulate", *named, "--db", two).out.startswith("run r: 2 steps, 2 groups, 12 trained tokens, held")
    forked = cli("fork", *named, "--at-step", 0, "--as", "t", "--db", two)
    assert forked.out.startswith("run t: 3 groups of r, as of step 0;"), forked.err


@pytest.mark.parametrize(
    "command", [("export", "--to", "x"), ("simulate",), ("fork", "--at-step", -1, "--as", "t")], ids=lambda c: c[0]
)
def test_without_a_name_it_is_the_newest_and_two_names_are_refused(
    cli: Cli, two: str, command: tuple[Any, ...]
) -> None:
    refused = cli(*command, "r", "--run", "s", "--db", two)
    assert refused.code == 2 and "two runs are named, 'r' and 's'" in refused.err
    newest = cli(*command, "--db", two)
    assert re.search(r"run s\b|of s,", newest.out), newest.err


@pytest.mark.parametrize(
    "command",
    ["export", "fork", "simulate", "import", "add-prompts", "status", "drop", "groups", "rewind", "prune", "eval"],
)
def test_the_shell_completes_the_names_of_runs(two: str, command: str) -> None:
    from samplestore.cli.app import load

    found = load(command)
    ways = [p for p in found.params if p.name in ("run", "place")]
    assert ways, command
    for way in ways:
        assert {item.value for item in way.shell_complete(context_of(two, found), "")} == {"r", "s"}, way.name


def context_of(url: str, command: Any) -> Any:
    context = command.make_context(command.name, [], resilient_parsing=True)
    context.params["db"] = url
    return context


def test_completion_is_silent_where_there_is_no_database(tmp_path: Path) -> None:
    from samplestore.cli.app import load

    context = context_of(str(tmp_path / "no.db"), load("export"))
    assert complete_run(context, "") == [] and list(tmp_path.iterdir()) == []


# -- almost right


def test_a_mistyped_run_is_told_the_one_that_is_meant(cli: Cli, two: str, store: samplestore.Store) -> None:
    store.run("gsm8k-long")
    for typed in ("gsm8k-lnog", "GSM8K-LONG"):
        answer = cli("status", "--run", typed, "--db", two)
        assert (
            answer.code == 1 and (f"no run named {typed!r}. Did you mean 'gsm8k-long'? The database has:") in answer.err
        )
    assert "Did you mean" not in cli("status", "--run", "other", "--db", two).err


def test_a_mistyped_database_is_told_the_one_beside_it(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "cwd"
    samplestore.open("rollouts.db").close()
    (folder / "rollout.txt").write_text("no database")
    for typed in ("rolouts.db", str(folder / "rollots.db"), "Rollouts.DB", f"sqlite:///{folder}/rollouts"):
        answer = cli("status", "--db", typed)
        assert answer.code == 3 and "Did you mean 'rollouts.db'? Create it with: samplestore db upgrade" in answer.err
    for typed in ("other.db", "no/folder.db", "samples.csv"):
        assert "Did you mean" not in cli("status", "--db", typed).err, typed


# -- names in commands


def test_names_in_commands_to_type_are_quoted_for_the_shell(tmp_path: Path) -> None:
    for error, word in (
        (errors.RunNotFound(ODD, []), ODD),
        (errors.DatabaseMissing(f"/no/{ODD}.db"), f"/no/{ODD}.db"),
        (errors.SchemaMismatch(f"/no/{ODD}.db", "0001", "0002", known=True), f"/no/{ODD}.db"),
        (errors.EngineInUse("http://a", ODD, [(1, "h", 2)]), ODD),
    ):
        typed = str(error)[str(error).rindex("samplestore ", 0, str(error).find(shlex.quote(word)) + 1) :]
        assert word in shlex.split(typed), typed


def test_paths_in_commands_to_type_are_quoted_for_the_shell(cli: Cli, tmp_path: Path) -> None:
    here = tmp_path / "cwd"
    (here / "it's none.db").write_text("no database")
    samplestore.open("a.db").close()
    for command, word in (
        (("db", "current", "--db", "it's none.db"), "it's none.db"),
        (("backup", "no such folder/b.db", "--db", "a.db"), "no such folder"),
        (("restore", "it's none.db", "--db", "b.db"), "it's none.db"),
    ):
        told = cli(*command).err
        assert shlex.split(re.split(r"(?=mkdir -p|ls -l )", told)[-1])[-1].endswith(word), told


def test_an_export_that_is_there_is_replaced_by_the_command_that_is_told(cli: Cli, tmp_path: Path) -> None:
    """All of it: the same run, database, place, format, steps and choice of samples."""
    url, out = str(tmp_path / "a b.db"), str(tmp_path / "out 1.jsonl")
    with samplestore.open(url) as store:
        run = f.make_run(store, ODD, prompts=2)
        f.finish_all(run, run.register())
        batch = f.lease(run, trainer := run.register("trainer"), 3, 1)
        assert batch is not None
        f.commit(run, batch, trainer)
        store.run("newer")
    typed = ("export", "--run", ODD, "--to", out, "--format", "jsonl", "--steps", "3:3", "--status", "completed")
    assert cli(*typed, "--db", url).out.endswith(f"2 samples of 1 group, 6 response tokens (run {ODD})\n")
    before = Path(out).read_bytes()
    refused = cli(*typed, "--db", url)
    assert refused.code == 1
    name, *words = shlex.split(refused.err.rpartition("Replace it with: ")[2])
    assert name == "samplestore" and words[-1] == "--force"
    Path(out).write_bytes(before[:-1])
    answer = cli(*words)
    assert answer.code == 0 and Path(out).read_bytes() == before, answer.err


def test_a_run_without_what_is_asked_for_is_quoted(cli: Cli, tmp_path: Path) -> None:
    url = str(tmp_path / "a.db")
    with samplestore.open(url) as store:
        store.run(ODD)
    refused = cli("export", "--run", ODD, "--to", "x", "--db", url)
    assert shlex.split(refused.err.rpartition("with: ")[2]) == ["samplestore", "status", "--run", ODD]


# -- groups and samples


def test_events_name_groups_and_samples_as_everything_does(cli: Cli, small: Small) -> None:
    assert cli("drop", 2, "--db", small.url, "--reason", "x").code == 0
    (dropped,) = cli("tail", "--kind", "dropped", "--db", small.url).out.splitlines()
    assert "  group 2" in dropped and "id" not in dropped
    told = cli("tail", "--kind", "dropped", "--db", small.url, "--json").json
    assert (told["group"], told["sample"], told["group_id"]) == (2, None, 3)
    stopped = cli("tail", "--kind", "release", "--db", small.url).out
    assert "sample 2/0," in stopped and "sample 3/0" in stopped, stopped


def test_the_numbers_that_are_shown_are_those_to_type(cli: Cli, many_runs: str) -> None:
    """Ids and numbers differ in every run but the first."""
    shown = [row.split()[0] for row in cli("groups", "--run", "b", "--db", many_runs).out.splitlines()[1:]]
    assert shown == ["1", "0"]
    assert (
        cli("drop", *shown, "--run", "b", "--reason", "x", "--db", many_runs).out == "run b: 2 groups dropped (0, 1)\n"
    )
    told = cli("groups", "--run", "a", "--db", many_runs, "--json").json
    assert {g["state"] for g in told["groups"]} == {"open"}


@pytest.fixture
def many_runs(store: samplestore.Store, db_url: str) -> str:
    for name in ("a", "b"):
        f.make_run(store, name, prompts=2)
    return db_url


# -- nothing is left behind


def test_a_refused_import_makes_no_database(cli: Cli, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    bad.write_text('{"prompt_ids": [1], "response_ids": "no"}\n')
    good.write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    folder = tmp_path / "cwd"
    refused = cli("import", good, bad, "--run", "r", "--db", "new.db")
    assert refused.code == 1 and "response_ids" in refused.err
    assert list(folder.iterdir()) == []
    assert cli("import", good, "--run", "r", "--db", "new.db").out.endswith("1 group added, 0 already there (run r)\n")


def test_a_copy_does_not_show_those_who_worked_for_its_original(cli: Cli, two: str, tmp_path: Path) -> None:
    target = tmp_path / "all.db"
    assert len(cli("status", "--run", "r", "--db", two, "--json").json["workers"]) == 2
    assert cli("fork", "--run", "r", "--at-step", 0, "--as", "t", "--db", two).code == 0
    assert cli("merge", target, two).code == 0
    for url, name in ((two, "t"), (target, "r"), (target, "t")):
        told = cli("status", "--run", name, "--db", url)
        assert told.code == 0 and not re.search("^worker", told.out, re.M), told.out
        assert cli("status", "--run", name, "--db", url, "--json").json["workers"] == []
        assert cli("check", "--run", name, "--db", url).code == 0
    with samplestore.open(two) as store:
        own = store.existing_run("t").register()
    assert [w["id"] for w in cli("status", "--run", "t", "--db", two, "--json").json["workers"]] == [own]
