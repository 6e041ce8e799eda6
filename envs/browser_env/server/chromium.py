"""A Chromium that reaches nothing but the site and the hosts that are allowed. Knows Playwright; must not know tasks.

The environments of a server share one browser, each with a profile of its own:

    Chromium            the process, an event loop in a thread; runs while an environment has joined
      BrowserProfile    an episode: cookies, pages, the site that answers its requests
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from playwright.async_api import (
    Browser,
    BrowserContext,
    Error,
    Locator,
    Page,
    Playwright,
    Request,
    Route,
    ViewportSize,
    async_playwright,
)

from browser_env.models import BrowserAction
from browser_env.server.site import HOME, HOST, Site

T = TypeVar("T")

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
VIEWPORT = ViewportSize(width=1024, height=640)
_ACTION_MS = 10_000
_SELECT_MS = 2000  # an option that is not there is waited for
_LOOK_MS = 60_000  # on a busy machine
_CALL_S = 180.0
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
    """A browser process, which runs while an environment has joined.

    Args:
        program: Its path; by default the Chromium that is installed.
        allowed_hosts: The hosts that it may reach besides the site.
    """

    def __init__(self, program: str | None = None, allowed_hosts: Sequence[str] = ()) -> None:
        self.program = program
        self.allowed_hosts = frozenset(host.strip().lower() for host in allowed_hosts if host.strip())
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting: asyncio.Lock | None = None
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None

    def __reduce__(self) -> tuple[Callable[..., Chromium], tuple[Any, ...]]:
        """A copy in another process has a browser of its own."""
        return Chromium, (self.program, sorted(self.allowed_hosts))

    def join(self) -> None:
        """Let the browser run until `leave`; it starts with the first profile."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._loop = asyncio.new_event_loop()
                self._starting = asyncio.Lock()
                self._thread = threading.Thread(target=self._loop.run_forever, name="chromium", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        """End the browser, if no other environment uses it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            loop, thread = self._loop, self._thread
            assert loop is not None
            assert thread is not None
            try:
                self.run(self._end())
            finally:
                loop.call_soon_threadsafe(loop.stop)
                thread.join(_CALL_S)
                loop.close()
                self._loop = self._thread = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the browser's thread and wait for it."""
        if self._loop is None:
            work.close()
            raise RuntimeError("the browser has ended: reset to start it again")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    async def new_context(self) -> BrowserContext:
        """Open an empty profile; a browser that has ended is started again.

        Raises:
            RuntimeError: There is no browser, or it does not start.
        """
        assert self._starting is not None
        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                self._browser = await self._launch()
        return await self._browser.new_context(
            viewport=VIEWPORT, locale="en-GB", accept_downloads=False, service_workers="block", reduced_motion="reduce"
        )

    async def _launch(self) -> Browser:
        program = self.program or next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise RuntimeError("no browser is installed: apt-get install chromium, or name one in BROWSER_PROGRAM")
        # Names of other hosts are not even resolved; requests are refused as well, for a clear message.
        exceptions = "".join(f", EXCLUDE {host}" for host in sorted(self.allowed_hosts))
        flags = [*_FLAGS, f"--host-resolver-rules=MAP * ~NOTFOUND{exceptions}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's own sandbox refuses to run as root
        if self._playwright is None:
            self._playwright = await async_playwright().start()
        try:
            return await self._playwright.chromium.launch(executable_path=program, args=flags, timeout=_LOOK_MS)
        except Error as error:
            raise RuntimeError(f"{program} does not start: {_first_line(error)}") from error

    async def _end(self) -> None:
        playwright, browser = self._playwright, self._browser
        self._playwright = self._browser = None
        try:
            if browser is not None and browser.is_connected():
                await browser.close()
        finally:
            if playwright is not None:
                await playwright.stop()


class BrowserProfile:
    """The pages of an episode. Its methods wait for the browser.

    Raises:
        RuntimeError: There is no browser, or it does not start.
    """

    def __init__(self, chromium: Chromium, site: Site) -> None:
        self._chromium = chromium
        self._site = site
        self._refused: list[str] = []
        self._context: BrowserContext | None = None
        self._page: Page | None = None
        chromium.run(self._open())

    def do(self, action: BrowserAction) -> None:
        """Do something on the page.

        Raises:
            ActionNotPossible: It cannot be done.
            RuntimeError: The browser has ended.
        """
        self._chromium.run(self._do(action))

    def look(self, *, screenshot: bool) -> PageView:
        """Return what can be seen.

        Raises:
            RuntimeError: The browser has ended.
        """
        return self._chromium.run(self._look(screenshot))

    def close(self) -> None:
        """Close all pages and forget them."""
        self._chromium.run(self._close())

    # -- in the browser's thread ----------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._context = await self._chromium.new_context()
        try:
            self._context.set_default_timeout(_ACTION_MS)
            await self._context.route("**/*", self._answer)
            await self._context.route_web_socket("**/*", lambda socket: socket.close())
            self._context.on("page", self._take_page)
            self._page = await self._context.new_page()
            await self._page.goto(HOME, timeout=_LOOK_MS)
        except Error as error:
            await self._close()
            raise RuntimeError(f"the site cannot be opened: {_first_line(error)}") from error

    async def _close(self) -> None:
        context, self._context = self._context, None
        if context is None:
            return
        try:
            await context.close()
        except Error:  # the browser has ended, and all profiles with it
            pass

    def _take_page(self, page: Page) -> None:
        """Go on with a page that was opened by another one."""
        self._page = page

    async def _answer(self, route: Route, request: Request) -> None:
        """Answer a request for the site, let one to an allowed host through, and refuse all others."""
        host = urlsplit(request.url).hostname or ""
        if host == HOST:
            page = self._site.respond(request.method, request.url, request.post_data or "")
            await route.fulfill(status=page.status, body=page.body, content_type="text/html; charset=utf-8")
        elif host in self._chromium.allowed_hosts:
            await route.continue_()
        else:
            self._refused.append(host)
            await route.abort("blockedbyclient")

    async def _do(self, action: BrowserAction) -> None:
        page, self._refused = self._living_page(), []
        try:
            await self._perform(page, action)
            await self._settle()
        except Error as error:
            self._living_page()
            if not self._refused:
                raise ActionNotPossible(_first_line(error)) from None
        if self._refused:
            raise ActionNotPossible(self._refusal(self._refused[0]))

    async def _perform(self, page: Page, action: BrowserAction) -> None:
        match action.action:
            case "goto":
                await page.goto(self._address(page.url, action.target))
            case "click":
                await (await _element(page, action)).click()
            case "type":
                await (await _element(page, action)).fill(action.text)
            case "select":
                await (await _element(page, action)).select_option(action.text, timeout=_SELECT_MS)
            case "press" if action.target:
                await (await _element(page, action)).press(action.text or "Enter")
            case "press":
                await page.keyboard.press(action.text or "Enter")
            case "scroll":
                await page.mouse.wheel(0, -VIEWPORT["height"] if action.text == "up" else VIEWPORT["height"])
            case "back":
                await page.go_back()
            case "forward":
                await page.go_forward()
            case "wait" | "answer":
                await page.wait_for_timeout(100)

    def _address(self, current: str, target: str) -> str:
        """Return the address to go to; a path is one of the current host."""
        address = urlsplit(urljoin(current if current.startswith("http") else HOME, target))
        if address.scheme not in ("http", "https"):
            raise ActionNotPossible(f"{target!r} is no address of a page: use http:// or https://, or a path")
        if address.hostname != HOST and address.hostname not in self._chromium.allowed_hosts:
            raise ActionNotPossible(self._refusal(address.hostname))
        return address.geturl()

    def _refusal(self, host: str | None) -> str:
        return f"{host} may not be reached, only {', '.join(sorted({HOST, *self._chromium.allowed_hosts}))}"

    async def _settle(self) -> None:
        """Wait until the page is loaded and drawn; an action may have begun to load another one."""
        for _ in range(3):
            try:
                page = self._living_page()
                await page.wait_for_load_state("load")
                await page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 20)))")
            except Error as error:
                if "navigation" not in str(error):
                    raise
            else:
                return

    async def _look(self, screenshot: bool) -> PageView:
        page = self._living_page()
        try:
            text = await page.locator("body").aria_snapshot(mode="ai", timeout=_LOOK_MS)
            picture = await page.screenshot(animations="disabled", timeout=_LOOK_MS) if screenshot else None
            title = await page.title()
        except Error as error:
            raise RuntimeError(f"the page cannot be read: {_first_line(error)}; reset to begin again") from error
        if len(text) > _MOST_TEXT:
            text = f"{text[:_MOST_TEXT]}\n... ({len(text) - _MOST_TEXT} more characters are left out)"
        return PageView(page.url, title, text, None if picture is None else _data_url(picture))

    def _living_page(self) -> Page:
        page, pages = self._page, [] if self._context is None else self._context.pages
        if page is not None and page.is_closed() and pages:
            page = self._page = pages[-1]
        if page is None or page.is_closed() or not pages:
            raise RuntimeError("the browser has ended: reset to start it again")
        return page


async def _element(page: Page, action: BrowserAction) -> Locator:
    """Return the element that an action is for."""
    target = action.target.strip()
    if not target:
        raise ActionNotPossible(f"{action.action} needs a target: the ref of an element, or a CSS selector")
    element = page.locator(f"aria-ref={target}" if _REF.fullmatch(target) else f"css={target}")
    if await element.count() == 0:  # else it would be waited for
        raise ActionNotPossible(f"there is no element {target} on this page")
    return element.first


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].removeprefix("Error: ")


def _data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
