"""Numbers come out as they went in, whatever a database keeps of them, so that an export has the same content keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samplestore import Store
from samplestore.prompts import InvalidPrompts
from samplestore.run import Run

from ..support import factory as f
from . import exporting as e

NUMBERS = [
    0, 1, 1.0, 18.0, 0.0, -0.0, 1.5, 0.1 + 0.2, 1e15, 1e16, 1e17 + 16, -1e18, 1e-7, 5e-324, 5.0e-310, 2**63 - 1,
    -(2**63), True, "1.0", "1e400", [1.0, -0.0, 1e22, 10**30, 1e300], {"a": [1.7976931348623157e308, 2**200, 2.0]},
]  # fmt: skip


def keys(run: Run) -> list[str]:
    return [row["content_key"] for row in f.rows(run, "SELECT content_key FROM prompt WHERE run_id = :r", r=run.id)]


def answered(store: Store, rows: list[dict[str, Any]]) -> tuple[Run, dict[int, Any]]:
    """A run whose samples are done, and what its claims said: (label, metadata) by place."""
    run = store.run("one", samples_per_prompt=1, groups_per_step=len(rows), epochs=1)
    run.add_prompts(rows)
    run.admit()
    claims = run.claim(f.register(run), 1000)
    for claim in claims:
        f.answer(run, claim)
    return run, {int(claim.prompt_ids[0]): (claim.label, claim.metadata) for claim in claims}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_numbers_in_labels_and_metadata_keep_their_content_keys(store: Store, tmp_path: Path, kind: str) -> None:
    rows = [{"prompt_ids": [i], "label": n, "metadata": {"x": n, "in": [n]}} for i, n in enumerate(NUMBERS)]
    run, said = answered(store, rows)
    for place, number in enumerate(NUMBERS):
        assert said[place] == (number, {"x": number, "in": [number]}), number
    again = run.add_prompts([{**row, "label": said[i][0], "metadata": said[i][1]} for i, row in enumerate(rows)])
    assert (again.added, again.existing) == (0, len(rows)), "what comes out is the same prompt"
    e.export(run, e.place(tmp_path, kind), kind)
    other = store.run("other", samples_per_prompt=1)
    assert other.import_samples(e.place(tmp_path, kind)).added == len(rows)
    assert sorted(keys(other)) == sorted(keys(run))


@pytest.mark.parametrize("label", [2**63, -(2**63) - 1, 10**30, 1e19, 1e300])
def test_a_label_that_sqlite_would_round_is_refused_with_its_place(store: Store, label: Any) -> None:
    good = {"prompt_ids": [1], "label": str(label), "metadata": {"n": label}}
    run = store.run("r")
    with pytest.raises(InvalidPrompts, match=r"rows:2: label.* is a whole number of more than 64 bits.*as text"):
        run.add_prompts([good, {"prompt_ids": [2], "label": label}])
    assert keys(run) == []
    assert run.add_prompts([good]).added == 1


def test_rewards_of_an_old_export_that_count_as_nothing_are_nothing(store: Store, tmp_path: Path) -> None:
    run, _ = answered(store, [{"prompt_ids": [1]}, {"prompt_ids": [2]}])
    e.export(run, tmp_path / "out.jsonl", "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line, tiny in zip(lines, (1e-200, 5e-324), strict=True):
        line["reward"] = tiny
        line["rewards"] = [{"name": "reward", "status": "done", "outcome": "ok", "value": tiny, "details": None}]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = store.run("other", samples_per_prompt=1)
    assert other.import_samples(tmp_path / "out.jsonl").added == 2
    assert [r["reward"] for r in f.rows(other, "SELECT reward FROM sample WHERE run_id = :r", r=other.id)] == [0.0, 0.0]
    assert f.value(other, "SELECT max(value) FROM stage") in (0.0, None)
    told = f.rows(other, "SELECT reward_mean, reward_std FROM version_rewards WHERE run_id = :r", r=other.id)
    assert [tuple(row.values()) for row in told] == [(0.0, 0.0)]
    f.sound(other)
