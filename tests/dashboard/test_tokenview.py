"""Tokens as HTML: decoding of split characters, versions, and texts that want to be more than text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplestore.dashboard import look, tokenview
from samplestore.queries.trajectory import Span, Tokens, Trajectory

HOSTILE = '</span><script>alert(1)</script><img src=x onerror="alert(2)">\u202e\u2067\u200b\x1b[31m\'"&<'


class Bytes:
    """A tokenizer with one token per byte: every character beyond ASCII is split."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class Parsed(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def span(
    start: int, n: int, version: int | None, kind: str = "generated", loss: int = 1, ended: str | None = None
) -> Span:
    return Span(0, 0, start, n, kind, loss, version, version, 1, 1, "http://e", "r", ended, -1.0, 0.0, 0.0)


def trajectory(
    ids: Sequence[int], n_prompt: int, spans: list[Span], logprobs: Sequence[float] | None = None
) -> Trajectory:
    told = np.full(len(ids), -0.5, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    none = np.empty(0, np.int32)
    tokens = Tokens(0, np.asarray(ids, np.int32), told, none, none)
    return Trajectory({}, {}, 0, n_prompt, len(ids) - n_prompt, spans, False, [], False, tokens, 0.0)


def spans_of(html: str) -> list[dict[str, str | None]]:
    """The attributes of every token's element."""
    return [a for tag, a in Parsed(html).tags if tag == "span" and (a.get("class") or "").split()[0] == "t"]


def test_a_split_character_is_shown_with_the_token_that_completes_it() -> None:
    ids = list("a🛒é!".encode())
    assert tokenview.pieces(Bytes(), [], ids, []) == ["a", None, None, None, "🛒", None, "é", "!"]


def test_a_character_that_is_cut_by_the_window_is_whole_on_both_sides() -> None:
    ids = list("x🛒y".encode())
    for cut in range(1, len(ids)):
        first = tokenview.pieces(Bytes(), [], ids[:cut], ids[cut : cut + 8])
        second = tokenview.pieces(Bytes(), ids[max(0, cut - 8) : cut], ids[cut:], [])
        assert first + second == ["x", None, None, None, "🛒", "y"], cut


def test_bytes_that_never_become_a_character_are_told_as_such() -> None:
    got = tokenview.pieces(Bytes(), [], [0xE2, 0x61, 0xF0, 0x9F], [])
    assert got[:2] == ["\ufffd", "a"]
    assert "".join(p or "" for p in got[2:]).strip("\ufffd") == ""
    assert "\ufffd" in "".join(p or "" for p in got[2:])


@given(st.text(max_size=40), st.integers(0, 60))
def test_the_pieces_of_any_window_add_up_to_its_text(text: str, cut: int) -> None:
    ids = list(text.encode("utf-8"))
    cut = min(cut, len(ids))
    first = tokenview.pieces(Bytes(), [], ids[:cut], ids[cut : cut + 8])
    second = tokenview.pieces(Bytes(), ids[max(0, cut - 8) : cut], ids[cut:], [])
    assert "".join(p or "" for p in first + second) == text


def test_every_token_is_one_element_with_its_versions_colour() -> None:
    ids = list(b"promptABCDEFtool")
    spans = [span(6, 3, 3, ended="abort"), span(9, 3, 4), span(12, 4, None, "environment", loss=0)]
    html = tokenview.render(trajectory(ids, 6, spans), Bytes())
    tokens = spans_of(html)
    assert len(tokens) == len(ids)
    assert [t["class"] for t in tokens] == ["t p"] * 6 + ["t"] * 6 + ["t m"] * 4
    assert {t.get("style") for t in tokens[6:9]} == {look.version_style(3)}
    assert {t.get("style") for t in tokens[9:12]} == {look.version_style(4)}
    assert look.version_style(3) != look.version_style(4)
    badges = re.findall(r'class="ss-badge"[^>]*>([^<]*)<', html)
    assert badges == ["prompt ▸", "v3 ▸", "v4 ▸", "environment ▸"]
    assert "log-prob -0.500" in (tokens[6]["title"] or "")
    assert "v3" in (tokens[6]["title"] or "") and f"id {ids[6]}" in (tokens[6]["title"] or "")
    assert "not trained on" in (tokens[-1]["title"] or "")


def test_versions_that_share_a_colour_differ_in_their_underline() -> None:
    styles = [look.version_style(v) for v in range(28)]
    assert len(set(styles)) == 28
    assert look.version_style(3) == look.version_style(3 + 28)


def test_hostile_text_stays_text() -> None:
    ids = list(HOSTILE.encode())
    html = tokenview.render(trajectory(ids, 7, [span(7, len(ids) - 7, 0)]), Bytes())
    parsed = Parsed(html)
    assert {tag for tag, _ in parsed.tags} == {"div", "span"}
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    assert "<script>alert(1)</script>" in parsed.text
    for hidden in "\u202e\u2067\u200b\x1b":
        assert hidden not in html
    assert "⟨U+202E⟩" in parsed.text and "⟨ESC⟩" in parsed.text


class Words:
    """A tokenizer whose tokens are whole words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids)


def test_a_token_that_is_a_tag_stays_text() -> None:
    words = ("</span></div>", "<script>alert(1)</script>", '" onmouseover="alert(2)', "<img src=x onerror=alert(3)>")
    for reason in words:
        made = trajectory([0, 1, 2, 3], 1, [span(1, 2, 0, ended=reason), span(3, 1, 1)])
        parsed = Parsed(tokenview.render(made, Words(*words)))
        assert {tag for tag, _ in parsed.tags} == {"div", "span"}
        assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
        assert all(word in parsed.text for word in words)


@given(st.text(max_size=200))
def test_no_text_leaves_its_element_or_hides(text: str) -> None:
    shown = look.esc(look.visible(text))
    assert "<" not in shown and '"' not in shown and "'" not in shown
    assert not re.search("[\u200b-\u200f\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\x7f\r]", shown)


def test_without_a_tokenizer_ids_are_shown() -> None:
    html = tokenview.render(trajectory([7, 42], 1, [span(1, 1, 0)]), None)
    assert Parsed(html).text.split() == ["prompt", "▸7", "v0", "▸42"]


@pytest.mark.parametrize("logprob,title", [(float("nan"), "not stored"), (-2.5, "-2.500")])
def test_a_log_prob_that_is_not_stored_is_never_a_number(logprob: float, title: str) -> None:
    made = trajectory([1, 2], 1, [span(1, 1, 0)], [float("nan"), logprob])
    for by in (tokenview.BY_VERSION, tokenview.BY_LOGPROB):
        assert f"log-prob {title}" in (spans_of(tokenview.render(made, None, by))[1]["title"] or "")


def test_unknown_version_is_not_version_zero() -> None:
    html = tokenview.render(trajectory([1, 2], 1, [span(1, 1, None)]), None)
    assert "v? ▸" in html and "v0" not in html
