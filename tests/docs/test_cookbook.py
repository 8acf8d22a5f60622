"""Every SQL question of the documentation has the right answer, on both databases, with no samplestore between."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from decimal import Decimal
from typing import Any

import psycopg

import samplestore
from samplestore.run import Run
from samplestore.types import RequestInfo
from tests.docs.pages import Block, page, runnable
from tests.docs.small_run import ENGINE, build
from tests.support import factory as f

COOKBOOK = "docs/cookbook.md"


def more(run: Run) -> None:
    """Beside what small_run.build does: a call that was aborted and resumed with a cached prefix, an answer that was
    cut, a second data set that nobody solves, and a step that was rewound."""
    worker, trainer = f.register(run), f.register(run, "trainer")
    told: list[tuple[str, int, str, dict[str, Any]]] = [
        ("r2", 4, "abort", {"generated_tokens": 5, "lost_reason": "cut", "prompt_tokens": 3, "cached_tokens": 0}),
        ("r3", 2, "length", {"generated_tokens": 2, "prompt_tokens": 7, "cached_tokens": 5}),
    ]
    for rid, n, reason, info in told:
        (claim,) = run.claim(worker, 1)
        run.begin_request(claim, rid, ENGINE, 1.0, resumes=rid == "r3")
        f.add(run, claim, n, run.current_version, reason, rid=rid, engine=ENGINE)
        run.end_request(RequestInfo(rid, ENGINE, finish_reason=reason, e2e_s=2.0, queue_s=0.5, **info))
        if reason == "abort":
            run.release(claim, "weight update")
        else:
            run.finish(claim)
    run.add_prompts([{"prompt_ids": [3, 3], "label": "hard", "metadata": {"task": "t2"}}], dataset="aime")
    run.admit()
    for claim in run.claim(worker, 2):
        f.answer(run, claim, 5, run.current_version)
    for stage, reward in zip(run.claim_stages(worker, 4), (1.0, 0.5, 0.0, 0.0), strict=True):
        run.score(stage, reward)
    f.commit(run, f.lease(run, trainer, 3, 1, max_staleness=2) or 0, trainer)
    run.publish_weights(path="/checkpoints/3", step=3)
    run.rewind(step=2)
    f.sound(run)


def heading(block: Block) -> str:
    lines = page(block.page).text.splitlines()[: block.line - 1]
    return next(line.lstrip("# ") for line in reversed(lines) if line.startswith("#"))


def plain(value: Any) -> Any:
    """One value for both drivers: PostgreSQL's sums are Decimals, SQLite's JSON is text."""
    if isinstance(value, Decimal):
        return float(value)
    return json.loads(value) if isinstance(value, str) and value.startswith('"') else value


def asked(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Question -> answer, from the drivers themselves: the platform's SQLite, and psycopg."""
    kind, other = ("sqlite", "postgresql") if url.startswith("sqlite") else ("postgresql", "sqlite")
    found = {}
    if kind == "sqlite":
        connection: Any = sqlite3.connect(f"file:{url.removeprefix('sqlite:///')}?mode=ro", uri=True)
    else:
        connection = psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))
    with closing(connection):
        for block in runnable("sql"):
            if other in block.words:
                continue
            name = heading(block) if block.page == COOKBOOK else f"{block.page}: {heading(block)}"
            assert name not in found, f"two questions under {name}"
            try:
                rows = connection.execute(block.text).fetchall()
            except (sqlite3.Error, psycopg.Error) as error:
                raise AssertionError(f"{block.page}:{block.line}: {error}") from error
            found[name] = [tuple(map(plain, row)) for row in rows]
    return found


def of(x: float) -> Any:
    """As it is shown: three decimals."""
    return round(x, 3)


ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "README.md: The trainer's side": [(1, 2, 0.5, 11, 0, 1), (2, 2, 1.0, 11, 1, 0)],
    "How does the reward develop?": [(1, 2, 0.5, 0.0, 5.5), (2, 2, 1.0, 0.0, 5.5)],
    "What are the samples of each weight version like?": [
        (0, None, 11, 10, of(0.6), of(0.24**0.5), 0.0, of(92 / 11)),
        (2, 2, 4, 4, 0.375, of((1.25 / 4 - 0.375**2) ** 0.5), 0.25, 5.5),
    ],
    "Reward by data set and weight version": [
        ("aime", 2, 2, 0.0), ("default", 0, 10, of(0.6)), ("default", 2, 2, 0.75),
    ],
    "Reward by something in the metadata": [
        ("t0", 4, 0.5), ("t1", 6, of(2 / 3)), ("t2", 2, 0.0), ("t9", 2, 0.75),
    ],
    "Which prompts are hardest?": [
        (8, "hard", 2, 0.0, 0.0), (1, "0", 2, 0.5, 1.0), (2, "1", 2, 0.5, 1.0), (3, "2", 2, 0.5, 1.0),
        (6, "5", 2, 0.5, 1.0), (7, None, 2, 0.75, 1.0), (4, "3", 2, 1.0, 1.0),
    ],
    "Which prompts were never solved?": [("aime", "hard", 2, 0.0)],
    "How far apart are the rewards in a group?": [
        (7, "ready", 2, 0.0, 0.0, 0.0), (6, "ready", 2, 0.5, 1.0, 0.25), (4, "ready", 2, 0.0, 1.0, 0.5),
        (3, "ready", 2, 0.0, 1.0, 0.5), (2, "ready", 2, 0.0, 1.0, 0.5), (1, "consumed", 2, 1.0, 1.0, 0.0),
        (0, "consumed", 2, 0.0, 1.0, 0.5),
    ],
    "Which groups teach nothing?": [
        (7, "ready", 0.0, 2, "aime", "hard"), (1, "consumed", 1.0, 2, "default", "3"),
    ],
    "What part of a step taught nothing?": [(1, 1, 0.0), (2, 1, 1.0)],
    "Are the log-probs sane?": [(0, 11, of(-0.5883152173913043)), (2, 4, -0.438)],
    "How stale was what each step trained on?": [(1, 0, 1), (2, 1, 1)],
    "How stale are the ready groups now?": [(0, 1, 1, 10), (1, 1, 1, 12), (2, 1, 3, 57)],
    "Which ready groups have waited longest?": [
        (2, "default", 15, 2, 1, 0.5), (3, "default", 19, 2, 1, 0.5), (4, "default", 23, 2, 1, 0.5),
        (6, "default", 12, 1, 1, 0.75), (7, "aime", 10, 0, 1, 0.0),
    ],
    "What did step 2 consume?": [
        (0, 1, 0, "completed", 5, 1.0, 0, 0), (0, 1, 1, "completed", 6, 1.0, 0, 0),
    ],
    "Which batches did a rewind undo?": [(0, 3, "rewound", 1, 15, 2.0, 0.5)],
    "How many weight versions wrote a sample?": [(1, 14), (2, 1)],
    "Why were samples stopped?": [("abort", "engine", 3, 11, 3), ("fail", "engine refused: too long", 1, 0, 0)],
    "Which engine and worker is interrupted most?": [(ENGINE, 1, 1, 2, 0), (ENGINE, 3, 1, 1, 2), (None, 1, 1, 0, 0)],
    "Which samples were interrupted most?": [
        (0, 0, "completed", 7, 1, 1, 0, 0), (6, 0, "completed", 6, 1, 0, 1, 2), (6, 1, "truncated", 6, 1, 1, 2, 2),
    ],
    "What did resuming save?": [(2, 8)],
    "What part of the prompts did engines find in their prefix cache?": [
        ("new", 1, 3, 0.0), ("resumed", 1, 7, of(5 / 7)),
    ],
    "How many segments has a sample?": [("completed", 14, of(16 / 14), 2), ("truncated", 1, 2, 2)],
    "Which samples failed, with which error?": [("engine refused: too long", 1, 1)],
    "Where is every generated token?": [("ready", "", 79), ("consumed", "", 22), ("dropped", "sample failed", 13)],
    "What was generated and will not be trained on, by reason?": [("dropped", "sample failed", 0, 13)],
    "What did engines generate for nothing, and why?": [(ENGINE, "abort", 1, 6, 2), (ENGINE, "cut", 1, 5, 1)],
    "How fast does each engine answer?": [(ENGINE, 2, 1.75, 2.0, 0.5)],
    "Who holds what at this moment?": [
        (1, "rollout", 0, None), (2, "trainer", 0, None), (3, "rollout", 0, None), (4, "trainer", 0, None),
    ],
    "What is each data set's part in training?": [
        ("aime", "ready", 1, 10), ("default", "consumed", 2, 22), ("default", "dropped", 1, None),
        ("default", "ready", 4, 69),
    ],
}  # fmt: skip


def test_every_question_has_the_right_answer(db_url: str) -> None:
    build(db_url, steps=2)
    with samplestore.open(db_url) as store:
        more(store.existing_run())
    told = asked(db_url)
    lately = told.pop("What happened in the last hour?")
    assert {("abort", "engine", 3, 11), ("resume", None, 2, 8), ("rewind", None, 1, None)} <= set(lately)
    waiting = told["Which ready groups have waited longest?"]
    assert all(0 <= row[-1] < 600 for row in waiting)
    told["Which ready groups have waited longest?"] = [row[:-1] for row in waiting]
    holds = told["Who holds what at this moment?"]  # host and process are this test's
    told["Who holds what at this moment?"] = [(*row[:2], *row[4:]) for row in holds]
    elsewhere = {question for question in told if question.partition(".md: ")[1]}
    assert told.keys() - elsewhere == ANSWERS.keys() - elsewhere
    for question, answer in told.items():
        assert answer == ANSWERS[question] if question in ANSWERS else answer, question
    assert len([q for q in ANSWERS if not q.startswith("README")]) >= 20
