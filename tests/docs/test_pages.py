"""Links resolve, generated pages are current, diagrams show the state machines, nothing private is named."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest

from samplestore import states
from tests.docs.pages import ROOT, Page, page, pages

NAMES = [p.name for p in pages()]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def broken_links(of: Page) -> list[str]:
    broken = []
    for link in of.links():
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (of.path.parent / target).resolve() if target else of.path
        if not path.exists() or (anchor and anchor not in Page(path).anchors):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str) -> None:
    assert broken_links(page(name)) == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in page("README.md").links()}
    assert {name for name in NAMES if name != "README.md"} <= linked


def test_a_broken_link_is_found() -> None:
    concepts = page("docs/concepts.md")
    concepts.text += "\n[x](nowhere.md) [y](install.md#nothing) [z](install.md#torch)\n"
    assert broken_links(concepts) == ["nowhere.md", "install.md#nothing"]


def test_generated_pages_are_current() -> None:
    made = generator().made()
    folder = ROOT / "docs" / "reference"
    assert {path.name for path in folder.glob("*.md")} == set(made)
    for name, text in made.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"{name} is out of date: python docs/generate.py"


def arrows(diagram: str) -> set[tuple[str, str]]:
    return set(re.findall(r"^\s*(\w+) --> (\w+)", diagram, re.MULTILINE))


@pytest.mark.parametrize("transitions", [states.SAMPLE_TRANSITIONS, states.GROUP_TRANSITIONS])
def test_state_diagrams_are_the_state_machines(transitions: Mapping[StrEnum, tuple[StrEnum, ...]]) -> None:
    wanted = {(a.value, b.value) for a, targets in transitions.items() for b in targets}
    diagrams = [arrows(b.text) for b in page("docs/concepts.md").blocks if b.text.startswith("stateDiagram")]
    assert wanted in diagrams


def test_every_fate_is_explained() -> None:
    text = page("docs/concepts.md").prose.partition("## The token ledger")[2]
    assert all(f"`{fate}`" in text for fate in states.Fate)


def test_every_setting_is_explained() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    empty = re.findall(r"^\| `(\w+)` \|.*\|\s*\|$", text, re.MULTILINE)
    assert not empty


@pytest.mark.parametrize("name", NAMES)
def test_nothing_private_is_named(name: str) -> None:
    text = page(name).text
    for pattern in (str(ROOT), r"/tmp/", r"/root/", r"/home/"):
        assert not re.search(pattern, text), f"{name} names {pattern}"
