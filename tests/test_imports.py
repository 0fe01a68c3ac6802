"""What importing the package and asking for help load: nothing that takes time."""

import subprocess
import sys

import pytest

import pathcond

HELP = """
import sys
from pathcond.cli.commands import main
sys.argv = ["pathcond", *{arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code
"""


def loaded_after(code: str) -> set[str]:
    """The modules that a fresh process has loaded after some code."""
    code += "\nimport sys\nprint('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_import_does_not_load_torch() -> None:
    loaded = loaded_after("import pathcond\ndir(pathcond)")
    assert "pathcond" in loaded
    assert not loaded & {"torch", "numpy"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["condition", "--help"], ["reproduce", "--help"]]
)
def test_help_does_not_load_torch(arguments: list[str]) -> None:
    loaded = loaded_after(HELP.format(arguments=arguments))
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy"}


def test_public_names_are_there_when_asked_for() -> None:
    missing = [name for name in pathcond.__all__ if not hasattr(pathcond, name)]
    assert not missing
    assert set(pathcond.__all__) <= set(dir(pathcond))
    rooms = {name for names in pathcond._ROOMS.values() for name in names}
    assert rooms | {"reference", "theory"} == set(pathcond.__all__)


def test_modules_are_loaded_when_asked_for() -> None:
    code = "import pathcond\npathcond.networks.mlp\nassert callable(pathcond.teleport)"
    assert "pathcond.networks" in loaded_after(code)
    with pytest.raises(AttributeError, match="has no attribute 'conditions'"):
        pathcond.conditions  # noqa: B018
