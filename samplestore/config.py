"""Configuration: samplestore.toml, then environment variables, then flags; the later one wins.

    [database]
    url = "rollouts.db"          # for every command

    [worker]
    router = "http://127.0.0.1:30000"
    concurrency = 64
    [worker.sampling]
    temperature = 0.8

The file is --config FILE, else $SAMPLESTORE_CONFIG, else ./samplestore.toml if it is there. Environment variables are
SAMPLESTORE_DATABASE_URL and SAMPLESTORE_WORKER_<SETTING> (nested with __, e.g. SAMPLESTORE_WORKER_SAMPLING__TOP_P).
Tables (sampling) are merged key by key. Paths in the file are relative to the current directory, as in flags.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from samplestore import othernames
from samplestore.errors import SampleStoreError
from samplestore.logs import mask
from samplestore.words import close_to

DEFAULT_FILE = "samplestore.toml"
ENV_FILE = "SAMPLESTORE_CONFIG"
ENV_DATABASE = "SAMPLESTORE_DATABASE_URL"
ENV_WORKER = "SAMPLESTORE_WORKER_"
MAX_FILE_BYTES = 1 << 20

Whole = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]


class ConfigError(SampleStoreError):
    """A setting that can't be used, and where it was set. The command line ends with exit code 2."""

    exit_code = 2


class WorkerConfig(BaseSettings):
    """Settings of `samplestore worker`. Make it with load_worker_config, which knows where each one came from.

    db                 database: a SQLite file or postgresql://...
    run                the run to serve; None is the only or newest one
    router, engines    where the engines are: a router's URL, and/or URLs of engines
    dispatch           "router": requests go through the router; "direct": to the engines that it lists or that are
                       given, the least loaded one for each group. None is the router where one is named
    concurrency        samples in flight at once
    flush_tokens       store a segment at the latest after this many new tokens
    flush_seconds      ... and after this many seconds
    mode               "stream" tokens; "sliced": calls of slice_tokens each; "unary": one call a sample
    routed_experts     ask for the experts of every token and store them; the engines must be started for it
    episode            several turns, tools, agents: MODULE:FUNCTION or FILE.py:FUNCTION, async def episode(ctx)
    episode_max_calls  calls of ctx that one episode may make
    episode_max_aborts an episode that was aborted and resumed more often than this fails
    episode_step_timeout_s  seconds that a step of an episode may take, where it says nothing else
    reward             [STAGE=]SPEC, or a list of them: a built-in name, MODULE:FUNCTION, FILE.py:FUNCTION, or the URL
                       of a reward model; STAGE is "reward" if left out
    reward_key         of an object that a reward function or model returns: which key is the reward
    reward_args        what a function of slime's kind, f(args, sample), finds in args
    reward_batch       samples in one request to a reward model
    reward_tries       requests to a reward model, with growing pauses, before a sample has failed once
    reward_concurrency requests at once to a reward model, or to a teacher
    teacher            engines that fill the stage "teacher" with their log-probs
    group_filter       the group filter "custom" of the run: MODULE:FUNCTION or FILE.py:FUNCTION, f(args, samples)
    sample_filter      the sample filter "custom" of the run, f(args, [samples]), which sets remove_sample
    filter_timeout_s   for one group; then the process of the filter is killed and the group tried again
    max_new_tokens     response budget of a sample, in tokens; None is the run's
    sampling           engine sampling parameters over those of the run
    poll_seconds       between two looks for work
    reward_memory_mb   address space of a process that runs rewards or filters, 64 or more; 0 sets no limit
    drain_timeout_s    given to samples in flight when the worker ends
    request_timeout_s  silence of an engine after which a request counts as dead
    abort_timeout_s    for an engine's answer to an abort; then the connection is closed
    update_timeout_s   for an engine to load weights
    update_engines     bring engines to the run's weights
    exit_when_done     end when the run's prompts are used up
    max_queued         claim nothing more while every engine has more requests waiting than this; None never looks
    metrics_port       serve metrics for Prometheus there; 0 is a free port, None serves none
    metrics_host       the address that they listen on, without a login
    """

    model_config = SettingsConfigDict(env_prefix=ENV_WORKER, env_nested_delimiter="__", extra="forbid", frozen=True)

    db: str = ""
    run: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    router: str | None = None
    engines: Annotated[list[str], NoDecode] = Field(default_factory=list, max_length=10_000)
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 32
    flush_tokens: Whole = 1024
    flush_seconds: Seconds = 2.0
    mode: Literal["stream", "sliced", "unary"] = "stream"
    slice_tokens: Whole = 256
    dispatch: Literal["router", "direct"] | None = None
    routed_experts: bool = False
    episode: Annotated[str, Field(min_length=1)] | None = None
    episode_max_calls: Annotated[int, Field(ge=1, le=100_000)] = 1000
    episode_max_aborts: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    episode_step_timeout_s: Seconds = 600
    reward: Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode] = Field(default_factory=list, max_length=100)
    reward_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    reward_args: dict[str, Any] = Field(default_factory=dict)
    reward_batch: Annotated[int, Field(ge=1, le=4096)] = 1
    reward_tries: Annotated[int, Field(ge=1, le=1000)] = 10
    reward_concurrency: Annotated[int, Field(ge=1, le=10_000)] = 16
    teacher: Annotated[list[str], NoDecode] = Field(default_factory=list, max_length=1000)
    reward_processes: Annotated[int, Field(ge=1, le=1024)] = 1
    reward_timeout_s: Seconds = 30
    reward_memory_mb: Annotated[int, Field(ge=0, le=1_000_000_000)] = 2048
    group_filter: Annotated[str, Field(min_length=1)] | None = None
    sample_filter: Annotated[str, Field(min_length=1)] | None = None
    filter_timeout_s: Seconds = 30
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    max_new_tokens: Whole | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    poll_seconds: Annotated[float, Field(ge=0.01, le=3600, allow_inf_nan=False)] = 0.5
    drain_timeout_s: Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)] = 60
    update_engines: bool = True
    update_timeout_s: Seconds = 300
    request_timeout_s: Seconds = 600
    abort_timeout_s: Seconds = 10
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    exit_when_done: bool = False
    max_queued: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    metrics_host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but the arguments: load_worker_config reads file and environment, to know who set what."""
        return (init_settings,)

    @field_validator("engines", "reward", "teacher", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A list, JSON, or URLs separated by commas (what fits into an environment variable)."""
        if isinstance(value, str):
            value = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        if isinstance(value, list | tuple):
            return [item.strip() if isinstance(item, str) else item for item in value if item != ""]
        return value

    @field_validator("engines", "teacher")
    @classmethod
    def _engine_urls(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(map(_http_url, value)))

    @field_validator("router")
    @classmethod
    def _router_url(cls, value: str | None) -> str | None:
        return None if value is None else _http_url(value)

    @property
    def direct(self) -> bool:
        """Whether requests go to the engines themselves."""
        return self.dispatch == "direct" or self.router is None

    @field_validator("sampling", "reward_args", mode="before")
    @classmethod
    def _table(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("reward_memory_mb")
    @classmethod
    def _starts(cls, value: int) -> int:
        if 0 < value < 64:
            raise ValueError("no process starts in so little; use 0 for no limit, or 64 or more")
        return value

    @model_validator(mode="after")
    def _sampling_is_json(self) -> WorkerConfig:
        try:
            json.dumps(self.sampling, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"sampling must be what JSON can hold: {error}") from None
        return self


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises for what is no port
    except ValueError as error:
        raise ValueError(f"{value!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value!r} is no URL of an engine or router; use http://HOST:PORT")
    return value.rstrip("/")


def load_worker_config(config_file: Path | None, flags: dict[str, Any]) -> WorkerConfig:
    """The worker's settings from file, environment and flags (None: not given). Raises ConfigError."""
    config = resolve(config_file, flags)
    if not config.db:
        raise no_database("samplestore worker --db FILE")
    return config


def sources(config: WorkerConfig) -> dict[str, str]:
    """Where each setting came from: "flag", "env NAME", "file PATH" or "default"; several where tables were merged."""
    return {name: config._sources.get(name, "default") for name in type(config).model_fields}


def resolve(config_file: Path | None, flags: Mapping[str, Any]) -> WorkerConfig:
    """load_worker_config, but a database need not be named."""
    path = config_path(config_file)
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        _require_known(name, WorkerConfig.model_fields, "flag")
    if isinstance(given.get("sampling"), str):
        given["sampling"] = _json_table(given["sampling"], "flag --sampling")
    layers = [_from_file(path), _from_env(), {name: (value, "flag") for name, value in given.items()}]
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer in layers:
        for name, (value, source) in layer.items():
            before = values.get(name)
            if name == "sampling" and isinstance(value, dict) and isinstance(before, dict) and before:
                values[name], origin[name] = {**before, **value}, f"{origin[name]}, {source}"
            else:
                values[name], origin[name] = value, source
    try:
        config = WorkerConfig(**values)
    except ValidationError as error:
        raise _explained(error, origin) from None
    config._sources.update(origin)
    return config


def config_path(config_file: Path | None = None) -> Path | None:
    """The configuration file, or None where there is none. One that is named must be there. Raises ConfigError."""
    named = config_file or (Path(os.environ[ENV_FILE]) if os.environ.get(ENV_FILE) else None)
    if named is None:
        return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).is_file() else None
    if not named.is_file():
        who = "--config" if config_file else ENV_FILE
        raise ConfigError(f"there is no file {named} ({who}). See the settings in force with: samplestore config show")
    return named


def database_url(config_file: Path | None = None) -> tuple[str, str] | None:
    """(url, source) of the database from environment or file, None where neither names one. Raises ConfigError."""
    if url := os.environ.get(ENV_DATABASE):
        return url, f"env {ENV_DATABASE}"
    path = config_path(config_file)
    url = _read(path).get("database", {}).get("url") if path else None
    return None if not url else (url, f"file {path}")


def no_database(example: str) -> ConfigError:
    return ConfigError(
        f"no database is named: give --db FILE or --db postgresql://..., set {ENV_DATABASE}, or put [database] url "
        f"into {DEFAULT_FILE}. For example: {example}"
    )


def _read(path: Path) -> dict[str, Any]:
    """The checked tables of a configuration file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}. Look at it with: ls -l {quote(str(path))}"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes: no configuration file. Use: --config FILE")
    try:
        tables = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}. Correct it, then run: samplestore config show") from error
    allowed: dict[str, Any] = {"database": ("url",), "worker": tuple(WorkerConfig.model_fields)}
    for table, content in tables.items():
        _require_known(table, allowed, str(path))
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table} must be a table; write [{table}]. Then run: samplestore config show")
        for key in content:
            _require_known(key, allowed[table], str(path), table)
    url = tables.get("database", {}).get("url", "")
    if not isinstance(url, str):
        raise ConfigError(f"{path}: database.url must be text, not {url!r}. Then run: samplestore config show")
    return tables


def _require_known(key: str, allowed: Any, where: str, table: str = "") -> None:
    if key in allowed:
        return
    close = othernames.meant(key, allowed, othernames.WORKER)
    meant = f" Did you mean {close}?" if close else ""
    raise ConfigError(
        f"{where}: unknown {'setting' if table or where == 'flag' else 'table'} {f'{table}.' if table else ''}{key!s}."
        f"{meant} Allowed: {', '.join(allowed)}. Then run: samplestore config show"
    )


def _from_file(path: Path | None) -> dict[str, tuple[Any, str]]:
    if path is None:
        return {}
    tables = _read(path)
    found = {"db": url} if (url := tables.get("database", {}).get("url")) else {}
    return {name: (value, f"file {path}") for name, value in {**found, **tables.get("worker", {})}.items()}


def _from_env() -> dict[str, tuple[Any, str]]:
    known = {f"{ENV_WORKER}{name.upper()}": name for name in WorkerConfig.model_fields}
    seen: dict[str, list[str]] = {}
    for variable in sorted(os.environ):
        if variable.startswith(ENV_WORKER):
            head = variable.split("__", 1)[0]
            if head not in known or ("__" in variable and known[head] != "sampling"):
                raise _unknown_variable(variable, known)
            seen.setdefault(known[head], []).append(variable)
    if isinstance(whole := os.environ.get(f"{ENV_WORKER}SAMPLING"), str):
        _json_table(whole, f"env {ENV_WORKER}SAMPLING")
    values = EnvSettingsSource(WorkerConfig)()
    nested = {v.split("__", 1)[1].lower() for v in seen.get("sampling", []) if "__" in v}
    for key in nested & set(values.get("sampling", {})):
        values["sampling"][key] = _json_or_text(values["sampling"][key])
    found = {name: (values[name], f"env {', '.join(seen[name])}") for name in seen if name in values}
    if "db" not in found and (url := os.environ.get(ENV_DATABASE)):
        found["db"] = (url, f"env {ENV_DATABASE}")
    return found


def _unknown_variable(variable: str, known: Mapping[str, str]) -> ConfigError:
    close = close_to(variable, known)
    meant = f" Did you mean {close[0]}?" if close else ""
    return ConfigError(
        f"environment: unknown variable {variable}.{meant} Allowed after {ENV_WORKER}: "
        f"{', '.join(name.upper() for name in known.values())}. Remove it with: unset {variable}"
    )


def _json_or_text(value: Any) -> Any:
    """0.7 of SAMPLESTORE_WORKER_SAMPLING__TEMPERATURE=0.7: a number, since engines refuse "0.7"."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _json_table(text: str, source: str) -> dict[str, Any]:
    example = "Write it like: '{\"top_p\": 0.9}'. See all settings with: samplestore config show"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"sampling ({source}) is no JSON: {error}. {example}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"sampling ({source}) must be a JSON object, not {text[:100]}. {example}")
    return value


def _explained(error: ValidationError, origin: Mapping[str, str]) -> ConfigError:
    told = []
    for problem in error.errors(include_url=False, include_context=False):
        place = problem["loc"]
        name = str(place[0]) if place else "sampling"
        said = problem["msg"]
        if said.startswith("Input should be "):
            said = "must be " + said.removeprefix("Input should be ")
        shown = f" = {problem['input']!r}"[:200] if len(place) == 1 else ""
        told.append(f"{name}{shown} ({origin.get(name, 'default')}): {said.removeprefix('Value error, ')}")
    return ConfigError(mask("; ".join(dict.fromkeys(told))) + ". See all settings with: samplestore config show")
