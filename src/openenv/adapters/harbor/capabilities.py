"""Check the setup for Harbor's tasks: agents, sandboxes, datasets and the model's endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openenv import settings
from openenv.errors import message_of
from openenv.rollout.capture.sessions_api.engine_probe import only_model, validate_llm
from openenv.sandboxes.base import IMAGES, backend

from . import seams
from .options import HarborSetup, ModelEndpoint, takes_fields
from .tasks import HarborTaskProvider

HOST_SIDE_AGENTS = frozenset({"oracle", "nop"})
"""Agents that call no model."""
# Other backends run commands, but no images.
KNOWN_SANDBOXES = ("docker", "kubernetes")
"""Backends that start container images, which task folders require."""


@dataclass
class SandboxStatus:
    """Whether a backend can run tasks here."""

    name: str
    available: bool
    detail: str = ""


@dataclass
class HarnessStatus:
    """An agent and its test status."""

    name: str
    dialect: str
    kind: str
    """`installed`: works in the sandbox with a model. `base`: calls no model."""
    status: str
    needs_subclass: bool
    notes: str = ""


@dataclass
class HarborCapabilities:
    """Agents, sandboxes, datasets and endpoint of a server."""

    harnesses: list[HarnessStatus] = field(default_factory=list)
    sandboxes: list[SandboxStatus] = field(default_factory=list)
    datasets: list[dict[str, Any]] = field(default_factory=list)
    llm: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in the tool `capabilities`."""
        return asdict(self)

    @property
    def available_sandboxes(self) -> list[str]:
        """The usable backends."""
        return [sandbox.name for sandbox in self.sandboxes if sandbox.available]

    @property
    def is_usable(self) -> bool:
        """Whether a sandbox can run, and everything that was named works: the endpoint and each dataset."""
        is_endpoint_down = bool(self.llm) and self.llm.get("ok") is False and not self.llm.get("reachable")
        has_broken_dataset = any(dataset.get("error") for dataset in self.datasets)
        return bool(self.available_sandboxes) and not is_endpoint_down and not has_broken_dataset

    @property
    def validated_harnesses(self) -> list[str]:
        """The agents covered by tests."""
        return [harness.name for harness in self.harnesses if harness.status == "validated"]

    def render(self, *, verbose: bool = False) -> str:
        """Return the summary as lines for a terminal, with the reason for each missing part.

        Args:
            verbose: List the agents with their notes, and every finding about the endpoint.
        """
        # Order of the summary: endpoint, sandboxes, datasets, agents.
        lines = _llm_lines(self.llm, verbose=verbose)
        lines.append(f"sandboxes {len(self.available_sandboxes)} of {len(self.sandboxes)} usable")
        for sandbox in self.sandboxes:
            # Plain ASCII, because the summary is also read in logs.
            mark = "ok" if sandbox.available else "--"
            lines.append(f"  [{mark}]  {sandbox.name:<12} {sandbox.detail}".rstrip())
        if self.datasets:
            total = sum(dataset.get("num_tasks", 0) for dataset in self.datasets)
            lines.append(f"datasets  {len(self.datasets)} with {total} tasks")
        # A dataset with an error is listed, so that a typo in its name is visible.
        for dataset in self.datasets:
            text = dataset.get("error") or f"{dataset.get('num_tasks', 0)} tasks"
            lines.append(f"  [{'--' if dataset.get('error') else 'ok'}]  {dataset['name']}  {text}")
        lines.append(f"harnesses {len(self.validated_harnesses)} of {len(self.harnesses)} validated")
        for harness in self.harnesses:
            if verbose:
                lines.append(f"  {harness.name:<16} {harness.dialect:<17} {harness.status}  {harness.notes}".rstrip())
        if not verbose:
            lines.append(f"  {', '.join(self.validated_harnesses)}")
        return "\n".join(lines)


Capabilities = HarborCapabilities
"""The published name. The internal name is unique: manifests have a class `Capabilities` too."""


def _llm_lines(llm: Mapping[str, Any], *, verbose: bool) -> list[str]:
    if not llm:
        return []
    # TRAIN: tokens and log-probabilities. EVAL ONLY: text. FAILED: no answer.
    if llm.get("ok"):
        mark = "TRAIN" if llm.get("trainable", True) else "EVAL ONLY"
    elif llm.get("reachable"):
        mark = "EVAL ONLY"
    else:
        mark = "FAILED" if llm.get("ok") is False else "unchecked"
    lines = [f"llm       {llm.get('model') or '?'}  [{mark}]"]
    if llm.get("url"):
        lines.append(f"          {llm['url']}{' (authenticated)' if llm.get('authenticated') else ''}")
    if mark == "EVAL ONLY":
        lines.append("          rollouts have rewards and traces, but no tokens to train on")
    lines += [f"          changed for this endpoint: {fix}" for fix in llm.get("param_fixes") or []]
    findings = [str(finding) for finding in llm.get("findings") or []]
    lines += [f"          {finding}" for finding in findings if verbose or not finding.startswith("[INFO]")]
    return lines


def check_sandbox(name: str) -> SandboxStatus:
    """Check whether a backend can run tasks here; `detail` explains a problem."""
    try:
        # `check` talks to the engine; the import alone only proves that the package is installed.
        chosen = backend(name)
        if not chosen.features >= IMAGES:
            return SandboxStatus(name, False, f"starts no images; {' and '.join(KNOWN_SANDBOXES)} do")
        chosen.check()
    except Exception as exc:  # one broken backend must not hide the others
        return SandboxStatus(name, False, message_of(exc).partition("\n")[0][:200])
    return SandboxStatus(name, True)


def list_harnesses() -> list[HarnessStatus]:
    """Return the supported agents."""
    return [
        HarnessStatus(
            name=seam.name,
            dialect=seam.dialect,
            kind="base" if seam.name in HOST_SIDE_AGENTS else "installed",
            status=seam.status,
            needs_subclass=seam.import_path is not None,
            notes=seam.notes,
        )
        # By name, so that lists are the same on every server.
        for _, seam in sorted(seams.SEAMS.items())
    ]


def capabilities(
    *,
    datasets: Sequence[str] | None = None,
    sandboxes: Sequence[str] = KNOWN_SANDBOXES,
    llm: Mapping[str, Any] | None = None,
) -> HarborCapabilities:
    """Check sandboxes and datasets, and return everything that a server can run.

    Args:
        datasets: Count the tasks of these datasets.
        sandboxes: Backends to check.
        llm: The probed endpoint, as in the result of `prepare`.
    """
    return HarborCapabilities(
        harnesses=list_harnesses(),
        sandboxes=[check_sandbox(name) for name in sandboxes],
        # Counting tasks may download a dataset, so it happens only if one is named.
        datasets=HarborTaskProvider(datasets).list_splits() if datasets else [],
        llm=dict(llm or {}),
    )


def load_env_file(path: str | Path | None = None) -> list[str]:
    """Set the unset variables of a file, and return their names, never their values.

    Args:
        path: The file, which must exist. Default: `OPENENV_ENV_FILE`. A `.env` is only read if it is named.

    Raises:
        OSError: The file cannot be read.
    """
    chosen = Path(path).expanduser() if path is not None else settings.env_file()
    return [] if chosen is None else settings.export_file(chosen)


def check_setup(
    endpoint: ModelEndpoint,
    *,
    datasets: Sequence[str] | None = None,
    sandboxes: Sequence[str] | None = None,
    require_llm: bool = True,
    report: Callable[[str], None] | None = None,
) -> HarborCapabilities:
    """Check everything that rollouts need, and return the results.

    Args:
        endpoint: The model's endpoint.
        datasets: Default: `OPENENV_DATASETS`.
        sandboxes: The backends to check. Default: `OPENENV_SANDBOXES`, or every backend that starts images.
        require_llm: Fail unless the endpoint answers. An endpoint without token IDs suffices for evaluations.
        report: Receives the summary as lines for a terminal.

    Raises:
        RuntimeError: The endpoint is required, and is missing or does not answer.
    """
    if require_llm and not endpoint.llm_url:
        raise RuntimeError("no LLM URL given: pass --llm-url (or llm_url=) with the model's endpoint")
    llm = _probe(endpoint) if endpoint.llm_url else {}
    ready = capabilities(
        datasets=settings.harbor_datasets() if datasets is None else datasets,
        sandboxes=(settings.harbor_sandboxes() or KNOWN_SANDBOXES) if sandboxes is None else sandboxes,
        llm=llm,
    )
    # The summary comes before the error: it shows the other parts that need attention, too.
    if report is not None:
        report(ready.render())
    if require_llm and not llm.get("reachable"):
        reasons = "\n  ".join(llm.get("findings") or ["it does not answer"])
        raise RuntimeError(f"inference endpoint is not usable:\n  {reasons}")
    return ready


def _prepare(setup: HarborSetup) -> HarborCapabilities:
    """Load the variables of `env_file`, then check the setup as `check_setup` does.

    Raises:
        RuntimeError: The endpoint is required, and is missing or does not answer.
    """
    load_env_file(setup.env_file)
    return check_setup(
        setup,
        datasets=setup.datasets,
        sandboxes=setup.sandboxes,
        require_llm=setup.require_llm,
        report=None if setup.quiet else setup.report,
    )


prepare = takes_fields(HarborSetup, _prepare, name="prepare")


def _probe(endpoint: ModelEndpoint) -> dict[str, Any]:
    """Ask the endpoint for its models, and probe its capture level with short calls."""
    url, key = endpoint.llm_url or "", endpoint.api_key or settings.llm_api_key()
    about: dict[str, Any] = {"url": url, "authenticated": bool(key)}
    model = endpoint.model or settings.llm_model() or only_model(url, api_key=key, auth_header=endpoint.auth_header)
    if not model:
        problem = "no model given and the endpoint does not serve exactly one; pass --model"
        return {**about, "model": "", "ok": False, "findings": [problem]}
    report = validate_llm(url, model, api_key=key, auth_header=endpoint.auth_header, provider=endpoint.provider)
    names = "ok findings served_models capture_level rollout_type trainable reachable param_fixes logprobs_mode"
    return {
        **about,
        "model": report.model,
        **{name: getattr(report, name) for name in names.split()},
        "tool_support": report.tool_support,
    }
