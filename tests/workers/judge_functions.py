"""Reward functions for test_judges.py: slime's kind, groups, dicts, and answers that cannot be read."""

from __future__ import annotations

from typing import Any


async def slime_one(args: Any, sample: Any) -> dict[str, Any]:
    """f(args, sample), as slime calls it."""
    assert sample.status == sample.Status.COMPLETED
    assert len(sample.tokens) >= sample.response_length
    return {
        "accuracy": 1.0 if sample.response == sample.label else 0.0,
        "format": args.format_reward,
        "n": sample.index,
    }


async def slime_group(args: Any, samples: list[Any]) -> list[float]:
    """f(args, samples), as slime calls it with --group-rm."""
    longest = max(s.response_length for s in samples)
    return [1.0 if s.response_length == longest else 0.0 for s in samples]


def slime_missing(args: Any, sample: Any) -> float:
    assert getattr(args, "nobody", 7) == 7
    return float(args.nobody)


def ranks(samples: list[Any]) -> list[Any]:
    """A group by samplestore's own signature."""
    order = sorted(samples, key=lambda s: s.response_length)
    return [{"reward": float(order.index(s)), "of": len(samples)} for s in samples]


def short_list(samples: list[Any]) -> list[float]:
    return [1.0]


def partly(samples: list[Any]) -> list[Any]:
    return [1.0, None, {"reward": None, "said": "?"}]


def unreadable(sample: Any) -> dict[str, Any]:
    return {"reward": None, "said": "well, perhaps"}
