"""The notebooks run from the first cell to the last, and show what they were committed with."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_steps", "reading_a_report"]


# Libraries around Jupyter warn of their own future; what the notebooks warn of is in their outputs.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_as_many_outputs_as_it_shows(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    committed = [_kinds(cell) for cell in notebook.cells]
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", coalesce_streams=True
    )
    client.execute(cwd=str(path.parent))
    assert [_kinds(cell) for cell in notebook.cells] == committed
    assert not [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    ]


def _kinds(cell: object) -> list[str]:
    """What a cell puts out: text, a picture."""
    outputs = cell.get("outputs", [])  # type: ignore[attr-defined]
    return [output.get("name") or " ".join(sorted(output.get("data", {}))) for output in outputs]
