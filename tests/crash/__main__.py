"""The crash harness: `python -m tests.crash --kills 1000`. Prints seeds, progress, and what was survived, by point."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from samplestore.faults import POINTS
from tests.crash.levels import LEVELS, Level
from tests.crash.proof import Broken
from tests.crash.world import Tally


def main() -> int:
    args = _arguments()
    logging.basicConfig(level=logging.ERROR)
    tally, seed, began = Tally(Counter(), Counter(), Counter()), args.seed, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="samplestore-crash-", dir=args.folder))
    backends = ["sqlite", "postgres"] if args.db == "both" else [args.db]
    with Level.open(LEVELS[args.level], folder) as level:
        while tally.killed < args.kills and time.monotonic() - began < args.minutes * 60:
            backend = backends[seed % len(backends)]
            limit = min(args.each, args.kills - tally.killed)
            print(f"seed {seed} on {backend}: up to {limit} deaths (of {tally.killed} so far)", flush=True)
            try:
                level.survive(backend, seed, limit, tally, args.prompts)
            except Broken as broken:
                again = f"--level {args.level} --db {backend} --seed {seed} --kills {limit} --each {limit}"
                print(
                    f"BROKEN: {broken}\nfiles: {folder}\nagain: python -m tests.crash {again} --prompts {args.prompts}",
                    file=sys.stderr,
                    flush=True,
                )
                print(report(tally, time.monotonic() - began), flush=True)
                return 1
            seed += 1
    shutil.rmtree(folder)
    print(report(tally, time.monotonic() - began), flush=True)
    rare = {point: n for point, n in hits(tally).items() if n < args.hits}
    if rare:
        print(f"hit less than {args.hits} times: {rare}", file=sys.stderr)
    return int(bool(rare))


# Points that no world comes to, and the tests that kill there: worlds have no array files, imports, exports, merges.
ELSEWHERE = {
    "filed": "tests/contract/test_array_crashes.py",
    "importing": "tests/contract/test_array_crashes.py",
    "exporting": "tests/contract/test_export_places.py",
    "replacing": "tests/contract/test_export_places.py",
    "copying": "tests/contract/test_merge.py",
}


def hits(tally: Tally) -> Counter[str]:
    """Kills and stops at each named point, whoever it was."""
    counted = Counter(dict.fromkeys(POINTS.keys() - ELSEWHERE.keys(), 0))
    for what, n in [*tally.kills.items(), *tally.stops.items()]:
        counted[what.split()[1]] += n
    return counted


def report(tally: Tally, seconds: float) -> str:
    lines = [f"survived {tally.killed} kills and {tally.stops.total()} stops in {seconds:.0f} s", ""]
    lines += [f"{'point':<28}{'killed':>8}{'stopped':>9}"]
    for what in sorted({*tally.kills, *tally.stops}):
        lines.append(f"{what:<28}{tally.kills[what]:>8}{tally.stops[what]:>9}")
    lines += ["", "hits of each named point: " + ", ".join(f"{p} {n}" for p, n in sorted(hits(tally).items()))]
    lines += [f"{n} times a {kind} left because the database server was away" for kind, n in tally.left.items()]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--level", choices=sorted(LEVELS), default="store", help="store: scripted engines")
    parser.add_argument("--db", choices=["sqlite", "postgres", "both"], default="both")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first world; the next has the next")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--each", type=int, default=40, help="deaths in one world, before its run may end in peace")
    parser.add_argument("--hits", type=int, default=0, help="fail if a named point was hit less often")
    parser.add_argument("--prompts", type=int, default=120, help="of one world: how long its run is")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no new world after so long")
    parser.add_argument("--folder", type=Path, default=None, help="where databases and logs go; kept if it breaks")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
