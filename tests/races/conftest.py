"""Fixtures of the tests of races."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import samplestore
from samplestore import Store


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Store]:
    store = samplestore.open(postgres_url)
    yield store
    store.close()
