"""Pieces of the overview as HTML. Pure functions: data in, escaped text out."""

from __future__ import annotations

from typing import Any

from samplestore.dashboard import advisories, look
from samplestore.dashboard.look import age, count, esc, line
from samplestore.dashboard.parts import ICONS, bar, beat, card, link, serving, state, status, table, url
from samplestore.words import amount, amount_is, which


def header(data: Any, *, as_of: str) -> str:
    s = data.status
    pill = {"running": "ok", "paused": "warn", "draining": "warn"}.get(s["state"], "warn")
    branch = f" · timeline {s['timeline']}" if s["timeline"] else ""
    return (
        '<div class="ss"><div class="ss-head">'
        f'<span class="name">{line(s["run"], 200)}</span><span class="ss-pill {pill}">{esc(s["state"])}</span>'
        f'<span class="w">weights {look.version_key(s["current_version"])}</span>'
        f'<span class="meta">{line(data.database, 300)}{branch} · '
        f"epoch {s['epoch']} · {as_of}</span></div></div>"
    )


def verdict(data: Any) -> str:
    """The answer to "is my run healthy?": alarms first, each with the page to look at."""
    told = advisories.of(data)
    level = advisories.level(told)
    title = {"ok": "Healthy", "warn": "Look here", "bad": "Needs attention"}[level]
    w = data.why
    ready, needed = w["ready_in_window"], w["needed"]
    batch = (
        f"a batch can be taken: {amount_is(ready, 'group')} ready inside the window, a step takes {count(needed)}"
        if ready >= needed
        else f"no batch yet: {count(ready)} of {amount(needed, 'group')} are ready inside the window"
    )
    said = [_advice(data, a) for a in told if a.level != advisories.HINT]
    text = "; ".join([*said, esc(batch)])
    told_so = f"{ICONS[level]} <b>{title}</b> <span>– {text}.</span>"
    return f'<div class="ss"><div class="ss-verdict {level}">{told_so}</div></div>'


def _advice(data: Any, a: advisories.Advice) -> str:
    said = line(a.text, 300)
    if a.page is not None:
        said += " (" + link(a.page, "look", run=data.status["run"], **dict(a.query)) + ")"
    return said


def advice(data: Any) -> str:
    """What to type for alarms, why no batch is ready, and hints. Empty when there is nothing to say."""
    told = advisories.of(data)
    items = [f"{esc(a.text)}: <code>{line(a.command, 200)}</code>" for a in told if a.command]
    w = data.why
    if w["ready_in_window"] < w["needed"]:
        reasons = [line(r["text"], 400) for r in w["reasons"]] or ["nothing stands in the way"]
        items += [f"<b>Why is no batch ready?</b> {'; '.join(reasons)}"]
    items += [_advice(data, a) for a in told if a.level == advisories.HINT]
    if not items:
        return ""
    made = "".join(f"<li>{item}</li>" for item in items)
    return f'<div class="ss"><div class="ss-title">Advice</div><ul class="ss-list">{made}</ul></div>'


def cards(data: Any) -> str:
    s, w = data.status, data.why
    live = [x for x in s["workers"] if x["state"] == "live"]
    silent = sum(x["heartbeat_age_s"] > x["ttl_s"] for x in live)
    rollout = sum(x["kind"] == "rollout" for x in live)
    engines, at = s["engines"], s["current_version"]
    current = sum(e["version"] == at and e["state"] == "live" for e in engines)
    served = f"all serve v{at}" if current == len(engines) else f"{len(engines) - current} not on v{at}"
    last = s["batches"]["last"]
    made = [
        (
            "Workers", f"{len(live)} <small>live</small>",
            f"{silent} silent" if silent else f"{rollout or 'none'} {which(rollout or 1, 'generates', 'generate')}",
            "bad" if silent or not rollout else "ok",
        ),
        (
            "Engines", f"{current} <small>of {len(engines)}</small>" if engines else "–",
            served if engines else "none registered",
            "" if not engines else "ok" if current == len(engines) else "warn",
        ),
        (
            "In flight", _large(s["in_flight"], "sample"),
            f"{count(s['resumed_samples'])} resumed so far", "",
        ),
        (
            "Ready in window", _large(w["ready_in_window"], "group"),
            f"a step takes {count(w['needed'])}",
            "ok" if w["ready_in_window"] >= w["needed"] else "",
        ),
        ("Tokens per second", *rate(data.rate), ""),
        (
            "Trained on", _large(s["groups"]["consumed"], "group"),
            "no batch yet" if last is None else f"last: step {last['step']} ({last['state']})", "",
        ),
    ]  # fmt: skip
    return '<div class="ss"><div class="ss-cards">' + "".join(card(*c) for c in made) + "</div></div>"


def _large(n: int, noun: str) -> str:
    """The number of a card, its noun small behind it."""
    number, _, named = amount(n, noun).partition(" ")
    return f"{number} <small>{named}</small>"


def rate(told: tuple[float, float] | None) -> tuple[str, str]:
    """(value, what it is of) of tokens stored a second."""
    if told is None:
        return "–", "known after two looks"
    return (f"{count(told[0])}" if told[0] >= 10 else f"{told[0]:.1f}"), f"stored, over the last {told[1]:.0f} s"


def states(data: Any) -> str:
    """Samples by status and groups by state: two bars, each with its total."""
    s = data.status
    held = f"{count(s['in_flight'])} of them in flight, {count(s['resumed_samples'])} resumed after an abort"
    both = (
        ("Samples by status", s["samples"], look.STATUS_COLOURS, f"{count(sum(s['samples'].values()))} in all, {held}"),
        ("Groups by state", s["groups"], look.GROUP_COLOURS, f"{count(sum(s['groups'].values()))} in all"),
    )
    made = "".join(
        f'<div><div class="ss-title">{title}<span class="dim">{note}</span></div>'
        f"{bar(counts, colours, hatched=look.WASTED if colours is look.GROUP_COLOURS else (), names=title)}</div>"
        for title, counts, colours, note in both
    )
    return f'<div class="ss"><div class="ss-two">{made}</div></div>'


def token_ledger(data: Any) -> str:
    """Every generated token, by what became of it. The parts add up to the total, or the page says that they don't."""
    book = data.ledger
    by_fate = look.fates(book)
    total, wasted = book["generated"], sum(by_fate.get(fate, 0) for fate in look.WASTED)
    share = f" ({100 * wasted / total:.1f} %)" if total else ""
    requests = book["requests"]
    lost = sum(requests["lost_by_reason"].values())
    notes = [f"{amount(book['kept_by_resuming'], 'token')} kept by {amount(book['resumes'], 'resume')}"]
    if lost:
        why = ", ".join(f"{reason} {count(n)}" for reason, n in requests["lost_by_reason"].items())
        notes.append(f"{count(lost)} more were lost at the engines ({why})")
    if requests["unexplained_tokens"]:
        notes.append(f"{count(requests['unexplained_tokens'])} are unexplained")
    engines = book["engines"]
    if engines["generated"] is not None:
        more, about = engines["unaccounted"], "about " if engines["inexact"] else ""
        rest = f"{about}{count(abs(more))} {'more' if more > 0 else 'fewer'} than" if more else f"{about}as many as"
        told = f"engines counted {amount(engines['generated'], 'token')}"
        notes.append(f"{told}, {rest} the requests of this run that ended")
    wrong = "" if sum(by_fate.values()) == total else '<div class="bad">■ The parts do not add up to the total.</div>'
    tokens = which(total, "token", "tokens")
    return (
        f'<div class="ss"><div class="ss-title">Token ledger<span class="dim"><b>{count(total)}</b> {tokens} generated '
        f"and stored = {count(total - wasted)} kept + {count(wasted)} wasted{share}, hatched</span></div>"
        f"{bar(by_fate, look.FATE_COLOURS, hatched=look.WASTED, tall=True, names='Token ledger')}"
        f'<div class="dim" style="margin-top:.25rem">{line("; ".join(notes), 500)}.</div>{wrong}</div>'
    )


def workers(data: Any, most: int = 12) -> str:
    rows = []
    listed = sorted(data.status["workers"], key=lambda w: w["state"] != "live")
    for w in listed[:most]:
        beats = beat(w) if w["state"] == "live" else f'<span class="dim">{esc(w["state"])}</span>'
        error = f' <span class="bad">{line(w["error"], 160)}</span>' if w["error"] else ""
        rows.append([line(w["name"], 60) + error, esc(w["kind"]), beats, count(w["samples"])])
    note = f"showing {most} of {len(listed)}" if len(listed) > most else ""
    if not rows:
        body = '<div class="ss-empty">No worker has connected yet. Start one with: samplestore worker</div>'
    else:
        body = table([("worker", ""), ("kind", "n"), ("heartbeat", "n"), ("holds", "r")], rows)
    return f'<div class="ss"><div class="ss-title">Workers<span class="dim">{note}</span></div>{body}</div>'


def engines(data: Any, most: int = 12) -> str:
    current, listed, rows = data.status["current_version"], data.status["engines"], []
    for e in listed[:most]:
        told = serving({**e, "current_version": current})
        if e["state"] == "failed":
            told += f' <span class="dim">{line(e["error"] or "", 160)}</span>'
        rows.append([url(e["url"]), look.version_key(e["version"]), told])
    note = f"showing {most} of {len(listed)}" if len(listed) > most else ""
    if not rows:
        body = '<div class="ss-empty">No engine is registered for this run yet.</div>'
    else:
        body = table([("engine", ""), ("serves", "n"), ("weights", "")], rows)
    return f'<div class="ss"><div class="ss-title">Engines<span class="dim">{note}</span></div>{body}</div>'


def arrays(data: Any) -> str:
    """What named arrays take; nothing for a run that has none."""
    sizes = data.status["arrays"]
    if not sizes:
        return ""
    rows = [[line(a["name"], 64), count(a["arrays"]), look.size(a["bytes"])] for a in sizes]
    body = table([("array", ""), ("segments", "r"), ("size", "r")], rows)
    note = "per-token arrays beside segments, in the database and in files"
    return f'<div class="ss"><div class="ss-title">Named arrays<span class="dim">{note}</span></div>{body}</div>'


def recent(data: Any) -> str:
    rows = []
    for r in data.recent:
        name = f"{r['group']}/{r['index']}"
        spans = r["version_min"] is not None and r["version_max"] != r["version_min"]
        versions = (
            look.version_key(r["version_min"]) + (" → " + look.version_key(r["version_max"]) if spans else "")
            if r["version_min"] is not None
            else "–"
        )
        reward = "–" if r["reward"] is None else f"{r['reward']:.2f}"
        rows.append(
            [
                link("trajectory", name, run=data.status["run"], sample=name), status(r), versions,
                count(r["n_tokens"]), count(r["n_resumes"]), reward, state(r["group_state"], r["group_reason"]),
                age(data.status["as_of"] - r["moved_at"]) + " ago",
            ]
        )  # fmt: skip
    title = (
        '<div class="ss-title">Latest trajectories<span class="dim">group/sample, those that moved last</span></div>'
    )
    if not rows:
        return f'<div class="ss">{title}<div class="ss-empty">No sample has tokens yet.</div></div>'
    columns = [("sample", "n"), ("status", "n"), ("weights", "n"), ("tokens", "r"), ("resumes", "r"), ("reward", "r"),
               ("group is", "n"), ("moved", "n")]  # fmt: skip
    return f'<div class="ss">{title}{table(columns, rows)}</div>'
