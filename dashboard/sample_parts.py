"""Pieces of the trajectory page as HTML. Pure functions: data in, escaped text out."""

from __future__ import annotations

from typing import Any

from samplestore.dashboard import look, parts, tokenview
from samplestore.dashboard.look import line
from samplestore.queries.trajectory import Trajectory
from samplestore.run import Run
from samplestore.words import amount

MAX_BADGES = 24
MAX_ROWS = 200


def life(t: Trajectory) -> dict[str, Any]:
    """What a sample's row says, of the life that is shown: the row is that of the present one, so for a former one it
    is told from its spans. None: not kept."""
    s = t.sample
    if t.incarnation == s["incarnation"]:
        return s
    trained = [span for span in t.spans if span.loss]
    versions = [v for span in t.spans for v in (span.version_min, span.version_max) if v is not None]
    told = [span for span in trained if span.logprob_sum is not None]
    return {
        **s, "owner": None, "status": "superseded", "error": None, "reward": None, "staleness": None,
        "finish_reason": t.spans[-1].finish_reason if t.spans else None,
        "version_min": min(versions, default=None), "version_max": max(versions, default=None),
        "n_loss_tokens": sum(span.n_tokens for span in trained), "n_aborts": None, "n_resumes": None,
        "n_without_logprob": sum(span.n_tokens for span in trained) - sum(span.n_tokens for span in told),
        "logprob_sum": sum(span.logprob_sum or 0.0 for span in told),
    }  # fmt: skip


def summary(of: Run, t: Trajectory) -> str:
    s = life(t)
    status = "in flight" if s["owner"] is not None else s["status"]
    versions = "–" if s["version_min"] is None else look.version_key(s["version_min"])
    if s["version_max"] is not None and s["version_max"] != s["version_min"]:
        versions += " → " + look.version_key(s["version_max"])
    scored = s["n_loss_tokens"] - s["n_without_logprob"]
    mean = "–" if scored <= 0 else f"{s['logprob_sum'] / scored:.3f}"
    lag = "unknown" if s["staleness"] is None else f"{s['staleness']} behind"
    if t.incarnation != s["incarnation"]:
        lag = "–"
    images = f", {amount(len(s['images']), 'image')}" if s["images"] else ""
    facts = [
        ("status", look.esc(status) + (f" ({line(s['finish_reason'], 40)})" if s["finish_reason"] else "")),
        ("weights", versions),
        (parts.staleness_of(t.group["state"]), lag if s["n_loss_tokens"] else "no trained tokens"),
        ("reward", "–" if s["reward"] is None else f"{s['reward']:.3f}"),
        ("prompt", amount(t.n_prompt, "token") + images),
        ("response", f"{amount(t.n_response, 'token')}, {look.count(s['n_loss_tokens'])} trained on"),
        ("aborts, resumes", "–" if s["n_aborts"] is None else f"{s['n_aborts']}, {s['n_resumes']}"),
        ("group", f"{parts.link('group', str(t.group['number']), run=of.name, group=t.group['number'])}: "
                  f"{look.esc(t.group['state'])}"
                  + (f" ({line(t.group['reason'], 60)})" if t.group["reason"] else "")),
        ("mean log-prob", mean),
    ]  # fmt: skip
    made = "".join(f'<span><span class="dim">{k}</span> <b>{v}</b></span>' for k, v in facts)
    extra = ""
    name = f"{t.group['number']}/{s['index']}"
    if t.incarnation != s["incarnation"]:
        now = parts.link("trajectory", "the present one", run=of.name, sample=name)
        told = f"▲ A former life, incarnation {t.incarnation}: its tokens are superseded. See {now}."
        extra = f'<div class="warn">{told}</div>'
    elif s["incarnation"]:
        former = parts.link("trajectory", "the one before", run=of.name, sample=f"{name}/{s['incarnation'] - 1}")
        extra = f'<div class="dim">It was started afresh; this is incarnation {s["incarnation"]}. See {former}.</div>'
    if s["error"]:
        extra += f'<div class="bad">■ {line(s["error"], 400)}</div>'
    if s["parent_id"] is not None:
        extra += f'<div class="dim">{_parent(of, t)}</div>'
    return f'<div class="ss"><div class="ss-legend" style="font-size:.88rem">{made}</div>{extra}</div>'


def _parent(of: Run, t: Trajectory) -> str:
    """Where a fork comes from, and what stands before its own tokens."""
    number, index = t.group["number"], t.sample["parent_index"]
    name = "a sample that is gone"
    if index is not None:
        name = "sample " + parts.link("trajectory", f"{number}/{index}", run=of.name, sample=f"{number}/{index}")
    upto = t.sample["parent_upto"]
    if upto is None:
        return f"It was forked by {name} with a prompt of its own, which is its first segment."
    return (
        f"It branches off {name} after {amount(upto, 'response token')}: they stand between its prompt and its own "
        "tokens, and are not shown again."
    )


def title(of: Run, t: Trajectory) -> str:
    life = f"/{t.incarnation}" if t.incarnation != t.sample["incarnation"] else ""
    name = f"{t.group['number']}/{t.sample['index']}{life}"
    return (
        f'<div class="ss"><div class="ss-head"><span class="name">Sample {name}</span><span class="meta">run '
        f"{line(of.name, 200)} · {line(of.database.shown_url, 300)} · as of {look.when(t.as_of)} UTC</span>"
        "</div></div>"
    )


def legend(t: Trajectory, by: str, shades: tokenview.Shades | None = None) -> str:
    rest = "the prompt is dim, what is not trained on has a dotted frame; point at a token for its details"
    if by == tokenview.BY_VERSION:
        versions = sorted({s.version_min for s in t.spans if s.kind == "generated" and s.version_min is not None})
        keys = " ".join(look.version_key(v) for v in versions[:MAX_BADGES])
        if len(versions) > MAX_BADGES:
            keys += f" and {len(versions) - MAX_BADGES} more"
        if any(s.kind == "generated" and s.version_min is None for s in t.spans):
            keys += f" {look.version_key(None)}"
        return f'<div class="ss dim">{keys} &nbsp;{rest}</div>'
    return f'<div class="ss dim">{_explained(by, shades or tokenview.Shades())}; {rest}</div>'


def _explained(by: str, shades: tokenview.Shades) -> str:
    if by == tokenview.BY_LOGPROB:
        return "The stronger the colour, the less likely the token was (full at −5)"
    if by == tokenview.BY_SEGMENT:
        return "Each segment (neighbouring flushes are one) has its own colour and underline"
    if by == tokenview.BY_LOSS:
        return "Green is trained on"
    if by == tokenview.BY_STALENESS:
        names = [str(i) for i in range(len(tokenview.LAG_COLOURS) - 1)] + [f"{len(tokenview.LAG_COLOURS) - 1} or more"]
        dots = " ".join(
            f'<span class="ss-dot" style="background-color:{c}"></span>{n}'
            for n, c in zip(names, tokenview.LAG_COLOURS, strict=True)
        )
        return f"{dots} versions behind the current weights, as of now"
    low, high = shades.limits
    if by == tokenview.BY_DIFFERENCE:
        told = "Blue: the trainer finds the token more likely than the rollout did; orange: less (full at 1 nat)"
        return f"{told}; here from {low:+.3f} to {high:+.3f}"
    return f"{line(by, 64)}, from {low:.4g} to {high:.4g} in this window: the higher, the stronger"


def segments(t: Trajectory) -> str:
    rows = []
    for s in t.spans[:MAX_ROWS]:
        generated = s.kind == "generated"
        mean = "–" if s.logprob_sum is None else f"{s.logprob_sum / s.n_tokens:.3f}"
        seq = str(s.first_seq) if s.first_seq == s.last_seq else f"{s.first_seq}–{s.last_seq}"
        rows.append(
            [
                seq, look.version_key(s.version_min, s.version_max) if generated else "–",
                look.esc(s.kind) + ("" if s.loss else ", masked"), line(s.engine or "–", 40),
                look.count(s.n_tokens), mean, line(s.finish_reason or "–", 40), look.moment(s.last_at, t.as_of),
            ]
        )  # fmt: skip
    note = "neighbouring flushes are merged"
    if t.spans_cut or len(t.spans) > MAX_ROWS:
        note = f"showing the first {len(rows)}; the sample has more"
    columns = [("seq", "n"), ("weights", "n"), ("kind", "n"), ("engine", "n"), ("tokens", "r"), ("mean log-prob", "r"),
               ("ended by", "n"), ("stored (UTC)", "n")]  # fmt: skip
    body = parts.table(columns, rows) if rows else '<div class="ss-empty">No segment is stored.</div>'
    return f'<div class="ss"><div class="ss-title">Segments<span class="dim">{note}</span></div>{body}</div>'


def requests(rows: list[dict[str, Any]], as_of: float) -> str:
    """Engine calls of this life of the sample."""
    columns: list[Any] = [
        ("engine", "n"), ("prompt", "r"), ("cached", "r"), ("generated", "r"), ("stored", "r"), ("lost", "r"),
        ("carried over", "r"), ("temperature", "r"), ("queued", "r"), ("took", "r"), ("ended by", "n"),
        ("started (UTC)", "n"),
    ]  # fmt: skip

    def number(value: Any) -> str:
        return "–" if value is None else look.count(value)

    def seconds(value: Any) -> str:
        return "–" if value is None else look.duration(value)

    made = [
        [
            line(r["engine"] or "–", 60), number(r["prompt_tokens"]), number(r["cached_tokens"]),
            number(r["generated_tokens"]), number(r["stored_tokens"]),
            number(r["lost_tokens"]) + (f" ({line(r['lost_reason'], 40)})" if r["lost_reason"] else ""),
            number(r["resumed_tokens"]), "–" if r["temperature"] is None else f"{r['temperature']:.3g}",
            seconds(r["queue_s"]), seconds(r["e2e_s"]), line(r["finish_reason"] or "–", 40),
            look.moment(r["started_at"], as_of),
        ]
        for r in rows
    ]  # fmt: skip
    body = parts.table(columns, made) if made else '<div class="ss-empty">No call to an engine is recorded.</div>'
    return parts.section("Engine calls", "generated = stored + lost; carried over: tokens that a resume kept", body)


def events(t: Trajectory) -> str:
    rows = [
        [
            look.moment(e["at"], t.as_of), look.esc(e["kind"].replace("_", " ")), line(e["reason"] or "–", 160),
            "–" if e["version"] is None else look.version_key(e["version"]),
            "–" if e["tokens"] is None else look.count(e["tokens"]),
        ]
        for e in t.events
    ]  # fmt: skip
    note = f"the first {len(rows)}" if t.events_cut else "of the sample, and of the run while it was written"
    columns: list[Any] = [("at (UTC)", "n"), ("event", "n"), ("reason", ""), ("weights", "n"), ("tokens", "r")]
    body = parts.table(columns, rows) if rows else '<div class="ss-empty">Nothing has happened to it.</div>'
    return f'<div class="ss"><div class="ss-title">Events<span class="dim">{note}</span></div>{body}</div>'
