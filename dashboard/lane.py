"""The life of a sample as one line: created, generated under these weights, interrupted, resumed, scored, consumed."""

from __future__ import annotations

from dataclasses import dataclass

from samplestore.dashboard import look, parts
from samplestore.dashboard.look import line
from samplestore.queries.sample_page import Evidence
from samplestore.queries.trajectory import Trajectory
from samplestore.words import amount

MAX_STEPS = 60
STOPS = {
    "abort": "‖ aborted",
    "release": "⏏ released",
    "reap": "✗ its worker died",
    "fail": "✗ failed",
    "requeue": "↺ afresh",
}
OF_GROUP = {"dropped": "✗ dropped", "stale": "✗ too stale", "superseded": "✗ superseded", "regenerate": "↺ afresh"}
SOON_S = 0.05  # an abort and the release that follows it are one stop


@dataclass(frozen=True, slots=True)
class Step:
    """until: for what takes time, else None; colour: of its left edge, beside the words."""

    at: float
    text: str
    colour: str
    until: float | None = None


def steps(t: Trajectory, found: Evidence) -> list[Step]:
    """What happened, in order of time."""
    made = [Step(t.sample["created_at"], "created", look.GREY)]
    began = {r["rid"]: r["started_at"] for r in found.requests}  # before its first tokens were stored
    starts = list(began.values())
    for span in t.spans:
        if span.kind == "generated":
            version = look.version_name(span.version_min, span.version_max)
            colour = look.GREY if span.version_min is None else look.VERSION_COLOURS[span.version_min % 7]
            text = f"▶ {version}, {amount(span.n_tokens, 'token')}"
        else:
            colour, text = look.GREY, f"⚙ {span.kind}, {amount(span.n_tokens, 'token')}"
        at = min(span.first_at, began.pop(span.request_rid, span.first_at))
        made.append(Step(at, text, colour, span.last_at))
    for e in t.events:
        why = f": {look.visible(str(e['reason']), 60)}" if e["reason"] else ""
        if e["kind"] in STOPS:
            made.append(Step(e["at"], STOPS[e["kind"]] + why, look.ORANGE))
        elif e["kind"] == "resume":
            # it is written a moment after the request that it tells of, in the same transaction
            at = max((start for start in starts if start <= e["at"]), default=e["at"])
            made.append(Step(at, f"↻ resumed with {amount(e['tokens'] or 0, 'token')}", look.SKY))
        elif e["kind"] in OF_GROUP:
            made.append(Step(e["at"], f"group {OF_GROUP[e['kind']]}{why}", look.VERMILLION))
    s = t.sample
    if s["finished_at"] is not None and t.incarnation == s["incarnation"]:
        ended = f"✓ {s['status']}" + (f" ({look.visible(str(s['finish_reason']), 30)})" if s["finish_reason"] else "")
        made.append(Step(s["finished_at"], ended, look.STATUS_COLOURS.get(s["status"], look.GREY)))
    for stage in found.stages:
        if stage["settled_at"] is not None:
            value = stage["outcome"] or stage["status"] if stage["value"] is None else f"{stage['value']:.3g}"
            made.append(Step(stage["settled_at"], f"★ {look.visible(stage['name'], 30)} {value}", look.PURPLE))
    if t.group["ready_at"] is not None:
        made.append(Step(t.group["ready_at"], "group ready", look.GREEN))
    for b in found.batches:
        made.append(Step(b["created_at"], f"leased for step {b['step']}", look.ORANGE))
        if b["settled_at"] is not None:
            made.append(Step(b["settled_at"], f"step {b['step']} {b['state']}", look.BLUE))
    # Of what happened in one transaction: taken up again, then generated, then stopped.
    order = {"created": 0, "↻": 1, "▶": 2, "⚙": 2}
    return sorted(made, key=lambda step: (step.at, order.get(step.text.split(" ")[0], 3)))


def html(t: Trajectory, found: Evidence) -> str:
    every = steps(t, found)
    pieces: list[str] = []
    before: float | None = None
    for step in every[:MAX_STEPS]:
        if before is not None and step.at - before > SOON_S:
            pieces.append(f'<span class="gap">– {look.duration(step.at - before)} →</span>')
        elif before is not None:
            pieces.append('<span class="gap">→</span>')
        took = ""
        if step.until is not None and step.until - step.at > SOON_S:
            took = f' <span class="dim">{look.duration(step.until - step.at)}</span>'
        title = f"{look.when(step.at)} UTC"
        pieces.append(
            f'<span class="step" style="--c:{step.colour}" title="{title}">{line(step.text, 120)}{took}</span>'
        )
        before = step.at if step.until is None else max(step.at, step.until)
    more = f"; the first {MAX_STEPS} of {len(every)} steps" if len(every) > MAX_STEPS else ""
    note = f"point at a step for its time{more}"
    return parts.section("Life", note, f'<div class="ss-lane">{"".join(pieces)}</div>')
