"""Which database and which run: from slime's args, else from the environment. Nothing of slime is imported.

slime puts every key of its --custom-config-path file into args, so the settings need no flags of their own:

    samplestore_db              database; else SAMPLESTORE_DATABASE_URL, else samplestore.toml
    samplestore_run             run; else SAMPLESTORE_RUN, else the only or newest one (an observer: "slime")
    samplestore_timeout_s       seconds that a rollout waits for its groups; for ever if left out
    samplestore_need_logprobs   false: samples without log-probs are taken too
    samplestore_strict          true: what an observer could not record stops slime
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import samplestore.store
from samplestore import config
from samplestore.errors import InvalidSetting
from samplestore.run import Run
from samplestore.store import Store

ENV_RUN = "SAMPLESTORE_RUN"
OBSERVED_RUN = "slime"
HOW = (
    "say where the database is: samplestore_db in the file of --custom-config-path, or the environment variable "
    f"{config.ENV_DATABASE}. Make one with: samplestore add-prompts FILE --db DATABASE --run NAME"
)


class NotConfigured(config.ConfigError):
    """slime was not told which database to use."""

    def __init__(self) -> None:
        super().__init__(f"samplestore.slime knows no database; {HOW}")


@dataclass(frozen=True, slots=True)
class Settings:
    """As the module says; db has no default."""

    db: str
    run: str | None = None
    timeout_s: float | None = None
    need_logprobs: bool = True
    strict: bool = False


def settings_of(args: Any) -> Settings:
    """The settings in slime's args (None, where there are none). Raises NotConfigured, ConfigError, InvalidSetting."""

    def said(name: str, default: Any = None) -> Any:
        value = getattr(args, f"samplestore_{name}", None)
        return default if value is None else value

    db = said("db")
    if db is None:
        found = config.database_url()
        if found is None:
            raise NotConfigured
        db = found[0]
    timeout = said("timeout_s")
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout >= 0
    if timeout is not None and not number:
        raise InvalidSetting("samplestore_timeout_s", timeout, "seconds, from 0; leave it out to wait for ever")
    flags = {"need_logprobs": said("need_logprobs", True), "strict": said("strict", False)}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidSetting(f"samplestore_{name}", value, "true or false")
    run = said("run", os.environ.get(ENV_RUN) or None)
    if run is not None and not isinstance(run, str):
        raise InvalidSetting("samplestore_run", run, "the name of a run, as text")
    return Settings(str(db), run, timeout, **flags)


_stores: dict[tuple[int, str], Store] = {}  # by process and URL
_lock = threading.Lock()


def store_at(url: str) -> Store:
    """One store for a database in this process: its heartbeat and its leases are those of all that asks for it. A
    process that was forked gets its own."""
    with _lock:
        key = (os.getpid(), url)
        if key not in _stores:
            opened = _stores[key] = samplestore.store.open(url)
            opened.database.on_close.append(lambda: _forget(key))
        return _stores[key]


def _forget(key: tuple[int, str]) -> None:
    _stores.pop(key, None)


def run_of(settings: Settings) -> Run:
    """The run, which must exist. Raises RunNotFound, DatabaseMissing, SchemaMismatch."""
    return store_at(settings.db).existing_run(settings.run)


def observed_run(settings: Settings, args: Any) -> Run:
    """The run that an observer writes to, made if it is not there."""
    store, name = store_at(settings.db), settings.run or OBSERVED_RUN
    if name in store.run_names():
        return store.existing_run(name)
    return store.run(
        name, samples_per_prompt=getattr(args, "n_samples_per_prompt", None),
        groups_per_step=getattr(args, "rollout_batch_size", None),
    )  # fmt: skip
