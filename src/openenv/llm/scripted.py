"""The former path of `openenv.testing.scripted`; `python -m openenv.llm.scripted` still works."""

from __future__ import annotations

from openenv.testing.scripted import CutFailure as CutFailure
from openenv.testing.scripted import Failure as Failure
from openenv.testing.scripted import HangFailure as HangFailure
from openenv.testing.scripted import ModelAddress as ModelAddress
from openenv.testing.scripted import Played as Played
from openenv.testing.scripted import Script as Script
from openenv.testing.scripted import ScriptedCall as ScriptedCall
from openenv.testing.scripted import ScriptedModel as ScriptedModel
from openenv.testing.scripted import StatusFailure as StatusFailure
from openenv.testing.scripted import Turn as Turn
from openenv.testing.scripted import load_scripts as load_scripts

if __name__ == "__main__":
    import sys

    from openenv.testing.scripted.__main__ import main

    sys.exit(main())
