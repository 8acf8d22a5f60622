"""Pieces of pages without a server: finding tokens, turns, the life of a sample, advice, charts, texts of prompts."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samplestore.dashboard import advisories, charts, compare, conversation, find, lane, look, parts, tokenview
from samplestore.queries.sample_page import Evidence
from samplestore.queries.trajectory import Span, Tokens, Trajectory

TEXTS = {1: "The ", 2: "Ans", 3: "wer", 4: " is", 5: " two", 6: "İs", 7: "TWO"}


class Bytes:
    """Ids up to 255 are bytes, the others words: some characters take several tokens."""

    def decode(self, ids: Any) -> str:
        return b"".join(TEXTS[i].encode() if i in TEXTS else bytes([i]) for i in map(int, ids)).decode(
            "utf-8", "replace"
        )


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def test_a_text_over_several_tokens() -> None:
    found = find.find(ids(1, 2, 3, 4, 5, 4, 7), "answer", Bytes())
    assert found.tokens == [range(1, 3)] and found.positions == {1, 2} and not found.cut
    assert find.find(ids(1, 2, 3, 4, 5, 4, 7), "TWO", Bytes()).tokens == [range(4, 5), range(6, 7)]
    assert find.find(ids(1, 2, 3), "nothing", Bytes()).tokens == []
    assert find.find(ids(6, 4, 5), "two", Bytes()).tokens == [range(2, 3)], "lower case may be longer"
    assert find.find(ids(), "two", Bytes()).tokens == []


def test_a_character_of_several_tokens_is_found() -> None:
    snowman = list("☃".encode())
    found = find.find(ids(1, *snowman, 4), "☃ is", Bytes())
    assert found.tokens == [range(3, 5)], "it is told where it is complete"


def test_ids_are_found_without_a_decoder() -> None:
    assert find.find(ids(7, 5, 7), "id: 7", None).tokens == [range(0, 1), range(2, 3)]
    assert find.find(ids(7), "id:99999999999", None).looked_at == 0
    assert find.find(ids(7), "id:4294967303", None).tokens == [], "no overflow"
    assert find.find(ids(7), "two", None) == find.Hits([], 0)


def test_hits_and_tokens_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "MAX_HITS", 3)
    monkeypatch.setattr(find, "MAX_TOKENS", 8)
    found = find.find(ids(*[5] * 20), "two", Bytes())
    assert len(found.tokens) == 3 and found.cut and found.looked_at == 8


def span(seq: int, start: int, n: int, kind: str = "generated", version: int | None = 1, at: float = 0.0) -> Span:
    return Span(
        seq, seq, start, n, kind, int(kind == "generated"), version, version, 1, 1, "e", "r", None, -1.0, at, at
    )


def trajectory(spans: list[Span], n_prompt: int = 2, **sample: Any) -> Trajectory:
    total = n_prompt + sum(s.n_tokens for s in spans)
    tokens = Tokens(0, np.arange(total, dtype=np.int32), np.full(total, -0.5, np.float32), ids(), ids())
    row = {"created_at": 0.0, "finished_at": 9.0, "status": "completed", "finish_reason": "stop", "incarnation": 0}
    of_group = {"number": 0, "ready_at": None, "state": "open"}
    return Trajectory({**row, **sample}, of_group, 0, n_prompt, total - n_prompt, spans, False, [], False, tokens, 10.0)


def test_turns_join_what_one_side_says() -> None:
    spans = [span(0, 2, 3, version=1), span(1, 5, 3, version=2), span(2, 8, 2, "environment", None), span(3, 10, 1)]
    told = conversation.turns(trajectory(spans))
    assert [(t.kind, t.start, t.stop, t.versions) for t in told] == [
        ("prompt", 0, 2, ()), ("generated", 2, 8, (1, 2)), ("environment", 8, 10, ()), ("generated", 10, 11, (1,)),
    ]  # fmt: skip


def test_a_turn_that_is_cut_says_so() -> None:
    html = conversation.html(trajectory([span(0, 2, 3)]), ids(60, 62, 60), Bytes())
    assert "&lt;&gt;" in html and "only the first 1 of them are shown" in html


def test_ids_that_are_cut_say_so() -> None:
    """Without a tokenizer a turn is its token ids."""
    long = conversation.MAX_IDS + 1
    for n, told in ((long - 1, False), (long, True)):
        html = conversation.html(trajectory([span(0, 0, n)], n_prompt=0), np.full(n, 123456, np.int32), None)
        assert html.count("123456") == min(n, conversation.MAX_IDS)
        assert (f"the first {conversation.MAX_IDS:,} token ids" in html) is told


def test_recorded_calls_are_escaped_and_unknown_outcomes_said() -> None:
    call = SimpleNamespace(
        number=1,
        kind="step",
        name="<b>",
        state="started",
        asked={"x": "<i>"},
        result=None,
        start=3,
        stop=None,
        error=None,
    )
    html = conversation.calls([call])  # type: ignore[list-item]
    assert "outcome unknown" in html and "<b>" not in html and "&lt;i&gt;" in html


def test_the_life_of_a_sample_is_in_order() -> None:
    stage = {"settled_at": 9.5, "value": 1.0, "outcome": "ok", "status": "done", "name": "reward<b>"}
    batch = {"created_at": 11.0, "settled_at": 12.0, "step": 7, "state": "committed"}
    t = trajectory([span(0, 2, 3, at=1.0), span(1, 5, 3, version=None, at=4.0)])
    t.events.extend(
        {"at": at, "kind": kind, "reason": why, "tokens": 3, "version": None}
        for at, kind, why in ((1.0, "abort", "w"), (4.0, "resume", None))
    )
    evidence = Evidence([stage], [], [], [batch], [])
    told = [s.text.split(":")[0] for s in lane.steps(t, evidence)]
    assert told == [
        "created", "▶ v1, 3 tokens", "‖ aborted", "↻ resumed with 3 tokens", "▶ v?, 3 tokens", "✓ completed (stop)",
        "★ reward<b> 1", "leased for step 7", "step 7 committed",
    ]  # fmt: skip
    assert "<b>1" not in lane.html(t, evidence) and "reward&lt;b&gt;" in lane.html(t, evidence)


def test_a_request_took_as_long_as_its_engine_call() -> None:
    """The first tokens of it are stored later than it began; what comes after them is of the same request."""
    first, second = span(0, 2, 3, at=4.0), span(1, 5, 3, version=2, at=6.0)
    call = {"rid": "r", "started_at": 1.5}
    told = lane.steps(trajectory([first, second]), Evidence([], [call], [], [], []))
    assert [(s.at, s.until) for s in told if s.text.startswith("▶")] == [(1.5, 4.0), (6.0, 6.0)]


def test_a_place_to_go_to_is_the_first_marked_token_of_the_window() -> None:
    t = trajectory([span(0, 2, 3)])
    html = tokenview.render(t, None, marked={0, 3, 4})
    assert html.count('"t hit"') + html.count('"t p hit"') == 3
    assert html.count(f'id="{tokenview.HIT}"') == 1 and html.index('id="found"') < html.index("response token 0")
    assert 'id="' not in tokenview.render(t, None)


def test_signed_differences_have_two_hues_and_missing_ones_none() -> None:
    t = trajectory([span(0, 2, 3)])
    values = np.array([np.nan, np.nan, 2.0, -0.5, np.nan], np.float32)
    html = tokenview.render(t, None, tokenview.BY_DIFFERENCE, shades=tokenview.Shades(values), marked={3})
    assert html.count("rgba(0,114,178,0.72)") == 1 and html.count("rgba(213,94,0,0.36)") == 1
    assert html.count(": none") == 1 and html.count('"t hit"') == 1
    assert tokenview.Shades(values).limits == (-0.5, 2.0)


def test_unknown_staleness_stays_unknown() -> None:
    t = trajectory([span(0, 2, 1, version=3), span(1, 3, 1, version=None), span(2, 4, 1, version=9)])
    html = tokenview.render(t, None, tokenview.BY_STALENESS, shades=tokenview.Shades(lag={3: 2}))
    assert html.count("· 2 behind") == 1 and html.count("staleness unknown") == 2


def test_how_far_two_responses_agree() -> None:
    assert "first <b>2</b> tokens" in compare.told(ids(1, 2, 3), ids(1, 2, 4, 5))
    assert "first <b>1</b> tokens" in compare.told(ids(1), ids(1, 2))
    assert "are the same, all 2" in compare.told(ids(1, 2), ids(1, 2))


@pytest.mark.parametrize("cut", [4, 17, 30, 44, 47, 400])
def test_a_prompt_that_is_cut_anywhere(cut: int) -> None:
    stored = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Zoë says "x\n"?'}])
    told = parts.prompt_text(stored[:cut], cut=True)
    assert "\\u00" not in told or cut < 60
    if cut == 400:
        assert told == 'Be brief. ⏵ Zoë says "x\n"?'
    assert parts.prompt_text(json.dumps("a <b>"), cut=True) == "a <b>" and parts.prompt_text(None) == ""


def overview(**changes: Any) -> Any:
    status = {
        "run": "r", "state": "running", "current_version": 3, "starving": [], "workers": [
            {"kind": "rollout", "state": "live", "heartbeat_age_s": 1.0, "ttl_s": 30.0}
        ], "engines": [], "groups": dict.fromkeys(("dropped", "stale", "consumed"), 0),
    }  # fmt: skip
    book = {"requests": {"unexplained_tokens": 0}, "by_fate": {}, "dropped_by_reason": {}, "generated": 0}
    metrics = changes.pop("metrics", {})
    return SimpleNamespace(status={**status, **changes}, ledger=book, metrics=metrics)


def test_a_healthy_run_has_no_advice() -> None:
    assert advisories.of(overview()) == [] and advisories.level([]) == "ok"


def test_alarms_come_first_and_hints_are_no_alarm() -> None:
    metrics = {"samplestore/recent/zero_std_ratio": 0.9, "samplestore/recent/truncated_ratio": 0.5}
    told = advisories.of(overview(metrics=metrics))
    assert [a.level for a in told] == ["hint", "hint"] and advisories.level(told) == "ok"
    silent = [{"kind": "rollout", "state": "live", "heartbeat_age_s": 99.0, "ttl_s": 30.0}]
    told = advisories.of(overview(metrics=metrics, workers=silent, state="paused"))
    assert [a.level for a in told] == ["bad", "warn", "hint", "hint"] and advisories.level(told) == "bad"
    assert told[0].command == "samplestore reap --run r" and "resume" in (told[1].command or "")
    gone = advisories.of(overview(workers=[], groups={"dropped": 6, "stale": 0, "consumed": 4}))
    assert [a.text for a in gone] == ["no rollout worker is connected", "6 of 10 settled groups were thrown away"]


def test_who_ended_with_an_error_and_was_not_replaced_is_an_alarm() -> None:
    live = {"id": 9, "kind": "rollout", "name": "w9", "state": "live", "heartbeat_age_s": 1.0, "ttl_s": 30.0}
    old = {"id": 2, "kind": "trainer", "name": "t2", "state": "gone", "error": "out of memory"}
    new = {**old, "id": 5, "name": "t5", "error": "loss is NaN"}
    (told,) = advisories.of(overview(workers=[live, old, new]))
    assert told.level == "bad" and told.text == "no trainer is left; the last one, t5, ended with: loss is NaN"
    left_in_order = {**new, "id": 6, "error": None}
    again = {**live, "id": 7, "kind": "trainer"}
    for others in ([left_in_order], [again], [{**old, "kind": "rollout", "error": "x"}, left_in_order]):
        assert advisories.of(overview(workers=[live, old, new, *others])) == []


def test_a_run_that_is_over_is_no_alarm() -> None:
    """Everyone said goodbye. Where the last one of a kind died instead, somebody has to look."""
    worker = {"id": 1, "kind": "rollout", "name": "w", "state": "gone", "error": None}
    trainer = {**worker, "id": 2, "kind": "trainer"}
    died_before = {**worker, "id": 0, "state": "dead"}
    (told,) = advisories.of(overview(workers=[trainer, worker, died_before]))
    assert told.level == "warn" and told.text.startswith("nobody works on the run any more")
    for last in ({**worker, "id": 3, "state": "dead"}, {**trainer, "id": 3, "error": "out of memory"}):
        assert advisories.level(advisories.of(overview(workers=[last, trainer, worker]))) == "bad"


def test_tokens_of_evaluations_are_not_wasted() -> None:
    book = {"by_fate": {"dropped": 300, "consumed": 50_000}, "dropped_by_reason": {"evaluation": 200, "flat": 100}}
    told = look.fates(book)
    assert (told["dropped"], told["evaluated"], told["consumed"]) == (100, 200, 50_000)
    assert list(told)[: len(look.FATE_COLOURS)] == list(look.FATE_COLOURS)
    assert "evaluated" not in look.fates({"by_fate": {"dropped": 3}, "dropped_by_reason": {"flat": 3}})
    mostly = {"by_fate": {"dropped": 30_000}, "dropped_by_reason": {"evaluation": 30_000}, "generated": 30_000}
    run = overview()
    run.ledger.update(mostly)
    assert advisories.of(run) == []


def test_a_group_that_was_evaluated_is_not_told_as_thrown_away() -> None:
    assert "evaluated" in parts.state("dropped", "evaluation") and "dropped" not in parts.state("dropped", "evaluation")
    for other in (parts.state("dropped", "flat"), parts.state("dropped"), parts.state("ready", "evaluation")):
        assert "evaluated" not in other


def test_what_is_of_another_day_has_its_date() -> None:
    at = 1_796_000_000.0  # 2026-11-30 00:53:20 UTC
    assert look.moment(at, at + 3600) == "00:53:20" and look.moment(None, at) == "–"
    assert look.moment(at, at + look.DAY_S) == look.moment(at, at - look.DAY_S) == "2026-11-30 00:53"
    assert look.moment(at - 3300, at) == "2026-11-29 23:58", "minutes ago, and yesterday"


def test_a_runs_name_is_quoted_in_what_to_type() -> None:
    told = advisories.of(overview(run="a b$(id)", workers=[], state="paused"))
    assert [a.command for a in told] == [
        "samplestore worker --run 'a b$(id)'", "samplestore resume --run 'a b$(id)'",
    ]  # fmt: skip


def bars(counts: dict[str, int], window: int) -> list[tuple[str, int, str]]:
    spec = charts.staleness(counts, window).to_dict()
    (rows,) = spec["datasets"].values()
    return [(r["versions behind"], r["groups"], r["window"]) for r in rows]


def test_a_window_of_any_width_is_some_bars() -> None:
    assert bars({"1": 4, "3": 1, "unknown": 2}, 2) == [
        ("0", 0, "inside the window"), ("1", 4, "inside the window"), ("2", 0, "inside the window"),
        ("3", 1, "too stale"), ("unknown", 2, "version unknown"),
    ]  # fmt: skip
    assert len(bars({"0": 1}, 10**6)) == charts.MAX_BARS
    tracemalloc.start()
    charts._lags({0: 1}, 10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000, "it costs with the bars, not with the window"


@pytest.mark.parametrize(
    ("window", "last"),
    [
        (1, [("11 or more", 19, "too stale")]),
        (11, [("11", 1, "inside the window"), ("12 or more", 18, "too stale")]),
        (15, [("11–15", 5, "inside the window"), ("16 or more", 14, "too stale")]),
        (10**6, [("11 or more", 19, "inside the window")]),
    ],
)
def test_no_known_lag_is_left_out(window: int, last: list[tuple[str, int, str]]) -> None:
    counts = {str(lag): 1 for lag in range(30)}
    told = bars(counts, window)
    assert told[charts.MAX_BARS - 1 :] == last and sum(n for _, n, _ in told) == 30


def test_bars_over_time_are_stacked_and_weights_drawn() -> None:
    bars = [{"at": 0.0, "why": "abort: <b>", "times": 2}, {"at": 0.0, "why": "fail", "times": 3}]
    told = {
        "since": 0.0, "until": 20.0, "width_s": 10.0, "bars": bars, "publishes_cut": False,
        "publishes": [{"at": 5.0, "version": 7, "step": 1}],
    }  # fmt: skip
    spec = charts.over_time(told).to_dict()
    rows = [r for data in spec["datasets"].values() for r in data]
    assert [(r["reason"], r["low"], r["high"]) for r in rows if "low" in r] == [("abort: <b>", 0, 2), ("fail", 2, 5)]
    assert [r["weights"] for r in rows if "weights" in r] == ["v7"]
    assert charts.over_time({**told, "publishes": []}).to_dict()["mark"]["type"] == "rect"


def test_sizes_have_units() -> None:
    assert [look.size(n) for n in (None, 0, 999, 1500, 2_500_000, 7.2e9)] == [
        "–", "0 B", "999 B", "1.5 kB", "2.5 MB", "7.2 GB",
    ]  # fmt: skip
