"""samplestore show: one sample, its segments, text, rewards and events."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplestore.cli import exits, tokens
from samplestore.cli.common import AsJson, Db, RunName, existing, opened
from samplestore.cli.output import emit_json, note, pairs, say, table, when
from samplestore.cli.typed import to_type
from samplestore.states import TAKEN, SegmentKind
from samplestore.words import amount

if TYPE_CHECKING:
    from samplestore.queries.determinism import Determinism
    from samplestore.queries.episodes import RecordedCall
    from samplestore.queries.trajectory import Span, Trajectory
    from samplestore.store import Store

MAX_REQUESTS = 200
MAX_TEXT_TOKENS = 200_000  # longer responses are cut, and it is said
MAX_IDS = 256  # of a response that no tokenizer makes text
_NAMED = re.compile(
    r"(?:(?:(?P<uuid>[0-9a-f-]{36})/)?(?P<group>\d{1,18})/(?P<index>\d{1,9})(?:/(?P<life>\d{1,9}))?|(?P<id>\d{1,18}))"
)


def find_sample(store: Store, named: str, run: str | None) -> dict[str, Any]:
    """The sample that was typed: an id, GROUP/INDEX of a run, or RUN_UUID/GROUP/INDEX[/INCARNATION].

    Keys: id, run, uuid, run_id, group_id, number, index, life (None: not typed). Raises CommandError.
    """
    from samplestore.queries.inspect import sample_at, samples_by_id

    match = _NAMED.fullmatch(named)
    if match is None:
        raise exits.CommandError(
            f"{named!r} names no sample: use GROUP/INDEX, RUN_UUID/GROUP/INDEX, or its id. "
            "See: samplestore show --help",
            exits.USAGE,
        )
    life = match["life"]
    if match["id"]:
        found = samples_by_id(store.database, [int(match["id"])])
    elif match["uuid"]:
        found = sample_at(store.database, int(match["group"]), int(match["index"]), uuid=match["uuid"])
    else:
        of_run = existing(store, run)
        found = sample_at(store.database, int(match["group"]), int(match["index"]), run_id=of_run.id)
    if not found or (run is not None and found[0]["run"] != run):
        of_whom = "" if run is None else f" in run {run}"
        raise exits.CommandError(f"there is no sample {named}{of_whom}. List the groups with: samplestore groups")
    return {**found[0], "life": None if life is None else int(life)}


def show(
    sample: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLE", help="GROUP/INDEX, RUN_UUID/GROUP/INDEX/INCARNATION (last part optional), or its id."
        ),
    ],
    db: Db = None,
    run: RunName = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="FOLDER",
            help="The model's folder: show the text too.",
            show_default="tokenizer of samplestore.toml",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """One sample: status, group, segments with their weight versions, rewards and other stages, events, and its text in
    the colours of the weight versions.

    Without a tokenizer the text is token ids. A mark before each stretch names the version that wrote it, and what
    ended the stretch before.
    """
    from samplestore.queries import determinism, episodes, inspect, stages, trajectory

    loaded = tokens.known_tokenizer(tokenizer)
    with opened(db) as store:
        place = find_sample(store, sample, run)
        at = (store.database, place["run_id"], place["number"], place["index"])
        try:
            found = trajectory.read(*at, incarnation=place["life"], limit=1)
            assert found is not None, "the sample was found a moment ago, and samples are never deleted"
            text = _text(at, found, loaded)
            requests = inspect.requests(store.database, place["id"], found.incarnation, MAX_REQUESTS + 1)
            calls = store.database.read(lambda c: episodes.record(c, place["id"], found.incarnation)).calls
            done = store.database.read(lambda c: stages.of_sample(c, place["id"], place["group_id"], found.incarnation))
            again = determinism.of_sample(store.database, place["run_id"], place["id"])
        except ValueError as error:
            raise exits.CommandError(
                f"{error}. Find all damaged rows with: {to_type('check', '--run', place['run'])}"
            ) from error
    if as_json:
        emit_json(
            {
                **_as_json(place, found, requests, text, loaded is not None),
                "stages": done,
                "determinism": asdict(again),
                "calls": [asdict(c) for c in calls],
            }
        )
    else:
        _print(place, found, requests, again, done)
        if calls:
            say()
            table(("call", "kind", "name", "state", "from", "to", "error"), [_call(c) for c in calls[:MAX_REQUESTS]])
        say()
        tokens.show(text)


def _call(c: RecordedCall) -> tuple[Any, ...]:
    return c.number, c.kind, c.name or None, c.state, c.start, c.stop, c.error


def _text(at: tuple[Any, ...], found: Trajectory, decoder: Any) -> list[tokens.Stretch]:
    """Prompt and response by who wrote them. Without a tokenizer the first ids only."""
    from samplestore.queries import trajectory

    if found.pruned:
        note("the response was pruned; only the prompt is left")
    most = MAX_IDS if decoder is None else MAX_TEXT_TOKENS
    n = found.n_prompt if found.pruned else min(found.n_tokens, found.n_prompt + most)
    ids: list[int] = []
    for start in range(0, n, trajectory.MAX_WINDOW):
        page = trajectory.read(*at, incarnation=found.incarnation, start=start, limit=trajectory.MAX_WINDOW)
        ids += [] if page is None else page.tokens.ids.tolist()
    if n < found.n_tokens and not found.pruned:
        how = "read it as text with: --tokenizer FOLDER" if decoder is None else "read it all in: samplestore dashboard"
        note(f"the response is cut after {most:,} of {found.n_response:,} tokens; {how}")
    return tokens.stretches(ids[:n], found.n_prompt, [] if found.pruned else found.spans, decoder)


def _portable(place: dict[str, Any], found: Trajectory) -> str:
    return f"{place['uuid']}/{place['number']}/{place['index']}/{found.incarnation}"


def _as_json(
    place: dict[str, Any], found: Trajectory, requests: list[dict[str, Any]], text: list[tokens.Stretch], decoded: bool
) -> dict[str, Any]:
    of = {x.span.first_seq: x.text for x in text if x.span is not None} if decoded else {}
    told = {
        "run": place["run"],
        "id": place["id"],
        "portable_id": _portable(place, found),
        "as_of": found.as_of,
        "incarnation": found.incarnation,
        "sample": found.sample,
        "group": {"id": place["group_id"], **found.group},
        "prompt_tokens": found.n_prompt,
        "response_tokens": found.n_response,
        "segments": [_span(span, of.get(span.first_seq)) for span in found.spans],
        "segments_cut": found.spans_cut,
        "requests": requests[:MAX_REQUESTS],
        "requests_cut": len(requests) > MAX_REQUESTS,
        "events": found.events,
        "events_cut": found.events_cut,
    }
    if not decoded:
        return told
    response = "".join(x.text for x in text if x.span is not None)
    return {**told, "text": {"prompt": text[0].text, "response": response}}


def _span(span: Span, text: str | None) -> dict[str, Any]:
    return asdict(span) if text is None else {**asdict(span), "text": text}


def _print(
    place: dict[str, Any], found: Trajectory, requests: list[dict[str, Any]], again: Determinism,
    done: list[dict[str, Any]],
) -> None:  # fmt: skip
    s, g = found.sample, found.group
    upto = s["parent_upto"]
    shares = "with a prompt of its own" if upto is None else f"with its first {amount(upto, 'response token')}"
    owner = f", held by worker {s['owner']} since {when(s['claimed_at'])}" if s["owner"] is not None else ""
    lives = "" if found.incarnation == s["incarnation"] else f" (a former life; the present one is {s['incarnation']})"
    reason = f": {g['reason']}" if g["reason"] else ""
    at_lease = " (at the lease)" if g["state"] in TAKEN else ""
    pairs(
        [
            ("sample", f"{g['number']}/{place['index']} (id {place['id']})"),
            ("portable id", _portable(place, found)),
            ("run", place["run"]),
            ("incarnation", f"{found.incarnation}{lives}"),
            ("status", f"{s['status']}{f' ({reason_})' if (reason_ := s['finish_reason']) else ''}{owner}"),
            ("group", f"{g['number']}, {g['state']}{reason}, {amount(g['n_samples'], 'sample')}, epoch {g['epoch']}"),
            *(
                [("forked", f"from the sample with id {s['parent_id']}, {shares}")]
                if s["parent_id"] is not None
                else []
            ),
            ("prompt", f"{amount(found.n_prompt, 'token')}, dataset {s['dataset']}"),
            (
                "response",
                f"{amount(found.n_response, 'token')}, {s['n_loss_tokens']:,} of them trained, "
                f"{amount(s['n_segments'], 'segment')}",
            ),
            ("versions", _versions(s["version_min"], s["version_max"])),
            ("staleness", f"{'unknown' if s['staleness'] is None else s['staleness']}{at_lease}"),
            ("reward", s["reward"]),
            (
                "stopped",
                f"{amount(s['n_aborts'], 'time')}, resumed {s['n_resumes']}, failed {s['failures']}; "
                f"attempt {s['attempt']}",
            ),
            ("same again", "yes: seeded or greedy" if again.holds else f"no: {'; '.join(again.reasons)}"),
            ("created", when(s["created_at"])),
            ("finished", when(s["finished_at"])),
            *([("no loss", f"taken out of it: {s['removed']}")] if s["removed"] else []),
            *([("error", s["error"])] if s["error"] else []),
        ]
    )
    if found.spans:
        say()
        table(SEGMENTS, [_segment(span) for span in found.spans])
    if done:
        say()
        table(STAGES, [_stage(d) for d in done])
    if requests:
        say()
        table(REQUESTS, [_request(r) for r in requests[:MAX_REQUESTS]])
    if found.events:
        say()
        table(("event", "at", "reason", "worker", "version", "tokens"), [_event(event) for event in found.events])
    if found.spans_cut or found.events_cut or len(requests) > MAX_REQUESTS:
        note("the lists are cut; see them all in: samplestore dashboard")


SEGMENTS = (
    *("segments", "start", "tokens", "kind", "loss", "versions", "log-prob"),
    *("worker", "attempt", "engine", "finish", "stored"),
)


def _segment(x: Span) -> tuple[Any, ...]:
    seqs = str(x.first_seq) if x.first_seq == x.last_seq else f"{x.first_seq}-{x.last_seq}"
    mean = None if x.logprob_sum is None else x.logprob_sum / x.n_tokens
    versions = _versions(x.version_min, x.version_max) if x.kind == SegmentKind.GENERATED else ""
    return (
        seqs, x.start, x.n_tokens, x.kind, x.loss, versions, mean, _id(x.owner), x.attempt, x.engine, x.finish_reason,
        when(x.last_at),
    )  # fmt: skip


STAGES = ("stage", "of", "status", "outcome", "value", "seconds", "settled", "error")


def _stage(d: dict[str, Any]) -> tuple[Any, ...]:
    return (
        d["name"], d["of"], d["status"], d["outcome"], d["value"], d["elapsed_s"], when(d["settled_at"]), d["error"],
    )  # fmt: skip


REQUESTS = (
    *("request", "engine", "prompt", "cached", "generated", "stored", "lost", "why lost"),
    *("retracted", "drafts kept", "queue s", "total s", "finish"),
)


def _request(r: dict[str, Any]) -> tuple[Any, ...]:
    return (
        r["rid"][:12], r["engine"], r["prompt_tokens"], r["cached_tokens"], r["generated_tokens"], r["stored_tokens"],
        r["lost_tokens"], r["lost_reason"], r["retractions"], _accepted(r["spec"]), r["queue_s"], r["e2e_s"],
        r["finish_reason"],
    )  # fmt: skip


def _accepted(spec: Any) -> float | None:
    """The share of drafted tokens that speculative decoding kept, under the names of old and new engines."""
    told = spec if isinstance(spec, dict) else {}
    for kept, drafted in (
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
        ("spec_accept_token_num", "spec_draft_token_num"),
    ):
        a, b = told.get(kept), told.get(drafted)
        if isinstance(a, int | float) and isinstance(b, int | float) and b > 0:
            return a / b
    return None


def _event(e: dict[str, Any]) -> tuple[Any, ...]:
    return e["kind"], when(e["at"]), e["reason"], _id(e["worker_id"]), _id(e["version"]), e["tokens"]


def _id(number: int | None) -> str | None:
    """Ids and versions are names, not amounts: no thousands separator."""
    return None if number is None else str(number)


def _versions(low: int | None, high: int | None) -> str:
    return "unknown" if low is None else str(low) if low == high else f"{low}-{high}"
