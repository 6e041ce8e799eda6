"""Common questions, typed into the search of the built documentation: the page is among the first three results."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
QUESTIONS = {
    "write an environment": "howto/environment/",
    "start a new project": "howto/new_project/",
    "gymnasium": "howto/gymnasium/",
    "multi agent": "howto/trainers/pettingzoo/",
    "mcp tools": "howto/tools/",
    "rubric": "howto/rubrics/",
    "llm judge": "howto/rubrics/",
    "test environment": "howto/testing/",
    "serve": "howto/serve/",
    "parallel environments": "howto/vector/",
    "fork": "howto/fork/",
    "reconnect": "howto/clients/",
    "docker container": "howto/providers/",
    "coding agent": "howto/rollouts/",
    "claude code": "howto/rollouts/",
    "opencode": "howto/opencode/",
    "checks": "howto/checks/",
    "reward missing": "howto/missing_reward/",
    "reward none": "howto/missing_reward/",
    "trust levels": "howto/checks/",
    "terminal-bench": "howto/harbor/",
    "token ids logprobs": "howto/capture/",
    "sandbox": "howto/sandboxes/",
    "train": "howto/train/",
    "checkpoint": "howto/resume/",
    "grpo trl": "howto/trainers/trl/",
    "authentication": "howto/secure/",
    "prometheus metrics": "howto/observe/",
    "kubernetes": "howto/kubernetes/",
    "ray cluster": "howto/ray/",
    "hugging face space": "howto/hub/",
    "environment variables": "reference/settings/",
    "jupyter notebook": "howto/notebooks/",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Build the documentation in a copy, serve it, and open it in a browser."""
    folder = tmp_path_factory.mktemp("documentation")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    (folder / "src").symlink_to(ROOT / "src")
    subprocess.run([sys.executable, "-m", "zensical", "build"], cwd=folder, check=True, capture_output=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        page.locator(".md-search__button").click()
        yield page
        browser.close()
        server.shutdown()


def first_pages(page: Page, question: str) -> list[str]:
    """Return the first three different pages that the search shows for a question."""
    page.locator("input").last.fill(question)
    # The list is filled by a worker: wait until it has been the same for a moment.
    links: list[str] = []
    while True:
        page.wait_for_timeout(250)
        before, links = links, page.locator("ol a").evaluate_all("links => links.map(link => link.pathname)")
        if links and links == before:
            return list(dict.fromkeys(link.lstrip("/") for link in links))[:3]


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_page(page: Page, question: str) -> None:
    assert QUESTIONS[question] in first_pages(page, question)
