"""The order of graders, and what becomes of one whose needs are not met or that breaks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

from ..graders import Grader, Subject
from ..policy import PolicyError
from ..report import CheckOutcome, skipped
from ..report import CheckResult as CheckResult
from ..types import CheckStatus, ProviderCapability


def order_graders(graders: Iterable[Grader]) -> list[Grader]:
    """Return graders so that each comes after those that it depends on, and else by their ids.

    Raises:
        PolicyError: Two have one id, or some depend on each other.
    """
    by_id: dict[str, Grader] = {}
    for grader in graders:
        if grader.check_id in by_id:
            raise PolicyError(f"two graders make the check {grader.check_id}")
        by_id[grader.check_id] = grader
    sorter = TopologicalSorter(
        {check_id: [other for other in grader.depends_on if other in by_id] for check_id, grader in by_id.items()}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        raise PolicyError(f"graders depend on each other: {' -> '.join(error.args[1])}") from error
    ordered: list[Grader] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        ordered += [by_id[check_id] for check_id in ready]
        sorter.done(*ready)
    return ordered


def execute_graders(
    graders: Iterable[Grader],
    subject: Subject,
    *,
    provider_capabilities: Collection[ProviderCapability] = frozenset(),
    prior: Sequence[CheckOutcome] = (),
) -> list[CheckOutcome]:
    """Run graders in their order and return their results; one that breaks is a result, not the end of the others.

    Args:
        graders: The graders to run.
        subject: What they look at.
        provider_capabilities: What the provider can do; a grader that needs more is skipped.
        prior: Results of checks that were made before, for graders that depend on them.
    """
    passed = {result.check_id for result in prior if result.status is CheckStatus.PASS}
    results: list[CheckOutcome] = []
    for grader in order_graders(graders):
        missing = sorted(one.value for one in grader.requires_provider if one not in provider_capabilities)
        unmet = [check_id for check_id in grader.depends_on if check_id not in passed]
        if unmet:
            result = skipped(grader.check_id, f"unmet dependency: {', '.join(unmet)}")
        elif missing:
            result = skipped(grader.check_id, f"missing provider capabilities: {', '.join(missing)}")
        else:
            result = _run(grader, subject)
        if result.status is CheckStatus.PASS:
            passed.add(result.check_id)
        results.append(result)
    return results


def _run(grader: Grader, subject: Subject) -> CheckOutcome:
    started = time.monotonic()
    try:
        result = grader.run(subject)
        if not isinstance(result, CheckOutcome) or result.check_id != grader.check_id:
            raise TypeError(f"returned no result of {grader.check_id}")
    except Exception as error:
        # Only the kind of the error: what a grader of another package puts into its texts may be secret.
        text = f"the grader failed ({type(error).__name__})"
        duration_s = time.monotonic() - started
        return CheckOutcome(check_id=grader.check_id, status=CheckStatus.ERROR, evidence=[text], duration_s=duration_s)
    return result
