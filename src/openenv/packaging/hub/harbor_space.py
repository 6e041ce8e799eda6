"""A Hugging Face Space that serves Harbor's tasks: its files, variables and secrets, and how it is pushed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from openenv import settings
from openenv.providers.own_wheel import add_wheels

from .spaces import Spaces, SpaceSettings, Upload

PORT = 7860
"""The port on which a Space expects its application."""
# Spaces run as user 1000 and expect port 7860.
_DOCKERFILE = """FROM python:3.12-slim
RUN useradd --create-home --uid 1000 user
USER user
ENV PATH=/home/user/.local/bin:$PATH
RUN pip install --no-cache-dir --user "openenv[harbor,hub]=={version}"
EXPOSE {port}
CMD {command}
"""
_README = """---
title: {title}
emoji: ⚓
colorFrom: blue
colorTo: gray
sdk: docker
app_port: {port}
tags:
  - openenv
  - harbor
---

Harbor's tasks, served by openenv: the Task API lists them, the tool `run_rollout` runs an agent on one.
"""


@dataclass(frozen=True)
class SpacePlan:
    """The plan of a Space: its files, variables and secrets."""

    repo_id: str
    datasets: tuple[str, ...] = ()
    llm_url: str = ""
    model: str = ""
    auth_header: str = "Authorization"
    private: bool = False
    hardware: str | None = None
    reward_key: str = ""
    visibility: str = "own"
    switches: Mapping[str, bool] = field(default_factory=dict)
    """Options of `openenv harbor serve` that are on or off."""
    api_key: str | None = field(default=None, repr=False)
    env_file: Path | None = None

    def files(self) -> dict[str, str]:
        """Return the Space's files.

        Raises:
            ValueError: a dataset is a folder of this machine, which no Space has.
        """
        # A Space can only download. A folder that exists here would be missing there.
        here = [spec for spec in self.datasets if Path(spec).expanduser().exists()]
        if here:
            raise ValueError(f"{', '.join(here)}: a Space has no folders of this machine; push the dataset to the Hub")
        command = ["openenv", "harbor", "serve", "--host", "0.0.0.0", "--port", str(PORT)]
        # Visible in the Dockerfile, so it contains no secrets.
        command += ["--run-visibility", self.visibility]
        command += [f"--{'' if is_on else 'no-'}{name}" for name, is_on in sorted(self.switches.items())]
        command += ["--reward-key", self.reward_key] if self.reward_key else []
        command += ["--llm-url", self.llm_url, "--auth-header", self.auth_header] if self.llm_url else []
        words = ", ".join(f'"{word}"' for word in command)
        # my-harbor_tasks -> "my harbor tasks"
        title = re.sub(r"[-_]+", " ", self.repo_id.partition("/")[2])
        return {
            "Dockerfile": _DOCKERFILE.format(version=metadata.version("openenv"), port=PORT, command=f"[{words}]"),
            "README.md": _README.format(port=PORT, title=title),
        }

    def variables(self) -> dict[str, str]:
        """Return the Space's public variables."""
        values = {"OPENENV_DATASETS": ",".join(self.datasets), "OPENENV_MODEL": self.model}
        return {name: value for name, value in values.items() if value}

    def secrets(self) -> dict[str, str]:
        """Return the Space's secrets, which the Hub shows to no visitor.

        Raises:
            OSError: the file of variables cannot be read.
        """
        # Variables of a Space are public, secrets are not; a file may hold either, so all become secrets.
        values = {} if self.env_file is None else settings.read_file(self.env_file)
        if self.api_key:
            values["OPENENV_LLM_API_KEY"] = self.api_key
        return values

    def describe(self) -> str:
        """Return the plan as text, with the names of secrets and not their values."""
        lines = [f"Space {self.repo_id}{' (private)' if self.private else ''}, {self.hardware or 'default hardware'}"]
        lines += [f"variable {name}={value}" for name, value in self.variables().items()]
        # Names only: the plan is printed on terminals and in CI logs.
        lines += [f"secret {name}" for name in self.secrets()]
        for name, text in self.files().items():
            lines += [f"--- {name}", text.rstrip()]
        return "\n".join(lines)


def push_space(plan: SpacePlan, *, recreate: bool = False, report: Callable[[str], None] = lambda line: None) -> str:
    """Make or change a Space, and return its address.

    Args:
        plan: The Space to create or change.
        recreate: Delete it first, with its variables and secrets.
        report: Receives each action as a line, without values of secrets.

    Raises:
        HubError: `huggingface_hub` is not installed, or the Hub refuses something.
        ValueError: a dataset is a folder of this machine.
    """
    files = plan.files()
    space = SpaceSettings(plan.private, plan.hardware, plan.variables(), plan.secrets())
    spaces = Spaces()
    if recreate:
        report(f"deleting {plan.repo_id}")
        spaces.delete(plan.repo_id)
    # The Hub's library uploads folders.
    with tempfile.TemporaryDirectory(prefix="openenv-space-") as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, "utf-8")
        add_wheels(Path(folder), Path(folder, "Dockerfile"))
        report(f"pushing {', '.join(files)}; {len(space.variables)} variables, {len(space.secrets)} secrets")
        return spaces.deploy(plan.repo_id, Upload(Path(folder), message="Serve Harbor's tasks"), space)
