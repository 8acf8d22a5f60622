"""slime's rollout function: samplestore's workers generate, slime trains."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from samplestore.errors import InvalidSetting
from samplestore.models import SampleGroup
from samplestore.portable import exports, slime_samples
from samplestore.portable.samples import PortableSample
from samplestore.queries.evaluation import Evaluation, datasets
from samplestore.run import Run
from samplestore.slime import objects
from samplestore.slime.settings import run_of, settings_of
from samplestore.slime.source import StoreDataSource
from samplestore.states import FINISHED, SampleStatus

group = SampleGroup.__table__


def generate_rollout(args, rollout_id, data_source, evaluation=False):  # type: ignore[no-untyped-def]
    """For `--rollout-function-path samplestore.slime.generate_rollout`; slime's signature, which it checks.

    Waits for args.rollout_batch_size finished groups (the run's groups_per_step, if that is not set), leases them as
    step `rollout_id` and gives them as slime's samples. They are consumed at StoreDataSource.save(rollout_id).
    evaluation: evaluates on args.eval_datasets, or on all of the run's data sets for evaluation.
    Raises BatchTimeout (samplestore_timeout_s), EvaluationTimeout, WorkerFailed, StepAlreadyCommitted, NotConfigured.
    """
    source = _source(args, data_source)
    if evaluation:
        return _evaluate(source.run, args, source.settings.timeout_s)
    since = time.monotonic()
    groups, batch = source.finished(rollout_id, getattr(args, "rollout_batch_size", None))
    if (path := getattr(args, "rollout_sample_filter_path", None)) is not None:
        load(path)(args, groups)
    metrics = {
        "rollout/samplestore/wait_s": time.monotonic() - since,
        "rollout/samplestore/current_version": batch.current_version,
        "rollout/samplestore/groups": len(groups),
    }
    return objects.train_output(groups, metrics)


_sources: dict[tuple[str, str | None], StoreDataSource] = {}


def _source(args: Any, data_source: Any) -> StoreDataSource:
    """slime's data source where it is ours, else one of this process: leases of which nobody says that they are saved
    end with the process, and nothing of them is consumed."""
    if isinstance(data_source, StoreDataSource):
        return data_source
    settings = settings_of(args)
    key = (settings.db, settings.run)
    known = _sources.get(key)
    if known is None or run_of(settings).database is not known.run.database:
        known = _sources[key] = StoreDataSource(args)
    return known


def load(path: str) -> Callable[..., Any]:
    """The function that slime names by `module.function`. Raises InvalidSetting."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidSetting("path", path, f"module.function that can be imported ({error})") from error
    return found


def _evaluate(run: Run, args: Any, timeout_s: float | None) -> Any:
    """RolloutFnEvalOutput: {data set: {rewards, truncated, samples}}. Samples without a reward are left out."""
    asked, key = _asked(run, args), getattr(args, "eval_reward_key", None)
    for name, question in asked.items():
        run.start_evaluation(name, **question)  # all at once; below they are waited for
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    for name, question in asked.items():
        found = run.evaluate(name, **question, timeout=timeout_s)
        scored = _samples(run, found, args)
        data[name] = {
            "rewards": [one.reward for one in scored],
            "truncated": [one.status == SampleStatus.TRUNCATED for one in scored],
            "samples": [objects.sample_of(args, slime_samples.to_slime(one), key) for one in scored],
        }
        metrics |= {f"eval/{name}/pass@{k}": value for k, value in found.pass_at.items()}
    return objects.eval_output(data, metrics)


SAMPLING = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "min_new_tokens")


def _asked(run: Run, args: Any) -> dict[str, dict[str, Any]]:
    """What run.evaluate is asked, by data set: of each config in args.eval_datasets, else slime's arguments for all."""

    def question(config: Any) -> dict[str, Any]:
        def said(name: str, fallback: str) -> Any:
            value = getattr(config, name, None)
            return getattr(args, fallback, None) if value is None else value

        sampling = {name: said(name, f"eval_{name}") for name in SAMPLING}
        return {
            "samples": said("n_samples_per_eval_prompt", "n_samples_per_eval_prompt") or 1,
            "sampling": {k: v for k, v in sampling.items() if v is not None},
            "max_new_tokens": said("max_response_len", "eval_max_response_len"),
        }

    configs = getattr(args, "eval_datasets", None) or []
    names: dict[str, Any] = {str(getattr(c, "name", c)): c for c in configs}
    names = names or dict.fromkeys(datasets(run.database, run.id))
    if not names:
        cure = "one that is there; add it with: samplestore add-prompts FILE --dataset NAME --eval"
        raise InvalidSetting("eval_datasets", None, cure)
    return {name: question(config) for name, config in names.items()}


def _samples(run: Run, of: Evaluation, args: Any) -> list[PortableSample]:
    """The scored samples of an evaluation."""
    mine = sa.select(group.c.id).where(group.c.evaluation_id == of.id).order_by(group.c.number)
    ids = run.database.read(lambda c: list(c.execute(mine).scalars()))
    tokenizer = objects.tokenizer_of(args)
    found = exports.samples(run, run.uuid, exports.Part(None, ids, {}), exports.Selection(statuses=FINISHED), tokenizer)
    return [one for one in found if one.reward is not None]


def publish_weights(args: Any, rollout_id: int, *, path: str | None = None, label: str | None = None) -> int:
    """Tell the run that the weights after training on `rollout_id` are there; the number of the new version. To be
    called once a rollout, after slime has brought its engines to them. Repeating it is harmless.

    path    a checkpoint that engines load themselves (Hugging Face format, complete on the disk); None where slime
            brings its engines to the weights
    label   what engines report for them: with slime's own engines the `weight_version` that they answer with
    Raises InvalidSetting for a label that another version has.
    """
    return run_of(settings_of(args)).publish_weights(path, rollout_id, label).version
