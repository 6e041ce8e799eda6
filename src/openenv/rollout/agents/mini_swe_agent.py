"""`mini-swe-agent`: the agent from PyPI, in a virtual environment that sandboxes mount read-only.

The interpreter that created the environment also runs it inside the sandbox, so the two always match.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openenv.rollout.agents.base import Agent, AgentRun, Installation, Launch
from openenv.rollout.agents.install import INSIDE, installed, run_installer
from openenv.sandboxes.base import Mount, Sandbox

VERSION = "2.4.6"
# Isolated (-I): the agent must not import modules from the work folder. Its commands must not find its packages through
# a PYTHONPATH, because the verifier has none.
_START = (
    "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); "
    "from minisweagent.run.mini import app; sys.argv[0] = 'mini'; sys.exit(app())"
)
_PACKAGES = f"{INSIDE}/mini-swe-agent"
_MODEL_FOLDER = f"{INSIDE}/mini-swe-agent-model"
_MODEL_MODULE = "endpoint_model"
_MODEL_CLASS = f"{_MODEL_MODULE}.EndpointModel"
_DEFAULT_CONFIG = f"{_PACKAGES}/minisweagent/config/mini.yaml"


class MiniSweAgent(Agent):
    """Drive mini-swe-agent.

    Options of a run: `config` (a list of `-c` values), and `model_class`, such as `litellm`. The default model class is
    `mini_swe_agent_model`: mini-swe-agent's default loads litellm, which takes ten times as long as everything else.

    Args:
        version: The version to use.
    """

    name = "mini-swe-agent"
    dialect = "openai_chat"

    def __init__(self, *, version: str = VERSION) -> None:
        self.version = version

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Find the environment in the cache, or create it with pip."""
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        place = cache / "agents" / f"{self.name}-{self.version}-{python}"

        def build(draft: Path) -> None:
            report(f"installing {self.name} {self.version} with pip, once per machine")
            what = f"The agent {self.name}"
            run_installer([sys.executable, "-m", "venv", str(draft / "venv")], cwd=draft, what=what)
            pip = [str(draft / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            packages = [f"mini-swe-agent=={self.version}", "mcp"]
            run_installer([*pip, "--disable-pip-version-check", *packages], cwd=draft, what=what)

        packages = installed(place, build) / "venv" / "lib" / python / "site-packages"
        model = Path(__file__).with_name("mini_swe_agent_model.py")
        mounts = [Mount(packages, _PACKAGES), Mount(model, f"{_MODEL_FOLDER}/{_MODEL_MODULE}.py")]
        interpreter = f"{sys.base_prefix}/bin/{python}"
        if not sys.base_prefix.startswith("/usr"):
            mounts.append(Mount(Path(sys.base_prefix), "/opt/openenv/python"))
            interpreter = f"/opt/openenv/python/bin/{python}"
        return Installation(mounts=tuple(mounts), executable=interpreter, version=self.version)

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start one run with the instruction, without questions to a user."""
        sandbox.write_text(f"{run.home}/task/instruction.md", run.task.instruction)
        argv = [
            *(run.installation.executable, "-I", "-B", "-c", _START, f"{_PACKAGES}:{_MODEL_FOLDER}"),
            *("-m", f"openai/{run.model}", "-y", "--exit-immediately"),
            *("-o", f"{run.home}/logs/agent/trajectory.json"),
            # A value, not a flag: an instruction may begin with a dash.
            f"--task={run.task.instruction}",
        ]
        config = run.options.get("config")
        chosen = [str(value) for value in config] if isinstance(config, (list, tuple)) else []
        model_class = run.options.get("model_class", _MODEL_CLASS)
        # Later values win. Name the default configuration by its full path: the task could have a file `mini.yaml`.
        for value in (f"model.model_class={model_class}", *(chosen or [_DEFAULT_CONFIG])):
            argv += ["-c", value]
        skipped: dict[str, str] = {}
        if run.skipped:
            skipped["OPENENV_OBSERVATIONS"] = f"{run.home}/task/observations.json"
            sandbox.write_text(skipped["OPENENV_OBSERVATIONS"], json.dumps(_observations(run.skipped)))
        envs = {
            **skipped,
            "OPENAI_API_BASE": run.base_url,
            "OPENAI_API_KEY": run.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return Launch(argv=tuple(argv), envs=envs, cwd=run.workdir)

    def can_skip(self, options: Mapping[str, object]) -> bool:
        """Return whether the model class is ours, which skips the commands of recorded answers."""
        return "model_class" not in options


def _observations(requests: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the messages with the results of each answer: those between it and the next request."""
    conversations = [list(request.get("messages") or ()) for request in requests]
    return [after[len(before) + 1 :] for before, after in itertools.pairwise(conversations)]
