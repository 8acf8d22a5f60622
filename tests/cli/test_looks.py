"""Commands that look closer: groups by filter and page, one sample's trajectory, aborts, events, numbers."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplestore
from samplestore.cli import app
from samplestore.cli.tokens import PALETTE, stretches
from samplestore.errors import ArrayNotStored, StoreUnavailable
from samplestore.queries.events import Follower
from samplestore.queries.trajectory import Span
from tests.cli.conftest import ENGINE, HOSTILE, Cli, Small
from tests.cli.test_commands import NESTED, SCRIPT, environment, on_terminal
from tests.docs.small_run import build
from tests.support import factory as f
from tests.support.processes import Processes

# What neither reads nor answers: it serves, or changes something and says so.
CHANGES = {
    "demo", "add-prompts", "import-samples", "worker", "reward", "engine", "sglang", "dashboard", "pause", "resume",
    "drain", "abort", "reap", "requeue", "drop", "expire", "rewind", "prune", "backup", "restore", "export", "import",
    "fork", "merge",
}  # fmt: skip
CHANGES_TOO = {("db", "upgrade"), ("db", "downgrade"), ("engines", "forget")}


@pytest.mark.parametrize("name", sorted(set(app.COMMANDS) - CHANGES))
def test_every_reading_command_has_json(name: str) -> None:
    command = app.load(name)
    read = [(name, command)]
    if name in NESTED:
        read = [(f"{name} {sub}", command.commands[sub]) for sub in NESTED[name] if (name, sub) not in CHANGES_TOO]
    for path, one in read:
        assert "--json" in {flag for p in one.params for flag in p.opts}, path


def test_what_looks_is_not_among_what_changes() -> None:
    assert not CHANGES & {name for name, listed in app.COMMANDS.items() if listed.panel == app.LOOK}


# -- groups


@pytest.fixture
def many(db_url: str) -> str:
    build(db_url, steps=2)
    return db_url


def numbers(cli: Cli, url: str, *flags: object) -> list[int]:
    return [g["number"] for g in cli("groups", "--db", url, *flags, "--json").json["groups"]]


def test_groups_by_staleness_and_spread(cli: Cli, many: str) -> None:
    told = {g["number"]: g for g in cli("groups", "--db", many, "--json").json["groups"]}
    assert numbers(cli, many, "--zero-std") == [n for n, g in told.items() if g["reward_std"] == 0] == [1]
    assert numbers(cli, many, "--some-std") == [n for n, g in told.items() if g["reward_std"]]
    old = [n for n, g in told.items() if g["staleness"] is not None and g["staleness"] >= 2]
    assert numbers(cli, many, "--min-staleness", 2) == old and old
    assert numbers(cli, many, "--min-staleness", 2, "--state", "ready") == [4, 3, 2]
    assert numbers(cli, many, "--state", "ready", "--state", "open") == [6, 4, 3, 2]
    assert numbers(cli, many, "--max-staleness", 0) == [0], "consumed when it was fresh"
    spread = numbers(cli, many, "--spread")
    assert spread[-1] == 1 and [told[n]["reward_std"] for n in spread[:-1]] == [0.5] * (len(spread) - 1)
    assert numbers(cli, many, "--version", 2) == [6] and numbers(cli, many, "--dataset", "no such") == []
    assert cli("groups", "--db", many, "--after", "nowhere").code == 1


@pytest.mark.parametrize("order", [[], ["--spread"]], ids=["newest", "spread"])
def test_groups_page_by_page(cli: Cli, many: str, order: list[str]) -> None:
    seen: list[int] = []
    after: list[object] = []
    while True:
        told = cli("groups", "--db", many, "--limit", 2, *order, *after, "--json").json
        seen += [g["number"] for g in told["groups"]]
        if not told["more"]:
            assert told["after"] is None
            break
        after = ["--after", told["after"]]
    assert seen == numbers(cli, many, *order) and len(set(seen)) == len(seen) > 3
    assert re.search(r"samplestore groups .*--after \S+$", cli("groups", "--db", many, "--limit", 2, *order).err)


def test_a_filter_that_fits_little_looks_on_by_itself(cli: Cli, many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from samplestore.queries import group_list

    monkeypatch.setattr(group_list, "LOOK", 2)
    assert numbers(cli, many, "--zero-std") == [1]
    monkeypatch.setattr("samplestore.cli.groups.MOST_LOOKS", 2)
    told = cli("groups", "--db", many, "--zero-std")
    assert "looked through down to number 3" in told.err and "--after 3" in told.err


# -- show


def span(start: int, n: int, version: int | None, **more: Any) -> Span:
    told: dict[str, Any] = {"kind": "generated", "loss": 1, "finish_reason": None, **more}
    return Span(
        0, 0, start, n, told["kind"], told["loss"], version, version, 1, 1, None, None, told["finish_reason"], None,
        0.0, 0.0,
    )  # fmt: skip


class Bytes:
    """Ids are bytes of UTF-8."""

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_character_that_two_versions_wrote_stands_whole() -> None:
    ids = [*b"P", *"aé🛒b".encode()]
    spans = [span(1, 2, 1), span(3, 3, 2), span(6, 3, 3)]
    told = stretches(ids, 1, spans, Bytes())
    assert [(x.label, x.text) for x in told] == [("prompt", "P"), ("v1", "a"), ("v2", "é"), ("v3", "🛒b")]
    assert "".join(x.text for x in told) == "Paé🛒b"
    cut = stretches(ids[:5], 1, spans, Bytes())
    assert [x.n_tokens for x in cut] == [1, 2, 2] and "".join(x.text for x in cut).startswith("Paé")
    assert [x.text for x in stretches(ids[:4], 1, spans)] == ["80", "97 195", "169"]


def test_stretches_differ_by_more_than_colour() -> None:
    spans = [span(0, 1, 4), span(1, 1, None), span(2, 1, 4, kind="environment"), span(3, 1, 5, loss=0)]
    told = stretches([97] * 4, 0, spans, Bytes())[1:]
    assert [x.label for x in told] == ["v4", "v?", "environment", "v5, not trained"]
    assert [x.style for x in told] == [PALETTE[4], "", "italic", f"dim {PALETTE[5]}"]


def test_show_tells_stages_and_where_versions_change(cli: Cli, many: str) -> None:
    answer = cli("show", "0/0", "--db", many)
    assert answer.code == 0, answer.err
    assert re.search(r"^reward +sample +done +ok +0 ", answer.out, re.M)
    left, right = ("⟦", "⟧") if "⟦" in answer.out else ("[[", "]]")
    assert (
        answer.out.endswith(
            f"{left}prompt{right} 1 2 2\n{left}v0{right} 10 11 12 13\n{left}abort | v0{right} 10 11 12\n"
        )
        or answer.out.count(f"{left}abort | v0{right}") == 1
    )
    told = cli("show", "6/0", "--db", many, "--json").json
    assert [(s["version_min"], s["n_tokens"]) for s in told["segments"]] == [(1, 3), (2, 3)]
    assert [s["name"] for s in told["stages"]] == ["reward"] and "text" not in told


def tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    names = {i: f"<{i}>" for i in range(64)} | {11: "\x1b[2J", 12: "\u202egnp"}
    path = folder / "tokenizer.json"
    Tokenizer(WordLevel({text: i for i, text in names.items()}, unk_token="<0>")).save(str(path))
    return path


def test_show_takes_the_configured_tokenizer(cli: Cli, many: str, tmp_path: Path) -> None:
    path = tokenizer(tmp_path)
    Path("samplestore.toml").write_text(f'[worker]\ntokenizer = "{path}"\n')
    answer = cli("show", "6/0", "--db", many)
    assert "v1" in answer.out and "<10>" in answer.out
    assert not set(answer.out) & {"\x1b", "\u202e"} and "\\x1b[2J" in answer.out and "\\u202egnp" in answer.out
    told = cli("show", "6/0", "--db", many, "--json").json
    assert [s["text"].split()[0] for s in told["segments"]] == ["<10>", "<10>"]
    assert told["text"]["response"] == "".join(s["text"] for s in told["segments"])
    path.unlink()
    without = cli("show", "6/0", "--db", many)
    assert without.code == 0 and "token ids instead of text" in without.err and "10 11 12" in without.out


def test_a_trajectory_has_the_colours_of_its_versions(sqlite_url: str) -> None:
    build(sqlite_url, steps=2)
    drawn = on_terminal(["show", "6/0", "--db", sqlite_url], COLORTERM="truecolor")
    for version in (1, 2):
        r, g, b = (int(PALETTE[version][i : i + 2], 16) for i in (1, 3, 5))
        assert f"38;2;{r};{g};{b}m" in drawn, f"v{version} has its colour"
        assert f"v{version}" in drawn
    assert "legend" in drawn and "3 tokens" in drawn
    plain = on_terminal(["show", "6/0", "--db", sqlite_url], NO_COLOR="1")
    assert "38;2" not in plain and "abort | v2" in plain


# -- aborts


def test_aborts(cli: Cli, small: Small) -> None:
    told = cli("aborts", "--db", small.url, "--json").json
    reasons = {(r["kind"], r["reason"]): r["times"] for r in told["by_reason"]}
    assert reasons[("fail", "an error")] == 1 and reasons[("release", "shutdown")] == 1
    cost = {"generated": 5, "stored": 3, "lost": 2, "untold": 0}
    assert told["by_engine"] == [{"engine": ENGINE, "cut_short": 1, **cost}]
    assert [(w["worker"], w["name"]) for w in told["by_worker"]] == [(small.worker, "worker-[red]x")]
    assert told["by_version"] == [{"version": 0, "aborted": 1}]
    assert told["cost"] == {"resumes": 0, "kept": 0, "lost": 2, "prefilled_again": 0}
    assert sum(part["release"] for part in told["over_time"]) == 2
    out = cli("aborts", "--db", small.url).out
    assert "0 kept by resuming, 2 lost" in out and "\\x1b[31mred" in out and "#" in out
    assert not set(out) & {"\x1b", "\x07", "\u202e"}


def test_a_resume_is_counted_with_what_it_cost(cli: Cli, small: Small) -> None:
    from samplestore.types import RequestInfo

    with samplestore.open(small.url) as store:
        run = store.run("small")
        (again,) = run.claim(small.worker, 1)
        run.begin_request(again, "again", ENGINE, 1.0, resumes=True)
        f.add(run, again, 2, 0, "stop", rid="again")
        run.end_request(RequestInfo("again", ENGINE, prompt_tokens=6, cached_tokens=2, generated_tokens=2))
    cost = cli("aborts", "--db", small.url, "--json").json["cost"]
    assert cost == {"resumes": 1, "kept": 3, "lost": 2, "prefilled_again": 4}


@pytest.mark.parametrize("since", ["soon", "0s", "-1h", "1 week", ""])
def test_a_time_that_is_none(cli: Cli, small: Small, since: str) -> None:
    answer = cli("aborts", "--db", small.url, "--since", since)
    assert answer.code == 2 and answer.err.rstrip().endswith("samplestore aborts --since 6h")


def test_no_aborts(cli: Cli, small: Small) -> None:
    with samplestore.open(small.url) as store:
        store.run("later")
    assert cli("aborts", "--db", small.url).out.rstrip().endswith("Look further back with: --since 30d")


# -- status


def test_failures_are_one_line(cli: Cli, small: Small) -> None:
    with samplestore.open(small.url) as store:
        run = store.run("small")
        claim = next(c for c in run.claim(small.worker, 8) if c.sample_id != small.claims[4].sample_id)
        run.fail(claim, "another error: 17")
    out = cli("status", "--db", small.url).out
    assert re.search(r"^failures +2; the newest, \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: another error: 17$", out, re.M)
    assert re.search(r"^fail +2$", out, re.M)
    assert out.count("another error") == 2, "once here, once in why"
    assert cli("status", "--db", small.url, "--json").json["failures"]["count"] == 2


def test_metrics(cli: Cli, small: Small) -> None:
    told = cli("metrics", "--db", small.url, "--json").json["metrics"]
    assert told["samplestore/groups/ready"] == 1 and told["samplestore/samples/in_flight"] == 1
    out = cli("metrics", "--db", small.url).out
    assert re.search(r"^samplestore/groups/ready +1 +groups ready, without those of evaluations$", out, re.M)


def test_a_typing_error_in_the_name_of_an_array_is_told(small: Small) -> None:
    with samplestore.open(small.url) as store:
        run = store.run("small")
        f.add(run, small.claims[7], 1)
        run.attach(small.claims[7], "hidden", np.ones((1, 2)))
        assert run.array(1, "values")[0].size == 0, "a known name that this sample has not"
        assert run.array(1, "hidden")[0].size == 0, "another sample has it"
        with pytest.raises(ArrayNotStored, match="no sample of this run has an array 'hiden'; stored: hidden"):
            run.array(1, "hiden")


# -- tail


def test_tail(cli: Cli, small: Small) -> None:
    lines = cli("tail", "--db", small.url, "--lines", 1000).out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  [a-z_]+ ", line) for line in lines)
    assert any("\\x1b[31mred" in line for line in lines)
    told = [json.loads(line) for line in cli("tail", "--db", small.url, "-n", 2, "--json").out.splitlines()]
    assert [t["schema_version"] for t in told] == [1, 1] and told[0]["id"] < told[1]["id"]
    assert told[0]["at"].endswith("Z") and told[0]["run"] == "small"
    kinds = cli("tail", "--db", small.url, "--kind", "fail", "--kind", "release").out.splitlines()
    assert {line.split()[1] for line in kinds} == {"fail", "release"}
    assert cli("tail", "--db", small.url, "-n", 0).out == ""


def test_each_event_is_told_once_however_late_its_commit(store: samplestore.Store) -> None:
    run = f.make_run(store)
    follower = Follower(run.database, run.id)
    follower.newest(5)
    run.pause("one")
    first = follower.more()
    assert [(e["kind"], e["reason"]) for e in first] == [("run_paused", "one")]
    if not run.database.is_sqlite:  # a lower id that was not committed yet
        f.execute(
            run, "INSERT INTO event (id, run_id, at, kind) SELECT min(id) - 1, :r, 0, 'late' FROM event", r=run.id
        )
        f.execute(run, "UPDATE event SET id = :i WHERE kind = 'late'", i=first[0]["id"] + 1)
        assert [e["kind"] for e in follower.more()] == ["late"]
        f.execute(run, "SELECT setval(pg_get_serial_sequence('event', 'id'), (SELECT max(id) FROM event))")
    run.resume()
    run.pause("two")
    assert [e["kind"] for e in follower.more()] == ["run_running", "run_paused"]
    assert follower.more() == []


def test_tail_waits_for_a_database_that_is_away(cli: Cli, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = [StoreUnavailable("db", "restarts", "Wait"), StoreUnavailable("db", "restarts", "Wait")]
    real = Follower.more

    def more(self: Follower) -> Any:
        if told:
            raise told.pop()
        if told == []:
            with samplestore.open(small.url) as store:
                store.run("small").pause("seen")
        told.append(KeyboardInterrupt())
        return real(self)

    monkeypatch.setattr(Follower, "more", more)
    answer = cli("tail", "--db", small.url, "-n", 0, "--follow", "--interval", 0.1)
    assert answer.code == 130
    assert re.match(r"\S+Z  run_paused +seen\n$", answer.out)
    assert answer.err.count("waiting: ") == 1 and answer.err.count("the database is back") == 1


def test_tail_follows_until_ctrl_c(processes: Processes, sqlite_url: str) -> None:
    with samplestore.open(sqlite_url) as store:
        run = store.run("small")
        run.pause("before")
        following = processes.start(
            [*SCRIPT, "tail", "--follow", "--interval", "0.1", "--json", "--db", sqlite_url], name="tail"
        )
        following.wait_for_log('"before"')
        run.resume(HOSTILE)
        following.wait_for_log('"run_running"')
    os.kill(following.pid, signal.SIGINT)
    assert following.wait(timeout=30) == 130
    told = [json.loads(line) for line in following.log().splitlines()]
    assert [t["kind"] for t in told] == ["run_paused", "run_running"] and told[1]["reason"] == HOSTILE


# -- watch


def screen(arguments: list[str], until: Callable[[str], bool]) -> tuple[int, str]:
    """(exit code, output) of a command on a terminal of 80 columns, ended by Ctrl-C when `until` is true."""
    master, slave = pty.openpty()
    env = environment(TERM="xterm") | {"COLUMNS": "80", "LINES": "40"}
    with subprocess.Popen([*SCRIPT, *arguments], stdout=slave, stderr=slave, stdin=slave, env=env) as process:
        os.close(slave)
        told, asked = b"", False
        try:
            while select.select([master], [], [], 60)[0] and (part := os.read(master, 65536)):
                told += part
                if not asked and until(told.decode(errors="replace")):
                    process.send_signal(signal.SIGINT)
                    asked = True
        except OSError:  # Linux reports the end of a terminal as EIO
            pass
        code = process.wait(timeout=60)
    os.close(master)
    return code, told.decode(errors="replace")


def test_watch_stands_still_on_a_terminal(small: Small) -> None:
    code, told = screen(
        ["status", "--watch", "--interval", "0.1", "--db", small.url], lambda text: text.count("Ctrl-C ends it") >= 2
    )
    assert code == 130 and "Traceback" not in told, told
    assert "\x1b[?1049h" in told and "\x1b[?1049l" in told, "the alternate screen, and back"
    after = told.split("\x1b[?1049l")[1]
    assert "small (running)" in after, "what was last seen stays"
    assert "\x1b[31mred" not in told and "\\x1b[31mred" in told


def test_tables_are_legible_on_a_narrow_terminal(sqlite_url: str) -> None:
    """Where columns do not fit, a row is a paragraph: no word of a number or a name is cut."""
    build(sqlite_url, steps=2)
    code, told = screen(["groups", "--limit", "2", "--db", sqlite_url], lambda _: False)
    assert code == 0, told
    text = re.sub(r"\x1b\[[0-9;]*m", "", told).replace("\r", "")
    assert re.search(r"^group 6, state open, finished 1/2, unscored 1, created", text, re.M), text
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("there may be more"))


def test_names_are_not_cut_in_two_while_there_is_room(sqlite_url: str) -> None:
    """The explanation beside them is folded instead, and none of it is lost."""
    from samplestore.queries.metric_names import NAMES, PREFIX

    build(sqlite_url, steps=2)
    code, told = screen(["metrics", "--db", sqlite_url], lambda _: False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", told).replace("\r", "").splitlines()
    assert code == 0 and all(len(line) <= 80 for line in lines), told
    head = next(line for line in lines if "value" in line)
    explained = " ".join(line[head.index("is", head.index("value") + 5) :].strip() for line in lines[2:]).split()
    names = [name for line in lines if (name := line.split(" ")[0]).startswith(PREFIX)]
    shown = [NAMES[name.removeprefix(PREFIX)] for name in names]  # a KeyError: a name was cut
    assert len(names) > 30 and explained == " ".join(shown).split()
