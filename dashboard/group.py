"""One group: how its samples were rewarded, where it was used, and two of its samples side by side.

The address names it: ?run=NAME&group=NUMBER, with &a=INDEX&b=INDEX for two samples to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from samplestore.dashboard import actions, charts, compare, frame, look, parts, source
from samplestore.media import Image
from samplestore.queries import browse
from samplestore.queries.group_page import GroupView
from samplestore.run import Run
from samplestore.states import EVALUATED
from samplestore.words import amount

PROMPT_SHOWN = 4000
IMAGES, IMAGE_BYTES = 8, 4_000_000  # that are drawn, and of each
NEWEST = 100  # groups among which one with rewards is looked for
SAMPLES = [
    ("sample", "r"), ("status", "n"), ("reward", "r"), ("tokens", "r"), ("weights", "n"), ("aborts", "r"),
    ("resumes", "r"),
    ("incarnation", "r"), ("ended by", "n"), ("error", ""),
]  # fmt: skip


def page() -> None:
    of = frame.open_run()
    number = frame.in_address("group")
    if number is None:
        newest = browse.groups(of.database, of.id, limit=NEWEST)
        if not newest:
            frame.nothing("The run has no groups yet. A worker admits them: samplestore worker")
            return
        # One with rewards shows most.
        number = next((g for g in newest if g["reward_mean"] is not None), newest[0])["number"]
    found = source.group(of, number)
    if found is None:
        newest = browse.groups(of.database, of.id, limit=1)
        text = f"Run {of.name} has no group {number}" + (f"; its newest is {newest[0]['number']}." if newest else ".")
        raise source.Problem("other", "There is no such group", text)
    st.html(frame.head(of, f"Group {number}", f"as of {look.when(found.as_of)} UTC"))
    _step(of, number, found.newest)
    st.html(parts.facts(facts(found)))
    if found.group["reason"] and found.group["reason"] != EVALUATED:
        st.html(
            f'<div class="ss warn">▲ {look.esc(found.group["state"])}: {look.line(found.group["reason"], 300)}</div>'
        )
    digests = found.group["images"] or []
    with st.expander("Prompt" + (f", with {amount(len(digests), 'image')}" if digests else "")):
        st.html(prompt(found))
        if digests:
            st.html(pictures(source.pictures(of, digests[:IMAGES]), len(digests)))
    _rewards(of, found)
    st.html(parts.section("Samples", f"{len(found.samples)} of this group", samples(of, found)))
    left, right = st.columns(2, gap="large")
    left.html(batches(of, found))
    right.html(
        parts.section("Work on the whole group", "filters, group rewards", parts.stages(found.stages, found.as_of))
    )
    if actions.allowed():
        actions.of_group(of, found)
    compare.choose(of, found)


def _step(of: Run, number: int, newest: int) -> None:
    """The group before and the one after, with the address."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("◂ group before", disabled=number == 0):
            _go(number - 1)
        if st.button("group after ▸", disabled=number >= newest):
            _go(number + 1)
        st.html(f'<div class="ss">{parts.link("groups", "all groups", run=of.name)}</div>', width="content")


def _go(number: int) -> None:
    frame.forget("a", "b")
    st.query_params["group"] = str(number)
    st.rerun()


def facts(found: GroupView) -> list[tuple[str, str]]:
    g = found.group
    failed, rewards = f", {g['n_failed']} failed" if g["n_failed"] else "", "–"
    if g["reward_mean"] is not None:
        flat = ' <span class="warn">≡ all equal</span>' if g["reward_std"] == 0 else ""
        rewards = f"{g['reward_mean']:.3f} ± {g['reward_std'] or 0:.3f}{flat}"
    return [
        ("state", parts.state(g["state"], g["reason"])),
        ("finished", f"{g['n_samples'] - g['n_open']} of {g['n_samples']}{failed}"),
        ("not scored yet", str(g["n_unscored"])),
        ("reward", rewards),
        ("oldest weights", "–" if g["oldest_version"] is None else look.version_key(g["oldest_version"])),
        (parts.staleness_of(g["state"]), "–" if g["staleness"] is None else f"{g['staleness']} behind"),
        ("tokens", "–" if g["n_tokens"] is None else look.count(g["n_tokens"])),
        ("epoch", str(g["epoch"])),
        ("data set", look.line(g["dataset"], 60)),
        ("created", f"{look.when(g['created_at'])} UTC"),
        ("ready", look.moment(g["ready_at"], found.as_of)),
        ("settled", look.moment(g["settled_at"], found.as_of)),
    ]  # fmt: skip


def prompt(found: GroupView) -> str:
    text = parts.prompt_text(found.group["prompt"], cut=True)
    more = "" if len(text) <= PROMPT_SHOWN else f'<div class="dim">the first {PROMPT_SHOWN:,} characters</div>'
    label = found.group["label"]
    told = "" if label is None else f'<div><span class="dim">label</span> <b>{look.line(label, 400)}</b></div>'
    shown = look.esc(look.visible(text, PROMPT_SHOWN))
    size = amount(found.group["prompt_tokens"], "token")
    return f'<div class="ss"><div class="dim">{size}</div><div class="ss-text">{shown}</div>{more}{told}</div>'


def pictures(shown: Sequence[Image], n: int) -> str:
    """Images by their own bytes, so that none is fetched from anywhere. Their types are those of images.py, no SVG."""
    made = "".join(
        f'<img src="{look.esc(image.data_url)}" alt="image {i + 1} of the prompt">' if len(image.data) <= IMAGE_BYTES
        else f'<span class="dim">image {i + 1}: {look.size(len(image.data))}, too large for this page</span>'
        for i, image in enumerate(shown)
    )  # fmt: skip
    cut = f", the first {len(shown)} of them" if len(shown) < n else ""
    return f'<div class="ss"><div class="dim">{amount(n, "image")}{cut}</div><div class="ss-images">{made}</div></div>'


def _rewards(of: Run, found: GroupView) -> None:
    scored = [s for s in found.samples if s["reward"] is not None]
    if not scored:
        st.html(parts.section("Rewards", "", parts.empty("No sample of this group has a reward yet.")))
        return
    low, high = min(s["reward"] for s in scored), max(s["reward"] for s in scored)
    note = f"{len(scored)} of {len(found.samples)} scored, from {low:.3f} to {high:.3f}"
    st.html(parts.section("Rewards", note, ""))
    alt = "Rewards: " + ", ".join(f"sample {s['index']} {s['reward']:.3f}" for s in scored[:64])
    frame.chart(charts.rewards(scored), "rewards", alt)


def samples(of: Run, found: GroupView) -> str:
    rows = []
    for s in found.samples:
        versions = "–"
        if s["version_min"] is not None:
            versions = look.version_key(s["version_min"])
            if s["version_max"] != s["version_min"]:
                versions += " → " + look.version_key(s["version_max"])
        name = f"{found.group['number']}/{s['index']}"
        rows.append(
            [
                parts.link("trajectory", str(s["index"]), run=of.name, sample=name), parts.status(s),
                "–" if s["reward"] is None else f"{s['reward']:.3f}", look.count(s["n_tokens"]), versions,
                str(s["n_aborts"]), str(s["n_resumes"]), str(s["incarnation"]),
                look.line(s["finish_reason"] or "–", 40), look.line(s["error"] or "–", 160),
            ]
        )  # fmt: skip
    return parts.table(SAMPLES, rows)


def batches(of: Run, found: GroupView) -> str:
    columns = [
        ("step", "r"),
        ("timeline", "r"),
        ("state", "n"),
        ("staleness", "r"),
        ("leased (UTC)", "n"),
        ("settled", "n"),
    ]
    rows: list[list[Any]] = [
        [
            parts.link("batches", str(b["step"]), run=of.name, batch=b["id"]), str(b["timeline"]), look.esc(b["state"]),
            "–" if b["staleness"] is None else str(b["staleness"]), look.when(b["created_at"]),
            look.moment(b["settled_at"], found.as_of),
        ]
        for b in found.batches
    ]  # fmt: skip
    body = parts.table(columns, rows) if rows else parts.empty("No trainer step has taken it.")
    return parts.section("Batches", "the trainer steps that took it", body)
