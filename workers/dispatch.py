"""Which engine a request goes to.

Through a router the router decides, and a sticky key asks it to keep siblings together. Without one this module
decides: the least loaded engine for the first sample of a group, and the same one for its siblings, whose prompt is in
that engine's prefix cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

REMEMBERED_GROUPS = 10_000


@dataclass(frozen=True, slots=True)
class Target:
    """Where a generate call goes: `base` is a router's or an engine's URL; `engine` is None where a router decides."""

    base: str
    engine: str | None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Samples, and groups, in flight at one engine. None: no limit."""

    samples: int | None = None
    groups: int | None = None


NO_LIMITS = EngineLimits()


class Dispatcher:
    """Direct dispatch over engines, by what this worker itself has in flight at each.

    A group leaves its engine when that has as many requests as it may, and goes to no engine that has as many groups as
    it may. Where all are full the least loaded is taken: claims hold the sum of all workers to the limits, so that this
    happens only when an engine has just gone.
    """

    def __init__(self, limits: EngineLimits = NO_LIMITS) -> None:
        self.limits = limits
        self._engine_of: OrderedDict[int, str] = OrderedDict()  # group id -> engine
        self._running: Counter[str] = Counter()  # engine -> requests in flight
        self._groups: dict[str, Counter[int]] = defaultdict(Counter)  # engine -> requests of each group

    def _room(self, engine: str, group_id: int) -> bool:
        limits, groups = self.limits, self._groups[engine]
        samples = limits.samples is None or self._running[engine] < limits.samples
        return samples and (limits.groups is None or group_id in groups or len(groups) < limits.groups)

    @contextmanager
    def place(self, group_id: int, fit: Sequence[str]) -> Iterator[str]:
        """The engine for a request of a group, counted as its load until the block ends. `fit` must not be empty."""
        engine = self._engine_of.get(group_id)
        if engine is None or engine not in fit or not self._room(engine, group_id):
            engine = min(sorted(fit), key=lambda url: (not self._room(url, group_id), self._running[url]))
            self._engine_of[group_id] = engine
        self._engine_of.move_to_end(group_id)
        while len(self._engine_of) > REMEMBERED_GROUPS:
            self._engine_of.popitem(last=False)
        self._running[engine] += 1
        groups = self._groups[engine]
        groups[group_id] += 1
        try:
            yield engine
        finally:
            self._running[engine] -= 1
            groups[group_id] -= 1
            if not groups[group_id]:
                del groups[group_id]
