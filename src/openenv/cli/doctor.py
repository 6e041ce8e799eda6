"""`openenv doctor`: working and missing prerequisites on this machine, with advice.

Every check tries the thing itself: it starts a sandbox, binds a port, asks the container engine.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

import typer
from packaging.requirements import Requirement

from openenv import settings
from openenv.errors import OpenEnvError, install_command, message_of
from openenv.sandboxes.host import LOW, file_limit

from .command import check_choice

_COLOURS = {"ok": "green", "missing": "red", "note": "yellow"}
_PURPOSES = {"serve": "servers and clients", "rollouts": "rollouts"}
# Columns of name and state; `_shown` wraps the explanation beside them.
_NAME = 16
_STATE = 9


def doctor(
    purpose: str = typer.Option("serve", "--for", metavar="PURPOSE", help="The purpose: serve or rollouts."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check this machine: show working and missing prerequisites, with advice.

      openenv doctor                        all checks
      openenv doctor --for rollouts         exit with 1 unless agents can run here
      openenv doctor --json                 for programs

    Exits with 1 if something needed is missing: for serving, and with `--for rollouts` also for agents, which need
    one kind of sandbox and one agent. Nothing is installed or changed; one sandbox is started and closed.
    """
    check_choice("--for", purpose, ("serve", "rollouts"))
    # Sample:
    #
    #   To let agents work on tasks
    #     ok       local sandbox   bubblewrap 0.8.0, as root, started in 170 ms
    #     missing  containers      The docker engine does not answer ...
    #                              > systemctl start docker
    #
    #   Everything is there for rollouts.
    findings: list[Diagnosis] = []
    area = None
    # Printed one by one: starting a sandbox and asking an engine take seconds.
    for finding in examine():
        findings.append(finding)
        if as_json:
            continue
        if finding.area != area:
            area = finding.area
            typer.secho(AREAS[area], bold=True)
        typer.echo(_shown(finding, is_needed=finding.area in ("serve", purpose)))
    # Exit code 1 lets an image's build or a CI job stop early.
    missing = missing_for(findings, "rollouts" if purpose == "rollouts" else "serve")
    if as_json:
        shown = {"ok": not missing, "for": purpose, "missing": missing, "findings": [asdict(one) for one in findings]}
        typer.echo(json.dumps(shown, indent=2))
    elif missing:
        typer.echo(f"\nMissing for {_PURPOSES[purpose]}: {', '.join(missing)}.")
    else:
        typer.echo(f"\nEverything is there for {_PURPOSES[purpose]}.")
    if missing:
        raise typer.Exit(1)


def _shown(finding: Diagnosis, *, is_needed: bool) -> str:
    """Format a diagnosis: wrapped text in a column, commands on separate lines for copying."""
    begin = " " * (_STATE + _NAME + 2)
    width = max(20, min(shutil.get_terminal_size().columns, 120) - len(begin))
    first, *rest = textwrap.wrap(finding.text, width, break_long_words=False, break_on_hyphens=False) or [""]
    # Red only for things that the chosen purpose needs.
    colour = "yellow" if finding.state == "missing" and not is_needed else _COLOURS[finding.state]
    head = f"  {typer.style(f'{finding.state:<{_STATE}}', fg=colour)}{finding.name:<{_NAME}}{first}"
    # A separate line without wrapping, so that a terminal selects the whole command.
    advice = [f"{begin}> {finding.advice}"] if finding.advice else []
    return "\n".join([head, *(begin + line for line in rest), *advice])


Area = Literal["serve", "rollouts", "extras"]
State = Literal["ok", "missing", "note"]

AREAS: dict[Area, str] = {
    "serve": "To serve and step environments",
    "rollouts": "To let agents work on tasks",
    "extras": "Extras",
}
# Name of the extra: (a module that it installs, its purpose). A test compares the names with pyproject.toml.
EXTRAS = {
    "numpy": ("numpy", "arrays in observations"),
    "images": ("PIL", "images in observations"),
    "gymnasium": ("gymnasium", "Gymnasium environments, both ways"),
    "parquet": ("pyarrow", "export of rollouts as training sequences"),
    "kubernetes": ("lightkube", "servers and sandboxes in a Kubernetes cluster"),
    "ray": ("ray", "rollouts and servers on a Ray cluster"),
    "e2b": ("e2b", "E2B sandboxes"),
    "hub": ("huggingface_hub", "openenv push and openenv fork"),
    "inspect": ("inspect_ai", "evaluations with Inspect AI"),
    "daytona": ("daytona", "Daytona servers and sandboxes"),
    "modal": ("modal", "servers on Modal"),
    "novita": ("novita_sandbox", "servers in Novita sandboxes"),
    "aca": ("azure.containerapps.sandbox", "servers in Azure Container Apps sandboxes"),
    "datasets": ("datasets", "stored rollouts as a data set for trainers"),
    "gradio": ("gradio", "web pages made with Gradio"),
}
_PORT = 8000
_TRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check."""

    area: Area  # what it is needed for
    name: str
    state: State  # `missing` keeps something from working; a `note` does not
    text: str
    advice: str = ""  # a command that helps, if there is one


def examine() -> Iterator[Diagnosis]:
    """Run every check, one after the other."""
    yield _python()
    yield _packages()
    yield _loopback()
    yield _port()
    yield _open_files()
    yield _diagnosed("rollouts", "local sandbox", _local_sandbox)
    yield _diagnosed("rollouts", "control groups", _control_groups)
    yield _diagnosed("rollouts", "containers", _containers)
    # opencode can be fetched if npm works, so its check needs npm's result.
    npm = _npm()
    yield npm
    yield _opencode(has_npm=npm.state == "ok")
    for extra, (module, purpose) in EXTRAS.items():
        yield _extra(extra, module, purpose)


def missing_for(findings: list[Diagnosis], area: Area) -> list[str]:
    """Return the missing prerequisites for a purpose; one kind of sandbox and one agent are enough."""
    # One of each is enough:
    #
    #   sandbox   (local sandbox and control groups)  or  containers
    #   agent     opencode  or  npm, which fetches it
    here = {one.name for one in findings if one.state == "ok"}
    unneeded = set()
    if "containers" in here:
        unneeded |= {"local sandbox", "control groups"}
    if {"local sandbox", "control groups"} <= here:
        unneeded.add("containers")
    if "opencode" in here:
        unneeded.add("npm")
    missing = [one.name for one in findings if one.state == "missing" and one.area in ("serve", area)]
    return [name for name in missing if name not in unneeded]


def _diagnosed(area: Area, name: str, check: Callable[[], str]) -> Diagnosis:
    """Turn the error of a check into its diagnosis; the errors contain the advice."""
    try:
        return Diagnosis(area, name, "ok", check())
    except (OpenEnvError, OSError, subprocess.SubprocessError) as exc:
        # Our errors have the form "PROBLEM. Install it with: COMMAND"; the command becomes the advice.
        text, _, advice = " ".join(message_of(exc).split()).partition(" Install it")
        if not advice:
            text, _, advice = text.partition(" Start it")
        return Diagnosis(area, name, "missing", text, advice.removeprefix(" with").removeprefix(":").strip())


def _python() -> Diagnosis:
    return Diagnosis("serve", "Python", "ok", f"{platform.python_version()}, {sys.executable}")


def _packages() -> Diagnosis:
    try:
        requirements = metadata.requires("openenv") or []
        version = metadata.version("openenv")
    # A checkout on PYTHONPATH has no metadata, and so no list of requirements to compare.
    except metadata.PackageNotFoundError:
        return Diagnosis("serve", "packages", "note", "openenv is not installed, but used from its sources")
    own = [Requirement(line) for line in requirements]
    # Markers with extras are false here, so requirements of extras are left out.
    names = [one for one in own if one.marker is None or one.marker.evaluate({"extra": ""})]
    problems = {one: problem for one in names if (problem := _problem(one))}
    if problems:
        # By name: an index may have another package called openenv.
        command = f"pip install {' '.join(repr(f'{one.name}{one.specifier}') for one in problems)}"
        return Diagnosis("serve", "packages", "missing", ", ".join(problems.values()), command)
    return Diagnosis("serve", "packages", "ok", f"openenv {version} and the {len(names)} it needs")


def _problem(requirement: Requirement) -> str | None:
    """Return the problem of a required package, or None."""
    name, specifier = requirement.name, requirement.specifier
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed"
    # Pre-releases count: pip installs them only on request, so the user has chosen one.
    return None if specifier.contains(version, prereleases=True) else f"{name} {version} is not {specifier}"


def _loopback() -> Diagnosis:
    try:
        # In a new network namespace the loopback interface is down.
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5) as client,
            server.accept()[0] as peer,
        ):
            client.sendall(b"x")
            peer.settimeout(5)
            peer.recv(1)
    except OSError as exc:
        return Diagnosis("serve", "loopback", "missing", f"127.0.0.1 cannot be used: {exc}", "ip link set lo up")
    return Diagnosis("serve", "loopback", "ok", "127.0.0.1 answers")


def _port() -> Diagnosis:
    try:
        with socket.socket() as probe:
            # As the server does: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", _PORT))
    except OSError:
        # Only a note: --port 0 works without it.
        return Diagnosis("serve", f"port {_PORT}", "note", "taken by another program", "openenv serve --port 0")
    return Diagnosis("serve", f"port {_PORT}", "ok", "free")


def _open_files() -> Diagnosis:
    limit = file_limit()
    if limit >= LOW:
        return Diagnosis("serve", "open files", "ok", f"{limit} for each program")
    text = (
        f"{limit} for each program; a rollout takes up to 30 of them, a client one. `openenv` raises its own limit as "
        "far as it may; programs of yours need a higher one"
    )
    return Diagnosis("serve", "open files", "note", text, f"ulimit -n {LOW}")


def _local_sandbox() -> str:
    """Start one, without limits: those are the next check."""
    from openenv.sandboxes.local import LocalSandboxes
    from openenv.sandboxes.local.bubblewrap import find_bubblewrap, is_privileged

    version = ".".join(map(str, find_bubblewrap()[1]))
    began = time.monotonic()
    # A real start: user namespaces may be switched off although bubblewrap is installed.
    with LocalSandboxes(require_cgroup=False).open() as sandbox:
        sandbox.exec(["true"], timeout=_TRY_S)
    spent = (time.monotonic() - began) * 1000
    namespaces = "as root" if is_privileged() else "with user namespaces"
    return f"bubblewrap {version}, {namespaces}, started in {spent:.0f} ms"


def _control_groups() -> str:
    from openenv.sandboxes.local import cgroups

    return f"version {cgroups.find().version}: memory, processes and processors can be limited"


def _containers() -> str:
    from openenv.sandboxes.container_cli import first_engine

    return f"{first_engine('auto', None).kind} answers"


def _npm() -> Diagnosis:
    program = shutil.which("npm")
    # opencode is an npm package.
    if program is None:
        return Diagnosis("rollouts", "npm", "missing", "agents are fetched with it", "apt-get install -y npm")
    return _diagnosed("rollouts", "npm", lambda: f"{_version_of(program)}, {program}")


def _version_of(program: str) -> str:
    result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_TRY_S, check=False)
    # For example npm without a working node.
    if result.returncode != 0:
        raise OSError(f"{program} does not run: {(result.stderr or result.stdout).strip()[:200]}")
    return result.stdout.strip()


def _opencode(*, has_npm: bool) -> Diagnosis:
    cached = sorted(place for place in settings.cache_dir().glob("agents/opencode-*") if place.is_dir())
    if path := shutil.which("opencode"):
        return Diagnosis("rollouts", "opencode", "ok", path)
    if cached:
        return Diagnosis("rollouts", "opencode", "ok", str(cached[-1]))
    if has_npm:
        return Diagnosis("rollouts", "opencode", "note", "is fetched with npm when it is first used, 180 MB")
    return Diagnosis("rollouts", "opencode", "missing", "install npm, which fetches it, or put `opencode` on the PATH")


def _extra(extra: str, module: str, purpose: str) -> Diagnosis:
    try:
        is_missing = importlib.util.find_spec(module) is None
    # find_spec("azure.containerapps.sandbox") imports the packages around it, and raises if one is missing.
    except ModuleNotFoundError:  # the package that it is in
        is_missing = True
    if is_missing:
        return Diagnosis("extras", extra, "missing", purpose, install_command(extra))
    return Diagnosis("extras", extra, "ok", purpose)
