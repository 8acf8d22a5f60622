"""Commands that look: what they print for a small run, on both databases, as text and as JSON."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from shlex import quote, split

import pytest

import samplestore
from samplestore.models import Segment
from tests.cli.conftest import ENGINE, Cli, Small
from tests.support.factory import snapshot

READING = ("status", "why", "runs", "groups", "ledger", "check", "doctor", "aborts", "tail", "metrics")


def lines(text: str) -> list[str]:
    """The lines, with times and run ids made equal."""
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", text)
    return [re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "UUID", line) for line in text.splitlines()]


def test_status_tells_the_run_in_words(cli: Cli, small: Small) -> None:
    answer = cli("status", "--db", small.url)
    assert (answer.code, answer.err) == (0, "")
    told = lines(answer.out)
    assert told[:11] == [
        "run         small (running)",
        "uuid        UUID",
        "as of       TIME",
        "weights     version 0, timeline 0",
        "prompts     4, epoch 0",
        "groups      open 2, ready 1, consumed 1",
        "samples     pending 3, aborted 1, completed 4; in flight 1, resumed 0",
        "tokens      resumable 3, ready 10, consumed 10",
        "staleness   of ready groups: 1 at 0",
        "batches     committed 1; last: step 1 committed, 1 group, 10 tokens",
        "next batch  1 of 2 groups is ready: 1 sample is in flight; 2 samples wait for a worker; "
        "1 sample waits before it is tried again",
    ]
    assert re.search(r"^1 +rollout +worker-\[red\]x +live +\d+\.\d s +1 ", answer.out, re.M)
    assert re.search(rf"^{ENGINE} +live +0 +default", answer.out, re.M)
    assert re.search(r"^release: shutdown +1$", answer.out, re.M)
    assert re.search(r"^failures +1; the newest, \S+Z: \\x1b\[31mred", answer.out, re.M)


def test_status_as_json(cli: Cli, small: Small) -> None:
    told = cli("status", "--db", small.url, "--json").json
    assert told["samples"] == {"pending": 3, "aborted": 1, "completed": 4, "truncated": 0, "failed": 0}
    assert told["tokens"]["consumed"] == 10
    assert told["why"]["ready_in_window"] == 1
    assert told["batches"]["last"]["step"] == 1


def test_text_of_models_and_engines_cannot_reach_the_terminal(cli: Cli, small: Small) -> None:
    commands = (["status"], ["show", "5"], ["show", "6"], ["groups"], ["why"], ["engines", "list"], ["check"])
    seen = ""
    for command in commands:
        for flags in ([], ["--json"]):
            answer = cli(*command, "--db", small.url, *flags)
            assert answer.code == 0
            assert not set(answer.out) & {"\x1b", "\x07", "\x9b", "\u202e", "\u202c", "\r"}, command
            assert "\nsecond line" not in answer.out
            seen += answer.out
    assert "\\x1b[31mred" in seen and "\\u202egnp.exe" in seen and "[bold]markup[/bold]" in seen


def test_why(cli: Cli, small: Small) -> None:
    answer = cli("why", "--db", small.url)
    assert lines(answer.out)[:2] == [
        "1 of 2 groups is ready inside the window",
        "- 1 sample is in flight",
    ]
    assert cli("why", "--db", small.url, "--groups", 1).out == "1 of 1 group is ready inside the window\n"
    told = cli("why", "--db", small.url, "--groups", 9, "--json").json
    assert told["needed"] == 9
    assert "window_too_small" in {reason["code"] for reason in told["reasons"]}


def test_runs_are_listed_newest_first_and_the_newest_is_meant(cli: Cli, small: Small) -> None:
    with samplestore.open(small.url) as store:
        store.run("later")
    told = cli("runs", "--db", small.url, "--json").json["runs"]
    assert [(r["name"], r["prompts"], r["groups"], r["live_workers"]) for r in told] == [
        ("later", 0, 0, 0),
        ("small", 4, 4, 2),
    ]
    assert cli("runs", "--db", small.url).out.splitlines()[1].startswith("later  running")
    assert cli("status", "--db", small.url).out.startswith("run         later (running)")
    assert cli("status", "--db", small.url, "--run", "small").out.startswith("run         small (running)")


def test_groups(cli: Cli, small: Small) -> None:
    answer = cli("groups", "--db", small.url)
    head, *rows = lines(answer.out)
    assert head.split()[:2] == ["group", "state"]
    assert [row.split()[:2] for row in rows] == [["3", "open"], ["2", "open"], ["1", "ready"], ["0", "consumed"]]
    told = cli("groups", "--db", small.url, "--state", "ready", "--json").json
    assert [(g["id"], g["n_tokens"], g["staleness"]) for g in told["groups"]] == [(2, 10, 0)]
    some = cli("groups", "--db", small.url, "--limit", 2)
    assert len(some.out.splitlines()) == 3
    assert some.err.endswith(f"the next page: samplestore groups --db {quote(small.url)} --limit 2 --after 2\n")
    _, *typed = split(some.err.rpartition("next page: ")[2])
    assert [row.split()[0] for row in cli(*typed).out.splitlines()[1:]] == ["1", "0"]
    assert cli("groups", "--db", small.url, "--limit", 2, "--json").json["more"] is True
    wrong = cli("groups", "--db", small.url, "--state", "redy")
    assert wrong.code == 2 and "superseded" in wrong.err


def test_show_tells_one_sample(cli: Cli, small: Small) -> None:
    answer = cli("show", 5, "--db", small.url)
    told = lines(answer.out)
    assert told[:6] == [
        "sample       2/0 (id 5)",
        "portable id  UUID/2/0/0",
        "run          small",
        "incarnation  0",
        "status       aborted (abort)",
        "group        2, open, 2 samples, epoch 0",
    ]
    assert re.search(rf"^0 +3 +3 +generated +1 +0 +-0.5 +1 +1 +{ENGINE} +abort +TIME$", "\n".join(told), re.M)
    assert re.search(r"^release +TIME +\\x1b\[31mred", "\n".join(told), re.M)


@pytest.mark.parametrize("form", ["5", "2/0", "{uuid}/2/0", "{uuid}/2/0/0"])
def test_a_sample_has_several_names(cli: Cli, small: Small, form: str) -> None:
    told = cli("show", form.format(uuid=small.uuid), "--db", small.url, "--json").json
    assert (told["id"], told["group"]["number"], told["sample"]["index"]) == (5, 2, 0)
    assert told["portable_id"] == f"{small.uuid}/2/0/0"
    assert [(s["n_tokens"], s["version_min"], s["finish_reason"]) for s in told["segments"]] == [(3, 0, "abort")]


def test_show_decodes_with_a_tokenizer(cli: Cli, small: Small, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocab = {f"<{i}>": i for i in range(32)} | {"\x1b[2J": 12}
    Tokenizer(WordLevel({text: i for text, i in vocab.items() if text != "<12>"}, unk_token="<0>")).save(
        str(tmp_path / "tokenizer.json")
    )
    answer = cli("show", 5, "--db", small.url, "--tokenizer", tmp_path / "tokenizer.json")
    assert answer.code == 0, answer.err
    text = answer.out.replace("[[", "⟦").replace("]]", "⟧")  # without Unicode, as where this is no terminal
    assert text.endswith(f"\n⟦prompt⟧ <1> <2> <{small.claims[4].prompt_ids[2]}>\n⟦v0⟧ <10> <11> \\x1b[2J\n")
    missing = cli("show", 5, "--db", small.url, "--tokenizer", "nowhere")
    assert missing.code == 1 and "--tokenizer" in missing.err and missing.out == ""


@pytest.mark.parametrize("named", ["99", "7/0", "0/9", "99999999999999999", "2/0"])
def test_a_sample_that_is_not_there(cli: Cli, small: Small, named: str) -> None:
    flags = ["--run", "nobody"] if named == "2/0" else []
    answer = cli("show", named, "--db", small.url, *flags)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.rstrip().endswith(("samplestore groups", "--run nobody"))


@pytest.mark.parametrize("named", ["five", "1/2/3/4/5", "-1", "", "1/"])
def test_what_names_no_sample_is_a_usage_error(cli: Cli, small: Small, named: str) -> None:
    answer = cli("show", "--db", small.url, "--", named)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ") and "samplestore show --help" in answer.err


def test_the_ledger_closes(cli: Cli, small: Small) -> None:
    told = cli("ledger", "--db", small.url, "--json").json
    assert (told["closed"], told["generated"], told["recounted"]) == (True, 23, 23)
    assert cli("ledger", "--db", small.url, "--no-exact", "--json").json["closed"] is None
    out = cli("ledger", "--db", small.url).out
    assert re.search(r"^consumed +10$", out, re.M) and re.search(r"^closed +yes$", out, re.M)
    assert "25 generated = 23 stored + 2 lost (abort 2)" in out


def test_a_damaged_segment_is_found(cli: Cli, small: Small) -> None:
    assert cli("check", "--db", small.url).out == "ok: run small keeps every promise that a query can verify\n"
    with samplestore.open(small.url) as store:
        table = Segment.__table__
        damage = table.update().where(table.c.sample_id == 5).values(payload=bytes([1]) + bytes(16))
        store.database.write(lambda connection: connection.execute(damage))
    for flags in ([], ["--json"]):
        ledger, check = (cli(name, "--db", small.url, *flags) for name in ("ledger", "check"))
        assert (ledger.code, check.code) == (5, 5)
        assert ledger.err.rstrip().endswith(f"samplestore check --run small --db {quote(small.url)}")
        assert check.err.rstrip().endswith(f"samplestore ledger --run small --db {quote(small.url)}")
        if flags:
            assert ledger.json["closed"] is False
            assert ledger.json["differences"] == [
                {"fate": "resumable", "reason": "", "version": 0, "recounted_minus_kept": -1}
            ]
            assert check.json["ok"] is False
            assert {f["code"] for f in check.json["findings"]} >= {"segment_length", "ledger"}
        else:
            assert re.search(r"^closed +NO$", ledger.out, re.M)
            assert "segment_length: " in check.out


def test_engines_list(cli: Cli, small: Small) -> None:
    told = cli("engines", "list", "--db", small.url, "--json").json["engines"]
    assert [(e["run"], e["url"], e["version"], e["up_to_date"]) for e in told] == [("small", ENGINE, 0, True)]
    with samplestore.open(small.url) as store:
        store.run("small").publish_weights(step=1)
    assert (
        cli("engines", "list", "--db", small.url, "--run", "small", "--json").json["engines"][0]["up_to_date"] is False
    )
    assert cli("engines", "list", "--db", small.url, "--run", "other").code == 1


def test_reading_never_writes(cli: Cli, small: Small) -> None:
    """What a run holds is the same before and after every reading command."""
    with samplestore.open(small.url) as store:
        before = snapshot(store.run("small"))
    for command in READING:
        assert cli(command, "--db", small.url).code == 0
    with samplestore.open(small.url) as store:
        assert snapshot(store.run("small")) == before


def test_reading_never_touches_a_sqlite_file(cli: Cli, sqlite_url: str) -> None:
    """The file's data version stays: nobody has committed to it."""
    with samplestore.open(sqlite_url) as store:
        store.run("small")
    watcher = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    before = watcher.execute("PRAGMA data_version").fetchone()
    for command in READING:
        assert cli(command, "--db", sqlite_url).code == 0
    assert watcher.execute("PRAGMA data_version").fetchone() == before
    watcher.close()
