"""A Chromium that reaches nothing but the site and the hosts that are allowed. Knows Playwright; must not know tasks.

Playwright's objects belong to the thread that made them, so each browser has a thread of its own.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    Error,
    Locator,
    Page,
    Playwright,
    Request,
    Route,
    sync_playwright,
)

from browser_env.models import BrowserAction
from browser_env.server.site import HOME, HOST, Site

T = TypeVar("T")

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
VIEWPORT = {"width": 1024, "height": 640}
_ACTION_MS = 3000
_CALL_S = 90.0
_MOST_TEXT = 50_000
_REF = re.compile(r"(f\d+)?e\d+")  # of the first document e12, of later ones f1e12
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)


class ActionNotPossible(Exception):
    """The browser could not do what was asked; the text says why."""


@dataclass(frozen=True, slots=True)
class PageView:
    """What can be seen of a page."""

    url: str
    title: str
    text: str
    screenshot: str | None


class Chromium:
    """A browser, started with the first page.

    Args:
        program: Its path; by default the Chromium that is installed.
        allowed_hosts: The hosts that it may reach besides the site.
    """

    def __init__(self, program: str | None = None, allowed_hosts: Sequence[str] = ()) -> None:
        self._program = program
        self._allowed = frozenset(host.strip().lower() for host in allowed_hosts if host.strip())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chromium")
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._context: BrowserContext | None = None
        self._page: Page | None = None
        self._site = Site(0)
        self._refused: list[str] = []

    def open(self, site: Site) -> None:
        """Begin with a new profile, on the home page of a site.

        Raises:
            RuntimeError: There is no browser, or it does not start.
        """
        self._call(lambda: self._open(site))

    def do(self, action: BrowserAction) -> None:
        """Do something on the page.

        Raises:
            ActionNotPossible: It cannot be done.
            RuntimeError: The browser has ended.
        """
        self._call(lambda: self._do(action))

    def look(self, *, screenshot: bool) -> PageView:
        """Return what can be seen.

        Raises:
            RuntimeError: The browser has ended.
        """
        return self._call(lambda: self._look(screenshot))

    def close(self) -> None:
        """End the browser and its thread."""
        try:
            self._thread.submit(self._close).result(_CALL_S)
        finally:
            self._thread.shutdown(wait=False)

    def _call(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result(_CALL_S)

    # -- in the browser's thread ----------------------------------------------------------------------------------

    def _open(self, site: Site) -> None:
        self._site = site
        if self._context is not None:
            self._context.close()
            self._context = None
        if self._browser is None or not self._browser.is_connected():
            self._browser = self._launch()
        self._context = self._browser.new_context(
            viewport=VIEWPORT, locale="en-GB", accept_downloads=False, service_workers="block", reduced_motion="reduce"
        )
        self._context.set_default_timeout(_ACTION_MS)
        self._context.route("**/*", self._answer)
        self._context.route_web_socket("**/*", lambda socket: socket.close())
        self._context.on("page", self._take_page)
        self._page = self._context.new_page()
        self._page.goto(HOME)

    def _take_page(self, page: Page) -> None:
        """Go on with a page that was opened by another one."""
        self._page = page

    def _launch(self) -> Browser:
        program = self._program or next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise RuntimeError("no browser is installed: apt-get install chromium, or name one in BROWSER_PROGRAM")
        # Names of other hosts are not even resolved; requests are refused as well, for a clear message.
        exceptions = "".join(f", EXCLUDE {host}" for host in sorted(self._allowed))
        flags = [*_FLAGS, f"--host-resolver-rules=MAP * ~NOTFOUND{exceptions}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's own sandbox refuses to run as root
        if self._playwright is None:
            self._playwright = sync_playwright().start()
        try:
            return self._playwright.chromium.launch(executable_path=program, args=flags, timeout=60_000)
        except Error as error:
            raise RuntimeError(f"{program} does not start: {_first_line(error)}") from error

    def _answer(self, route: Route, request: Request) -> None:
        """Answer a request for the site, let one to an allowed host through, and refuse all others."""
        host = urlsplit(request.url).hostname or ""
        if host == HOST:
            page = self._site.respond(request.method, request.url, request.post_data or "")
            route.fulfill(status=page.status, body=page.body, content_type="text/html; charset=utf-8")
        elif host in self._allowed:
            route.continue_()
        else:
            self._refused.append(host)
            route.abort("blockedbyclient")

    def _do(self, action: BrowserAction) -> None:
        page, self._refused = self._living_page(), []
        try:
            self._perform(page, action)
            self._settle()
        except Error as error:
            self._living_page()
            if not self._refused:
                raise ActionNotPossible(_first_line(error)) from None
        if self._refused:
            raise ActionNotPossible(self._refusal(self._refused[0]))

    def _perform(self, page: Page, action: BrowserAction) -> None:
        match action.action:
            case "goto":
                page.goto(self._address(page.url, action.target))
            case "click":
                _element(page, action).click()
            case "type":
                _element(page, action).fill(action.text)
            case "select":
                _element(page, action).select_option(action.text)
            case "press" if action.target:
                _element(page, action).press(action.text or "Enter")
            case "press":
                page.keyboard.press(action.text or "Enter")
            case "scroll":
                page.mouse.wheel(0, -VIEWPORT["height"] if action.text == "up" else VIEWPORT["height"])
            case "back":
                page.go_back()
            case "forward":
                page.go_forward()
            case "wait" | "answer":
                page.wait_for_timeout(100)

    def _address(self, current: str, target: str) -> str:
        """Return the address to go to; a path is one of the current host."""
        address = urlsplit(urljoin(current if current.startswith("http") else HOME, target))
        if address.scheme not in ("http", "https"):
            raise ActionNotPossible(f"{target!r} is no address of a page: use http:// or https://, or a path")
        if address.hostname != HOST and address.hostname not in self._allowed:
            raise ActionNotPossible(self._refusal(address.hostname))
        return address.geturl()

    def _refusal(self, host: str | None) -> str:
        return f"{host} may not be reached, only {', '.join(sorted({HOST, *self._allowed}))}"

    def _settle(self) -> None:
        """Wait until the page is loaded and drawn; an action may have begun to load another one."""
        for _ in range(3):
            try:
                page = self._living_page()
                page.wait_for_load_state("load")
                page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 20)))")
            except Error as error:
                if "navigation" not in str(error):
                    raise
            else:
                return

    def _look(self, screenshot: bool) -> PageView:
        page = self._living_page()
        try:
            text = page.locator("body").aria_snapshot(mode="ai")
            picture = page.screenshot(animations="disabled") if screenshot else None
            title = page.title()
        except Error as error:
            raise RuntimeError(f"the page cannot be read: {_first_line(error)}; reset to begin again") from error
        cut = (
            text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}\n... ({len(text) - _MOST_TEXT} more characters)"
        )
        return PageView(page.url, title, cut, None if picture is None else _data_url(picture))

    def _living_page(self) -> Page:
        page = self._page
        if page is not None and page.is_closed() and self._context is not None and self._context.pages:
            page = self._page = self._context.pages[-1]
        if page is None or page.is_closed() or self._browser is None or not self._browser.is_connected():
            raise RuntimeError("the browser has ended: reset to start it again")
        return page

    def _close(self) -> None:
        try:
            if self._browser is not None and self._browser.is_connected():
                self._browser.close()
        finally:
            if self._playwright is not None:
                self._playwright.stop()
            self._playwright = self._browser = self._context = self._page = None


def _element(page: Page, action: BrowserAction) -> Locator:
    """Return the element that an action is for."""
    target = action.target.strip()
    if not target:
        raise ActionNotPossible(f"{action.action} needs a target: the ref of an element, or a CSS selector")
    element = page.locator(f"aria-ref={target}" if _REF.fullmatch(target) else f"css={target}")
    if element.count() == 0:  # else it would be waited for
        raise ActionNotPossible(f"there is no element {target} on this page")
    return element.first


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].removeprefix("Error: ")


def _data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
