"""Writes the notebooks of examples/notebooks from docs_src/notebook_*.py, where `# %%` begins a cell.

python scripts/notebooks.py            # write them
python scripts/notebooks.py --check    # say which differ; exit code 1 if any
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "examples" / "notebooks"
_CELL = re.compile(r"^# %%(?P<kind>.*)\n", re.MULTILINE)


def notebook(source: str) -> dict[str, Any]:
    """Return the notebook of a source file, without outputs."""
    _, *parts = _CELL.split(source)
    cells = []
    for number, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        lines = text.strip("\n").splitlines(keepends=True)
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        if "[markdown]" in kind:
            cell |= {"cell_type": "markdown", "source": [line.removeprefix("#").removeprefix(" ") for line in lines]}
        else:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": [], "source": lines}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def files() -> dict[Path, str]:
    """Return the text of each notebook."""
    sources = sorted((ROOT / "docs_src").glob("notebook_*.py"))
    return {
        TARGET / f"{path.stem.removeprefix('notebook_')}.ipynb": json.dumps(
            notebook(path.read_text(encoding="utf-8")), indent=1, ensure_ascii=False
        )
        + "\n"
        for path in sources
    }


def main() -> int:
    """Write or check the notebooks; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check: bool = parser.parse_args().check
    texts = files()
    changed = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in changed:
        print(f"{path.relative_to(ROOT)} {'differs: run python scripts/notebooks.py' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
