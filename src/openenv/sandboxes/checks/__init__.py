"""The executable contract of a sandbox backend: `self_check` runs every check against it and reports each result.

Knows the checks and no backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from openenv.errors import SandboxUnsupported, message_of
from openenv.sandboxes.base import Sandboxes

from .bench import CheckBench, ContractCheck, NotOffered
from .commands import COMMANDS
from .files import FILES, SNAPSHOTS
from .isolation import ENDINGS, ISOLATION, LIMITS, PORTS

__all__ = ["CHECKS", "CheckBench", "CheckResult", "ContractCheck", "NotOffered", "self_check"]

CHECKS: tuple[ContractCheck, ...] = (*COMMANDS, *FILES, *SNAPSHOTS, *ISOLATION, *LIMITS, *PORTS, *ENDINGS)
CheckStatus = Literal["passed", "failed", "not offered"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a check came out."""

    id: str
    says: str
    status: CheckStatus
    detail: str = ""
    duration_s: float = 0.0


def self_check(
    backend: Sandboxes, *, report: Callable[[CheckResult], None] | None = None, only: Iterable[str] = ()
) -> list[CheckResult]:
    """Run the checks against a backend, in order; a check that fails does not keep the others from running.

    Args:
        backend: What starts the sandboxes.
        report: Called with each result as it comes.
        only: Ids, or beginnings of ids such as `isolation.`, of the checks to run; all when empty.

    Raises:
        SandboxUnavailable: The backend cannot run here at all.
    """
    backend.check()
    wanted = tuple(only)
    results = []
    with CheckBench(backend) as bench:
        for check in CHECKS:
            if wanted and not check.id.startswith(wanted):
                continue
            result = _run(check, bench)
            results.append(result)
            if report is not None:
                report(result)
    return results


def _run(check: ContractCheck, bench: CheckBench) -> CheckResult:
    started = time.monotonic()
    status: CheckStatus = "passed"
    detail = ""
    if check.feature is not None and check.feature not in bench.backend.features:
        return CheckResult(check.id, check.says, "not offered", f"{bench.backend.name} does not offer {check.feature}")
    try:
        check.run(bench)
    except (NotOffered, SandboxUnsupported) as error:
        status, detail = "not offered", message_of(error)
    except AssertionError as error:
        status, detail = "failed", message_of(error)
    except Exception as error:  # backends are foreign code: anything that one raises is a result
        status, detail = "failed", f"{type(error).__name__}: {message_of(error)}"
    try:
        bench.tidy()
    except Exception as error:  # the same
        status, detail = "failed", f"closing: {type(error).__name__}: {message_of(error)}"
    return CheckResult(check.id, check.says, status, detail, time.monotonic() - started)
