"""samplestore import, and its older name import-samples: samples from elsewhere into a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samplestore.cli.add_prompts import parse_settings
from samplestore.cli.common import AsJson, Db, MadeRun, database, existing_url
from samplestore.cli.output import emit_json, say
from samplestore.cli.progress import bar
from samplestore.words import amount


def import_samples(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="What `export` wrote, slime's debug rollouts (.pt), JSON lines (.jsonl, .jsonl.gz) or Parquet; told "
            "by content.",
        ),
    ],
    run: MadeRun,
    db: Db = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="FOLDER", help="For prompts that have no prompt_ids.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            help="Data set name of rows that do not say one; of an export, of all its prompts.",
            show_default="imported",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of a new run, e.g. --set 'stages=[\"teacher\"]'."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import samples: each file or folder in one transaction, all of it or nothing.

    What `samplestore export` wrote comes back as it was; groups are known by their portable ids. A file of slime's
    --save-debug-rollout-data is read without running anything of it.

    Another row has a prompt as add-prompts takes it, response_ids, and may have log_probs, loss_mask,
    teacher_log_probs, arrays, reward and status; or a list of such responses under samples, which become one group.
    Groups that the run has already are left alone: repeating the command is harmless. Rewards and filters run on them
    as on others.
    """
    import samplestore
    from samplestore.promptfiles import PromptFileError

    for file in files:
        # before anything is made: a typing error must not create a database
        if not file.exists() and "{rollout_id}" not in file.name:
            raise PromptFileError(str(file), "no such file")
    settings = parse_settings(set_ or [])
    if _is_new(db):  # what is refused makes no database
        _look_through(files, tokenizer, dataset)
    added = existing = 0
    with samplestore.open(database(db)) as store:
        found = store.run(run, **settings)
        for file in files:
            with bar(f"import {file.name}") as progress:
                done = found.import_samples(file, tokenizer=tokenizer, dataset=dataset, progress=progress)
            added, existing = added + done.added, existing + done.existing
            if not as_json:
                say(f"{file}: {amount(done.added, 'group')} added, {done.existing:,} already there (run {run})")
    if as_json:
        emit_json({"run": run, "added": added, "existing": existing})


def _is_new(db: str | None) -> bool:
    from samplestore.errors import DatabaseMissing

    try:
        existing_url(db)
    except DatabaseMissing:
        return True
    return False


def _look_through(files: list[Path], tokenizer: str | None, dataset: str | None) -> None:
    """Raises what an import of these files would refuse them with."""
    from samplestore.portable import imports
    from samplestore.tokenizers import load_tokenizer

    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    for file in files:
        with imports.rereadable(file) as source:
            imports.look_through(imports.checked(source.groups(loaded, dataset), source.name))
