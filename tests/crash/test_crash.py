"""The crash harness, small: a handful of deaths in `make test`, fifty and a whole stack in CI. `make test-crash` goes
on to a thousand, and to a hundred on whole stacks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from samplestore import faults
from tests.crash.__main__ import ELSEWHERE
from tests.crash.levels import LEVELS, Level
from tests.crash.schedule import POINTS, fate
from tests.crash.world import TTL_S, Tally

SEED = 20261129


def survive(level: str, backend: str, seed: int, deaths: int, prompts: int, folder: Path) -> Tally:
    tally = Tally(Counter(), Counter(), Counter())
    print(f"again: python -m tests.crash --level {level} --db {backend} --seed {seed} --kills {deaths} --each {deaths}")
    with Level.open(LEVELS[level], folder) as made:
        made.survive(backend, seed, deaths, tally, prompts)
    assert tally.killed >= deaths, f"the run ended after {tally.killed} deaths: {tally}"
    return tally


@pytest.mark.short
@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_a_handful_of_deaths(backend: str, tmp_path: Path) -> None:
    survive("store", backend, SEED, 6, 16, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_fifty_deaths(backend: str, tmp_path: Path) -> None:
    tally = survive("store", backend, SEED + 1, 50, 120, tmp_path)
    assert tally.kills["migration migrating"], tally
    assert backend == "sqlite" or tally.kills["postgres random"], tally


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deaths_of_a_whole_stack(tmp_path: Path) -> None:
    survive("full", "sqlite", SEED, 12, 30, tmp_path)


def test_every_named_point_has_its_killer() -> None:
    """A point that no world comes to fails `make test-crash` after its hour, unless a test elsewhere kills there."""
    drawn = {point for points in POINTS.values() for point in points} | {"migrating", "pruning"}  # the two of extras.py
    assert drawn | ELSEWHERE.keys() == faults.POINTS.keys() and not drawn & ELSEWHERE.keys()
    for point, file in ELSEWHERE.items():
        text = (Path(__file__).parents[2] / file).read_text()
        assert f"{point}=kill" in text or (f'"{point}"' in text and "{point}=kill" in text), (point, file)


def test_a_seed_repeats_its_schedule() -> None:
    def drawn(seed: int) -> list[str]:
        return [str(fate(seed, "worker", f"worker-{n}", life, TTL_S)) for n in range(3) for life in range(50)]

    assert drawn(7) == drawn(7) != drawn(8)


@pytest.mark.parametrize("kind", sorted(POINTS))
def test_every_named_point_is_drawn_often(kind: str) -> None:
    points = Counter(fate(1, kind, kind, life, TTL_S).point for life in range(300))
    assert all(points[point] >= 10 for point in [*POINTS[kind], None]), points
