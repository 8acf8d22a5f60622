"""Each error is found in troubleshooting by the text that it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from samplestore import (
    config,
    environment,
    errors,
    prompts,
    tokenizers,
)
from samplestore.backups import restored
from samplestore.copies import copying, hidden
from samplestore.copies import runs as copies
from samplestore.interop.trl import WrongCount
from samplestore.portable import exports, imports, replaced, slime_files
from samplestore.promptfiles import InvalidRow
from samplestore.slime import NotConfigured
from samplestore.types import Why
from samplestore.verbs import deaths, own_groups
from samplestore.workers.chat import TemplateChanged
from samplestore.workers.episode_runs import EpisodeFailed, EpisodeSpecError
from samplestore.workers.filters import FilterSpecError
from samplestore.workers.replies import EngineError, PromptRefused
from samplestore.workers.rewards import RewardSpecError
from tests.docs.pages import page

OPERATIONAL = sa.exc.OperationalError
DATABASE_UNUSABLE = [
    *[
        environment._sqlite("/d/a.db", Path("/d/a.db"), said)
        for said in ("file is not a database", "database disk image is malformed", "unable to open database file")
    ],
    errors.DatabaseUnusable("/tmp", *environment.closed(Path("/tmp"))),
    errors.DatabaseUnusable("/proc/1/mem/a.db", *environment.closed(Path("/nowhere/a.db"))),
    errors.DatabaseUnusable("/a.db", *environment.closed(Path("/a.db"))),
    errors.DatabaseUnusable("/a.db", "may not be read by this user", "Look at its rights: ls -l /a.db"),
    errors.DatabaseUnusable("/a.db.gate", "can't be opened to write (denied)", "Look at the rights: ls -ld /"),
    errors.DatabaseUnusable("/a", "can't be read or written: the disk reports an error", "Look at: dmesg | tail"),
    errors.DatabaseUnusable(
        "/a", "needs SQLite 3.38.0 or newer, and this Python has 3.34", "Run: pip install pysqlite3"
    ),
    *[
        environment._postgres("postgresql://h/a", OPERATIONAL("", None, Exception(said)), said)
        for said in ('database "a" does not exist', "password authentication failed for user")
    ],
    errors.DatabaseUnusable("p", "does not let this user do that (denied)", "Look at its rights: psql -c '\\dp' URL"),
    errors.DatabaseUnusable("p", "is a standby, which can't be written", "Use the primary: --db postgresql://..."),
]
BACKUP_ERRORS = [
    errors.BackupError("b.db exists. Name another file, or replace it with: --overwrite"),
    errors.BackupError(f"b.db is damaged: page 3. {restored.ANOTHER}"),
    errors.BackupError(f"run 'x' of b.db breaks a promise: ledger. {restored.ANOTHER}"),
    errors.BackupError(
        "pg_dump, which does this for PostgreSQL, is not installed. Debian: apt-get install postgresql-client"
    ),
    errors.BackupError("pg_dump failed: error. Look further with: samplestore doctor"),
]

EXAMPLES: list[Any] = [
    errors.DatabaseMissing("a.db"),
    errors.SchemaMismatch("a.db", None, "0001", True),
    errors.SchemaMismatch("a.db", "0001", "0002", True),
    errors.SchemaMismatch("a.db", "0009", "0001", False),
    errors.UnsupportedFileSystem("/mnt/a.db", "/mnt", "nfs4"),
    errors.StoreBusy("a.db.gate", 30.0, 77, 1e9),
    errors.StoreBusy("a.db.gate", 30.0, None, None),
    errors.StoreBusy("postgresql://h/a", 30.0, None, None, sessions="who held it is gone by now"),
    errors.ReadTooLong(300.0),
    errors.StoreUnavailable("a.db", "its disk is full", "Make room: df -h /data"),
    *DATABASE_UNUSABLE,
    errors.DowngradeRefused("0002", "7 segments that were pruned"),
    errors.RunInUse("run 'x'", [1, 2]),
    errors.ImportConflict("0b1c/7"),
    errors.ImportConflict("0b1c/7", own_groups.OLDER),
    errors.ImportConflict("0b1c/7", own_groups.LESS),
    errors.ImportConflict("0b1c/7", own_groups.ANOTHER),
    slime_files.SlimeFileError("a.pt", "is damaged: no end"),
    replaced.ExportExists("out", replaced.THERE.format(command="samplestore export --run r --to out")),
    replaced.ExportExists("out", replaced.NO_EXPORT),
    replaced.ExportExists("out", replaced.OTHERS.format(name="notes.txt")),
    replaced.ExportExists("a.db", replaced.DATABASE),
    exports.NothingToExport("r", "no groups"),
    copies.MergeRefused("a.db", "is the target itself", "Name other files: samplestore merge TARGET SOURCE..."),
    copying.SourceMoved("x", "went on"),
    hidden.CopyBusy("x", "h", 77),
    hidden.CopyLost("x"),
    errors.TokensPruned("step 3", 4),
    errors.TokensPruned("this segment"),
    *BACKUP_ERRORS,
    errors.RunNotFound("x", ["a", "b"]),
    errors.RunNotFound("x", []),
    errors.RunSettingsConflict("x", {"seed": 0}, {"seed": 1}),
    errors.InvalidSetting("seed", "x", "a whole number"),
    errors.WorkerDead(3),
    errors.UnknownWorker("w"),
    errors.StoreClosed("a.db"),
    errors.LeaseLost("sample", 4, 1, 9, 2),
    errors.LeaseLost("batch", 4, 0, 9),
    errors.InvalidSegment("it has no tokens", field="tokens"),
    errors.SequenceConflict(4, 7, 5, "it would leave a gap or overwrite"),
    errors.InvalidTransition("group", 4, "leased", "drop", "open, ready"),
    errors.NotInRun("groups", [1, 2]),
    errors.UnknownVersion("x", 9),
    errors.EngineInUse("http://h:1", "x", []),
    errors.EngineInUse("http://h:1", "x", [(3, "h", 77)]),
    errors.EngineUpdating("http://h:1", (3, "h-77", "h", 77), 12.0),
    errors.BatchTimeout(30.0, Why(8, 2, [("no_workers", "no rollout worker is connected")])),
    errors.AbortTimeout(10.0, [4, 5], [("http://h:1, for worker 3 (pid 77 on h)", 2)]),
    errors.AbortTimeout(10.0, [4, 5], []),
    errors.WorkerFailed(3, "worker-0", "boom"),
    errors.StepAlreadyCommitted(5, 7),
    errors.StepHeld(5, 7, 3),
    errors.WorldMismatch(5, 7, 2, 3),
    errors.OnlyRankZero("commit", 5, 1),
    errors.BatchReleased(5, 7, "trainer dead"),
    errors.BatchReleased(5, 7, None),
    errors.WaitStopped("the wait for step 5"),
    errors.MissingLogprobs(4),
    errors.ArrayNotStored("values", ["entropy"]),
    errors.ArrayNotStored("valeus", ["entropy"], "run"),
    errors.ArrayFileError("/data/arrays/x", "cannot read ab/abcd: No such file or directory", "samplestore check"),
    imports.InvalidImport("a.jsonl", [InvalidRow("a.jsonl", 1, "log_probs", "3 tokens but 1 log-prob")], 1),
    errors.RewindTooFar(5, 9, "what came after it was pruned, up to step"),
    errors.MissingExtra("the dashboard", "dashboard"),
    prompts.InvalidPrompts("a.jsonl", [InvalidRow("a.jsonl", 1, "prompt", "is empty")]),
    prompts.TokenizerNeeded("a.jsonl", 3),
    tokenizers.NoChatTemplate("model", "has no chat template"),
    EngineError("busy", "queue is full", 503),
    EngineError("unfit", "every log-prob of its answer is null"),
    PromptRefused("a prompt of 300 tokens leaves no room in a context of 256"),
    PromptRefused("prompt token 64 at position 1 is outside the vocabulary (0 to 63)"),
    PromptRefused("the prompt has places for images (token 4): 2, images: 1. Write one place for each image"),
    PromptRefused("the engine refused the prompt: image file is truncated", 400),
    EngineError("setup", "http://h:1 tells no routed experts"),
    RewardSpecError("x:y", "there is no module 'x'"),
    FilterSpecError("there is no module 'x'"),
    errors.EvaluationTimeout(3, 60.0, 7, "no worker"),
    errors.HookFailed("buffer filter", "it must return a list of groups of the buffer"),
    errors.EpisodeDiverged(4, 2, 'step tool {"args": [1]} at token 7', 'step tool {"args": [2]} at token 7'),
    errors.EpisodeTruncated(4, 1024),
    errors.EpisodeLimit(4, "its episode was aborted 101 times", 100, "episode-max-aborts"),
    errors.EpisodeLimit(4, "result of a call as JSON, in bytes", 262144),
    errors.StepFailed(4, 2, "tool", "ValueError: no"),
    errors.OutcomeUnknown(4, 2, "tool", "key"),
    EpisodeSpecError("x:y", "there is no module 'x'"),
    EpisodeFailed(4, "KeyError: 'x'"),
    TemplateChanged("<user>go", "<user>gone"),
    config.no_database("samplestore worker --db FILE"),
    NotConfigured(),
    WrongCount(3, 6, 8),
]  # fmt: skip

HEADINGS = [h[1:-1] for h in page("docs/troubleshooting.md").headings if h.startswith("`")]


def matches(heading: str, message: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, heading.split("…"))), message, re.DOTALL) is not None


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_each_message_has_a_heading(error: Exception) -> None:
    found = [h for h in HEADINGS if matches(h, str(error))]
    assert found, f"no heading for: {error}"
    most_exact = max(found, key=lambda h: len(h.replace("…", "")))
    section = page("docs/troubleshooting.md").text.partition(f"`{most_exact}`")[2].partition("\n#")[0]
    name = type(error).__name__
    assert f"`{name}`" in section, f"{name} is not named under: {most_exact}"


def test_every_error_class_is_covered() -> None:
    own: list[Any] = [c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
    assert {c for c in own if c is not errors.SampleStoreError} <= {type(e) for e in EXAMPLES}


def test_every_error_class_is_in_the_reference() -> None:
    """Also those that a module defines beside its work: docs/making/errors.py lists these modules."""
    root = Path(errors.__file__).parents[1]
    files = [path for part in ("samplestore", "workers") for path in sorted((root / part).rglob("*.py"))]
    kinds = r"SampleStoreError|TokenizerError"
    found = {
        name for path in files for name in re.findall(rf"^class (\w+)\((?:{kinds})\)", path.read_text(), re.MULTILINE)
    }
    told = set(re.findall(r"`samplestore\.[\w.]*?(\w+)`", page("docs/reference/errors.md").text))
    assert "FilterSpecError" in found and found <= told, found - told


def test_no_heading_is_made_up() -> None:
    sources = [str(error) for error in EXAMPLES]
    sources += [
        deaths.given_up_text(5, 7),
        "no engines to drive. Say --router http://HOST:PORT or --engine http://HOST:PORT",
        "/weights/1 is no complete checkpoint: it has no *.safetensors. An engine that loads it may die",
        "/weights/1 does not fit the model that is served, /weights/0: w is F32 [5], and there F32 [4]. No engine was "
        "told. Publish weights of the same model: run.publish_weights(PATH)",
    ]
    for heading in HEADINGS:
        assert any(matches(heading, text) for text in sources), f"no error says: {heading}"
