"""Options that `samplestore worker` and `samplestore reward` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
Db = Annotated[str | None, typer.Option(help="database: a SQLite file or postgresql://...")]
RewardProcesses = Annotated[int | None, typer.Option(help="processes that run a reward function")]
RewardTimeout = Annotated[float | None, typer.Option(help="seconds after which a verifier is killed")]
ModelFolder = Annotated[str | None, typer.Option(help="model folder; needed to decode text for rewards")]
Name = Annotated[str | None, typer.Option(help="shown in the dashboard")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML file; ./samplestore.toml if it is there")]
LogLevel = Annotated[str | None, typer.Option(help="debug | info | warning | error")]
LogFormat = Annotated[str | None, typer.Option(help="text | json")]
