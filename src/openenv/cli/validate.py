"""`openenv validate`: the options, exit codes and where a report goes; `validation/` makes the checks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import typer

from .. import settings
from ..errors import message_of
from .command import failure, tidy_on_sigterm

_LEVELS = ("static", "runtime", "semantic")
_POLICIES = ("v1", "v2")


def validate(
    target: str | None = typer.Argument(
        None,
        metavar="TARGET",
        help="A package's folder, by default the one you are in, a Python file, or a server's URL.",
    ),
    url: str | None = typer.Option(None, metavar="URL", help="The running server to check."),
    level: str = typer.Option(
        "semantic", metavar="LEVEL", help="The last level of checks: static (files), runtime or semantic."
    ),
    skip_build: bool = typer.Option(False, "--skip-build", help="Do not run the package: skip checks that need it."),
    local: bool = typer.Option(
        False, "--local", help="Check a package, which is the default; not together with a URL."
    ),
    policy: str | None = typer.Option(
        None,
        metavar="VERSION",
        help="The version of the rules: v1 (files only) or v2; by default the one that the level needs.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON, and nothing else."),
    output: Path | None = typer.Option(None, metavar="FILE", help="Write the report, as JSON, to a file too."),
    timeout: float = typer.Option(
        5.0, metavar="SECONDS", min=0.1, help="With a URL: how long a reply over HTTP may take."
    ),
    token: str | None = typer.Option(None, metavar="TOKEN", help="The server's token; by default OPENENV_TOKEN."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show the evidence of all checks."),
) -> None:
    """Check an environment: its files, its rewards, schemas, seeds and sessions.

      openenv validate                         the package in this folder
      openenv validate envs/maze_env           another one
      openenv validate guess.py                an environment in a file
      openenv validate http://localhost:8000   a running server
      openenv validate --level static          without running anything

    For the checks a process serves the package, with your rights: validate only code that you would run.

    Actions are generated from the schema of the action class. To use others, write validation/runtime.json:

      {"plan_schema_version": "1",
       "reset": {"seed": 1, "episode_id": "a"},
       "actions": [{"message": "hello"}]}

    Of a running server, six endpoints decide the verdict; checks of its sessions only warn.

    Exit codes: 0 passed, or only warnings; 1 failed; 2 no package; 3 the checks themselves could not be run.
    """
    from rich.console import Console  # all of this loads only for this command

    from .validation.package import NoPackage, check_package
    from .validation.report import Display, Report
    from .validation.running_server import RunningReport, check_running

    if target is not None and target.startswith(("http://", "https://")):
        if url is not None:
            raise failure("give one URL, not two", 1)
        target, url = None, target
    if url is not None and (target is not None or local):
        raise failure("give a package or a URL, not both", 1)
    if level not in _LEVELS:
        raise failure(f"{level!r} is no level: {', '.join(_LEVELS)}", 3)
    chosen = policy or ("v1" if level == "static" else "v2")
    if chosen not in _POLICIES:
        raise failure(f"{chosen!r} is no version of the rules: {', '.join(_POLICIES)}", 3)
    if url is None and chosen == "v1" and level != "static":
        raise failure("the rules v1 are for --level static; runtime and semantic need v2", 3)
    token = token or settings.client_token()
    try:
        display = Display(Console(highlight=False, quiet=as_json), verbose=verbose)
        report: Report | RunningReport
        if url is not None:
            report = check_running(
                url, timeout_s=timeout, token=token, with_episodes=level != "static", listen=display.criterion
            )
            display.running_summary(report)
        else:
            started = time.monotonic()
            folder = Path(target or ".").resolve()
            with tidy_on_sigterm():  # else the server of the package would outlive us
                report = check_package(
                    folder, level=level, policy=chosen, may_run=not skip_build, token=token, listen=display.result
                )
                display.summary(report, time.monotonic() - started)
        _deliver(report.json(), as_json, output)
    except NoPackage as error:
        raise failure(error, 2) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise failure(f"the checks could not be run: {type(error).__name__}: {message_of(error)}", 3) from error
    if not report.passed:
        raise typer.Exit(1)


def _deliver(report: dict[str, Any], as_json: bool, output: Path | None) -> None:
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8", newline="\n")
    if as_json:
        sys.stdout.write(text + "\n")
