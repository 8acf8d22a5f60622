"""The tokens of a sample, a window at a time: colours, search, and the way to the least likely one."""

from __future__ import annotations

from typing import Any

import streamlit as st

from samplestore import arrays
from samplestore.dashboard import look, sample_parts, source, tokenview
from samplestore.errors import SampleStoreError
from samplestore.queries.trajectory import Trajectory
from samplestore.run import Run
from samplestore.words import amount

PAGE_TOKENS = 2000
LOWEST = "lowest"


def show(of: Run, t: Trajectory, names: list[str]) -> None:
    decoder, why_not = source.tokenizer()
    choices = [*tokenview.ALWAYS, *([tokenview.BY_DIFFERENCE] if arrays.TRAINER in names else []), *names]
    by = st.segmented_control(
        "Colour by", choices, default=tokenview.BY_VERSION, key="colour", bind="query-params", required=True,
        label_visibility="collapsed", wrap=True,
    ) or tokenview.BY_VERSION  # fmt: skip
    keys, find_column, jump = st.columns([3.2, 1.4, 0.9], vertical_alignment="center")
    wanted = find_column.text_input(
        "Find in the response", key="find", bind="query-params", max_chars=200, label_visibility="collapsed",
        placeholder="Find text, or id:123", help="Whatever its case. id:123 finds a token by its id.",
    )  # fmt: skip
    jump.button(
        "Lowest log-prob", on_click=_to_lowest, args=(of, t), help="Go to the least likely token of the response"
    )
    marked = _marked(of, t, wanted or "", decoder)
    shades = _shades(of, t, by)
    keys.html(sample_parts.legend(t, by, shades))
    _windows(t)
    st.html(tokenview.render(t, decoder, by, shades=shades, marked=marked))
    if why_not:
        st.html(f'<div class="ss dim">{look.line(why_not, 400)}</div>')


def _shades(of: Run, t: Trajectory, by: str) -> tokenview.Shades:
    if by == tokenview.BY_STALENESS:
        return tokenview.Shades(lag=source.staleness_of(of, t))
    if by in (tokenview.BY_VERSION, tokenview.BY_LOGPROB, tokenview.BY_SEGMENT, tokenview.BY_LOSS):
        return tokenview.Shades()
    try:
        values = source.array_values(of, t, arrays.TRAINER if by == tokenview.BY_DIFFERENCE else by)
    except SampleStoreError as error:
        st.html(f'<div class="ss warn">▲ {look.line(f"{by} can not be read: {error}", 400)}</div>')
        return tokenview.Shades()
    return tokenview.Shades(values - t.tokens.logprobs if by == tokenview.BY_DIFFERENCE else values)


def _to_lowest(of: Run, t: Trajectory) -> None:
    """A callback, so that the page is built once, with the window of that token."""
    found = source.least_likely(of, t)
    if found is not None:
        st.query_params["at"] = str(found[0])
        st.session_state["find"] = LOWEST + ":"


def _marked(of: Run, t: Trajectory, wanted: str, decoder: Any) -> set[int]:
    """Positions to mark, and in words where they are."""
    if not wanted:
        return set()
    if wanted == LOWEST + ":":
        lowest = source.least_likely(of, t)
        if lowest is None:
            _say(t, "No token of this response has a log-prob.")
            return set()
        _say(t, f"The lowest log-prob is {lowest[1]:.3f}, of {_place(t, lowest[0])}", [lowest[0]])
        return {lowest[0]}
    hits = source.hits(of, t, wanted, decoder)
    if not hits.tokens:
        why = " Only id:NUMBER can be found without a tokenizer." if decoder is None and not hits.looked_at else ""
        _say(t, f"Not found among {amount(hits.looked_at, 'token')}.{why}")
        return set()
    of_all = "" if hits.looked_at >= t.n_tokens else f", in the first {amount(hits.looked_at, 'token')}"
    more = "more than " if hits.cut else ""
    times = amount(len(hits.tokens), "time")
    _say(t, f"Found {more}{times}{of_all}", [hit.start for hit in hits.tokens])
    return hits.positions


def _place(t: Trajectory, position: int) -> str:
    return f"prompt token {position}" if position < t.n_prompt else f"response token {position - t.n_prompt}"


def _say(t: Trajectory, text: str, hits: list[int] | None = None) -> None:
    """What was found, with the way to the next window that has some of it, and to the first place in this one."""
    at = t.tokens.start // PAGE_TOKENS
    windows = sorted({position // PAGE_TOKENS for position in hits or []})
    before, after = [w for w in windows if w < at], [w for w in windows if w > at]
    here = sum(position // PAGE_TOKENS == at for position in hits or [])
    if here:
        text += f"; {here} in this window, framed:" if windows != [at] else "; framed below:"
        way = f' <a href="#{tokenview.HIT}" target="_self">go there</a>'
    else:
        text, way = text + ("; none in this window" if hits else ""), ""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.html(f'<div class="ss">{look.line(text, 400)}{way}</div>', width="content")
        for label, window in (("◂ found earlier", before[-1:]), ("found later ▸", after[:1])):
            if before or after:
                _to_window(label, window[0] if window else None)


def _to_window(label: str, window: int | None) -> None:
    if st.button(label, disabled=window is None):
        st.query_params["at"] = str((window or 0) * PAGE_TOKENS)
        st.rerun()


def _windows(t: Trajectory) -> None:
    there = t.n_prompt if t.pruned else t.n_tokens
    if there <= PAGE_TOKENS:
        return
    pages, at = -(-there // PAGE_TOKENS), t.tokens.start // PAGE_TOKENS
    with st.container(horizontal=True, vertical_alignment="center"):
        _to_window("◂◂ first", 0 if at else None)
        _to_window("◂ earlier", at - 1 if at else None)
        _to_window("later ▸", at + 1 if at + 1 < pages else None)
        _to_window("last ▸▸", pages - 1 if at + 1 < pages else None)
        last = t.tokens.start + t.tokens.ids.size
        st.html(
            f'<div class="ss dim">tokens {look.count(t.tokens.start + 1)} to {look.count(last)} of '
            f"{look.count(t.n_tokens)}, prompt included</div>"
        )
