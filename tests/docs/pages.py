"""The documentation as data: pages, code blocks, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(`{3,})(\w*) ?(.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `words`: what stands behind the language; "run" means that a test executes it."""

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str


class Page:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.relative_to(ROOT).as_posix()
        self.text = path.read_text(encoding="utf-8")

    @cached_property
    def _parted(self) -> tuple[list[Block], str]:
        """(code blocks, the text without them)."""
        blocks, prose = [], []
        fence, start, head, body = "", 0, ("", ""), list[str]()
        for number, line in enumerate(self.text.splitlines(), 1):
            match = _FENCE.match(line)
            if fence and line == fence:
                blocks.append(Block(self.name, start, head[0], tuple(head[1].split()), "\n".join(body) + "\n"))
                fence = ""
            elif fence:
                body.append(line)
            elif match:
                fence, start, head, body = match[1], number + 1, (match[2], match[3]), []
            else:
                prose.append(line)
        assert not fence, f"{self.name}: a code block is not closed"
        return blocks, "\n".join(prose)

    @property
    def blocks(self) -> list[Block]:
        return self._parted[0]

    @property
    def prose(self) -> str:
        return self._parted[1]

    @cached_property
    def headings(self) -> list[str]:
        return re.findall(r"^#{1,6} (.+)$", self.prose, re.MULTILINE)

    @cached_property
    def anchors(self) -> set[str]:
        """As GitHub makes them: lower case, no punctuation, hyphens for spaces."""
        return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in self.headings}

    def links(self) -> Iterator[str]:
        yield from re.findall(r"\]\(([^)\s]+)\)", self.prose)
        yield from re.findall(r'(?:src|srcset)="([^"]+)"', self.prose)

    def shell_lines(self) -> Iterator[str]:
        """The command lines of bash blocks."""
        for block in self.blocks:
            if block.language == "bash":
                yield from (line for line in block.text.splitlines() if line.strip() and not line.startswith("#"))

    def inline(self) -> list[str]:
        """What stands between backquotes in the prose."""
        return re.findall(r"`([^`\n]+)`", self.prose)


def pages() -> list[Page]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(path) for path in found]


def page(name: str) -> Page:
    return Page(ROOT / name)


def runnable(language: str) -> list[Block]:
    return [b for p in pages() for b in p.blocks if b.language == language and "run" in b.words]
