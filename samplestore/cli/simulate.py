"""samplestore simulate: what another staleness window would have done to a recorded run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from samplestore.cli.common import AsJson, Db, RunName, RunPlace, one_name, opened_run
from samplestore.cli.output import emit_json, pairs, say, table
from samplestore.cli.typed import to_type
from samplestore.words import amount, which

MOST_STEPS = 40  # rows of the table; --json has all of them


def simulate(
    place: RunPlace = None,
    db: Db = None,
    run: RunName = None,
    max_staleness: Annotated[int, typer.Option(min=0, help="The window: versions that a group may lie behind.")] = 1,
    staleness_mode: Annotated[
        str | None, typer.Option(help="oldest | newest | mean.", show_default="as the run counts")
    ] = None,
    stale: Annotated[
        str | None, typer.Option(help="expire | regenerate | skip | mask: what to say of it.", show_default="the run's")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What would this staleness window have dropped, or masked, of what was trained on? Reads only.

    Everything is measured as it was when its batch was leased. Generation itself would have gone another way under
    another window, and what the run's own window has closed was never delivered: a wider one can't bring it back here.
    """
    with opened_run(db, one_name(place, run, "simulate")) as found:
        told = found.simulate(max_staleness, staleness_mode=staleness_mode, stale=stale)
        name = found.name
    if as_json:
        emit_json({"run": name, **told})
        return
    if not told["steps"]:
        say(f"run {name} has no committed step yet. See: {to_type('why', '--run', name)}")
        return
    _print(name, told)


def _print(name: str, told: dict[str, Any]) -> None:
    total, window, masks = told["total"], told["max_staleness"], told["stale"] == "mask"
    say(
        f"run {name}: {amount(total['steps'], 'step')}, {amount(total['groups'], 'group')}, "
        f"{amount(total['tokens'], 'trained token')}, held against max_staleness={window} (staleness: "
        f"{told['staleness_mode']}; the run had {told['recorded']['max_staleness']})"
    )
    say()
    shown = [step for step in told["steps"] if step["groups_beyond"] or step["tokens_masked"]]
    if shown:
        table(
            ("step", "groups", "beyond", "their tokens", "tokens masked instead"),
            [
                (s["step"], s["groups"], s["groups_beyond"], s["tokens_beyond"], s["tokens_masked"])
                for s in shown[-MOST_STEPS:]
            ],
        )
        if len(shown) > MOST_STEPS:
            n = len(shown) - MOST_STEPS
            say(f"... and {amount(n, 'step')} before {which(n, 'it', 'them')}; all of them with: --json")
        say()
    did = {"expire": "dropped", "regenerate": "generated again", "skip": "left waiting"}.get(told["stale"])
    beyond = (
        f"{_of(total['groups_beyond'], total['groups'])} of the groups, {_of(total['tokens_beyond'], total['tokens'])} "
        "of the tokens"
    )
    whole = f"{amount(total['groups_all_masked'], 'group')} with none left"
    masked = f"{_of(total['tokens_masked'], total['tokens'])} of the tokens; {whole}"
    pairs(
        [
            ("groups by staleness", ", ".join(f"{lag}: {n:,}" for lag, n in total["by_staleness"].items())),
            ("would be masked" if masks else f"would be {did}", masked if masks else beyond),
            (f"with stale={'expire' if masks else 'mask'}", f"dropped {beyond}" if masks else f"masked {masked}"),
            ("steps with groups beyond", f"{total['steps_short']:,} of {total['steps']:,}"),
            ("closed by the run's own window", f"{amount(told['closed_by_the_run'], 'group')}, not simulated"),
        ]
    )


def _of(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.1f} %)" if whole else "0"
