"""What can run Harbor's tasks here: agents, sandboxes, datasets and the model's endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from openenv.errors import message_of
from openenv.sandboxes.base import IMAGES, backend

from . import seams
from .tasks import HarborTaskProvider

HOST_SIDE_AGENTS = frozenset({"oracle", "nop"})
"""Agents that need no model."""
KNOWN_SANDBOXES = ("docker", "kubernetes")
"""The backends that start images."""


@dataclass
class SandboxStatus:
    """Whether a backend can run tasks here."""

    name: str
    available: bool
    detail: str = ""


@dataclass
class HarnessStatus:
    """An agent, and how far it was tried."""

    name: str
    dialect: str
    kind: str
    """`installed` for one that works in the sandbox with a model, `base` for one without."""
    status: str
    needs_subclass: bool
    notes: str = ""


@dataclass
class HarborCapabilities:
    """What a server can run."""

    harnesses: list[HarnessStatus] = field(default_factory=list)
    sandboxes: list[SandboxStatus] = field(default_factory=list)
    datasets: list[dict[str, Any]] = field(default_factory=list)
    llm: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @property
    def available_sandboxes(self) -> list[str]:
        """The backends that can run tasks here."""
        return [sandbox.name for sandbox in self.sandboxes if sandbox.available]

    @property
    def validated_harnesses(self) -> list[str]:
        """The agents that tests run."""
        return [harness.name for harness in self.harnesses if harness.status == "validated"]

    def render(self, *, verbose: bool = False) -> str:
        """Return it as lines for a terminal; what is missing comes with the reason.

        Args:
            verbose: List agents with their notes, and all findings about the endpoint.
        """
        lines = _llm_lines(self.llm, verbose=verbose)
        lines.append(f"sandboxes {len(self.available_sandboxes)} of {len(self.sandboxes)} usable")
        for sandbox in self.sandboxes:
            mark = "ok" if sandbox.available else "--"
            lines.append(f"  [{mark}]  {sandbox.name:<12} {sandbox.detail}".rstrip())
        if self.datasets:
            total = sum(dataset.get("num_tasks", 0) for dataset in self.datasets)
            lines.append(f"datasets  {len(self.datasets)} with {total} tasks")
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
"""The published name; a manifest has a class of that name, too."""


def _llm_lines(llm: Mapping[str, Any], *, verbose: bool) -> list[str]:
    if not llm:
        return []
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
        lines.append("          rollouts have rewards and traces, and nothing to train on")
    lines += [f"          changed for this endpoint: {fix}" for fix in llm.get("param_fixes") or []]
    findings = [str(finding) for finding in llm.get("findings") or []]
    lines += [f"          {finding}" for finding in findings if verbose or not finding.startswith("[INFO]")]
    return lines


def check_sandbox(name: str) -> SandboxStatus:
    """Return whether a backend can run tasks here, and what is missing if not."""
    try:
        chosen = backend(name)
        if not chosen.features >= IMAGES:
            return SandboxStatus(name, False, f"starts no images; {' and '.join(KNOWN_SANDBOXES)} do")
        chosen.check()
    except Exception as exc:  # whatever is wrong with it, the others are looked at
        return SandboxStatus(name, False, message_of(exc).partition("\n")[0][:200])
    return SandboxStatus(name, True)


def list_harnesses() -> list[HarnessStatus]:
    """Return the agents that run tasks here."""
    return [
        HarnessStatus(
            name=seam.name,
            dialect=seam.dialect,
            kind="base" if seam.name in HOST_SIDE_AGENTS else "installed",
            status=seam.status,
            needs_subclass=seam.import_path is not None,
            notes=seam.notes,
        )
        for _, seam in sorted(seams.SEAMS.items())
    ]


def capabilities(
    *,
    datasets: Sequence[str] | None = None,
    sandboxes: Sequence[str] = KNOWN_SANDBOXES,
    llm: Mapping[str, Any] | None = None,
) -> HarborCapabilities:
    """Return what can run here.

    Args:
        datasets: Datasets to count the tasks of.
        sandboxes: Backends to look at.
        llm: What is known about the endpoint, as `prepare` finds it.
    """
    return HarborCapabilities(
        harnesses=list_harnesses(),
        sandboxes=[check_sandbox(name) for name in sandboxes],
        datasets=HarborTaskProvider(datasets).list_splits() if datasets else [],
        llm=dict(llm or {}),
    )
