"""Libraries of extras that a test needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from .processes import in_ci


def library(name: str) -> Any:
    """The module `name`. Where it is not installed the test is skipped, since this suite may be installed with the
    extra "testing" alone, but fails in CI: a green run there must mean that it was tested."""
    try:
        return import_module(name)
    except ImportError as error:
        if in_ci():
            raise
        pytest.skip(f"could not import {name}: {error}", allow_module_level=True)
