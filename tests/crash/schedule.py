"""Who dies when: drawn from a seed, so that a seed repeats the schedule (not the race that it starts)."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Arrivals at a point in the life of such a process: deaths are drawn among the first so many.
POINTS: dict[str, dict[str, int]] = {
    "worker": {"claimed": 3, "appended": 12, "committed": 30},
    "scorer": {"claimed": 3, "appended": 12, "committed": 30, "rewarded": 6},
    "trainer": {"saved": 3, "committed": 12},
    "engine": {},
    "router": {},
}
AT_RANDOM = 0.3  # part of the deaths that have no named point
STOPS = 0.2  # part of the fates that are a suspension first
LOSES = 0.25  # part of the lives in which every so-manieth commit loses its answer


@dataclass(frozen=True)
class Fate:
    """How one life of a process ends.

    point      the named place, or None: at random, `after_s` seconds after its start
    stop_s     None: killed. Else suspended for so long, and killed `after_s` seconds after it was woken
    lose       every so-manieth commit loses its answer; 0: none
    """

    point: str | None
    number: int
    stop_s: float | None
    after_s: float
    lose: int

    @property
    def faults(self) -> str:
        parts = []
        if self.point is not None:
            parts.append(f"{self.point}={'kill' if self.stop_s is None else 'stop'}@{self.number}")
        if self.lose and self.point != "committed":
            parts.append(f"committed=lose%{self.lose}")
        return " ".join(parts)

    def __str__(self) -> str:
        where = "at random" if self.point is None else f"{self.point} {self.number}"
        return f"{where}, {'killed' if self.stop_s is None else f'stopped for {self.stop_s:.1f} s'}"


IMMORTAL = Fate(None, 0, None, float("inf"), 0)


def fate(seed: int, kind: str, name: str, life: int, ttl_s: float, slow: float = 1.0) -> Fate:
    """The fate of the `life`-th process that is called `name`. `slow`: how many times longer lives last."""
    rng = random.Random(f"{seed}/{name}/{life}")
    points = POINTS[kind]
    point = None if not points or rng.random() < AT_RANDOM else rng.choice(sorted(points))
    stops = rng.random() < STOPS and kind not in ("engine", "router")
    return Fate(
        point=point,
        number=rng.randint(1, points[point]) if point else 0,
        # shorter than the time to live: nobody notices. Longer: its work is somebody else's when it wakes up
        stop_s=(rng.uniform(0.1, 0.4) if rng.random() < 0.3 else ttl_s + rng.uniform(1.0, 2.0)) if stops else None,
        after_s=rng.uniform(0.1, 2.0) * slow * (4 if kind in ("engine", "router") else 1),
        lose=rng.randint(3, 12) if rng.random() < LOSES else 0,
    )
