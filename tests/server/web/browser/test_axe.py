"""Accessibility: axe-core finds nothing on any tab of the page; `test_rollouts` asks it about the viewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from environments import Add, Counter, Sum

LOOKS = {"light": {}, "dark on a phone": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}}}


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_the_page_has_no_finding(
    site: Callable[..., Any], visit: Callable[..., Any], axe_findings: Callable[..., Any], look: str
) -> None:
    page = visit(site(Counter, Add, Sum).url, **LOOKS[look]).page()
    findings = {"before": axe_findings(page)}
    page.get_by_role("button", name="Start an episode").click()
    page.locator(".badges").get_by_text("step 0").wait_for()
    page.locator(".action").get_by_role("button", name="Step").click()
    page.locator(".badges").get_by_text("step 1").wait_for()
    page.get_by_label("Fail").check()
    page.locator(".action").get_by_role("button", name="Step").click()
    page.locator(".notice.is-error").wait_for()
    findings["play"] = axe_findings(page)
    for tab in ("History", "Episodes", "Sessions", "About"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(400)
        findings[tab] = axe_findings(page)
    page.get_by_role("tab", name="Episodes").click()
    page.locator("tr[data-episode] a").first.click()
    page.locator(".replay").wait_for()
    findings["replay"] = axe_findings(page)
    page.get_by_role("tab", name="Sessions").click()
    page.get_by_role("link", name="Watch").first.click()
    page.locator(".watch dl > div").first.wait_for()
    findings["watch"] = axe_findings(page)
    assert {place: found for place, found in findings.items() if found} == {}
