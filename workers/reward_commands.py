"""`samplestore reward`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from samplestore.workers.command_options import (
    ConfigFile,
    Db,
    LogFormat,
    LogLevel,
    MetricsHost,
    MetricsPort,
    ModelFolder,
    Name,
    Reward,
    RewardArgs,
    RewardBatch,
    RewardConcurrency,
    RewardKey,
    RewardProcesses,
    RewardTimeout,
    RewardTries,
    Teacher,
    WorkedFor,
)


def reward(
    db: Db = None,
    run: WorkedFor = None,
    reward: Reward = None,
    reward_key: RewardKey = None,
    reward_args: RewardArgs = None,
    reward_processes: RewardProcesses = None,
    reward_timeout_s: RewardTimeout = None,
    reward_batch: RewardBatch = None,
    reward_tries: RewardTries = None,
    reward_concurrency: RewardConcurrency = None,
    teacher: Teacher = None,
    tokenizer: ModelFolder = None,
    drain_timeout_s: Annotated[float | None, typer.Option(help="seconds that a stop waits for what is begun")] = None,
    exit_when_done: Annotated[bool | None, typer.Option(help="leave when no group waits for a stage any more")] = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    name: Name = None,
    config: ConfigFile = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
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
