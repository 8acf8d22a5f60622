"""Tokens as HTML: one span each, coloured by weight version or log-prob. No Streamlit here; everything is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from samplestore.dashboard import look
from samplestore.queries.trajectory import Span, Trajectory

BY_VERSION, BY_LOGPROB = "weight version", "log-prob"
MAX_PENDING = 4  # a character of UTF-8 has up to four bytes, so more pending tokens are no unfinished character
MAX_PIECE = 300  # characters of one token that are drawn
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    def decode(self, ids: Any) -> str: ...


def pieces(decoder: Decoder, before: Sequence[int], ids: Sequence[int], after: Sequence[int]) -> list[str | None]:
    """The text of each of `ids`; None where its bytes are part of a character that a later token completes.

    before, after   the ids on either side: what a token says depends on its neighbours, and a character may be split
    """
    everything = [*map(int, before), *map(int, ids), *map(int, after)]
    result: list[str | None] = [None] * len(everything)
    anchor = done = shown = 0  # decode from `anchor` on; tokens before `done` are told; so are `shown` characters
    for i in range(len(everything)):
        text = decoder.decode(everything[anchor : i + 1])
        unfinished = text.endswith(REPLACEMENT) and i + 1 - done < MAX_PENDING and i + 1 < len(everything)
        told = text.rstrip(REPLACEMENT) if unfinished else text
        new = told[shown:]
        if new.startswith(REPLACEMENT) and i > done and result[done] is None:
            # The bytes before never became a character: their token stands for itself.
            result[done], new = REPLACEMENT, new[1:]
        if new:
            result[i] = new
        shown = max(shown, len(told))
        if not unfinished:
            anchor, done = done, i + 1
            shown = len(decoder.decode(everything[anchor:done]))
    return result[len(before) : len(before) + len(ids)]


@dataclass(frozen=True, slots=True)
class _Place:
    """What a position of the trajectory belongs to; span is None in the prompt."""

    span: Span | None

    @property
    def version(self) -> int | None:
        return None if self.span is None else self.span.version_min


def render(trajectory: Trajectory, decoder: Decoder | None, colour_by: str = BY_VERSION) -> str:
    """The window's tokens as one HTML block, class `ss-tokens`, a span of class `t` for each token."""
    window = trajectory.tokens
    ids = window.ids.tolist()
    if not ids:
        return '<div class="ss"><div class="ss-empty">There are no tokens here.</div></div>'
    texts = None if decoder is None else pieces(decoder, window.before.tolist(), ids, window.after.tolist())
    find = _finder(trajectory.spans)
    html: list[str] = []
    previous: _Place | None = None
    for offset, (id, logprob) in enumerate(zip(ids, window.logprobs.tolist(), strict=True)):
        position = window.start + offset
        place = _Place(find(position))
        html.append(_boundary(previous, place, first=offset == 0))
        text = f"{id} " if texts is None else texts[offset]
        html.append(_token(id, position, logprob, place, text, colour_by, trajectory.n_prompt))
        previous = place
    return f'<div class="ss"><div class="ss-tokens" role="region" aria-label="Tokens">{"".join(html)}</div></div>'


def _finder(spans: Sequence[Span]) -> Callable[[int], Span | None]:
    """Position to span; positions come in rising order, so one pass over the spans is enough."""
    at = 0

    def find(position: int) -> Span | None:
        nonlocal at
        while at < len(spans) and spans[at].start + spans[at].n_tokens <= position:
            at += 1
        return spans[at] if at < len(spans) and spans[at].start <= position else None

    return find


def _label(place: _Place) -> str:
    if place.span is None:
        return "prompt"
    if place.span.kind == "environment":
        return "environment"
    return look.version_name(place.span.version_min, place.span.version_max)


def _boundary(previous: _Place | None, place: _Place, first: bool) -> str:
    """A badge where the weights, or who wrote the tokens, change."""
    if not first and previous is not None and _label(previous) == _label(place):
        return ""
    generated = place.span is not None and place.span.kind == "generated"
    style = look.version_style(place.version) if generated else f"border-color:{look.GREY}"
    why = ""
    if previous is not None and previous.span is not None and previous.span.finish_reason:
        why = f' title="{look.line("before: " + previous.span.finish_reason)}"'
    return f'<span class="ss-badge" style="{style}"{why}>{look.esc(_label(place))} ▸</span>'


def _token(
    id: int, position: int, logprob: float, place: _Place, text: str | None, colour_by: str, n_prompt: int
) -> str:
    span = place.span
    title = f"id {id} · " + (f"prompt token {position}" if span is None else f"response token {position - n_prompt}")
    classes, style = "t", ""
    if span is None:
        classes = "t p"
    else:
        title += f" · {_label(place)} · log-prob {'not stored' if math.isnan(logprob) else f'{logprob:.3f}'}"
        if not span.loss:
            classes, title = "t m", title + " · not trained on (loss mask 0)"
        style = look.version_style(span.version_min) if span.kind == "generated" else ""
        if colour_by == BY_LOGPROB:
            style = _logprob_style(logprob)
    if text is None:
        shown = '<span class="part" aria-label="part of a character">·</span>'
        title += " · part of the next character"
    else:
        shown = look.esc(look.visible(text, MAX_PIECE)) or '<span class="part">∅</span>'
    styled = f' style="{style}"' if style else ""
    return f'<span class="{classes}"{styled} title="{look.esc(title)}">{shown}</span>'


def _logprob_style(logprob: float) -> str:
    """One hue, the stronger the less likely the token was; legible on both themes."""
    if math.isnan(logprob):
        return ""
    strength = min(1.0, max(0.0, -logprob) / 5.0)
    return f"background:rgba(213,94,0,{0.72 * strength:.2f});border-bottom-color:rgba(213,94,0,{strength:.2f})"
