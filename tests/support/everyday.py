"""What `make test` leaves to `make test-all` and CI, beside the tests that say `slow` themselves: it is to take less
than ten minutes on two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

# Their tests start workers, engines, pages, whole stacks: two thirds of all the time.
FOLDERS = frozenset({"worker", "dashboard", "engine", "examples", "races", "crash", "package"})
# Of those folders the files that take seconds.
QUICK = frozenset({
    "test_replies", "test_odd_answers", "test_zombies", "test_queries", "test_page_queries", "test_data_page",
    "test_cpu_engine_logprobs", "test_contract_aborts", "test_faults", "test_group_commits", "test_ranks",
    "test_layers", "test_support", "test_reasoning",
})  # fmt: skip
# These run on both databases; every day on SQLite, and on PostgreSQL where locks and fences are their matter.
ON_BOTH = frozenset({"contract", "cli", "trainer", "prompts", "interop"})
FENCES = frozenset({
    "test_append", "test_batches_rewind", "test_claim", "test_finish_release_fail", "test_liveness", "test_lost_ack",
    "test_ranks", "test_staleness_policies", "test_together", "test_zombies",
})  # fmt: skip
LONG = frozenset({"test_merge", "test_export_places", "test_forks", "test_retention_cli"})


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("short") is None and _left_out(item):
            item.add_marker(pytest.mark.slow)


def _left_out(item: pytest.Item) -> bool:
    folder, file = Path(item.path).parent.name, Path(item.path).stem
    if folder in FOLDERS:
        return file not in QUICK
    if folder not in ON_BOTH:
        return False
    backend = "postgres" if "postgres" in item.name else "sqlite"
    return file in LONG or (backend == "postgres" and file not in FENCES)
