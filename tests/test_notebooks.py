"""The notebooks of examples/ run from top to bottom, as a reader would run them, and hold no old output."""

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from data_tables import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
each_notebook = pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One process for all notebooks, which imports once; each begins with no names of those before."""
    with pytest.MonkeyPatch.context() as patch:  # no history, no settings of the user
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        manager, client = start_new_kernel(cwd=str(EXAMPLES))
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


@each_notebook
def test_a_notebook_runs_and_warns_of_nothing(path: Path, kernel: KernelManager) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset_selective -f ^[A-Za-z]"))
    client = NotebookClient(notebook, timeout=120, km=kernel)
    client.execute()
    client.kc.stop_channels()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs
    assert all(one["data"]["text/plain"] for one in outputs if one["output_type"] == "execute_result")
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]


@each_notebook
def test_a_notebook_is_stored_without_output(path: Path) -> None:
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not [cell.source for cell in code if cell.outputs or cell.execution_count]
