"""Two samples of a group side by side: how far they agree, and how each goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from samplestore.dashboard import frame, look, parts, source, tokenview
from samplestore.queries.group_page import GroupView
from samplestore.queries.trajectory import Trajectory
from samplestore.run import Run
from samplestore.words import amount

TOKENS = 1000  # of each response that are drawn
NONE = frame.EMPTY["a"]


def choose(of: Run, group: GroupView) -> None:
    st.html(parts.section("Compare two samples", "their responses from the beginning, side by side", ""))
    names = [str(s["index"]) for s in group.samples if s["n_tokens"]]
    if len(names) < 2:
        st.html(f'<div class="ss">{parts.empty("Two samples with tokens are needed.")}</div>')
        return
    left, right, by_column = st.columns([1, 1, 2], vertical_alignment="bottom")
    a = left.selectbox("Sample", [NONE, *names], key="a", bind="query-params")
    b = right.selectbox("with sample", [NONE, *names], key="b", bind="query-params")
    by = by_column.segmented_control(
        "Colour by", [tokenview.BY_VERSION, tokenview.BY_LOGPROB], default=tokenview.BY_VERSION, key="colour",
        bind="query-params", required=True,
    )  # fmt: skip
    if NONE in (a, b) or a is None or b is None:
        return
    number = group.group["number"]
    found = [source.read_trajectory(of, number, int(i), None, None, TOKENS) for i in (a, b)]
    if None in found:
        raise source.Problem("other", "A sample is gone", "It was there a moment ago. Load the page again.")
    st.html(f'<div class="ss">{told(*[source.all_ids(of, t)[t.n_prompt :] for t in found])}</div>')
    decoder, why_not = source.tokenizer()
    for column, t in zip(st.columns(2, gap="medium"), found, strict=True):
        with column:
            _one(of, t, decoder, by or tokenview.BY_VERSION)
    if why_not:
        st.html(f'<div class="ss dim">{look.line(why_not, 400)}</div>')


def told(a: Any, b: Any) -> str:
    """How long two responses are the same. a, b: int32 [n], [m]."""
    n = min(a.size, b.size)
    differ = np.nonzero(a[:n] != b[:n])[0]
    same = int(differ[0]) if differ.size else n
    if same == a.size == b.size:
        return f'<span class="warn">▲ The two responses are the same, all {amount(same, "token")}.</span>'
    return (
        f"The first <b>{look.count(same)}</b> tokens are the same; one has {amount(int(a.size), 'token')}, "
        f"the other {look.count(b.size)}."
    )


def _one(of: Run, t: Trajectory, decoder: Any, by: str) -> None:
    s = t.sample
    name = f"{t.group['number']}/{s['index']}"
    reward = NONE if s["reward"] is None else f"{s['reward']:.3f}"
    link = parts.link("trajectory", f"Sample {name}", run=of.name, sample=name)
    st.html(f'<div class="ss">{link} · {parts.status(s)} · reward <b>{reward}</b></div>')
    st.html(tokenview.render(t, decoder, by))
    shown = t.tokens.start + t.tokens.ids.size
    if shown < t.n_tokens:
        st.html(f'<div class="ss dim">{amount(t.n_tokens - shown, "more token")}: open the sample to read on.</div>')
