"""What users install: the wheel, in a clean environment with the core dependencies only, away from the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folders of the checkout, and where their files must be in the wheel.
INSTALLED_AS = {
    "samplestore": "samplestore",
    "workers": "samplestore/workers",
    "dashboard": "samplestore/dashboard",
    "examples": "samplestore/examples",
    "alembic": "samplestore/_alembic",
}
IS_CODE = re.compile(r"\.(py|typed|toml|css|js|html)$")

pytestmark = pytest.mark.timeout(900)  # installing waits for the package index


def run(args: Sequence[str | Path], cwd: Path) -> str:
    """Its stdout; anything but exit status 0 fails with both outputs. The checkout is not importable."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    result = subprocess.run(args, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, f"{args} exited with {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools packs whatever an earlier build left in build/lib."""
    copy = tmp_path_factory.mktemp("source")
    for name in INSTALLED_AS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    run([sys.executable, "-m", "build", "--wheel", "--outdir", copy / "dist", copy], copy)
    (built,) = (copy / "dist").glob("samplestore-*.whl")
    return built


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and its core dependencies."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel], folder)
    return folder / "bin"


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in INSTALLED_AS.items()
        for path in (ROOT / folder).rglob("*")
        if IS_CODE.search(path.name) and "__pycache__" not in path.parts
    }
    # A folder that pyproject.toml does not name under packages is left out without a word.
    assert sorted(expected - inside) == []
    assert "samplestore/_alembic/env.py" in inside
    assert any(re.fullmatch(r"samplestore/_alembic/versions/0001_\w+\.py", name) for name in inside)
    assert "samplestore/py.typed" in inside


def test_the_wheel_adds_one_import_name(wheel: Path) -> None:
    top_level = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"samplestore"}
    # It would shadow the library of that name for everyone who starts Python in the checkout.
    assert not (ROOT / "alembic" / "__init__.py").exists()


def test_a_core_installation_works_away_from_the_checkout(clean_bin: Path, tmp_path: Path) -> None:
    samplestore = clean_bin / "samplestore"
    where = run([clean_bin / "python", "-c", "import samplestore; print(samplestore.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(clean_bin.parent)
    run([samplestore, "db", "upgrade", "--db", "x.db"], tmp_path)
    assert (tmp_path / "x.db").stat().st_size > 0
    assert run([samplestore, "status", "--db", "x.db"], tmp_path).strip()
    assert "--db" in run([samplestore, "worker", "--help"], tmp_path)
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["samplestore.commands"]
    overview = run([samplestore, "--help"], tmp_path)
    for command in commands:
        assert command in overview
