"""`mini-swe-agent`: the agent of that name from PyPI, in an environment of its own, visible read-only inside.

The interpreter that made the environment is what runs it inside, so the two always fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from openenv.rollout.agents.base import Agent, AgentRun, Installation, Launch
from openenv.rollout.agents.install import INSIDE, installed, run_installer
from openenv.sandboxes.base import Mount, Sandbox

VERSION = "2.4.6"
_START = "import sys; from minisweagent.run.mini import app; sys.argv[0] = 'mini'; sys.exit(app())"


class MiniSweAgent(Agent):
    """Drive mini-swe-agent; `config` (a list of `-c` values) is an option of a run.

    Args:
        version: The version to use.
    """

    name = "mini-swe-agent"
    dialect = "openai_chat"

    def __init__(self, *, version: str = VERSION) -> None:
        self.version = version

    def install(self, cache: Path, report: Callable[[str], None]) -> Installation:
        """Find the environment in the cache, or make it with pip."""
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
        mounts = [Mount(packages, f"{INSIDE}/{self.name}")]
        interpreter = f"{sys.base_prefix}/bin/{python}"
        if not sys.base_prefix.startswith("/usr"):
            mounts.append(Mount(Path(sys.base_prefix), "/opt/openenv/python"))
            interpreter = f"/opt/openenv/python/bin/{python}"
        return Installation(mounts=tuple(mounts), executable=interpreter, version=self.version)

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Start one run over the instruction, without any prompt to a user."""
        sandbox.write_text(f"{run.home}/task/instruction.md", run.task.instruction)
        argv = [
            *(run.installation.executable, "-c", _START),
            *("-m", f"openai/{run.model}", "-y", "--exit-immediately"),
            *("-o", f"{run.home}/logs/agent/trajectory.json"),
            # A value, not a flag: an instruction may begin with a dash.
            f"--task={run.task.instruction}",
        ]
        config = run.options.get("config")
        for value in config if isinstance(config, (list, tuple)) else ():
            argv += ["-c", str(value)]
        envs = {
            "PYTHONPATH": f"{INSIDE}/{self.name}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENAI_API_BASE": run.base_url,
            "OPENAI_API_KEY": run.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return Launch(argv=tuple(argv), envs=envs, cwd=run.workdir)
