"""Named arrays on the overview."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from samplestore.dashboard import overview_parts


def told(*sizes: dict[str, Any]) -> str:
    return overview_parts.arrays(SimpleNamespace(status={"arrays": list(sizes)}))


def test_what_they_take() -> None:
    html = told({"name": "routed_experts", "arrays": 1234, "bytes": 56_700_000})
    assert "routed_experts" in html and "1,234" in html and "56.7 MB" in html


def test_a_run_without_any_shows_nothing() -> None:
    assert told() == ""


def test_names_are_escaped() -> None:
    html = told({"name": "<script>", "arrays": 1, "bytes": 1})
    assert "<script>" not in html and "&lt;script&gt;" in html
