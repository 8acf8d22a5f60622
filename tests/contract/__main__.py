"""The contract suite, on a database server of your own: python -m samplestore.testing.contract --samplestore-url URL

Further arguments go to pytest, e.g. -k test_claim. (pytest --pyargs would read conftest.py, where the option is, too
late.)
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    # Without a configuration of its own pytest would look for conftest.py no higher than this folder.
    where = ["--rootdir", str(HERE.parent), "--confcutdir", str(HERE.parent), "-p", "no:cacheprovider"]
    sys.exit(pytest.main([str(HERE), *where, *sys.argv[1:]]))
