"""Write the facade modules, the published module paths, from their table `tests/compat/published.toml`.

usage: python scripts/facades.py

Change the table when an implementation moves, then run this script. `tests/compat/test_facades.py` compares the two.
A facade contains re-exports only. The keys of a module in the table:

    "openenv.types" = "Action State"             names, and the module that defines them
    "openenv.errors" = "Failed as Failure"       a name that differs from the definition
    about = "..."                                the subject of the module docstring
    lazy = true                                  names load at their first use; packages are always lazy
    submodules = "a b", include = "module"       the package's modules; all names of another facade
    unlisted = "x y"                             names outside `__all__`
    command = "build"                            a command of `openenv.cli`, and `app` that runs it
    program = "main"                             the function that `python -m` runs
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "compat" / "published.toml"
OPTIONS = ("about", "lazy", "submodules", "include", "unlisted", "command", "program")


@dataclass(frozen=True, order=True)
class Export:
    """A name of a facade."""

    source: str
    definition: str
    """Its name in the source module."""
    name: str
    """Its name in the facade."""


@dataclass(frozen=True)
class Facade:
    """A published module."""

    module: str
    path: Path
    exports: tuple[Export, ...]
    options: Mapping[str, Any]

    @property
    def is_lazy(self) -> bool:
        """Whether names load at their first use."""
        return bool(self.options.get("lazy")) or self.path.name == "__init__.py"

    @property
    def listed(self) -> list[str]:
        """The names in `__all__`."""
        unlisted = self.options.get("unlisted", "").split()
        return [export.name for export in self.exports if export.name not in unlisted]

    @property
    def submodules(self) -> list[str]:
        """The modules that a package exports as attributes."""
        return list(self.options.get("submodules", "").split())


def read_table() -> list[Facade]:
    """Read all facades of the table."""
    table = tomllib.loads(TABLE.read_text("utf-8"))
    return [_facade(module, table) for module in table]


def _facade(module: str, table: Mapping[str, Mapping[str, Any]]) -> Facade:
    plain = ROOT / "src" / Path(*module.split("."))
    path = plain / "__init__.py" if plain.is_dir() else plain.with_suffix(".py")
    return Facade(module, path, tuple(sorted(set(_exports(module, table)))), table[module])


def _exports(module: str, table: Mapping[str, Mapping[str, Any]]) -> Iterator[Export]:
    entry = table[module]
    if "include" in entry:
        unlisted = table[entry["include"]].get("unlisted", "").split()
        yield from (each for each in _exports(entry["include"], table) if each.name not in unlisted)
    for source, text in entry.items():
        if source in OPTIONS:
            continue
        # "A B", or "A as B, C" if a name differs from its definition
        for part in text.split(",") if " as " in text else text.split():
            definition, _, name = " ".join(part.split()).partition(" as ")
            yield Export(source, definition, name or definition)


def source_text(facade: Facade) -> str:
    """Return the source of a facade, before `ruff format`."""
    subject = facade.options.get("about")
    if subject is None:
        subject = f"the published path of `{facade.exports[0].source if facade.exports else facade.module}`"
    lines = [f'"""Facade: {subject}. Re-exports only."""', "", "from __future__ import annotations", ""]
    if "command" in facade.options:
        body = _command(facade)
    elif not facade.exports and not facade.submodules:
        lines[0] = f'"""Facade: {subject}. It has no public names; its submodules have them."""'
        body = []
    elif facade.is_lazy:
        body = _lazy(facade)
    else:
        body = _eager(facade)
    return "\n".join([*lines, *body]).rstrip() + "\n"


def _imports(facade: Facade) -> list[str]:
    return [f"from {each.source} import {each.definition} as {each.name}" for each in facade.exports]


def _typed(facade: Facade) -> list[str]:
    """Return imports that a type checker accepts as re-exports without a literal `__all__`."""
    renamed = [each for each in facade.exports if each.name != each.definition]
    imports = [
        f"from {each.source} import {each.definition} as {'_' if each in renamed else ''}{each.definition}"
        for each in facade.exports
    ]
    return [*imports, *(f"{each.name} = _{each.definition}" for each in renamed)]


def _eager(facade: Facade) -> list[str]:
    # Type checkers accept `A as A` as a re-export. Other forms need a literal `__all__`.
    needs_list = any(each.name != each.definition or each.name.startswith("_") for each in facade.exports)
    if needs_list or "unlisted" in facade.options:
        body = [*_imports(facade), "", f"__all__ = {sorted(facade.listed)!r}"]
    else:
        body = ["from openenv._lazy import export_imports", *_imports(facade), "", "export_imports(__name__)"]
    if "program" in facade.options:
        body = ["import sys as _sys", "", *body, "", 'if __name__ == "__main__":']
        body.append(f"    _sys.exit({facade.options['program']}())")
    return body


def _lazy(facade: Facade) -> list[str]:
    used = (
        ["by_module"] * any(each.name == each.definition for each in facade.exports)
        + ["lazy_exports"]
        + ["submodules"] * bool(facade.submodules)
    )
    listed = [each for each in facade.exports if each.name in facade.listed]
    unlisted = [f"**{_by_module(rest)}"] if (rest := [each for each in facade.exports if each not in listed]) else []
    if facade.submodules:
        unlisted.append(f"**submodules(__name__, {_text(facade.submodules)})")
    others = f", unlisted={{{', '.join(unlisted)}}}" if unlisted else ""
    relative = [f"from . import {name} as {name}" for name in facade.submodules]
    return [
        "from typing import TYPE_CHECKING",
        "",
        f"from openenv._lazy import {', '.join(used)}",
        "",
        "if TYPE_CHECKING:",
        *textwrap.indent("\n".join([*_typed(facade), *[""] * bool(relative), *relative]), "    ").splitlines(),
        "",
        "    __all__: list[str]",
        "else:  # the same names, loaded at their first use",
        f"    __getattr__, __dir__, __all__ = lazy_exports(__name__, {_by_module(listed)}{others})",
    ]


def _command(facade: Facade) -> list[str]:
    listed, unlisted = (
        ", ".join(
            f'"{each.name}": "{each.source}"' for each in facade.exports if (each.name in facade.listed) is is_listed
        )
        for is_listed in (True, False)
    )
    others = f", unlisted={{{unlisted}}}" if unlisted else ""
    app = f', app="{facade.options["command"]}"' if facade.options["command"] else ""
    return [
        "from openenv.cli.published import command_exports",
        "",
        f"__getattr__, __dir__, __all__ = command_exports(__name__, {{{listed}}}{app}{others})",
    ]


def _by_module(exports: list[Export]) -> str:
    groups: dict[str, list[str]] = {}
    for each in exports:
        if each.name == each.definition:
            groups.setdefault(each.source, []).append(each.name)
    renamed = [f'"{each.name}": "{each.source}:{each.definition}"' for each in exports if each.name != each.definition]
    if not groups:
        return f"{{{', '.join(renamed)}}}"
    rows = ", ".join(f'"{source}": {_text(names, source)}' for source, names in groups.items())
    plain = f"by_module({{{rows}}})"
    return f"{{**{plain}, {', '.join(renamed)}}}" if renamed else plain


def _text(names: list[str], source: str = "") -> str:
    text = " ".join(names)
    if len(source) + len(text) < 98:
        return f'"{text}"'
    wrapped = textwrap.fill(text, 100, initial_indent=" " * 16, subsequent_indent=" " * 16)
    return f'"""\n{wrapped}\n            """'


def readme(folder: Path, facades: Sequence[Facade]) -> str:
    """Return the README of a folder of facades: each module, and the modules that define its names."""
    package = ".".join(folder.relative_to(ROOT / "src").parts)
    rows = []
    for facade in facades:
        if facade.path.parent == folder and facade.exports:
            sources = ", ".join(f"`{source}`" for source in dict.fromkeys(each.source for each in facade.exports))
            rows.append(f"| `{facade.path.name}` | {sources} |")
    head = "Published module paths, re-exports only, written by `scripts/facades.py`."
    table = ["", "| file | names of |", "|---|---|", *rows] if rows else []
    return "\n".join([f"# {package}", "", head, *table]) + "\n"


def main() -> None:
    """Write all facades, and the READMEs of the folders below the top ones."""
    facades = read_table()
    for facade in facades:
        facade.path.write_text(source_text(facade), "utf-8")
    for folder in sorted({facade.path.parent for facade in facades}):
        # READMEs of the top folders (src/openenv/core, ...) and of openenv_core are written by hand.
        is_top = folder.parent.parent.parent == ROOT or folder.name == "commands"
        if not is_top and "openenv_core" not in folder.parts:
            (folder / "README.md").write_text(readme(folder, facades), "utf-8")
    paths = [str(facade.path) for facade in facades]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "-q", "--fix", "--select", "I", *paths], cwd=ROOT, check=True)
    subprocess.run([*ruff, "format", "-q", *paths], cwd=ROOT, check=True)
    print(f"{len(facades)} facades written")


if __name__ == "__main__":
    main()
