"""The wheel, installed without extras beside torch alone, runs the README's first example."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

pytest.importorskip("hatchling")  # builds the wheel; in the test extra
pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parent.parent

# Without NumPy torch itself warns when it is imported. From there on every warning is an error.
BEFORE = """
import importlib.util, runpy, torch, warnings

warnings.simplefilter("error")
assert importlib.util.find_spec("numpy") is None and importlib.util.find_spec("typer") is None
"""
AFTER = """
print(pathcond.__file__)
runpy.run_module("pathcond", run_name="__main__")  # the command line, whose extra is not installed
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        out,
        ROOT,
    ]
    subprocess.run(command, check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that sees torch, what torch requires, and the wheel."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    for name in requirements("torch"):
        link_into(packages, name)
    interpreter = home / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        interpreter,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    ]
    subprocess.run(command, check=True, timeout=300)
    return interpreter


def requirements(name: str, seen: set[str] | None = None) -> set[str]:
    """A distribution and what it needs of what is installed; without extras, and without numpy."""
    seen = set() if seen is None else seen
    try:
        needed = distribution(name).requires or []
    except PackageNotFoundError:
        return seen
    seen.add(name)
    for line in needed:
        found = re.match(r"[\w.-]+", line)
        if found and "extra ==" not in line and found[0].lower() not in {*seen, "numpy"}:
            requirements(found[0].lower(), seen)
    return seen


def link_into(packages: Path, name: str) -> None:
    files = distribution(name).files or []
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
        link = packages / top
        if not link.exists():
            link.symlink_to(Path(str(distribution(name).locate_file(top))).resolve())


def run(python: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_first_example_of_the_readme(python: Path, tmp_path: Path) -> None:
    example = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
    )
    assert example
    done = run(python, BEFORE + example[1] + AFTER, tmp_path)
    assert "Sequential conditioned: 400 units in 2 groups" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(python.parent.parent)), (
        "the wheel is what ran"
    )
    assert done.returncode != 0
    assert 'pip install "pathcond[cli]"' in done.stderr, "the command says which extra it needs"


def test_what_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (
            archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")
        )
    assert "pathcond/py.typed" in names
    assert "pathcond/report/templates/base.html.jinja" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]
    assert "Requires-Python: >=3.11" in metadata
    assert "https://arxiv.org/abs/2602.19799" in metadata
