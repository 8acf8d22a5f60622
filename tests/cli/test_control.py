"""Commands that change a run, and what they refuse."""

from __future__ import annotations

from shlex import quote

import pytest
import sqlalchemy as sa

import samplestore
from samplestore.errors import InvalidSetting, LeaseLost
from samplestore.models import EngineRow, Event, Sample, SampleGroup, Worker
from tests.cli.conftest import ENGINE, Cli, Small
from tests.support import factory as f


def events(small: Small, kind: str) -> list[str | None]:
    with samplestore.open(small.url) as store, store.session() as session:
        return list(session.scalars(sa.select(Event.reason).where(Event.kind == kind).order_by(Event.id)))


def test_pause_resume_drain(cli: Cli, small: Small) -> None:
    assert cli("pause", "--db", small.url, "--reason", "maintenance").out.startswith("run small is paused")
    assert "the run is paused" in cli("why", "--db", small.url).out
    assert cli("resume", "--db", small.url).out == "run small is running\n"
    assert cli("drain", "--db", small.url, "--run", "small").code == 0
    assert cli("status", "--db", small.url, "--json").json["state"] == "draining"
    assert events(small, "run_paused") == ["maintenance"]


def test_abort_reaches_the_workers(cli: Cli, small: Small) -> None:
    answer = cli("abort", "--db", small.url, "--run", "small", "--reason", "batch complete")
    assert answer.out == "run small: workers were asked to abort what is in flight (1 sample)\n"
    with samplestore.open(small.url) as store:
        told = store.run("small").heartbeat(small.worker)
    assert (told.abort_seq, told.abort_reason) == (1, "batch complete")


def test_abort_names_samples_and_groups_as_everything_does(cli: Cli, small: Small) -> None:
    for wrong, said in ((("--group", 9), "run small has no group 9"), (("--sample", "3/7"), "there is no sample 3/7")):
        refused = cli("abort", "--db", small.url, "--reason", "x", *wrong)
        assert refused.code == 1 and said in refused.err, refused.err
    for named in (("--group", 3), ("--sample", "3/1"), ("--sample", 8)):
        answer = cli("abort", "--db", small.url, "--reason", "x", *named)
        assert answer.out == "run small: workers were asked to abort those samples\n", answer.err
    with samplestore.open(small.url) as store, store.session() as session:
        asked = session.scalars(sa.select(Event.details).where(Event.kind == "abort_inflight").order_by(Event.id))
        assert [details["samples"] for details in asked] == [[7, 8], [8], [8]]


def test_what_cannot_be_taken_back_names_its_run(cli: Cli, small: Small) -> None:
    with samplestore.open(small.url) as store:
        store.run("later")
    for command in (["abort", "--reason", "x"], ["rewind", "0", "--yes"]):
        answer = cli(*command, "--db", small.url)
        assert (answer.code, answer.out) == (2, "")
        assert "small, later" in answer.err and answer.err.rstrip().endswith(
            f"samplestore runs --db {quote(small.url)}"
        )


def test_reasons_are_asked_for(cli: Cli, small: Small) -> None:
    for command in (["abort"], ["drop", "3"], ["requeue", "5"]):
        answer = cli(*command, "--db", small.url)
        assert answer.code == 2
        assert "--reason" in answer.err and answer.err.rstrip().endswith(f"samplestore {command[0]} --help")


def test_reap_frees_the_dead(cli: Cli, small: Small) -> None:
    assert cli("reap", "--db", small.url).out.startswith("run small: 0 workers are dead; freed 0 samples")
    with samplestore.open(small.url) as store:
        old = sa.update(Worker).where(Worker.id == small.worker).values(heartbeat=1.0)
        store.database.write(lambda connection: connection.execute(old))
    sick = cli("doctor", "--db", small.url)
    assert sick.code == 5 and sick.err.rstrip().endswith(f"samplestore reap --run small --db {quote(small.url)}")
    answer = cli("reap", "--db", small.url)
    assert answer.out.startswith(f"run small: 1 worker is dead ({small.worker}); freed 1 sample, 0 stages")


def test_requeue_starts_afresh(cli: Cli, small: Small) -> None:
    answer = cli("requeue", 5, "3/1", "--db", small.url, "--reason", "bad prompt")
    assert answer.out == "run small: 2 samples start afresh (2/0, 3/1)\n", answer.err
    with samplestore.open(small.url) as store, store.session() as session:
        rows = session.execute(sa.select(Sample.id, Sample.incarnation, Sample.n_tokens).where(Sample.incarnation > 0))
        assert sorted(tuple(row) for row in rows) == [(5, 1, 0), (8, 1, 0)]
    assert cli("ledger", "--db", small.url, "--json").json["by_fate"]["superseded"] == 3
    old = cli("show", f"{small.uuid}/2/0/0", "--db", small.url)
    assert "0 (a former life; the present one is 1)" in old.out and "3 tokens" in old.out
    assert cli("requeue", 99, "--db", small.url, "--reason", "x").code == 1


def test_requeue_of_a_consumed_group_says_why_not(cli: Cli, small: Small) -> None:
    answer = cli("requeue", 1, "--db", small.url, "--reason", "x")
    assert (answer.code, answer.out) == (1, "")
    assert "cannot requeue group 0: it is consumed" in answer.err and "samplestore" in answer.err.rsplit(". ", 1)[-1]


def test_drop_closes_groups_for_their_owners(cli: Cli, small: Small) -> None:
    answer = cli("drop", 2, 3, "--db", small.url, "--reason", "duplicates")
    assert answer.out == "run small: 2 groups dropped (2, 3)\n", answer.err
    with samplestore.open(small.url) as store, store.session() as session:
        dropped = session.execute(sa.select(SampleGroup.id, SampleGroup.reason).where(SampleGroup.state == "dropped"))
        assert sorted(tuple(row) for row in dropped) == [(3, "duplicates"), (4, "duplicates")]
        with pytest.raises(LeaseLost):
            store.run("small").append(small.claims[7], [1], [-0.1], 0)
    assert events(small, "dropped") == ["duplicates", "duplicates"]


def test_drop_changes_nothing_if_one_group_is_wrong(cli: Cli, small: Small) -> None:
    for numbers, said in (((2, 99), "run small has no group 99"), ((2, 0), "cannot drop group 0: it is consumed")):
        answer = cli("drop", *numbers, "--db", small.url, "--reason", "x")
        assert (answer.code, answer.out) == (1, "") and said in answer.err
    assert cli("groups", "--db", small.url, "--state", "dropped", "--json").json["groups"] == []


def test_a_number_is_that_of_the_run_that_is_named(cli: Cli, small: Small) -> None:
    with samplestore.open(small.url) as store:
        later = store.run("later", samples_per_prompt=1, groups_per_step=1)
        later.add_prompts([{"prompt_ids": [1]}])
        later.admit()
    for command in (("drop", 0), ("expire", 0), ("abort", "--group", 0)):
        answer = cli(*command, "--db", small.url, "--reason", "x")
        assert answer.code == 2 and "several runs (small, later): name one with --run NAME" in answer.err, answer.err
    assert (
        cli("drop", 0, "--db", small.url, "--run", "later", "--reason", "x").out == "run later: 1 group dropped (0)\n"
    )
    states = [g["state"] for g in cli("groups", "--db", small.url, "--run", "small", "--json").json["groups"]]
    assert states == ["open", "open", "ready", "consumed"]


def test_rewind_asks_first(cli: Cli, small: Small) -> None:
    answer = cli("rewind", 0, "--db", small.url)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.rstrip().endswith(f"samplestore rewind 0 --run small --yes --db {quote(small.url)}")
    assert cli("status", "--db", small.url, "--json").json["timeline"] == 0


def test_rewind(cli: Cli, small: Small) -> None:
    answer = cli("rewind", 0, "--db", small.url, "--run", "small", "--yes")
    assert answer.out.startswith("run small is at step 0: timeline 1, weights version 1 "), answer.err
    told = cli("status", "--db", small.url, "--json").json
    assert (told["timeline"], told["groups"]["ready"], told["groups"]["consumed"]) == (1, 2, 0)
    assert told["batches"]["rewound"] == 1
    assert cli("rewind", "-1", "--db", small.url, "--yes").code == 2


def test_engines_forget(cli: Cli, small: Small) -> None:
    assert cli("engines", "forget", ENGINE, "--db", small.url).out == f"run small has forgotten engine {ENGINE}\n"
    with samplestore.open(small.url) as store, store.session() as session:
        assert session.scalars(sa.select(EngineRow.state)).all() == ["gone"]
    again = cli("engines", "forget", ENGINE, "--db", small.url)
    assert again.code == 1 and again.err.rstrip().endswith("samplestore engines list")
    assert len(events(small, "engine_forgotten")) == 1


def test_drain_says_how_to_go_on(cli: Cli, small: Small) -> None:
    assert (
        cli("drain", "--db", small.url).out.rstrip().endswith(f"samplestore resume --run small --db {quote(small.url)}")
    )


def test_a_name_is_quoted_in_what_to_type(cli: Cli, store: samplestore.Store, db_url: str) -> None:
    store.run("a b; $(id)")
    for command in ("pause", "drain"):
        assert cli(command, "--db", db_url).out.endswith(
            f"samplestore resume --run 'a b; $(id)' --db {quote(db_url)}\n"
        )
    refused = cli("rewind", 0, "--db", db_url)
    assert refused.code == 2 and refused.err.endswith(
        f"samplestore rewind 0 --run 'a b; $(id)' --yes --db {quote(db_url)}\n"
    )


@pytest.mark.parametrize("name", ["\udcff", "a\x00", "x" * 201], ids=["surrogate", "NUL", "long"])
def test_what_can_be_no_name_of_a_run_is_refused(store: samplestore.Store, name: str) -> None:
    for verb in (store.run, store.existing_run):
        with pytest.raises(InvalidSetting, match="1 to 200 characters without NUL or lone surrogates"):
            verb(name)
    assert store.run_names() == []


def test_expire_closes_named_groups(cli: Cli, small: Small) -> None:
    answer = cli("expire", 1, 2, "--db", small.url, "--reason", "old prompts")
    assert answer.out == "run small: 2 groups (1, 2) are stale\n", answer.err
    told = cli("ledger", "--db", small.url, "--json").json
    assert told["closed"] is True and (told["by_fate"]["stale"], told["by_fate"]["ready"]) == (13, 0)
    assert events(small, "stale") == ["old prompts", "old prompts"]
    with samplestore.open(small.url) as store:
        assert store.run("small").check() == []
    assert cli("expire", 1, "--db", small.url, "--reason", "again").code == 0, "what is stale stays so"


def test_expire_closes_what_is_too_far_behind(cli: Cli, store: samplestore.Store, db_url: str) -> None:
    run = f.make_run(store, prompts=3, max_staleness=5, stale="skip")
    claims = run.claim(f.register(run), 6)
    for claim in claims[:2]:
        f.answer(run, claim)
    f.add(run, claims[2])  # a group in the middle; the third has no tokens, and is as old as its first will be
    run.publish_weights(step=1)
    run.publish_weights(step=2)
    assert run.expire(max_staleness=2) == 0
    answer = cli("expire", "--max-staleness", 1, "--reason", "too old for us", "--db", db_url)
    assert answer.out == "run r: 2 groups that were more than 1 version behind are stale\n", answer.err
    f.sound(run)
    assert f.states(run) == ["stale", "stale", "open"]
    assert {e["reason"] for e in f.events(run, "stale")} == {"too old for us"}
    with pytest.raises(LeaseLost):
        f.add(run, claims[2])
    run.rewind(-1)
    assert f.states(run) == ["ready", "open", "open"], "as fresh as the weights again"
    f.sound(run)


def test_expire_refuses(cli: Cli, small: Small) -> None:
    for flags, code, said in (
        ([], 2, "samplestore expire --help"),
        ([2], 2, "samplestore expire --help"),
        ([2, "--max-staleness", 1, "--reason", "x"], 2, "samplestore expire --help"),
        ([0, "--reason", "x"], 1, "cannot expire group 0: it is consumed"),
        ([99, "--reason", "x"], 1, "samplestore groups"),
    ):
        answer = cli("expire", *flags, "--db", small.url)
        assert (answer.code, answer.out) == (code, ""), flags
        assert said in answer.err
    with samplestore.open(small.url) as store:
        run = store.run("small")
        for wrong in ({}, {"group_ids": [2], "max_staleness": 1}, {"max_staleness": -1}, {"group_ids": [2]}):
            with pytest.raises(samplestore.errors.InvalidSetting):
                run.expire(**wrong)
