"""Write the JSON schema of `openenv.yaml`, for editors, into the package and the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from openenv.env.manifest import SCHEMA_FILE, manifest_schema

ROOT = Path(__file__).parents[1]
PLACES = (ROOT / "src" / "openenv" / "env" / SCHEMA_FILE, ROOT / "docs" / "reference" / SCHEMA_FILE)


def main() -> None:
    """Write both files."""
    text = json.dumps(manifest_schema(), indent=2, ensure_ascii=False) + "\n"
    for place in PLACES:
        place.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
