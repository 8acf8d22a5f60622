"""Which stages a worker serves, from its settings: `--reward [STAGE=]SPEC`, as often as wanted, and `--teacher URL`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from samplestore import filters
from samplestore.errors import SampleStoreError
from samplestore.run import Run
from samplestore.runsettings import TEACHER_STAGE, RunSettings
from samplestore.tokenizers import load_tokenizer
from samplestore.workers.remote_rewards import RemoteJudge
from samplestore.workers.rewards import BUILTINS, Judge, RewardPool
from samplestore.workers.scoring import STAGE, RewardStage, Scorer, StageServer, Write
from samplestore.workers.teacher import TeacherStage

_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


def split_spec(text: str) -> tuple[str, str]:
    """(stage, spec) of `[STAGE=]SPEC`; a URL's own "=" comes after characters that no name has."""
    named = _NAMED.fullmatch(text)
    return (named[1], named[2]) if named else (STAGE, text)


def scorer_of(run: Run, settings: Any) -> Callable[[Write], Scorer] | None:
    """(write) -> Scorer for the stages that these settings name; None where they name none. Raises SampleStoreError for
    a stage that the run does not have."""
    specs = dict(map(split_spec, settings.reward))
    if len(specs) < len(settings.reward):
        raise SampleStoreError(f"--reward names a stage twice: {', '.join(settings.reward)}. Say --reward STAGE=SPEC")
    rules = run.settings
    for name in [*specs, *([TEACHER_STAGE] if settings.teacher else [])]:
        if name not in (*rules.stages, *rules.group_stages):
            raise SampleStoreError(_no_stage(run, name))
    if not specs and not settings.teacher:
        return None
    _check_bands(rules, specs)
    if specs and not settings.tokenizer:
        raise SampleStoreError("--reward needs the model's tokenizer to decode text. Say --tokenizer DIR")
    tokenizer = load_tokenizer(settings.tokenizer) if specs else None

    def made(write: Write) -> Scorer:
        servers: dict[str, StageServer] = {n: RewardStage(judge_of(s, settings), tokenizer) for n, s in specs.items()}
        if settings.teacher:
            servers[TEACHER_STAGE] = TeacherStage(
                settings.teacher, run.prepare_array, run.images, concurrency=settings.reward_concurrency,
                timeout_s=settings.request_timeout_s,
            )  # fmt: skip
        return Scorer(servers, write)

    return made


def judge_of(spec: str, settings: Any) -> Judge:
    """What a spec names: a reward model behind HTTP, or a function in reward processes."""
    if spec.startswith(("http://", "https://")):
        return RemoteJudge(
            spec, timeout_s=settings.reward_timeout_s, tries=settings.reward_tries, batch=settings.reward_batch,
            concurrency=settings.reward_concurrency, reward_key=settings.reward_key,
        )  # fmt: skip
    return RewardPool(
        spec, processes=settings.reward_processes, timeout_s=settings.reward_timeout_s,
        memory_mb=settings.reward_memory_mb, reward_key=settings.reward_key, args=settings.reward_args,
    )  # fmt: skip


def _check_bands(rules: RunSettings, specs: Mapping[str, str]) -> None:
    """Raises SampleStoreError where built-in verifiers, which give 0 to 1, score all that counts, and a group filter
    asks for means that their weights do not reach: every group would be dropped."""
    weights = {n: rules.reward_weights.get(n, 1.0) for n in (*rules.stages, *rules.group_stages) if n != TEACHER_STAGE}
    if not all(weight == 0 or specs.get(name) in BUILTINS for name, weight in weights.items()):
        return
    low, high = (sum(pick(0.0, weight) for weight in weights.values()) for pick in (min, max))
    for band in filters.parse(filters.GROUP, rules.group_filters):
        if band.name == "reward" and (band.numbers[0] > high or band.numbers[1] < low):
            raise SampleStoreError(
                f"group filter reward:{band.numbers[0]:g}:{band.numbers[1]:g} would drop every group: these rewards "
                f"lie in {low:g}..{high:g}. Make a run with another: samplestore add-prompts FILE --run NEW_NAME "
                f"--set 'group_filters=[\"reward:{low:g}:{high:g}\"]'"
            )


def _no_stage(run: Run, name: str) -> str:
    have = ", ".join((*run.settings.stages, *run.settings.group_stages)) or "none"
    flag = "--teacher" if name == TEACHER_STAGE else f"--reward {name}=..." if name != STAGE else "--reward"
    wanted = json.dumps([*run.settings.stages, name])
    more = "" if name == STAGE else f" --set 'stages={wanted}'"
    return (
        f"run {run.name!r} has no {name} stage (it has: {have}), so {flag} would never be asked. "
        f"Make one that has: samplestore add-prompts FILE --run NEW_NAME{more}"
    )
