"""The style sheet of the dashboard."""

from __future__ import annotations

RUN_CHOICE = "run-choice"  # key of its container
CHART_PX = 230
CHART = "chart-"  # begins the key of a chart's container: its room is kept while the chart is loaded

# light-dark() follows the color-scheme that Streamlit sets on the page, so one sheet serves both themes.
_SHEET = """<style>
.block-container, .stMainBlockContainer { padding-top: 4rem; padding-bottom: 3rem; max-width: 1500px; }
.ss {
  --line: light-dark(#dfe2e8, #363b47); --soft: light-dark(#f6f7f9, #191c24); --dim: light-dark(#5b6270, #a3a9b6);
  --ok: light-dark(#00734f, #2fc795); --warn: light-dark(#9a6200, #f0b429); --bad: light-dark(#b34700, #ff8a4c);
  font-size: .875rem; line-height: 1.45;
}
.ss * { box-sizing: border-box; }
.ss-verdict, .ss-list, .ss-legend, .ss-title, .ss-empty, .ss.dim, .ss.warn, .ss.ok { overflow-wrap: anywhere; }
.ss .dim, .ss.dim { color: var(--dim); }
.ss .num { font-variant-numeric: tabular-nums; }
.ss .ok, .ss.ok { color: var(--ok); }
.ss .warn, .ss.warn { color: var(--warn); }
.ss .bad { color: var(--bad); }
.ss-head { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; align-items: baseline; }
.ss-head .name { font-size: 1.45rem; font-weight: 650; letter-spacing: -.01em; overflow-wrap: anywhere; }
.ss-head .w { font-size: 1.05rem; font-weight: 600; }
.ss-head .meta { color: var(--dim); font-size: .8rem; overflow-wrap: anywhere; }
.ss-pill {
  border: 1px solid currentColor; border-radius: 99px; padding: 0 .55rem; font-size: .8rem; font-weight: 600;
  white-space: nowrap;
}
.ss-verdict {
  border-left: 4px solid currentColor; background: var(--soft); padding: .5rem .8rem;
  border-radius: 0 .4rem .4rem 0; font-size: .95rem;
}
.ss-verdict b { font-weight: 650; }
.ss-verdict span { color: light-dark(#31333f, #fafafa); }
.ss-cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); gap: .6rem; }
@media (max-width: 1240px) { .ss-cards:has(> :nth-child(6)) { grid-template-columns: repeat(3, 1fr); } }
.ss-card { border: 1px solid var(--line); border-radius: .5rem; padding: .55rem .8rem .6rem; min-width: 0; }
.ss-card .k { color: var(--dim); font-size: .78rem; }
.ss-card .v {
  font-size: 1.55rem; font-weight: 620; line-height: 1.25; font-variant-numeric: tabular-nums; white-space: nowrap;
}
.ss-card .v small { font-size: .85rem; font-weight: 450; color: var(--dim); }
.ss-card .s { font-size: .78rem; color: var(--dim); }
.ss-card .s.ok, .ss-card .s.warn, .ss-card .s.bad { font-weight: 550; }
.ss-card .s.ok { color: var(--ok); }
.ss-card .s.warn { color: var(--warn); }
.ss-card .s.bad { color: var(--bad); }
.ss-two { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: .6rem 1.4rem; }
.ss-title { font-weight: 620; font-size: .95rem; }
.ss-title .dim { font-weight: 400; font-size: .8rem; margin-left: .5rem; }
.ss-under { margin-top: -1rem; }
.ss-bar {
  display: flex; height: 18px; border-radius: 4px; overflow: hidden; background: var(--line);
  margin: .3rem 0 .35rem; gap: 1px;
}
.ss-bar.tall { height: 26px; }
.ss-bar i { display: block; min-width: 3px; height: 100%; }
.ss-bar i.waste {
  background-image: repeating-linear-gradient(45deg, rgba(255,255,255,.42) 0 3px, transparent 3px 8px);
}
.ss-legend { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; font-size: .82rem; }
.ss-legend span { white-space: nowrap; }
.ss-facts { font-size: .88rem; }
.ss-legend .zero { opacity: .5; }
.ss-legend b { font-weight: 620; font-variant-numeric: tabular-nums; }
.ss-dot {
  display: inline-block; width: .68rem; height: .68rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -1px;
}
.ss-dot.waste {
  background-image: repeating-linear-gradient(45deg, rgba(255,255,255,.55) 0 2px, transparent 2px 4px);
}
.ss-list { margin: .2rem 0 0; padding-left: 1.2rem; }
.ss ul.ss-list, .ss ul.ss-list li { font-size: .875rem; }
.ss .keep { white-space: nowrap; }
.ss code {
  background: var(--soft); border: 1px solid var(--line); border-radius: 3px; padding: 0 .3rem; font-size: .8rem;
}
.ss-scroll { overflow-x: auto; }
.ss-table { width: 100%; border-collapse: collapse; font-size: .82rem; }
.ss-table th {
  text-align: left; color: var(--dim); font-weight: 500; padding: .25rem .7rem .25rem 0;
  border-bottom: 1px solid var(--line); white-space: nowrap;
}
.ss-table td {
  padding: .28rem .7rem .28rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere;
}
.ss-table .r { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.ss-table .n { white-space: nowrap; }
.ss-table .r + :not(.r) { padding-left: 1.1rem; }
.ss-table tr.on td { background: var(--soft); font-weight: 600; }
.ss a { color: light-dark(#0062a0, #79c3ff); }
.ss-empty { border: 1px dashed var(--line); border-radius: .5rem; padding: .9rem 1rem; color: var(--dim); }
.ss-vkey {
  display: inline-block; padding: 0 .35rem; border-radius: 3px; border-bottom: 3px; font-weight: 600;
  white-space: nowrap;
}
.ss-table .cut {
  width: 99%; max-width: 0; min-width: 12rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
}
.ss-text {
  white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: .4rem;
  padding: .5rem .7rem; margin: .25rem 0; max-height: 24rem; overflow-y: auto; unicode-bidi: isolate; direction: ltr;
}
.ss-images { display: flex; flex-wrap: wrap; gap: .5rem; margin: .3rem 0; align-items: flex-start; }
.ss-images img { max-width: 100%; max-height: 18rem; border: 1px solid var(--line); border-radius: .3rem; }
.ss-lane { display: flex; flex-wrap: wrap; gap: .3rem .25rem; align-items: center; margin: .3rem 0; font-size: .82rem; }
.ss-lane .step {
  border: 1px solid var(--line); border-left: 4px solid var(--c, var(--line)); border-radius: .35rem;
  padding: .15rem .5rem; background: var(--soft);
}
.ss-lane .gap { color: var(--dim); white-space: nowrap; font-size: .76rem; }
.ss-turn { border-left: 4px solid var(--c, var(--line)); padding: .1rem 0 .1rem .7rem; margin: .5rem 0; }
.ss-turn .who { font-weight: 620; font-size: .8rem; }
.ss-tokens {
  tab-size: 4;
  font-family: "Source Code Pro", ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .86rem;
  line-height: 1.95; white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: .5rem; padding: .8rem 1rem; overflow: hidden; unicode-bidi: isolate; direction: ltr;
}
.ss-tokens .t {
  border-bottom-width: 2px; border-bottom-color: transparent; border-bottom-style: solid; border-radius: 2px;
  padding: .1rem 0; box-shadow: inset -1px 0 0 light-dark(rgba(0,0,0,.07), rgba(255,255,255,.09));
}
.ss-tokens .p { color: var(--dim); opacity: .82; }
.ss-tokens .m { opacity: .68; border: 1px dotted currentColor; background: none !important; }
.ss-tokens .t:hover { outline: 2px solid light-dark(#31333f, #fafafa); opacity: 1; }
.ss-tokens .hit {
  box-shadow: 0 -2px 0 light-dark(#b34700, #ff8a4c), 0 2px 0 light-dark(#b34700, #ff8a4c);
  font-weight: 700; opacity: 1; background-color: light-dark(#ffe2cc, #5a2c0c) !important;
}
.ss-tokens .hit { scroll-margin-top: 6rem; }
.ss-tokens .part { color: var(--dim); font-size: .7em; }
.ss-badge {
  font-size: .72rem; font-weight: 700; white-space: nowrap; padding: .05rem .35rem; margin: 0 .2rem;
  border-radius: 3px; border: 1px solid; font-family: "Source Sans", system-ui, sans-serif; user-select: none;
}
[data-testid="stButtonGroup"] button[role="radio"] { min-height: 2.5rem; }
/* What is read again stays as it is until the new numbers are there: no fading every few seconds. */
[data-testid="stElementContainer"][data-stale="true"] { opacity: 1 !important; transition: none !important; }
.st-key-run-choice { position: fixed; top: .65rem; right: 5rem; width: 17rem; z-index: 999991; }
@media (max-width: 1000px) { .st-key-run-choice { position: static; } }
.ss-facts .ss-dot { margin-left: .2rem; }
</style>"""

CSS = _SHEET.replace("</style>", f'[class*="st-key-{CHART}"] {{ min-height: {CHART_PX}px; }}\n</style>')
