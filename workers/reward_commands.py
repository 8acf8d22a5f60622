"""`samplestore reward`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from samplestore.cli.common import complete_run

REWARD_HELP = (
    "[STAGE=]SPEC, may be repeated; SPEC is module:function, file.py:function, math, reasoning_gym or a reward model's "
    "http://... STAGE is reward if left out"
)
Reward = Annotated[list[str] | None, typer.Option(help=REWARD_HELP)]
RewardKey = Annotated[str | None, typer.Option(help="of a returned object: which key is the reward")]
RewardArgs = Annotated[str | None, typer.Option(help="JSON object: args of slime's f(args, sample)")]
RewardBatch = Annotated[int | None, typer.Option(help="samples in one request to a reward model")]
RewardTries = Annotated[int | None, typer.Option(help="requests to a reward model before a sample has failed once")]
RewardConcurrency = Annotated[int | None, typer.Option(help="requests at once to a reward model or teacher")]
Teacher = Annotated[
    list[str] | None, typer.Option(help="engine URL of a teacher: fills the stage teacher; may be repeated")
]

WorkedFor = Annotated[
    str | None, typer.Option(help="run to work for; the only or newest one if left out", autocompletion=complete_run)
]
MetricsPort = Annotated[
    int | None, typer.Option(help="serve http://HOST:PORT/metrics for Prometheus; 0 picks a free port")
]
MetricsHost = Annotated[
    str | None, typer.Option(help="where the metrics listen; without a login. 127.0.0.1 if left out")
]


def reward(
    db: Annotated[str | None, typer.Option(help="database: a SQLite file or postgresql://...")] = None,
    run: WorkedFor = None,
    reward: Reward = None,
    reward_key: RewardKey = None,
    reward_args: RewardArgs = None,
    reward_processes: Annotated[int | None, typer.Option(help="processes that run a reward function")] = None,
    reward_timeout_s: Annotated[float | None, typer.Option(help="seconds after which a verifier is killed")] = None,
    reward_batch: RewardBatch = None,
    reward_tries: RewardTries = None,
    reward_concurrency: RewardConcurrency = None,
    teacher: Teacher = None,
    tokenizer: Annotated[str | None, typer.Option(help="model folder; needed to decode text for rewards")] = None,
    drain_timeout_s: Annotated[float | None, typer.Option(help="seconds that a stop waits for what is begun")] = None,
    exit_when_done: Annotated[bool | None, typer.Option(help="leave when no group waits for a stage any more")] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    name: Annotated[str | None, typer.Option(help="shown in the dashboard")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; ./samplestore.toml if it is there")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug | info | warning | error")] = None,
    log_format: Annotated[str | None, typer.Option(help="text | json")] = None,
) -> None:
    """Score finished samples and groups, without an engine: for judges that take long, and for machines of their own.

    Stages that nobody's --reward names wait for a worker that names them. Give slow ones to this command, and not to
    `samplestore worker`, and generation never waits for them. SIGTERM or Ctrl-C ends what is begun and exits 0.
    """
    from samplestore.config import load_worker_config
    from samplestore.logs import setup_logging

    given = {key: value for key, value in locals().items() if key in _FLAGS and value is not None}
    settings = load_worker_config(config, given)
    setup_logging(settings.log_level, settings.log_format)
    raise typer.Exit(run_reward_worker(settings))


_FLAGS = frozenset(
    (
        "db run reward reward_key reward_args reward_processes reward_timeout_s reward_batch reward_tries "
        "reward_concurrency teacher tokenizer drain_timeout_s exit_when_done metrics_port metrics_host name "
        "log_level log_format"
    ).split()
)


def run_reward_worker(settings: Any) -> int:
    """Open the store and serve until told to stop. Returns the exit code. Raises SampleStoreError."""
    import samplestore
    from samplestore.errors import SampleStoreError
    from samplestore.workers.commands import with_signals
    from samplestore.workers.reward_worker import RewardWorker
    from samplestore.workers.stage_servers import scorer_of

    with samplestore.open(settings.db, create=False) as store:
        run = store.existing_run(settings.run)
        made = scorer_of(run, settings)
        if made is None:
            have = ", ".join((*run.settings.stages, *run.settings.group_stages)) or "none"
            raise SampleStoreError(
                f"nothing to serve. Say --reward [STAGE=]SPEC or --teacher URL; the stages of run {run.name!r}: {have}"
            )
        return asyncio.run(with_signals(RewardWorker(run, settings, made)))
