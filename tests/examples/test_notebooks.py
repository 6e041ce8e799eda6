"""The notebooks equal their sources, and run from the first cell to the last."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("inspect", "play", "train")


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """The script that writes the notebooks."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebooks_equal_their_sources(writer: ModuleType) -> None:
    texts = writer.files()
    assert sorted(path.stem for path in texts) == list(NAMES)
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/notebooks.py"


def test_a_source_becomes_cells(writer: ModuleType) -> None:
    document = writer.notebook("# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1\n\nx\n")
    markdown, code = document["cells"]
    assert (markdown["cell_type"], "".join(markdown["source"])) == ("markdown", "# Title\n\nText.")
    assert (code["cell_type"], "".join(code["source"]), code["outputs"]) == ("code", "x = 1\n\nx", [])


PRINTED = {
    "inspect": ["[1.0, 1.0, 0.0, 0.0]\n", "It is 43.\n"],
    "play": ["3.12 guesses per episode\n"],
    "train": ["mean reward: 0.65 in the first ten updates, 0.72 in the last ten\n"],
}
SHOWN = {"inspect": "<strong>Outcome ", "play": "<strong>StepResult</strong>", "train": None}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_as_a_program(name: str) -> None:
    source = ROOT / "docs_src" / f"notebook_{name}.py"
    done = subprocess.run([sys.executable, str(source)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for text in PRINTED[name]:
        assert text in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nbclient") is None, reason="it has an environment of its own: make test-notebooks")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_in_jupyter(name: str, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    document: Any = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(document, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in document.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    for text in PRINTED[name]:
        assert text in printed
    shown = SHOWN[name]
    assert shown is None or any(shown in output.get("data", {}).get("text/html", "") for output in outputs)
    assert json.dumps(document).count('"ename"') == 0
