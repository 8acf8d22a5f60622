"""`samplestore sglang`: install SGLang, start its servers and routers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from samplestore.workers.sglang.launch import Command, engine_command, router_command
from samplestore.workers.sglang.releases import NEWEST, RELEASES

app = typer.Typer(name="sglang", no_args_is_help=True, help="Install SGLang, start its servers and routers.")

Home = Annotated[Path | None, typer.Option(help="folder of SGLang; $SAMPLESTORE_SGLANG_HOME or .sglang if left out")]
Show = Annotated[bool, typer.Option("--print", help="print the command instead of running it")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command()
def install(
    release: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{' | '.join(RELEASES)} | newest | oldest | all; may be repeated; {NEWEST} if left out",
            show_default=False,
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Install SGLang releases side by side, apart from samplestore's own packages.

    With an NVIDIA GPU each is an ordinary installation; elsewhere a small one that runs on the CPU. Typed again, it
    finishes what is missing.
    """
    from samplestore.workers.sglang.install import install as run_install
    from samplestore.workers.sglang.releases import parse_releases

    run_install(parse_releases(",".join(release or [NEWEST])), home)


@app.command(context_settings=PASS_ON)
def engine(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="model folder or Hugging Face name")],
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 30000,
    weight_version: Annotated[str, typer.Option(help="label of the weights it starts with")] = "default",
    release: Annotated[str | None, typer.Option(help="of those installed; the newest if left out")] = None,
    home: Home = None,
    python: Annotated[str | None, typer.Option(help="interpreter with SGLang; overrules --home")] = None,
    show: Show = False,
) -> None:
    """Start an SGLang server as samplestore needs it. Other options are passed on to SGLang, and overrule ours."""
    _run(
        engine_command(
            model, host=host, port=port, weight_version=weight_version, release=release, home=home, python=python,
            extra=context.args,
        ),
        show,
    )  # fmt: skip


@app.command(context_settings=PASS_ON)
def router(
    context: typer.Context,
    engine: Annotated[list[str] | None, typer.Option(help="engine URL; may be repeated")] = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 30000,
    policy: Annotated[str, typer.Option(help="manual keeps a group on one engine")] = "manual",
    kind: Annotated[str, typer.Option(help="sglang-router | smg")] = "sglang-router",
    metrics_port: Annotated[int | None, typer.Option(help="1000 below --port if left out")] = None,
    show: Show = False,
) -> None:
    """Start a router as samplestore needs it. Other options are passed on to it, and overrule ours."""
    _run(
        router_command(
            engine or [], host=host, port=port, policy=policy, kind=kind, metrics_port=metrics_port, extra=context.args
        ),
        show,
    )


def _run(command: Command, show: bool) -> None:
    """Become the program: signals and the exit status are its own."""
    if show:
        print(command)
        return
    print(command, file=sys.stderr, flush=True)
    os.execvpe(command.argv[0], command.argv, command.environment())  # noqa: S606
