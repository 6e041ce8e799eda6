"""Fixtures for tests of the page in a real browser: Chromium, a new profile for each visitor, a real server.

Each visit is watched: the page must not raise, must not run against its content policy, and must not ask anybody but
its server for anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from openenv.rollout import RolloutStore
from openenv.rollout.viewer.rollout_routes import viewer_app
from openenv.server.app import create_app
from openenv.server.web.web_page import attach_web
from openenv.settings import cache_dir
from servers import Serve

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
TIMEOUT_MS = 30_000
AXE = "4.10.3"
TRIES = 5
WATCH = "window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.blockedURI));"


def find_browser() -> str | None:
    """Return the browser's program: `OPENENV_TEST_BROWSER`, or what is installed."""
    path = os.environ.get("OPENENV_TEST_BROWSER")
    return path or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser. It ends with the module, since tests of others need the thread's event loop for themselves."""
    api = pytest.importorskip("playwright.sync_api", reason="the page's tests need Playwright: pip install playwright")
    program = find_browser()
    if program is None:
        pytest.skip("no browser: install Chromium (apt-get install chromium), or name one in OPENENV_TEST_BROWSER")
    api.expect.set_options(timeout=TIMEOUT_MS)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS, timeout=120_000)
        yield browser
        browser.close()


class Visit:
    """One visitor: a profile of its own, with cookies of its own, and as many pages as it likes.

    Args:
        browser: The running browser.
        server: The address of the only server that may be asked.
        options: For the profile: size, colours.
    """

    def __init__(self, browser: Any, server: str, **options: Any) -> None:
        self.server = server
        self.allowed = {urlsplit(server).netloc}
        self.asked: list[str] = []
        self.raised: list[str] = []
        self.said: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(TIMEOUT_MS)
        self.context.add_init_script(WATCH)

    def page(self, path: str = "/web/") -> Any:
        """Open the page, in a tab of its own."""
        page = self.context.new_page()
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("websocket", lambda socket: self.asked.append(socket.url))
        page.on("pageerror", lambda error: self.raised.append(str(error)))
        page.on("console", lambda message: self.said.append(message.text))
        self._go(page, self.server + path)
        page.locator(".loading").wait_for(state="detached")
        return page

    def _go(self, page: Any, url: str) -> None:
        """Load an address. Chromium gives up what it loads when a network appears, as it does for a container's."""
        for _ in range(TRIES):
            try:
                page.goto(url)
                return
            except Exception as error:
                if "ERR_NETWORK_CHANGED" not in str(error):
                    raise
        raise AssertionError("networks come and go all the time")

    def close(self) -> None:
        """Leave, and look at what was noticed on the way."""
        violations = [one for page in self.context.pages for one in page.evaluate("window.violations || []")]
        self.context.close()
        assert self.raised == []
        assert violations == []
        assert [text for text in self.said if "Content Security Policy" in text] == []
        places = [urlsplit(url) for url in self.asked]
        strangers = [p.geturl() for p in places if p.scheme not in ("data", "blob", "about")]
        assert {urlsplit(url).netloc for url in strangers} <= self.allowed


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Open a browser on a server; all are closed when the test ends."""
    with contextlib.ExitStack() as stack:

        def begin(server: str, **options: Any) -> Visit:
            visitor = Visit(browser, server, **options)
            stack.callback(visitor.close)
            return visitor

        yield begin


@pytest.fixture
def site(serve: Serve) -> Callable[..., Any]:
    """Serve an environment with its page: class, action and observation models, and arguments of `create_app`."""

    def start(env: Any, action: Any, observation: Any, **options: Any) -> Any:
        app = create_app(env, action, observation, **{"env_name": "test_env", "max_concurrent_envs": 8, **options})
        attach_web(app)
        return serve(app)

    return start


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def open_page(store: RolloutStore, serve: Serve, visit: Callable[..., Any]) -> Callable[..., Any]:
    """Open the viewer of the test's store."""
    server = serve(viewer_app({"store": store.root}))
    return lambda path="/web/", **options: visit(server.url, **options).page(path)


@pytest.fixture(scope="session")
def axe_findings() -> Callable[[Any], list[str]]:
    """Ask axe-core, which comes from npm and is kept in the cache, what it finds on a page."""
    folder = cache_dir() / "tests" / f"axe-core-{AXE}"
    source = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not source.exists():
        if shutil.which("npm") is None:
            pytest.skip("no npm to get axe-core with")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", f"axe-core@{AXE}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode != 0:
            pytest.skip(f"axe-core cannot be installed: {done.stderr[-300:]}")
    axe = source.read_text(encoding="utf-8")

    def find(page: Any) -> list[str]:
        page.evaluate(axe)  # evaluated, not loaded: the content policy allows no other script
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [f"{each['id']}: {[node['html'][:160] for node in each['nodes']][:3]}" for each in found["violations"]]

    return find
