"""`openenv doctor`: what works on this machine, what is missing, and how to get it.

Knows how findings are shown; what is looked at is in `diagnosis`.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from .diagnosis import Finding

_EXAMPLES = """
Say what works on this machine, what is missing and how to get it.

  openenv doctor                        everything there is to know
  openenv doctor --for rollouts         exit with 1 unless agents can run here
  openenv doctor --json                 for programs

Exits with 1 when something is missing that is needed; that is what serving needs, and with `--for rollouts` what
agents need as well: one kind of sandbox, and an agent. Nothing is installed or changed; a sandbox is started once.
"""

_COLOURS = {"ok": "green", "missing": "red", "note": "yellow"}
_PURPOSES = {"serve": "Servers and clients", "rollouts": "Rollouts"}
_NAME = 16
_STATE = 9


def doctor(
    purpose: str = typer.Option("serve", "--for", metavar="PURPOSE", help="What has to work: serve or rollouts."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    from .diagnosis import AREAS, examine, lacking  # other commands do not need it

    if purpose not in _PURPOSES:
        raise typer.BadParameter(f"{purpose!r} is not one of serve, rollouts", param_hint="--for")
    findings: list[Finding] = []
    area = None
    for finding in examine():
        findings.append(finding)
        if as_json:
            continue
        if finding.area != area:
            area = finding.area
            typer.secho(AREAS[area], bold=True)
        typer.echo(_shown(finding, is_needed=finding.area in ("serve", purpose)))
    missing = lacking(findings, "rollouts" if purpose == "rollouts" else "serve")
    if as_json:
        shown = {"ok": not missing, "for": purpose, "missing": missing, "findings": [asdict(one) for one in findings]}
        typer.echo(json.dumps(shown, indent=2))
    elif missing:
        typer.echo(f"\n{_PURPOSES[purpose]} lack: {', '.join(missing)}.")
    else:
        typer.echo(f"\n{_PURPOSES[purpose]} have all they need.")
    if missing:
        raise typer.Exit(1)


doctor.__doc__ = _EXAMPLES


def _shown(finding: Finding, *, is_needed: bool) -> str:
    """Write a finding; its text is wrapped below itself, and a command stands alone, to be copied."""
    begin = " " * (_STATE + _NAME + 2)
    width = max(20, min(shutil.get_terminal_size().columns, 120) - len(begin))
    first, *rest = textwrap.wrap(finding.text, width, break_long_words=False, break_on_hyphens=False) or [""]
    colour = "yellow" if finding.state == "missing" and not is_needed else _COLOURS[finding.state]
    head = f"  {typer.style(f'{finding.state:<{_STATE}}', fg=colour)}{finding.name:<{_NAME}}{first}"
    advice = [f"{begin}> {finding.advice}"] if finding.advice else []
    return "\n".join([head, *(begin + line for line in rest), *advice])
