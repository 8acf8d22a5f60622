"""What this machine has, and where its SGLang is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from samplestore.errors import SampleStoreError
from samplestore.workers.sglang.releases import RELEASES

ENV_HOME = "SAMPLESTORE_SGLANG_HOME"
STAMP = ".samplestore-installed"  # written last: a folder without it is not complete


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is there to be used. CUDA_VISIBLE_DEVICES set to nothing says that it isn't."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def home_folder(home: Path | None = None) -> Path:
    """Where `samplestore sglang install` puts SGLang: the argument, the environment, or .sglang here."""
    return (home or Path(os.environ.get(ENV_HOME) or ".sglang")).absolute()


def release_folder(home: Path, release: str) -> Path:
    """A virtual environment of its own where there is a GPU; elsewhere a folder of packages beside HOME/venv."""
    return home / "releases" / release


@dataclass(frozen=True, slots=True)
class Installation:
    """An SGLang that can be started: its release, the interpreter, and folders to put first on its path."""

    version: str
    python: str
    path: tuple[str, ...] = ()


def find_sglang(release: str | None = None, home: Path | None = None, python: str | None = None) -> Installation:
    """The interpreter given, else this one if it has SGLang, else what was installed under `home`.

    `release` None takes what is there, the newest first. Raises SampleStoreError with the command to type.
    """
    if python:
        return _matching(release, Installation(_version_in(python), python))
    if home is None and (own := _own_version()) and release in (None, own):
        return Installation(own, sys.executable)
    folder = home_folder(home)
    for name in [release] if release else RELEASES:
        at = release_folder(folder, name)
        if not (at / STAMP).is_file():
            continue
        if (at / "bin" / "python").exists():
            return Installation(name, str(at / "bin" / "python"))
        if (folder / "venv" / STAMP).is_file():
            return Installation(name, str(folder / "venv" / "bin" / "python"), (str(at),))
    wanted = f" --release {release}" if release else ""
    where = f" --home {home}" if home else ""
    raise SampleStoreError(
        f"SGLang{' ' + release if release else ''} is installed neither beside samplestore nor in {folder}. "
        f"Run: samplestore sglang install{wanted}{where}"
    )


def _own_version() -> str | None:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def _version_in(python: str) -> str:
    try:
        asked = subprocess.run(
            [python, "-c", "from importlib.metadata import version; print(version('sglang'))"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    except OSError as error:
        raise SampleStoreError(f"{python} cannot be run ({error}). Run: samplestore sglang install") from error
    if asked.returncode != 0:
        raise SampleStoreError(f"{python} has no SGLang. Run: {python} -m pip install sglang")
    return asked.stdout.strip()


def _matching(release: str | None, found: Installation) -> Installation:
    if release not in (None, found.version):
        raise SampleStoreError(
            f"{found.python} has SGLang {found.version}, not {release}. "
            f"Run: samplestore sglang install --release {release}"
        )
    return found
