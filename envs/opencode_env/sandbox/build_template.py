"""Bakes an E2B template with everything that a rollout needs, so that sandboxes start at once.

    python -m opencode_env.sandbox.build_template --name opencode-rl

Needs the package `e2b` and `E2B_API_KEY`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from opencode_env.config import OpenCodeConfig
from opencode_env.opencode_runtime import SandboxPaths, build_install_command
from opencode_env.sandbox import interception

NAME = "opencode-rl"
CPUS = 2
MEMORY_MB = 2048
PACKAGES = ["fastapi", "uvicorn", "httpx", "pytest"]


def describe(config: OpenCodeConfig | None = None) -> Any:
    """Return the template: Python 3.12, OpenCode, the folders and the proxy.

    Raises:
        ImportError: The package `e2b` is not installed.
    """
    try:
        from e2b import Template
    except ImportError as exc:
        raise ImportError("Building a template needs the package e2b: pip install e2b") from exc
    config = config or OpenCodeConfig(base_url="http://127.0.0.1")
    paths = SandboxPaths(config.sandbox_home)
    source = Path(interception.__file__)
    folders: list[str | Path] = [paths.workdir]
    folders += [str(Path(path).parent) for path in (paths.agent_log, paths.reward, paths.instruction)]
    return (
        Template(file_context_path=source.parent)
        .from_python_image("3.12")
        .apt_install(["curl", "git", "ca-certificates", "unzip"])
        .pip_install(PACKAGES)
        .make_dir(folders, user="user")
        .copy(source.name, paths.proxy_source, user="user")
        .set_user("user")
        .run_cmd(build_install_command(config))
        .set_workdir(paths.workdir)
    )


def main() -> None:
    """Build the template and print its name."""
    parser = argparse.ArgumentParser(description="Bake an E2B template for OpenCode rollouts.")
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--skip-cache", action="store_true", help="build every layer again")
    options = parser.parse_args()
    template = describe()
    from e2b import Template, default_build_logger

    built = Template.build(
        template,
        options.name,
        cpu_count=CPUS,
        memory_mb=MEMORY_MB,
        skip_cache=options.skip_cache,
        on_build_logs=default_build_logger(),
    )
    print(f"{options.name}: template {built.template_id}")


if __name__ == "__main__":
    main()
