"""Charts (Altair). Each gets counts that were made in SQL, so that a browser never draws more than some bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from samplestore.dashboard import look
from samplestore.dashboard.style import CHART_PX

MAX_BARS = 12
MAX_POINTS = 256
MANY_MARKS = 30  # lines that would hide what they cross
MUTED = "#808896"  # the text colour of the page is unknown here; this grey can be read on both themes


def _drawn(chart: Any) -> Any:
    """With labels that stand at their line and near their axis, and no room for what is not there. The height is that
    of the whole, legend included."""
    axis = {"labelPadding": 5, "labelFlush": False, "titlePadding": 6, "titleFontSize": 12, "titleFontWeight": 400}
    return (
        chart.properties(height=CHART_PX, padding={"left": 2, "right": 6, "top": 8, "bottom": 4})
        .configure_axis(**axis)
        .configure_legend(offset=8, padding=0, rowPadding=2, labelFontSize=12, symbolSize=90)
    )


def staleness(counts: Mapping[str, int], max_staleness: int) -> Any:
    """Ready groups by staleness; bars beyond the window are hatched by word and colour, unknown stands apart."""
    import altair as alt
    import pandas as pd

    rows = [
        {"versions behind": name, "groups": n, "window": "inside the window" if inside else "too stale"}
        for name, n, inside in _lags({int(k): n for k, n in counts.items() if k != "unknown"}, max_staleness)
    ]
    if "unknown" in counts:
        rows.append({"versions behind": "unknown", "groups": counts["unknown"], "window": "version unknown"})
    order = [str(row["versions behind"]) for row in rows]
    scale = alt.Scale(
        domain=["inside the window", "too stale", "version unknown"], range=[look.GREEN, look.VERMILLION, look.GREY]
    )
    base = alt.Chart(pd.DataFrame(rows)).encode(
        x=alt.X(
            "versions behind:N", sort=order, title="versions behind the current weights", axis=alt.Axis(labelAngle=0)
        ),
        y=alt.Y("groups:Q", title=None, axis=alt.Axis(tickMinStep=1, tickCount=4, format=",d")),
    )
    bars = base.mark_bar(cornerRadiusTopLeft=3, cornerRadiusTopRight=3, size=34).encode(
        color=alt.Color("window:N", scale=scale, legend=alt.Legend(orient="top", title=None) if _mixed(rows) else None),
        tooltip=["versions behind:N", alt.Tooltip("groups:Q", format=",d"), "window:N"],
    )
    return _drawn(bars + _labels(base, "groups", dy=-7))


def _lags(known: Mapping[int, int], window: int) -> list[tuple[str, int, bool]]:
    """(name, groups, inside the window) of each bar, at most MAX_BARS + 1. The window may be as wide as a setting can
    be, and lags too: what has no bar of its own is in the last one of its side of the window."""
    # Every lag of the window has its place, so that "nothing at 0" can be seen.
    lags = sorted({*range(min(window + 1, MAX_BARS)), *known})
    single = len(lags) if len(lags) <= MAX_BARS else MAX_BARS - 1
    bars = [(str(lag), known.get(lag, 0), lag <= window) for lag in lags[:single]]
    for inside in (True, False):
        if rest := [lag for lag in lags[single:] if (lag <= window) is inside]:
            more = f"–{rest[-1]}" if rest[-1] < lags[-1] else " or more"
            name = f"{rest[0]}{more if len(rest) > 1 else ''}"
            bars.append((name, sum(known.get(lag, 0) for lag in rest), inside))
    return bars


def _mixed(rows: list[dict[str, Any]]) -> bool:
    return len({row["window"] for row in rows}) > 1


def _labels(base: Any, field: str, **place: Any) -> Any:
    import altair as alt

    return base.mark_text(fontSize=12, fontWeight=600, color=MUTED, **place).encode(
        text=alt.Text(f"{field}:Q", format=",d"),
        opacity=alt.condition(f"datum['{field}'] > 0", alt.value(1), alt.value(0)),
    )


def rewards(samples: Sequence[Mapping[str, Any]]) -> Any:
    """A point for each scored sample of a group, labelled with its index; its shape and colour tell the status."""
    import altair as alt
    import pandas as pd

    rows = [{"sample": str(s["index"]), "reward": s["reward"], "status": s["status"]} for s in samples[:MAX_POINTS]]
    colours = look.STATUS_COLOURS
    base = alt.Chart(pd.DataFrame(rows)).encode(
        x=alt.X("sample:N", sort=[r["sample"] for r in rows], title="sample", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("reward:Q", title="reward", scale=alt.Scale(zero=True, nice=True)),
    )
    points = base.mark_point(filled=True, size=110, opacity=1).encode(
        color=alt.Color("status:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())),
                        legend=None if len({r["status"] for r in rows}) == 1 else alt.Legend(orient="top", title=None)),
        shape=alt.Shape("status:N", scale=alt.Scale(domain=list(colours),
                        range=["square", "diamond", "circle", "triangle-up", "cross"]), legend=None),
        tooltip=["sample:N", alt.Tooltip("reward:Q", format=".4g"), "status:N"],
    )  # fmt: skip
    mean = sum(r["reward"] for r in rows) / len(rows)
    rule = alt.Chart(pd.DataFrame([{"reward": mean}])).mark_rule(strokeDash=[4, 4], color=MUTED).encode(y="reward:Q")
    return _drawn(rule + points)


def over_time(told: Mapping[str, Any], columns: int = 2) -> Any:
    """Interruptions in equal parts of time, stacked by reason; a line where new weights were published. columns: of its
    legend."""
    import altair as alt
    import pandas as pd

    order = sorted({bar["why"] for bar in told["bars"]})  # not by how many: a reason keeps its colour and its place
    rows, top = [], dict[float, int]()
    for bar in sorted(told["bars"], key=lambda bar: order.index(bar["why"])):
        low = top.get(bar["at"], 0)
        top[bar["at"]] = low + bar["times"]
        rows.append(
            {
                "from": _instant(bar["at"]), "to": _instant(bar["at"] + told["width_s"]), "low": low,
                "high": low + bar["times"], "times": bar["times"], "reason": look.visible(bar["why"], 46),
            }
        )  # fmt: skip
    names = [look.visible(why, 46) for why in order]
    parts = math.ceil((told["until"] - told["since"]) / told["width_s"] - 1e-6)
    end = told["since"] + parts * told["width_s"]  # the last bar has its whole width, so that the axis stands still
    scale = alt.Scale(domain=[_instant(told["since"]), _instant(end)])
    # Stacked here: a bar that has two ends in time is not stacked by the chart.
    drawn = (
        alt.Chart(pd.DataFrame(rows))
        .mark_rect(stroke="#80889655", strokeWidth=0.5)
        .encode(
            x=alt.X("from:T", scale=scale, title=None, axis=alt.Axis(format="%H:%M", labelAngle=0, tickCount=8)),
            x2="to:T",
            y=alt.Y("low:Q", title=None, scale=alt.Scale(domain=[0, max(top.values(), default=1)], nice=True),
                    axis=alt.Axis(tickMinStep=1, tickCount=4, format=",d")),
            y2="high:Q",
            color=alt.Color("reason:N", sort=names, scale=alt.Scale(domain=names, range=list(look.VERSION_COLOURS)),
                            legend=alt.Legend(orient="bottom", title=None, columns=columns, labelLimit=240)),
            tooltip=["reason:N", alt.Tooltip("times:Q", format=",d"), alt.Tooltip("from:T", format="%H:%M:%S")],
        )
    )  # fmt: skip
    marks = [
        {"at": _instant(p["at"]), "weights": look.version_name(p["version"]), "step": p["step"]}
        for p in told["publishes"]
    ]
    if not marks:
        return _drawn(drawn)
    lines = (
        alt.Chart(pd.DataFrame(marks))
        .mark_rule(color=MUTED, strokeDash=[3, 3], strokeWidth=1.2, opacity=1.0 if len(marks) <= MANY_MARKS else 0.4)
        .encode(x="at:T", tooltip=["weights:N", "step:Q", alt.Tooltip("at:T", format="%H:%M:%S")])
    )
    layers = drawn + lines
    if len(marks) <= MAX_BARS:
        layers += lines.mark_text(align="left", dx=3, fontSize=10, color=MUTED).encode(
            text="weights:N", y=alt.value(6), strokeDash=alt.value([0])
        )
    return _drawn(layers)


def _instant(at: float) -> str:
    """As a chart reads it: without a zone, so that the browser shows UTC as it stands."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
