"""Tokens as HTML: one span each, coloured by what is asked. No Streamlit here; everything is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from samplestore.dashboard import look
from samplestore.queries.trajectory import Span, Trajectory

BY_VERSION, BY_LOGPROB = "weight version", "log-prob"
BY_STALENESS, BY_SEGMENT, BY_LOSS = "staleness", "segment", "loss mask"
BY_DIFFERENCE = "trainer − rollout"  # log-probs
ALWAYS = (BY_VERSION, BY_LOGPROB, BY_STALENESS, BY_SEGMENT, BY_LOSS)
LAG_COLOURS = (look.GREEN, look.SKY, look.YELLOW, look.ORANGE, look.VERMILLION)  # 0, 1, 2, 3, more behind
MAX_PENDING = 4  # a character of UTF-8 has up to four bytes, so more pending tokens are no unfinished character
HIT = "found"  # id of the first marked token, to go to
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


@dataclass(frozen=True, slots=True)
class Shades:
    """What colours need beside the trajectory.

    values   float [n] of the window's tokens, NaN where there is none: a stored array, or a difference of log-probs
    lag      staleness of weight versions
    """

    values: Any = None
    lag: Mapping[int, int] = field(default_factory=dict)

    @property
    def limits(self) -> tuple[float, float]:
        known = [v for v in ([] if self.values is None else self.values.tolist()) if math.isfinite(v)]
        return (min(known), max(known)) if known else (0.0, 0.0)


def render(
    trajectory: Trajectory, decoder: Decoder | None, colour_by: str = BY_VERSION, *, shades: Shades | None = None,
    marked: Collection[int] = (),
) -> str:  # fmt: skip
    """The window's tokens as one HTML block, class `ss-tokens`, a span of class `t` for each token; those at positions
    `marked` have class `hit` too, and the first of them the id HIT."""
    window = trajectory.tokens
    ids = window.ids.tolist()
    if not ids:
        return '<div class="ss"><div class="ss-empty">There are no tokens here.</div></div>'
    texts = None if decoder is None else pieces(decoder, window.before.tolist(), ids, window.after.tolist())
    find = _finder(trajectory.spans)
    paint = _painter(trajectory, colour_by, shades or Shades())
    first = min((p for p in marked if p >= window.start), default=None)
    html: list[str] = []
    previous: _Place | None = None
    for offset, (id, logprob) in enumerate(zip(ids, window.logprobs.tolist(), strict=True)):
        position = window.start + offset
        place = _Place(find(position))
        html.append(_boundary(previous, place, first=offset == 0))
        text = f"{id} " if texts is None else texts[offset]
        style, said = paint(place.span, offset, logprob)
        mark = "" if position not in marked else HIT if position == first else "hit"
        html.append(_token(id, position, logprob, place, text, style, said, trajectory.n_prompt, mark))
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


Paint = Callable[[Span | None, int, float], tuple[str, str]]  # (span, place in the window, log-prob) -> (style, told)


def _painter(t: Trajectory, by: str, shades: Shades) -> Paint:
    """How a token of the response is coloured, and what its details say of that."""
    places = {s.first_seq: i for i, s in enumerate(t.spans)}
    low, high = shades.limits

    def value(offset: int) -> float:
        return math.nan if shades.values is None else float(shades.values[offset])

    def paint(span: Span | None, offset: int, logprob: float) -> tuple[str, str]:
        if span is None:
            return "", ""
        if by == BY_LOGPROB:
            return _logprob_style(logprob), ""
        if by == BY_SEGMENT:
            at = places[span.first_seq]
            return look.version_style(at), f" · segment {at + 1}"
        if by == BY_LOSS:
            return (f"background:{look.GREEN}38;border-bottom-color:{look.GREEN}" if span.loss else ""), ""
        if by == BY_STALENESS:
            return _lag_style(span, shades.lag)
        if by == BY_VERSION:
            return (look.version_style(span.version_min) if span.kind == "generated" else ""), ""
        told = value(offset)
        if math.isnan(told):
            return "", f" · {by}: none"
        style = _signed_style(told) if by == BY_DIFFERENCE else _scaled_style(told, low, high)
        return style, f" · {by}: {told:.4g}"

    return paint


def _token(
    id: int, position: int, logprob: float, place: _Place, text: str | None, style: str, said: str, n_prompt: int,
    mark: str,
) -> str:  # fmt: skip
    span = place.span
    title = f"id {id} · " + (f"prompt token {position}" if span is None else f"response token {position - n_prompt}")
    classes = "t"
    if span is None:
        classes = "t p"
    else:
        title += f" · {_label(place)} · log-prob {'not stored' if math.isnan(logprob) else f'{logprob:.3f}'}" + said
        if not span.loss:
            classes, title = "t m", title + " · not trained on (loss mask 0)"
    if mark:
        classes += " hit"
    if text is None:
        shown = '<span class="part" aria-label="part of a character">·</span>'
        title += " · part of the next character"
    else:
        shown = look.esc(look.visible(text, MAX_PIECE)) or '<span class="part">∅</span>'
    styled = f' style="{style}"' if style else ""
    named = f' id="{HIT}"' if mark == HIT else ""
    return f'<span class="{classes}"{named}{styled} title="{look.esc(title)}">{shown}</span>'


def _logprob_style(logprob: float) -> str:
    """One hue, the stronger the less likely the token was; legible on both themes."""
    return "" if math.isnan(logprob) else _strong(213, 94, 0, -logprob / 5.0)


def _scaled_style(value: float, low: float, high: float) -> str:
    """One hue, from the window's lowest value to its highest."""
    return _strong(0, 114, 178, 0.0 if high <= low else (value - low) / (high - low))


def _signed_style(value: float) -> str:
    """Blue where the trainer finds the token more likely than the rollout did, orange where less; full at 1 nat."""
    return _strong(0, 114, 178, value) if value > 0 else _strong(213, 94, 0, -value)


def _strong(red: int, green: int, blue: int, strength: float) -> str:
    s = min(1.0, max(0.0, strength))
    return (
        f"background:rgba({red},{green},{blue},{0.72 * s:.2f});border-bottom-color:rgba({red},{green},{blue},{s:.2f})"
    )


def _lag_style(span: Span, lag: Mapping[int, int]) -> tuple[str, str]:
    if span.kind != "generated":
        return "", ""
    behind = None if span.version_min is None else lag.get(span.version_min)
    if behind is None:
        return look.version_style(None), " · staleness unknown"
    colour = LAG_COLOURS[min(max(behind, 0), len(LAG_COLOURS) - 1)]
    line = look.UNDERLINES[min(max(behind, 0), len(look.UNDERLINES) - 1)]
    style = f"background:{colour}38;border-bottom-color:{colour};border-bottom-style:{line}"
    return style, f" · {behind} behind"
