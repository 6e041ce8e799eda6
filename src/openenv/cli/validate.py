"""`openenv validate`: the options, what is printed, exit codes, where a report goes; `validation/` makes the checks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from openenv import settings
from openenv.errors import message_of

from .command import failure, tidy_on_sigterm

if TYPE_CHECKING:
    from rich.console import Console

    from openenv.packaging.validate.checks_server import Criterion, RunningReport
    from openenv.packaging.validate.container import DockerValidationProvider
    from openenv.packaging.validate.report import CheckOutcome, ValidationReport

_LEVELS = ("static", "runtime", "semantic")
_POLICIES = ("v1", "v2")
_PROVIDERS = ("process", "docker")


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
    provider: str = typer.Option(
        "process",
        metavar="NAME",
        help="What runs the package: a process of this machine, or docker, which builds its image.",
    ),
    artifacts: Path | None = typer.Option(
        None, metavar="FOLDER", help="Keep the report, the plan and every message of an episode here."
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show the evidence of all checks."),
) -> None:
    """Check an environment: its files, its rewards, schemas, seeds and sessions.

      openenv validate                         the package in this folder
      openenv validate envs/maze_env           another one
      openenv validate guess.py                an environment in a file
      openenv validate http://localhost:8000   a running server
      openenv validate --level static          without running anything
      openenv validate --provider docker       in its own image

    For the checks a process serves the package, with your rights: validate only code that you would run, or in Docker.

    Actions are generated from the schema of the action class. To use others, write validation/runtime.json:

      {"plan_schema_version": "1",
       "reset": {"seed": 1, "episode_id": "a"},
       "actions": [{"message": "hello"}]}

    Of a running server, six endpoints decide the verdict; checks of its sessions only warn.

    Exit codes: 0 passed, or only warnings; 1 failed; 2 no package; 3 the checks themselves could not be run.
    """
    from rich.console import Console  # all of this loads only for this command

    from openenv.packaging.validate.checks_server import check_running
    from openenv.packaging.validate.manifest import SignatureError, UnsupportedPackageError
    from openenv.packaging.validate.policy import PolicyError, load_policy
    from openenv.packaging.validate.rules import Level
    from openenv.packaging.validate.runner import run_validation

    if target is not None and target.startswith(("http://", "https://")):
        if url is not None:
            raise failure("give one URL, not two", 1)
        target, url = None, target
    if url is not None and (target is not None or local):
        raise failure("give a package or a URL, not both", 1)
    chosen = policy or ("v1" if level == "static" else "v2")
    for name, kinds, what in (
        (level, _LEVELS, "level"),
        (chosen, _POLICIES, "version of the rules"),
        (provider, _PROVIDERS, "provider"),
    ):
        if name not in kinds:
            raise failure(f"{name!r} is no {what}: {', '.join(kinds)}", 3)
    if url is not None and (provider != "process" or artifacts is not None):
        raise failure("--provider and --artifacts are for packages: a server at a URL runs already", 1)
    token = token or settings.client_token()
    try:
        display = _Display(Console(highlight=False, quiet=as_json), verbose=verbose)
        if url is not None:
            running = check_running(
                url, timeout_s=timeout, token=token, with_episodes=level != "static", listen=display.criterion
            )
            display.running_summary(running)
            passed = running.passed
            _deliver(running.json(), as_json, output)
        else:
            started = time.monotonic()
            with tidy_on_sigterm():  # else the server of the package would outlive us
                report = run_validation(
                    Path(target or ".").resolve(),
                    max_level=Level[level.upper()],
                    skip_build=skip_build,
                    policy=load_policy(chosen),
                    provider=_docker_provider() if provider == "docker" and not skip_build else None,
                    artifacts_dir=artifacts,
                    token=token,
                    listen=display.result,
                )
            display.summary(report, time.monotonic() - started)
            passed = report.passed
            _deliver(report.model_dump(mode="json"), as_json, output)
    except (SignatureError, UnsupportedPackageError) as error:
        raise failure(error, 2) from error
    except PolicyError as error:
        raise failure(error, 3) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise failure(f"the checks could not be run: {type(error).__name__}: {message_of(error)}", 3) from error
    if not passed:
        raise typer.Exit(1)


def _docker_provider() -> DockerValidationProvider:
    from openenv.packaging.validate.container import DockerValidationProvider

    return DockerValidationProvider()


def _deliver(report: dict[str, Any], as_json: bool, output: Path | None) -> None:
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8", newline="\n")
    if as_json:
        sys.stdout.write(text + "\n")


_MARKS = {
    "pass": "[green]✓[/]",
    "fail": "[red]✗[/]",
    "warn": "[yellow]![/]",
    "skip": "[yellow]?[/]",
    "n/a": "[dim]–[/]",
    "error": "[red]✗[/]",
}
_STYLES = {"pass": "dim", "fail": "red", "warn": "yellow", "skip": "yellow", "n/a": "dim", "error": "red"}
_VERDICTS = {"pass": "[green]pass[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


class _Display:
    """Prints results as they come, and then the verdict."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        from openenv.packaging.validate.rules import RULE

        self._console = console
        self._verbose = verbose
        self._rules = RULE
        self._width = max(len(check_id) for check_id in RULE)

    def result(self, result: CheckOutcome) -> None:
        """Print the result of a check of a package."""
        rule = self._rules.get(result.check_id)  # None: a grader of another package
        kind: str = result.status.value
        if kind == "fail" and rule is not None and rule.severity.value == "warn":
            kind = "warn"
        if not result.applies:
            kind = "n/a"
        says = "by a grader of another package" if rule is None else rule.says
        self._line(kind, result.check_id, says, result.evidence, result.remediation)

    def criterion(self, one: Criterion) -> None:
        """Print the result of a check of a running server."""
        kind = "pass" if one.passed else "fail" if one.required else "warn"
        self._line(kind, one.id, one.description, (one.details,) if one.details else (), one.fix)

    def summary(self, report: ValidationReport, seconds: float) -> None:
        """Print the verdict on a package."""
        words = {"pass": "passed", "fail": "failed", "error": "could not be made", "skip": "skipped"}
        counts = {name: sum(one.status.value == name and one.applies for one in report.results) for name in words}
        tally = ", ".join(f"{counts[name]} {words[name]}" for name in counts if counts[name] or name == "fail")
        if aside := sum(not one.applies for one in report.results):
            tally += f", {aside} not applicable"
        note = ""
        if report.verdict.value == "warn" and not counts["fail"] and not counts["error"]:
            note = "; nothing failed, but skipped checks prove nothing"
        verdict = _VERDICTS[report.verdict.value]
        self._console.print(f"\n{tally} in {seconds:.1f} s. Verdict: {verdict}{note}", soft_wrap=True)

    def running_summary(self, report: RunningReport) -> None:
        """Print the verdict on a running server."""
        failed = [one for one in report.criteria if not one.passed]
        tally = f"{len(report.criteria) - len(failed)} passed, {len(failed)} failed"
        verdict = "fail" if not report.passed else "warn" if failed else "pass"
        where = f"{report.mode} mode, {report.profile}"
        self._console.print(f"\n{tally} ({where}). Verdict: {_VERDICTS[verdict]}", soft_wrap=True)

    def _line(self, kind: str, name: str, says: str, evidence: Sequence[str], fix: str | None) -> None:
        from rich.markup import escape

        self._console.print(f"{_MARKS[kind]} {name:<{self._width}}  {says}", soft_wrap=True)
        if kind in ("pass", "n/a") and not self._verbose:
            return
        for text in evidence:
            for line in text.splitlines():
                self._console.print(f"    [{_STYLES[kind]}]{escape(line)}[/]", soft_wrap=True)
        for index, line in enumerate((fix or "").splitlines()):
            self._console.print(f"    {'fix: ' if index == 0 else '     '}{escape(line)}", soft_wrap=True)
