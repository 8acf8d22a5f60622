"""Files that are imported are read twice: one that can't be, or is another the second time, loses nothing unnoticed."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from samplestore import Store
from samplestore.portable import imports
from samplestore.portable.imports import InvalidImport
from samplestore.promptfiles import PromptFileError

from ..support import factory as f

ROWS = [{"prompt_ids": [1, i], "response_ids": [7, 8], "log_probs": [-0.5, -0.5]} for i in range(3)]


def lines(rows: list[dict[str, object]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_pipe_comes_in_whole(store: Store, pack: type[bytes]) -> None:
    run = store.run("r", samples_per_prompt=1, groups_per_step=1)
    reads, writes = os.pipe()
    os.write(writes, pack(lines(ROWS)))
    os.close(writes)
    try:
        assert run.import_samples(f"/dev/fd/{reads}").added == 3
    finally:
        os.close(reads)
    f.sound(run)


def test_a_refused_row_of_a_pipe_names_the_pipe(store: Store) -> None:
    run = store.run("r", samples_per_prompt=1, groups_per_step=1)
    reads, writes = os.pipe()
    os.write(writes, b"{}\n")
    os.close(writes)
    try:
        with pytest.raises(InvalidImport, match=f"/dev/fd/{reads}:1"):
            run.import_samples(f"/dev/fd/{reads}")
    finally:
        os.close(reads)


@pytest.mark.parametrize("then", [ROWS[:2], [*ROWS, {**ROWS[0], "prompt_ids": [9]}], ROWS[::-1], []])
def test_a_file_that_changes_meanwhile_is_not_stored(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: list[dict[str, object]]
) -> None:
    run, path = store.run("r", samples_per_prompt=1, groups_per_step=1), tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS))
    first = imports.look_through

    def and_then_changed(groups: object) -> bytes:
        seen = first(groups)  # type: ignore[arg-type]
        path.write_bytes(lines(then))
        return seen

    monkeypatch.setattr(imports, "look_through", and_then_changed)
    with pytest.raises(PromptFileError, match="was changed while it was read, and nothing of it was stored"):
        run.import_samples(path)
    assert f.value(run, "SELECT count(*) FROM sample") == 0
