"""Every Python block marked `run` works as it stands: those of a page one after the other, in an empty folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.pages import page, runnable
from tests.docs.small_run import build

PAGES = sorted({block.page for block in runnable("python")})
NEEDS_A_RUN = {  # steps committed before
    "README.md": 0, "docs/howto/trainer.md": 0, "docs/cookbook.md": 2, "docs/howto/sql.md": 2,
    "docs/howto/export.md": 2,
}  # fmt: skip


def test_there_are_runnable_blocks() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/concepts.md", "docs/howto/trainer.md"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_python_blocks_run(name: str, tmp_path: Path, sqlite_template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name in NEEDS_A_RUN:
        shutil.copyfile(sqlite_template, tmp_path / "rollouts.db")
        build("rollouts.db", NEEDS_A_RUN[name])
    seen: list[Any] = []
    space: dict[str, Any] = {"__name__": "__main__", **_given(seen)}
    for block in page(name).blocks:
        if block.language == "python" and "run" in block.words:
            # Empty lines first, so that a traceback names the line of the page.
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), space)
    if name == "README.md":
        assert [loss for loss in seen] == [2 * 2, 2 * 2, 2 * 2], "three steps of two groups of two samples"
        assert space["run"].current_version == 3 and len(space["best"]) == 3 and len(space["frame"]) == 12
    if (store := space.get("store")) is not None:
        store.close()


def _given(seen: list[Any]) -> dict[str, Any]:
    """What the examples take for granted: the reader's model, loss and checkpoints."""

    def update(model: Any, *, tokens: Any, loss_mask: Any, old_log_probs: Any, advantages: Any) -> float:
        assert tokens.shape == loss_mask.shape == old_log_probs.shape and len(advantages) == len(tokens)
        seen.append(len(tokens))
        return 0.0

    return {
        "model": SimpleNamespace(),
        "update": update,
        "save_checkpoint": lambda model, step: f"/checkpoints/step-{step}",
        "train_and_save": lambda data, step: f"/checkpoints/step-{step}",
    }
