"""Built-in verifiers, run inside a reward process. They need `pip install 'samplestore[verify]'`.

math           math-verify: is the final answer of the response equal to the label?
reasoning_gym  the scoring function of the reasoning-gym dataset that made the prompt
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from samplestore.errors import InvalidSetting, MissingExtra
from samplestore.workers.rewards import RewardSample

_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_BARE_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|exp|frac|infinity|pi)(?![A-Za-z])")
_WITH_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d{1,2}")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")
_MAX_BARE_ANSWER = 200


def load(name: str) -> Callable[[RewardSample], dict[str, Any]]:
    """The built-in `name`, its library imported. Raises ImportError if the extra is not installed."""
    return {"math": _load_math, "reasoning_gym": _load_reasoning_gym}[name]()


def visible(response: str) -> str:
    """The response without the reasoning that precedes `</think>`: an answer tried out there is not the answer."""
    return response.rpartition("</think>")[2]


# ---- math


def _load_math() -> Callable[[RewardSample], dict[str, Any]]:
    import math_verify  # type: ignore[import-untyped]  # noqa: F401  (a missing package is found at start)

    # It warns that its own timeouts are off. They are, on purpose: they use signals and swallow the timeout into False;
    # the pool's hard timeout is the one that counts.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return score_math


def score_math(sample: RewardSample) -> dict[str, Any]:
    """1.0 if the response's final answer equals the label, else 0.0.

    The answer is the last \\boxed{} after any `</think>`, else the last LaTeX or plain expression. A response without
    one scores 0. The label is a number or a string: plain ("12", "x^2-1"), LaTeX, or with the answer behind "####".
    Raises ValueError for a label that is no mathematics: that is the data's fault, not the sample's.
    """
    from math_verify import verify

    gold, _ = _parse_label(sample.label)
    found, shown = _parse_response(visible(sample.response))
    equal = bool(found) and verify(gold, found, timeout_seconds=None, raise_on_error=True)
    return {"reward": 1.0 if equal else 0.0, "answer": shown}


def _parse(text: str) -> tuple[list[Any], str | None]:
    """(expressions, the text that they came from); ([], None) if there is none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    try:
        found = parse(text, targets, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:  # whatever its parser trips over is, by definition, not parsable
        logging.getLogger(__name__).debug("unparsable: %.200r", text, exc_info=True)
        return [], None
    raw = next((f for f in found if isinstance(f, str)), None)
    return [f for f in found if not isinstance(f, str)], raw


def _parse_response(text: str) -> tuple[list[Any], str | None]:
    found, shown = _parse(text)
    if found or any(mark in text for mark in _MATH_MARKS):
        return found, shown
    # A bare "\frac12" or "x^2-1" has none of the marks by which expressions are found in prose.
    bare = text.strip().rpartition("\n")[2].strip()
    if not bare or len(bare) > _MAX_BARE_ANSWER or _BARE_WORD.search(bare):
        return [], None
    return _parse(f"\\boxed{{{bare}}}")


def _parse_label(label: Any) -> tuple[list[Any], str | None]:
    if isinstance(label, bool) or not isinstance(label, int | float | str):
        raise ValueError(f"the label of a math prompt must be a number or a string, not {type(label).__name__}")
    text = str(label).rpartition("####")[2].strip()
    if _WITH_EXPONENT.fullmatch(text):
        text = f"{Decimal(text):f}"  # the parser reads 1e3 as 1 * e * 3
    if not any(mark in text for mark in _MATH_MARKS):
        if _BARE_FUNCTION.search(text):
            raise ValueError(f"the label {text[:100]!r} has a bare function name; write it in LaTeX, e.g. \\sqrt{{2}}")
        # "12 apples" stays as it is: the number in it is found, and the word is not read as a product of letters.
        if "\\" in text or not _BARE_WORD.search(text):
            text = f"\\boxed{{{text}}}"
    found, shown = _parse(text)
    if not found:
        raise ValueError(f"the label {str(label)[:100]!r} cannot be parsed as mathematics")
    return found, shown


# ---- reasoning-gym


def _load_reasoning_gym() -> Callable[[RewardSample], dict[str, Any]]:
    import reasoning_gym  # type: ignore[import-untyped]

    datasets: dict[tuple[str, str], Any] = {}

    def score(sample: RewardSample) -> dict[str, Any]:
        """Score by metadata["reasoning_gym"] = {"dataset", "config", "entry"} of `reasoning_gym_prompts`."""
        name, config, entry = _source(sample.metadata)
        key = (name, json.dumps(config, sort_keys=True))
        if key not in datasets:
            if len(datasets) >= 256:
                datasets.clear()  # configs come from data: bound what they can make us keep
            datasets[key] = reasoning_gym.create_dataset(name, **config)
        text = visible(sample.response)
        tagged = _ANSWER_TAG.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        reward = datasets[key].score_answer(answer, entry)
        return {"reward": reward, "answer": answer, "answer_from": "tags" if tagged else "response", "dataset": name}

    return score


def _source(metadata: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    source = metadata.get("reasoning_gym")
    if not isinstance(source, dict) or not isinstance(source.get("dataset"), str):
        raise ValueError(
            "the prompt's metadata has no 'reasoning_gym' object with 'dataset', 'config' and 'entry'; "
            "make the rows with samplestore.workers.verifiers.reasoning_gym_prompts"
        )
    config, entry = _unpack(source.get("config") or {}), _unpack(source.get("entry"))
    if not isinstance(config, dict) or not isinstance(entry, dict) or "answer" not in entry:
        raise ValueError("metadata['reasoning_gym'] needs an 'entry' with 'question', 'answer' and 'metadata'")
    return source["dataset"], config, entry


def reasoning_gym_prompts(name: str, n: int, seed: int, **config: Any) -> list[dict[str, Any]]:
    """`n` prompt rows of the reasoning-gym dataset `name`; the same arguments give the same rows.

    A row is {"prompt": [one user message], "label": the stored answer, "metadata": {"reasoning_gym": {"dataset": name,
    "config": config, "entry": {...}}}} and pure JSON. The entry is what the dataset's scoring function needs; tuples
    and dicts whose keys are not strings are tagged in it, since some datasets score a list unlike a tuple.
    Raises MissingExtra, or InvalidSetting for an unknown name or a config that the dataset refuses.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra("reasoning_gym prompts", "verify") from error
    if name not in DATASETS or name == "composite":
        raise InvalidSetting("name", name, "one of: " + ", ".join(sorted(set(DATASETS) - {"composite"})))
    try:
        dataset = reasoning_gym.create_dataset(name, size=n, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidSetting("config", config, f"what reasoning-gym's {name} accepts ({error})") from error
    rows = []
    for entry in (dataset[i] for i in range(n)):
        text = f"{entry['question']}\n\nWrite your final answer, and nothing else, between <answer> and </answer>."
        source = {"dataset": name, "config": _pack(config), "entry": _pack(entry)}
        row = {
            "prompt": [{"role": "user", "content": text}],
            "label": _pack(entry["answer"]),
            "metadata": {"reasoning_gym": source},
        }
        rows.append(json.loads(json.dumps(row)))
    return rows


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v) for v in value]}
    if isinstance(value, list):
        return [_pack(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: _pack(v) for k, v in value.items()}
        return {"$items": [[_pack(k), _pack(v)] for k, v in value.items()]}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if isinstance(value, dict):
        if list(value) == ["$tuple"]:
            return tuple(_unpack(v) for v in value["$tuple"])
        if list(value) == ["$items"]:
            return {_unpack(k): _unpack(v) for k, v in value["$items"]}
        return {k: _unpack(v) for k, v in value.items()}
    return value
