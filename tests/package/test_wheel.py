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

from tests.support.postgres import Databases

ROOT = Path(__file__).parent.parent.parent
# Folders of the checkout, and where their files must be in the wheel.
INSTALLED_AS = {
    "samplestore": "samplestore",
    "workers": "samplestore/workers",
    "dashboard": "samplestore/dashboard",
    "examples": "samplestore/examples",
    "alembic": "samplestore/_alembic",
    "tests/support": "samplestore/testing/support",
    "tests/contract": "samplestore/testing/contract",
}
OF_TESTS = ("tests/__init__.py", "tests/conftest.py")  # the only files of that folder itself
IS_CODE = re.compile(r"\.(py|typed|toml|css|js|html)$")

pytestmark = pytest.mark.timeout(900)  # installing waits for the package index


def run(args: Sequence[str | Path], cwd: Path) -> str:
    """Its stdout; anything but exit status 0 fails with both outputs. The checkout is not importable, and it is
    somebody else's machine, not CI: what needs an extra may be left out there."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV", "CI"}}
    result = subprocess.run(args, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, f"{args} exited with {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def install(bin: Path, what: str) -> None:
    """With this environment's pip: to put one into each environment takes as long as the installation."""
    run([sys.executable, "-m", "pip", "--python", bin / "python", "install", "--quiet", what], bin)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools packs whatever an earlier build left in build/lib."""
    copy = tmp_path_factory.mktemp("source")
    for name in INSTALLED_AS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests" / "data").mkdir()
    for name in ("pyproject.toml", "README.md", "tests/data/cases.json", *OF_TESTS):
        shutil.copy(ROOT / name, copy / name)
    run([sys.executable, "-m", "build", "--wheel", "--outdir", copy / "dist", copy], copy)
    (built,) = (copy / "dist").glob("samplestore-*.whl")
    return built


def test_a_wheel_of_the_checkout_has_no_other_tests() -> None:
    """setuptools packs every module of a folder that is a package: tests/ itself must hold no more than it gives."""
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")} == set(OF_TESTS)


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and its core dependencies."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder)
    install(folder / "bin", str(wheel))
    return folder / "bin"


@pytest.fixture(scope="module")
def testing_bin(wheel: Path, clean_bin: Path) -> Path:
    """The same folder, with what the contract suite needs besides."""
    install(clean_bin, f"{wheel}[testing]")
    return clean_bin


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
    assert "samplestore/testing/conftest.py" in inside


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


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_the_contract_suite_runs_from_the_wheel(
    backend: str, testing_bin: Path, postgres_server: Databases, tmp_path: Path
) -> None:
    """As somebody else runs it on a server of theirs: away from the checkout, and on the database that they name."""
    url = "sqlite:" if backend == "sqlite" else postgres_server.url("postgres")
    suite = ["-m", "samplestore.testing.contract", "-v", "-rs", "--samplestore-url", url]
    some = "test_claim or test_gate or test_ledger_check or object_store or of_every_kind"  # the last two need extras
    told = run([testing_bin / "python", *suite, "-k", some], tmp_path)
    assert re.search(r"= \d+ passed,( \d+ skipped,)? \d+ deselected", told), told
    assert not re.search(r"\d+ (failed|errors?)", told), told
    left_out = re.findall(r"^SKIPPED .*", told, re.MULTILINE)
    assert all("could not import" in line for line in left_out), "only what needs an extra that is not installed"
    other = {"sqlite": "postgres", "postgres": "sqlite"}[backend]
    assert f"[{backend}]" in told and f"[{other}]" not in told
    assert ("test_a_stopped_holder_is_named" in told) == (backend == "sqlite"), "the gate is SQLite's"


def test_nothing_that_is_installed_needs_the_contract_suite() -> None:
    """samplestore.testing stands above everything: it needs pytest, and whatever imported it would, too."""
    folders = [ROOT / name for name in INSTALLED_AS if not name.startswith("tests")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 50
    assert [path for path in files if re.search(r"\b(samplestore\.testing|import testing)\b", path.read_text())] == []
    inside = [path for name in ("tests/support", "tests/contract") for path in (ROOT / name).glob("*.py")]
    outside = re.compile(r"^\s*(from|import) tests\b", re.MULTILINE)
    assert [path for path in inside if outside.search(path.read_text())] == [], "use relative imports: see conftest.py"
