"""samplestore add-prompts: data set files into a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from samplestore.cli import exits
from samplestore.cli.common import AsJson, Db, MadeRun, database, existing_url
from samplestore.cli.output import emit_json, note, say
from samplestore.errors import DatabaseMissing, InvalidSetting, SampleStoreError
from samplestore.words import amount, which

if TYPE_CHECKING:
    from rich.progress import Progress

    from samplestore.prompts import InvalidRow, Prompt

REDRAW_ROWS = 32  # rows between two updates of the progress bar

Files: TypeAlias = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="JSON lines (.jsonl, .jsonl.gz) or Parquet; told by content.")
]
TokenizerFolder: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="FOLDER", help="The model's folder (tokenizer and chat template). Nothing is downloaded."
    ),
]
Samples: TypeAlias = Annotated[
    int | None, typer.Option("--samples-per-prompt", min=1, help="Samples of a group. For a new run (default 8).")
]
Epochs: TypeAlias = Annotated[
    int | None, typer.Option("--epochs", min=1, help="Passes over the prompts. For a new run (default: without end).")
]
Seed: TypeAlias = Annotated[
    int | None, typer.Option("--seed", help="Seed of the order in which prompts are served. For a new run (default 0).")
]
Mode: TypeAlias = Annotated[
    str | None, typer.Option("--mode", help="sync, partial or async rollouts. For a new run (default async).")
]
Resume: TypeAlias = Annotated[
    bool | None,
    typer.Option("--resume/--no-resume", help="Go on from an aborted sample's tokens. For a new run (default yes)."),
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any other setting of a new run, e.g. --set groups_per_step=32. May repeat."
    ),
]
Evaluation: TypeAlias = Annotated[
    bool, typer.Option("--eval", help="The data set is for `samplestore eval`, and never trained on.")
]
Dataset: TypeAlias = Annotated[str, typer.Option("--dataset", help="Data set name of rows that do not say one.")]
MaxTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-prompt-tokens", min=1, help="Refuse prompts with more tokens.")
]
ApplyTemplate: TypeAlias = Annotated[
    bool,
    typer.Option("--apply-chat-template", help="Make text prompts one user message. Messages always are rendered."),
]
SkipInvalid: TypeAlias = Annotated[
    bool, typer.Option("--skip-invalid", help="Store the valid rows although others were refused.")
]
PromptKey: TypeAlias = Annotated[
    str | None, typer.Option("--prompt-key", help="Key of the prompt.", show_default="prompt, text or messages")
]
LabelKey: TypeAlias = Annotated[str | None, typer.Option("--label-key", help="Key of the label.", show_default="label")]
MetadataKey: TypeAlias = Annotated[
    str | None, typer.Option("--metadata-key", help="Key of the metadata object.", show_default="metadata")
]
ExtraToMetadata: TypeAlias = Annotated[
    bool, typer.Option("--extra-to-metadata", help="Keep keys that mean nothing here in the metadata.")
]


def add_prompts(
    files: Files,
    run: MadeRun,
    db: Db = None,
    tokenizer: TokenizerFolder = None,
    samples_per_prompt: Samples = None,
    epochs: Epochs = None,
    seed: Seed = None,
    mode: Mode = None,
    resume: Resume = None,
    set_: Settings = None,
    dataset: Dataset = "default",
    evaluation: Evaluation = False,
    max_prompt_tokens: MaxTokens = None,
    apply_chat_template: ApplyTemplate = False,
    skip_invalid: SkipInvalid = False,
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    metadata_key: MetadataKey = None,
    extra_to_metadata: ExtraToMetadata = False,
    as_json: AsJson = False,
) -> None:
    """Add prompts to a run: checked, tokenised once, stored in one transaction.

    A row has prompt (text or messages) or prompt_ids, and may have label, metadata, dataset, tools and
    chat_template_kwargs. Rows that the run has already are left alone: repeating the command is harmless.
    If a row of any file is refused, nothing is stored, unless --skip-invalid says so.
    A run made by this command scores its samples (--set stages=[] makes one that does not).
    """
    from samplestore.prompts import InvalidPrompts, RowKeys

    # transformers warns about what does not concern prompts (no torch, long texts).
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        flags = {
            "samples_per_prompt": samples_per_prompt, "epochs": epochs, "seed": seed, "mode": mode, "resume": resume,
        }  # fmt: skip
        settings = {**parse_settings(set_ or []), **{k: v for k, v in flags.items() if v is not None}}
        options = {
            "dataset": dataset, "max_prompt_tokens": max_prompt_tokens, "apply_chat_template": apply_chat_template,
            "keys": RowKeys(prompt_key, label_key, metadata_key, extra_to_metadata),
        }  # fmt: skip
        result = _add(files, database(db), run, settings, tokenizer, skip_invalid, evaluation, options)
    except InvalidPrompts as error:
        _fail(error, as_json, error.rows)
    except SampleStoreError as error:
        _fail(error, as_json)
    else:
        result.tell(as_json)


@dataclass(slots=True)
class _Result:
    run: str
    added: int = 0
    existing: int = 0
    duplicates: int = 0
    invalid: list[InvalidRow] = field(default_factory=list)

    def tell(self, as_json: bool) -> None:
        from samplestore.prompts import LISTED

        if as_json:
            counts = {name: getattr(self, name) for name in ("run", "added", "existing", "duplicates")}
            emit_json({**counts, **_invalid_json(self.invalid)})
            return
        notes = [f"{self.existing:,} already there"]
        if self.duplicates:
            notes.append(f"{self.duplicates:,} repeated in the files")
        if self.invalid:
            notes.append(f"{len(self.invalid):,} refused")
            for row in self.invalid[:LISTED]:
                note(f"refused: {row}")
            if len(self.invalid) > LISTED:
                note(f"refused: {len(self.invalid) - LISTED:,} more")
        say(f"added {amount(self.added, 'prompt')}, {', '.join(notes)} (run {self.run})")


def _add(
    files: list[Path],
    db: str,
    name: str,
    settings: dict[str, Any],
    tokenizer: str | None,
    skip_invalid: bool,
    evaluation: bool,
    options: dict[str, Any],
) -> _Result:
    import samplestore
    from samplestore.prompts import InvalidPrompts, PromptFileError, first_of_each
    from samplestore.tokenizers import load_tokenizer

    for file in files:
        if not file.exists():  # before anything is made or loaded: a typing error must not create a database
            raise PromptFileError(str(file), "no such file")
    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    settings = _settings_of(db, name, settings)
    with _progress() as progress:
        prompts, invalid = _read(files, loaded, options, progress)
        if invalid and not skip_invalid:
            raise InvalidPrompts(", ".join(dict.fromkeys(row.source for row in invalid)), invalid)
        if not prompts:
            all_of_them = which(len(invalid), "the only row was", f"all {len(invalid):,} rows were")
            what = f"{all_of_them} refused" if invalid else "there are no rows"
            raise PromptFileError(", ".join(map(str, files)), f"{what}, nothing was stored")
        unique, duplicates = first_of_each(prompts)
        progress.add_task("storing", total=None)
        with samplestore.open(db) as store:  # not before: what is refused makes no database
            done = store.run(name, **settings).add_prompts(unique, evaluation=evaluation)
    return _Result(name, done.added, done.existing, duplicates, invalid)


def _settings_of(db: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the run is asked for with. Of one that is there, another setting than stored is told before the files are
    tokenised. Raises RunSettingsConflict, SchemaMismatch."""
    import samplestore

    try:
        with samplestore.open(existing_url(db), create=False) as store:
            if name in store.run_names():
                store.run(name, **settings)
                return settings
    except DatabaseMissing:
        pass
    return {"stages": ["reward"], **settings}


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; values are JSON, or text where they are not. Raises InvalidSetting for a name that is none."""
    from samplestore import othernames
    from samplestore.runsettings import RunSettings

    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in RunSettings.names():
            if equals:
                raise InvalidSetting(
                    "--set", pair, othernames.advice(name, RunSettings.names(), othernames.RUN, "--set {}=VALUE")
                )
            raise InvalidSetting("--set", pair, "NAME=VALUE")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    RunSettings.parse(settings)
    return settings


def _read(
    files: list[Path], tokenizer: Any, options: dict[str, Any], progress: Progress
) -> tuple[list[Prompt], list[InvalidRow]]:
    """The prompts of all files, and the refused rows of all files."""
    from samplestore.prompts import InvalidRow, PromptFile, prepare

    prompts: list[Prompt] = []
    invalid: list[InvalidRow] = []
    for path in files:
        file = PromptFile(path)
        task = progress.add_task(path.name, total=None)
        made: Prompt | InvalidRow
        for count, made in enumerate(prepare(file, tokenizer, source=file.name, **options)):
            if isinstance(made, InvalidRow):
                invalid.append(made)
            else:
                prompts.append(made)
            if count % REDRAW_ROWS == 0:
                progress.update(task, completed=file.done, total=file.size or None)
        progress.update(task, completed=file.size or 1, total=file.size or 1)
    return prompts, invalid


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on stderr, so that stdout stays the result; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    shown = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as progress:
        yield progress


def _invalid_json(rows: list[InvalidRow]) -> dict[str, Any]:
    from samplestore.prompts import LISTED

    return {"invalid": len(rows), "invalid_rows": [row.as_json() for row in rows[:LISTED]]}


def _fail(error: SampleStoreError, as_json: bool, rows: list[InvalidRow] | None = None) -> None:
    if as_json:
        emit_json({"error": str(error), **_invalid_json(rows or [])})
    else:
        from samplestore.logs import mask

        note(f"error: {mask(exits.with_next_command(error))}", lines=rows is not None)
    raise typer.Exit(exits.exit_code(error))
