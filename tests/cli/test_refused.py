"""What can't be meant ends in one line that says so, whatever it was: never in a traceback, never with a password."""

from __future__ import annotations

import pytest

from .conftest import Cli, Small

LONG = "a" * 300


@pytest.mark.parametrize(
    "url", ["postgresql://u:s3cr3t@[::/x", "postgresql://u:s3cr3t@h:port/x", "://u:s3cr3t@h", "+://s3cr3t"]
)
def test_what_is_no_url_is_refused_and_not_shown(cli: Cli, url: str) -> None:
    for args in (["status", "--json"], ["db", "upgrade"], ["doctor"], ["merge", url], ["backup", "x"]):
        told = cli(*args, "--db", url) if args[0] != "merge" else cli("merge", "all.db", url)
        assert told.code in (1, 2, 3) and "s3cr3t" not in told.out + told.err, told
        assert "Traceback" not in told.err and told.err.startswith("error: ") and told.err.count("\n") == 1, told


def test_a_name_that_no_file_can_have(cli: Cli, small: Small) -> None:
    given = [
        ["merge", " ", LONG], ["backup", LONG, "--db", small.url], ["config", "show", "--config", LONG],
        ["export", "small", "--to", LONG, "--db", small.url], ["restore", LONG, "--db", "new.db"],
        ["import", LONG, "--run", "small", "--db", small.url], ["status", "--db", LONG],
    ]  # fmt: skip
    for args in given:
        told = cli(*args)
        assert told.code and told.out == "" and "File name too long" in told.err, (args, told)
        assert told.err.startswith("error: ") and told.err.count("\n") == 1 and "ls -l" in told.err, told


@pytest.mark.parametrize("revision", ["2", "²", "٠٠٠٢", "00002", "-1", "", "9999"])
def test_a_revision_that_is_not_there(cli: Cli, small: Small, revision: str) -> None:
    told = cli("db", "downgrade", "--db", small.url, "--", revision)
    assert told.code == 2 and f"there is no schema revision {revision!r}" in told.err, told
