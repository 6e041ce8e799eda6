"""Keeps the Python blocks of README.md and docs/ equal to the files in docs_src/.

A block stands below a comment `<!-- snippet: FILE.py -->`, or `FILE.py#REGION` for the part of the file between
`# region: REGION` and `# endregion`.

    python scripts/snippets.py            # rewrite the blocks
    python scripts/snippets.py --check    # say which differ, or have no such comment; exit code 1 if any
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "docs_src"
MARKED = re.compile(r"<!-- snippet: (?P<file>[\w.]+)(?:#(?P<region>\w+))? -->\n```python\n(?P<body>.*?)```", re.DOTALL)
ANY = re.compile(r"^[ \t]*```[ \t]*(?:python|py|pycon)\b", re.MULTILINE)


def snippet(file: str, region: str | None) -> str:
    """Return the text of a file or of one of its regions.

    Raises:
        LookupError: There is no such file or region.
    """
    path = SOURCES / file
    if not path.is_file():
        raise LookupError(f"docs_src has no {file}")
    text = path.read_text(encoding="utf-8")
    if region is None:
        return text
    match = re.search(rf"^# region: {region}\n(.*?)^# endregion$", text, re.DOTALL | re.MULTILINE)
    if match is None:
        raise LookupError(f"{file} has no region {region}")
    return match.group(1).strip("\n") + "\n"


def renewed(match: re.Match[str]) -> str:
    """Return a marked block with the text of its source."""
    start, end = match.start("body") - match.start(), match.end("body") - match.start()
    return match.group()[:start] + snippet(match["file"], match["region"]) + match.group()[end:]


def problems(page: Path) -> list[str]:
    """List what is wrong with a page's blocks."""
    text = page.read_text(encoding="utf-8")
    marked = list(MARKED.finditer(text))
    complaints = [
        f"{page.relative_to(ROOT)}: the block of {match['file']} differs from docs_src"
        for match in marked
        if match.group() != renewed(match)
    ]
    if len(ANY.findall(text)) != len(marked):
        complaints.append(f"{page.relative_to(ROOT)}: a Python block has no snippet comment right above it")
    return complaints


def pages() -> list[Path]:
    """List the pages whose blocks are kept."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Rewrite the blocks, or check them."""
    parser = argparse.ArgumentParser(description="Keep the documentation's Python blocks equal to docs_src.")
    parser.add_argument("--check", action="store_true", help="change nothing, list what differs")
    if not parser.parse_args().check:
        for page in pages():
            text = page.read_text(encoding="utf-8")
            page.write_text(MARKED.sub(renewed, text), encoding="utf-8")
    complaints = [problem for page in pages() for problem in problems(page)]
    print("\n".join(complaints) or "all snippets are up to date")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
