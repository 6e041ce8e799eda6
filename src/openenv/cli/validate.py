"""`openenv validate`: options, printed results, exit codes and report files; `packaging.validate` runs the checks."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openenv import settings
from openenv.errors import message_of

from .command import failure, printable, tidy_on_sigterm
from .options import flags_class, options_of

if TYPE_CHECKING:
    from rich.console import Console

    from openenv.packaging.validate.checks_server import Criterion, RunningReport
    from openenv.packaging.validate.container import DockerValidationProvider
    from openenv.packaging.validate.report import CheckOutcome, ValidationReport

# Each level contains the ones before it:
#
#   static     reads files                       runs nothing
#   runtime    serves and plays the package      runs the package's code
#   semantic   judges the meaning of its parts   needs the levels before
_LEVELS = ("static", "runtime", "semantic")
_POLICIES = ("v1", "v2")
_PROVIDERS = ("process", "docker")


@flags_class
class ValidateFlags:
    """Options of `openenv validate`."""

    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="A package's folder (by default the current one), a Python file, or a server's URL."
        ),
    ] = None
    url: Annotated[str | None, typer.Option(metavar="URL", help="The running server to check.")] = None
    level: Annotated[
        str, typer.Option(metavar="LEVEL", help="The last level of checks: static (files), runtime or semantic.")
    ] = "semantic"
    skip_build: Annotated[
        bool, typer.Option("--skip-build", help="Do not run the package; skip the checks that need it.")
    ] = False
    local: Annotated[
        bool, typer.Option("--local", help="Check a package, which is the default; not together with a URL.")
    ] = False
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="The version of the rules: v1 (files only) or v2; by default the level's."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report to this file, as JSON.")
    ] = None
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Time limit of an HTTP reply, with a URL.")
    ] = 5.0
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The server's token; by default OPENENV_TOKEN.")
    ] = None
    provider: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Where to run the package: process (on this machine), or docker (in its own image)."
        ),
    ] = "process"
    artifacts: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Store the report, the plan and every message of an episode here."),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the evidence of all checks.")] = False

    @property
    def server(self) -> str | None:
        """The URL of the server to check, which may also be the target; None for a package."""
        if self.target is not None and self.target.startswith(("http://", "https://")):
            return self.target
        return self.url

    @property
    def rules(self) -> str:
        """The version of the rules."""
        return self.policy or ("v1" if self.level == "static" else "v2")

    def check(self) -> None:
        """End the command if options contradict each other (1) or a choice does not exist (3)."""
        # Scripts distinguish contradicting options (1) from a choice that does not exist (3).
        if self.server is not None:
            if self.server == self.target and self.url is not None:
                raise failure("give one URL, not two", 1)
            if self.local or self.target not in (None, self.server):
                raise failure("give a package or a URL, not both", 1)
        for name, choices, noun in (
            (self.level, _LEVELS, "level"),
            (self.rules, _POLICIES, "version of the rules"),
            (self.provider, _PROVIDERS, "provider"),
        ):
            if name not in choices:
                raise failure(f"unknown {noun} {name!r}; choose from {', '.join(choices)}", 3)
        if self.server is not None and (self.provider != "process" or self.artifacts is not None):
            raise failure("--provider and --artifacts are for packages; a server at a URL already runs", 1)


@options_of(ValidateFlags)
def validate(flags: ValidateFlags) -> None:
    """Check an environment: its files, its rewards, schemas, seeds and sessions.

      openenv validate                         the package in this folder
      openenv validate envs/maze_env           another one
      openenv validate guess.py                an environment in a file
      openenv validate http://localhost:8000   a running server
      openenv validate --level static          without running anything
      openenv validate --provider docker       in its own image

    A process with your rights serves the package, so validate only code that you trust, or use --provider docker.

    Actions are generated from the schema of the action class. To use others, write validation/runtime.json:

      {"plan_schema_version": "1",
       "reset": {"seed": 1, "episode_id": "a"},
       "actions": [{"message": "hello"}]}

    For a running server, six endpoints decide the verdict; checks of its sessions only warn.

    Exit codes: 0 passed, perhaps with warnings; 1 failed; 2 no package; 3 the checks themselves could not run.
    """
    from openenv.packaging.validate.manifest import SignatureError, UnsupportedPackageError
    from openenv.packaging.validate.policy import PolicyError  # all of this loads only for this command

    # Two ways:
    #
    #   a package   files ──> server in a process or container ──> episodes ──> report, verdict
    #   a URL       requests to a running server ──────────────────────────────> report, verdict
    flags.check()
    try:
        passed = _check_package(flags) if flags.server is None else _check_server(flags, flags.server)
    # The target is not a package, or a kind of package that cannot be validated.
    except (SignatureError, UnsupportedPackageError) as error:
        raise failure(error, 2) from error
    # The rules could not be loaded, which says nothing about the package.
    except PolicyError as error:
        raise failure(error, 3) from error
    # A fault on our side of the check, such as a report file without permission; never reported as a failed package.
    except (OSError, ValueError, RuntimeError) as error:
        raise failure(f"the checks could not run: {type(error).__name__}: {message_of(error)}", 3) from error
    if not passed:
        raise typer.Exit(1)


def _check_server(flags: ValidateFlags, url: str) -> bool:
    """Check a running server; print and write the report, return the verdict."""
    from openenv.packaging.validate.checks_server import check_running

    display = _Display.of(flags)
    # Results are printed while the checks run: an endpoint that hangs is visible as the last line.
    report = check_running(
        url,
        timeout_s=flags.timeout,
        token=flags.token or settings.client_token(),
        with_episodes=flags.level != "static",
        listen=display.criterion,
    )
    display.running_summary(report)
    _deliver(report.json(), flags)
    return report.passed


def _check_package(flags: ValidateFlags) -> bool:
    """Check a package; print and write the report, return the verdict."""
    from openenv.packaging.validate.policy import load_policy
    from openenv.packaging.validate.rules import Level
    from openenv.packaging.validate.runner import run_validation

    display = _Display.of(flags)
    started = time.monotonic()
    with tidy_on_sigterm():  # otherwise the package's server would outlive us
        report = run_validation(
            Path(flags.target or ".").resolve(),
            max_level=Level[flags.level.upper()],
            skip_build=flags.skip_build,
            policy=load_policy(flags.rules),
            provider=_docker_provider() if flags.provider == "docker" and not flags.skip_build else None,
            artifacts_dir=flags.artifacts,
            token=flags.token or settings.client_token(),
            listen=display.result,
        )
    display.summary(report, time.monotonic() - started)
    _deliver(report.model_dump(mode="json"), flags)
    return report.passed


def _docker_provider() -> DockerValidationProvider:
    from openenv.packaging.validate.container import DockerValidationProvider

    return DockerValidationProvider()


def _deliver(report: dict[str, Any], flags: ValidateFlags) -> None:
    """Write the report to the file of `--output` and, with `--json`, to standard output."""
    text = json.dumps(report, indent=2, ensure_ascii=False)
    if flags.output is not None:
        # A script may name a folder of reports that does not exist yet.
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        flags.output.write_text(text + "\n", encoding="utf-8", newline="\n")
    if flags.as_json:
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
    """Prints each result at once, and the verdict at the end."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        from openenv.packaging.validate.rules import RULE

        self._console = console
        self._verbose = verbose
        self._rules = RULE
        # One width for all lines, from the longest ID:
        #
        #   ✓ static.manifest                openenv.yaml says what the environment promises
        #   ✗ runtime.startup                it can be served
        #       ...the evidence...
        #       fix: ...the advice...
        self._width = max(len(check_id) for check_id in RULE)
        # Checks that were skipped because another one failed, by that other one: they say nothing of their own.
        self._folded: Counter[str] = Counter()

    @classmethod
    def of(cls, flags: ValidateFlags) -> _Display:
        """Return the display that the options ask for."""
        from rich.console import Console

        return cls(Console(highlight=False, quiet=flags.as_json), verbose=flags.verbose)

    def result(self, result: CheckOutcome) -> None:
        """Print the result of a check of a package."""
        rule = self._rules.get(result.check_id)  # None for a grader of another package
        kind: str = result.status.value
        # A rule of severity `warn` lowers the verdict to `warn` and does not fail the package.
        if kind == "fail" and rule is not None and rule.severity.value == "warn":
            kind = "warn"
        if not result.applies:
            kind = "n/a"
        if kind == "skip" and result.unmet is not None and not self._verbose:
            self._folded[result.unmet] += 1
            return
        says = "by a grader of another package" if rule is None else rule.says
        self._line(kind, result.check_id, says, result.evidence, result.remediation)

    def criterion(self, one: Criterion) -> None:
        """Print the result of a check of a running server."""
        # Required endpoints decide the verdict; other criteria only warn.
        kind = "pass"
        if not one.passed:
            kind = "fail" if one.required else "warn"
        self._line(kind, one.id, one.description, (one.details,) if one.details else (), one.fix)

    def summary(self, report: ValidationReport, seconds: float) -> None:
        """Print the verdict on a package."""
        for name, count in self._folded.items():
            says = f"{count} check{'s were' if count > 1 else ' was'} skipped because of it; --verbose lists them"
            self._line("skip", name, says, (), None)
        words = {"pass": "passed", "fail": "failed", "error": "could not run", "skip": "skipped"}
        counts = {name: sum(one.status.value == name and one.applies for one in report.results) for name in words}
        # Sample: `31 passed, 0 failed, 2 skipped, 3 not applicable in 8.4 s. Verdict: pass`.
        tally = ", ".join(f"{counts[name]} {words[name]}" for name in counts if counts[name] or name == "fail")
        if aside := sum(not one.applies for one in report.results):
            tally += f", {aside} not applicable"
        note = ""
        # Nothing failed, but --skip-build or a missing engine left checks out.
        if report.verdict.value == "warn" and not counts["fail"] and not counts["error"]:
            note = "; no check failed, but skipped checks prove nothing"
        verdict = _VERDICTS[report.verdict.value]
        self._console.print(f"\n{tally} in {seconds:.1f} s. Verdict: {verdict}{note}", soft_wrap=True)

    def running_summary(self, report: RunningReport) -> None:
        """Print the verdict on a running server."""
        failed = [one for one in report.criteria if not one.passed]
        tally = f"{len(report.criteria) - len(failed)} passed, {len(failed)} failed"
        verdict = "warn" if failed else "pass"
        if not report.passed:
            verdict = "fail"
        where = f"{report.mode} mode, {report.profile}"
        self._console.print(f"\n{tally} ({where}). Verdict: {_VERDICTS[verdict]}", soft_wrap=True)

    def _line(self, kind: str, name: str, says: str, evidence: Sequence[str], fix: str | None) -> None:
        from rich.markup import escape

        self._console.print(f"{_MARKS[kind]} {name:<{self._width}}  {escape(printable(says))}", soft_wrap=True)
        # Evidence of a passed check is noise, except with --verbose.
        if kind in ("pass", "n/a") and not self._verbose:
            return
        for text in evidence:
            for line in text.splitlines():
                self._console.print(f"    [{_STYLES[kind]}]{escape(printable(line))}[/]", soft_wrap=True)
        for index, line in enumerate((fix or "").splitlines()):
            self._console.print(f"    {'fix: ' if index == 0 else '     '}{escape(printable(line))}", soft_wrap=True)
