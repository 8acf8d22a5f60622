"""Who may import whom, and what an import may cost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("workers", "dashboard", "examples")  # installed inside samplestore
IMPORT_LINTER = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command(sys.argv[1:])"

# Each line may be added to the file without anything else changing, and breaks one rule.
FORBIDDEN = {
    "the core imports workers": ("samplestore/verbs/planted.py", "import samplestore.workers"),
    "the core imports the dashboard": ("samplestore/verbs/planted.py", "import samplestore.dashboard"),
    "a lower layer imports a higher one": ("samplestore/statements/planted.py", "import samplestore.verbs"),
    "types import the engine": ("samplestore/types.py", "import samplestore.engine"),
    "an import inside a function": ("samplestore/codec.py", "def planted():\n    import samplestore.verbs"),
    "the dashboard imports workers": ("dashboard/planted.py", "import samplestore.workers"),
    "workers import the dashboard": ("workers/planted.py", "import samplestore.dashboard"),
    "a module that no layer names": ("samplestore/planted.py", ""),
}
HEAVY = ("torch", "sglang", "sglang_router", "aiohttp", "streamlit", "pandas", "transformers", "tokenizers", "pyarrow")
SLOW_TO_IMPORT = ("sqlalchemy", "alembic", *HEAVY)


def assemble(folder: Path) -> Path:
    """A copy of the package as it is installed: workers, dashboard and examples inside samplestore."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "samplestore", folder / "samplestore", ignore=ignore)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "samplestore" / name, ignore=ignore)
    return folder


def check_layers(folder: Path) -> subprocess.CompletedProcess[str]:
    # Both name the copy: import-linter looks in the working directory, and an editable install would come after it.
    return subprocess.run(
        [sys.executable, "-c", IMPORT_LINTER, "--no-logo", "--no-cache", ROOT / ".importlinter"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_imports_follow_the_layers(tmp_path: Path) -> None:
    result = check_layers(assemble(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_a_broken_layer_is_found(rule: str, tmp_path: Path) -> None:
    folder = assemble(tmp_path)
    file, line = FORBIDDEN[rule]
    inside, _, rest = file.partition("/")
    path = folder / file if inside == "samplestore" else folder / "samplestore" / inside / rest
    with path.open("a") as planted:
        planted.write(f"\n{line}\n")
    result = check_layers(folder)
    assert result.returncode != 0, result.stdout
    assert path.stem in result.stdout, f"it failed for another reason:\n{result.stdout}{result.stderr}"


def modules_after(code: str, tmp_path: Path) -> tuple[set[str], str]:
    """(top-level modules imported by `code` in a fresh interpreter, its output)."""
    listing = tmp_path / "modules"
    code += f"\nimport sys; open({str(listing)!r}, 'w').write('\\n'.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in listing.read_text().split()}, result.stdout


def test_importing_the_library_pulls_in_nothing_heavy(tmp_path: Path) -> None:
    imported, _ = modules_after("import samplestore", tmp_path)
    assert "samplestore" in imported
    assert not imported.intersection(HEAVY)


def test_every_core_module_imports_without_the_heavy_libraries(tmp_path: Path) -> None:
    """Heavy libraries are imported inside the functions that need them, so that a core installation works."""
    core = ROOT / "samplestore"
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in sorted(core.rglob("*.py"))]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    assert "samplestore.models" in names
    imported, _ = modules_after("\n".join(f"import {name}" for name in names), tmp_path)
    assert not imported.intersection(HEAVY)


def test_help_answers_without_the_database_libraries(tmp_path: Path) -> None:
    """`samplestore --help` and completion should feel immediate: SQLAlchemy and Alembic alone cost half a second."""
    code = (
        "import sys\nfrom samplestore.cli import main\nsys.argv = ['samplestore', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    imported, output = modules_after(code, tmp_path)
    assert "Usage" in output
    assert not imported.intersection(SLOW_TO_IMPORT)
