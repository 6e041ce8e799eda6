"""Add the modules of `openenv` that clients need, from the tree of `openenv` or from a source distribution.

In the wheel they go into a folder that openenv_client.pth puts at the end of sys.path. So `openenv`, if it is installed
too, comes first, no file belongs to two packages, and either of them can be uninstalled without breaking the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SharedModules(BuildHookInterface):  # type: ignore[type-arg, unused-ignore]
    """Adds the modules that pyproject.toml lists."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Tell the builder which files to include."""
        unpacked, tree = (Path(self.root, *above, "src", "openenv") for above in ((), ("..", "..")))
        source = unpacked if unpacked.is_dir() else tree
        target = "src/openenv" if self.target_name == "sdist" else "openenv_client/openenv"
        for name in self.config["modules"]:
            build_data["force_include"][str(source / name)] = f"{target}/{name}"
