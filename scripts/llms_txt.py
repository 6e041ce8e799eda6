"""Writes llms.txt: the documentation as a list of pages with a sentence each, and llms-full.txt: all of it.

    python scripts/llms_txt.py FOLDER     # `make docs` writes them into site/

The order is that of the table of contents; pages of the Python API, which are made from the source, are left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ABOUT = "Write a reinforcement learning environment once as a typed Python class; serve it, step it, train on it."


def listed_pages() -> list[Path]:
    """Return the pages of the table of contents, in its order."""
    names = re.findall(r'"([\w/]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    return [DOCS / name for name in names if not name.startswith("reference/python/")]


def title_and_sentence(text: str) -> tuple[str, str]:
    """Return a page's title and the first sentence of its prose."""
    title = text.partition("\n")[0].removeprefix("# ")
    plain = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    prose = next((block for block in plain.split("\n\n")[1:] if re.match(r"[A-Z`*]", block.strip())), "")
    unlinked = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return title, re.split(r"(?<=[.:])\s", unlinked)[0].rstrip(":.")


def write(folder: Path) -> None:
    """Write both files into a folder."""
    lines, whole = ["# OpenEnv", "", f"> {ABOUT}", ""], []
    for page in listed_pages():
        text = page.read_text(encoding="utf-8")
        title, sentence = title_and_sentence(text)
        address = page.relative_to(DOCS).with_suffix("").as_posix()
        lines.append(f"- [{title}]({'' if address == 'index' else f'{address}/'}): {sentence}")
        whole.append(text)
    (folder / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
