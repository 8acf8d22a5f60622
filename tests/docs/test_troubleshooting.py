"""Each error is found in troubleshooting by the text that it prints."""

from __future__ import annotations

import re
from typing import Any

import pytest

from samplestore import config, errors, prompts, tokenizers
from samplestore.promptfiles import InvalidRow
from samplestore.types import Why
from samplestore.workers.replies import EngineError
from samplestore.workers.rewards import RewardSpecError
from tests.docs.pages import page

EXAMPLES: list[Exception] = [
    errors.DatabaseMissing("a.db"),
    errors.SchemaMismatch("a.db", None, "0001", True),
    errors.SchemaMismatch("a.db", "0001", "0002", True),
    errors.SchemaMismatch("a.db", "0009", "0001", False),
    errors.UnsupportedFileSystem("/mnt/a.db", "/mnt", "nfs4"),
    errors.StoreBusy("a.db.gate", 30.0, 77, 1e9),
    errors.StoreBusy("postgresql://h/a", 30.0, None, None),
    errors.RunNotFound("x", ["a", "b"]),
    errors.RunNotFound("x", []),
    errors.RunSettingsConflict("x", {"seed": 0}, {"seed": 1}),
    errors.InvalidSetting("seed", "x", "a whole number"),
    errors.WorkerDead(3),
    errors.LeaseLost("sample", 4, 1, 9, 2),
    errors.InvalidSegment("it has no tokens", field="tokens"),
    errors.SequenceConflict(4, 7, 5, "it would leave a gap or overwrite"),
    errors.InvalidTransition("group", 4, "leased", "drop", "open, ready"),
    errors.NotInRun("groups", [1, 2]),
    errors.UnknownVersion("x", 9),
    errors.BatchTimeout(30.0, Why(8, 2, [("no_workers", "no rollout worker is connected")])),
    errors.WorkerFailed(3, "worker-0", "boom"),
    errors.StepAlreadyCommitted(5, 7),
    errors.StepHeld(5, 7, 3),
    errors.MissingLogprobs(4),
    errors.RewindTooFar(5, 9, "what came after it was pruned, up to step"),
    errors.MissingExtra("the dashboard", "dashboard"),
    prompts.InvalidPrompts("a.jsonl", [InvalidRow("a.jsonl", 1, "prompt", "is empty")]),
    prompts.TokenizerNeeded("a.jsonl", 3),
    tokenizers.NoChatTemplate("model", "has no chat template"),
    EngineError("busy", "queue is full", 503),
    RewardSpecError("x:y", "there is no module 'x'"),
    config.no_database("samplestore worker --db FILE"),
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


def test_no_heading_is_made_up() -> None:
    sources = [str(error) for error in EXAMPLES]
    sources += [
        "no engines to drive. Say --router http://HOST:PORT or --engine http://HOST:PORT",
        "engine http://h:1 belongs to run 'x'; an engine serves one run's weights. "
        "Give it back with: samplestore engines forget http://h:1",
    ]
    for heading in HEADINGS:
        assert any(matches(heading, text) for text in sources), f"no error says: {heading}"
