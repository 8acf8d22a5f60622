"""Charts (Altair). Each gets counts that were made in SQL, so that a browser never draws more than some bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplestore.dashboard import look

MAX_BARS = 12


def staleness(counts: Mapping[str, int], max_staleness: int) -> Any:
    """Ready groups by staleness; bars beyond the window are hatched by word and colour, unknown stands apart."""
    import altair as alt
    import pandas as pd

    known = [int(k) for k in counts if k != "unknown"]
    # Every lag of the window has its place, so that "nothing at 0" can be seen.
    order = [str(n) for n in sorted({*range(max_staleness + 1), *known})][:MAX_BARS]
    rows = [
        {
            "versions behind": lag,
            "groups": counts.get(lag, 0),
            "window": "inside the window" if int(lag) <= max_staleness else "too stale",
        }
        for lag in order
    ]
    if "unknown" in counts:
        order.append("unknown")
        rows.append({"versions behind": "unknown", "groups": counts["unknown"], "window": "version unknown"})
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
    return (bars + _labels(base, "groups", dy=-7)).properties(height=190)


def _mixed(rows: list[dict[str, Any]]) -> bool:
    return len({row["window"] for row in rows}) > 1


def _labels(base: Any, field: str, **place: Any) -> Any:
    import altair as alt

    # A middle grey: the chart's text colour is unknown here, and this one can be read on both themes.
    return base.mark_text(fontSize=12, fontWeight=600, color="#808896", **place).encode(
        text=alt.Text(f"{field}:Q", format=",d"),
        opacity=alt.condition(f"datum['{field}'] > 0", alt.value(1), alt.value(0)),
    )


def aborts(counts: Mapping[str, int]) -> Any:
    """Why samples were stopped in the middle, the most frequent first."""
    import altair as alt
    import pandas as pd

    rows: list[dict[str, Any]] = [
        {"reason": look.visible(why, 46), "times": n, "kind": why.partition(":")[0]} for why, n in counts.items()
    ][:MAX_BARS]
    base = alt.Chart(pd.DataFrame(rows)).encode(
        y=alt.Y("reason:N", sort=[r["reason"] for r in rows], title=None, axis=alt.Axis(labelLimit=260, ticks=False)),
        x=alt.X("times:Q", title=None, axis=alt.Axis(tickMinStep=1, tickCount=4, format=",d")),
    )
    bars = base.mark_bar(cornerRadiusEnd=3).encode(
        color=alt.Color(
            "kind:N",
            legend=None,
            scale=alt.Scale(
                domain=["abort", "release", "reap", "fail"], range=[look.ORANGE, look.SKY, look.PURPLE, look.VERMILLION]
            ),
        ),
        tooltip=["reason:N", alt.Tooltip("times:Q", format=",d")],
    )
    return (bars + _labels(base, "times", dx=5, align="left")).properties(height=max(90, 26 * len(rows) + 36))
