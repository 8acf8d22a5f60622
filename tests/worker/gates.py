"""A gate at which code of a user waits, in another process, until the test opens it. It stays open; nobody polls."""

from __future__ import annotations

import fcntl
from pathlib import Path

# For files in the gate's folder, which they call HERE.
AT_THE_GATE = """
def wait_at_the_gate():
    import fcntl
    with open(HERE / "gate") as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)  # the test holds it
"""


class Gate:
    """Shut from the start."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "gate").open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        """Who waits goes on, and who comes later does not wait."""
        self._file.close()
