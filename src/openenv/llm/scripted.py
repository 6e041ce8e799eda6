"""The former path of `openenv.testing.scripted`; `python -m openenv.llm.scripted` still works."""

from __future__ import annotations

from openenv.testing.scripted import *  # noqa: F403 - every name, on the former path

if __name__ == "__main__":
    import sys

    from openenv.testing.scripted.__main__ import main

    sys.exit(main())
