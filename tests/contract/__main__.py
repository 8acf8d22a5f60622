"""The contract suite, on a database server of your own: python -m samplestore.testing.contract --samplestore-url URL

Further arguments go to pytest, e.g. -k test_claim. (pytest --pyargs would read conftest.py, where the option is, too
late.)
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from samplestore.errors import MissingExtra

from ..support.processes import in_ci

HERE = Path(__file__).resolve().parent


class LeftOut:
    """Where an extra is not installed, what is about it is skipped. In CI it fails, as all that is missing does."""

    def pytest_configure(self, config: pytest.Config) -> None:
        for mark in ("slow", "short"):  # the checkout chooses by them
            config.addinivalue_line("markers", mark)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        try:
            return (yield)
        except (MissingExtra, ModuleNotFoundError) as error:
            ours = isinstance(error, ModuleNotFoundError) and str(error.name).startswith("samplestore")
            if ours or in_ci():
                raise
            pytest.skip(f"could not import what it is about: {error}")


if __name__ == "__main__":
    # Without a configuration of its own pytest would look for conftest.py no higher than this folder.
    where = ["--rootdir", str(HERE.parent), "--confcutdir", str(HERE.parent), "-p", "no:cacheprovider"]
    sys.exit(pytest.main([str(HERE), *where, *sys.argv[1:]], plugins=[LeftOut()]))
