"""The snippets about sandboxes run in real ones and print what their page says."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

PRINTED = {
    "sandbox_limits.py": "task 7\n137 True\n124 True begun\n",
    "sandbox_pool.py": "[0, 1, 4, 9, 16, 25]\n",
    "sandbox_port.py": "hello from the host\n",
    "sandbox_snapshot.py": "built 0 \nbuilt 1 \nbuilt 2 \n",
    "sandbox_trees.py": "137\n1\n",
    "use_py_executor.py": (
        "['begin', '144']\n1 before ZeroDivisionError: division by zero\nImportError: Import of os is not allow\n"
    ),
    "use_sandbox.py": "3 hello Ada\n['apple', 'pear']\n",
}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize("file", sorted(PRINTED))
def test_a_snippet_about_sandboxes_prints_what_it_should(file: str, run_snippet: Callable[..., str]) -> None:
    assert run_snippet(file) == PRINTED[file]
