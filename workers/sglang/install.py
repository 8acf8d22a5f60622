"""Install SGLang releases side by side: python -m samplestore.workers.sglang.install --release 0.5.23 --release 0.5.9

    HOME/venv                  CPU only: what all releases share (torch, transformers, ...)
    HOME/releases/VERSION      CPU only: a folder with that release and its pins; with a GPU: a virtual environment

A stamp is written into each folder when it is complete. Whatever has none, or that of other pins, is made again, so a
killed installation is finished by typing the same command.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samplestore.errors import SampleStoreError
from samplestore.workers.sglang.machine import STAMP, has_gpu, home_folder, release_folder
from samplestore.workers.sglang.releases import CPU_REQUIREMENTS, CPU_WITHOUT_DEPS, NEWEST, RELEASES, parse_releases


def install(releases: Sequence[str], home: Path | None = None) -> None:
    """Install `releases` under `home`, and say in one line each what was done. Raises SampleStoreError."""
    folder = home_folder(home)
    folder.mkdir(parents=True, exist_ok=True)
    gpu = has_gpu()
    print(f"SGLang for {'NVIDIA GPUs' if gpu else 'the CPU (no NVIDIA GPU found)'} in {folder}", flush=True)
    with _alone(folder):
        if not gpu:
            _cpu_base(folder)
        for release in releases:
            (_gpu_release if gpu else _cpu_release)(folder, release)


def _cpu_base(home: Path) -> None:
    venv, wanted = home / "venv", "\n".join((*CPU_REQUIREMENTS, *CPU_WITHOUT_DEPS))
    if _complete(venv, wanted):
        return _say("venv", "is there")
    _say("venv", f"{len(CPU_REQUIREMENTS)} requirements, about 2.6 GB: a minute or more")
    python = _venv(venv)
    _pip(python, *CPU_REQUIREMENTS)
    _pip(python, "--no-deps", *CPU_WITHOUT_DEPS)
    (venv / STAMP).write_text(wanted)


def _cpu_release(home: Path, release: str) -> None:
    target, packages = release_folder(home, release), RELEASES[release].cpu_packages
    wanted = "\n".join(packages)
    if _complete(target, wanted):
        return _say(release, "is there")
    _say(release, " ".join(packages))
    partial = target.with_name(f".{release}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    _pip(str(home / "venv" / "bin" / "python"), "--no-deps", "--target", str(partial), *packages)
    (partial / STAMP).write_text(wanted)
    partial.rename(target)


def _gpu_release(home: Path, release: str) -> None:
    venv, wanted = release_folder(home, release), f"sglang=={release}"
    if _complete(venv, wanted):
        return _say(release, "is there")
    _say(release, "with its CUDA requirements, many gigabytes: several minutes")
    _pip(_venv(venv), wanted)
    (venv / STAMP).write_text(wanted)


def _complete(folder: Path, wanted: str) -> bool:
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return True
    stamp.unlink(missing_ok=True)  # from here until the end it is not complete
    return False


def _venv(folder: Path) -> str:
    """Its interpreter. One that a killed installation left half made is repaired."""
    _run(
        [sys.executable, "-m", "venv", str(folder)],
        "no virtual environment could be made. On Debian: apt-get install python3-venv",
    )
    return str(folder / "bin" / "python")


def _pip(python: str, *arguments: str) -> None:
    _run(
        [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments],
        "pip could not install SGLang; its message is above. Then type the same command again: it goes on",
    )


def _run(command: list[str], otherwise: str) -> None:
    code = subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        raise SampleStoreError(f"{otherwise} (exit status {code})")


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One installation at a time: two would unpack into the same folders. A lock ends with the process that has it."""
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(name: str, text: str) -> None:
    print(f"  {name}: {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install SGLang releases side by side.")
    parser.add_argument("--release", action="append", help=f"{' | '.join(RELEASES)} | all (default: {NEWEST})")
    parser.add_argument("--home", type=Path, help="folder; $SAMPLESTORE_SGLANG_HOME or .sglang if left out")
    given = parser.parse_args(arguments)
    try:
        install(parse_releases(",".join(given.release or [NEWEST])), given.home)
    except SampleStoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
