"""The maps of the tree: ARCHITECTURE.md and the README of each folder name files that exist, and every file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "openenv"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_ROWS = 30
NO_PATHS = {"openenv.yaml"}  # a file of environments


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def paths_in(text: str) -> list[str]:
    """The paths in backticks: a folder with its slash, or a file with its suffix."""
    names = re.findall(r"`([^`\n]+)`", text)
    return [
        name for each in names for name in each.split() if re.fullmatch(r"[\w./*-]+(/|\.(py|md|js|toml|yaml))", name)
    ]


def exists(name: str) -> bool:
    """Whether a path is in the repository or the package; a short name may be anywhere in the package."""
    if "/" in name.rstrip("/"):
        return any(any(folder.glob(name.rstrip("/"))) for folder in (ROOT, PACKAGE))
    return (ROOT / name).exists() or any(PACKAGE.rglob(name.rstrip("/")))


def test_the_table_of_places_is_short() -> None:
    assert 0 < len(table_rows(section("Where is …?"))) <= MOST_ROWS


@pytest.mark.parametrize(
    "title", ["The tree", "Where is …?", "One step", "One tool call", "One page step", "One rollout"]
)
def test_every_path_in_the_architecture_exists(title: str) -> None:
    text = section(title)
    assert paths_in(text), f"no section {title}"
    assert [name for name in paths_in(text) if not exists(name) and name not in NO_PATHS] == []


def test_every_name_in_the_table_of_places_exists() -> None:
    missing = []
    for row in table_rows(section("Where is …?")):
        for file, names in re.findall(r"`([\w/.]+\.py)` \(([^)]*)\)", row):
            source = (PACKAGE / file).read_text(encoding="utf-8") if (PACKAGE / file).exists() else ""
            missing += [f"{file}: {name}" for name in re.findall(r"`(\w+)", names) if name not in source]
    assert missing == []


def folders_with_modules() -> list[Path]:
    """The folders of the package, without those of published re-exports, which `scripts/facades.py` writes."""
    published = re.findall(r'^\["(openenv[\w.]*)"\]', (ROOT / "tests/compat/published.toml").read_text(), re.MULTILINE)
    facades = {"/".join(name.split(".")[1:]) for name in published}
    folders = {file.parent for file in PACKAGE.rglob("*.py") if file.stat().st_size > 0}
    templates = PACKAGE / "cli/importers/templates"  # its files are copied, and only look like modules
    return sorted(folder for folder in folders - {templates} if folder.relative_to(PACKAGE).as_posix() not in facades)


@pytest.mark.parametrize("folder", folders_with_modules(), ids=lambda folder: folder.relative_to(PACKAGE).as_posix())
def test_the_readme_of_a_folder_names_its_modules_and_no_others(folder: Path) -> None:
    readme = (folder / "README.md").read_text(encoding="utf-8")
    modules = {file.name for file in folder.glob("*.py")} - {"__init__.py"}
    assert sorted(name for name in modules if not re.search(rf"\b{re.escape(name[:-3])}\b", readme)) == []
    first_cells = [line.split("|")[1] for line in readme.splitlines() if line.startswith("| `")]
    listed = [name for cell in first_cells for name in re.findall(r"`([\w./]+(?:\.py|/))`", cell)]
    assert [name for name in listed if not (folder / name).exists()] == []
