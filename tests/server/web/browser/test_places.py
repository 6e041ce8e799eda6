"""Where the page may stand: behind a prefix, without sockets, in production, beside a page of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import HTMLResponse
from starlette.routing import Route

from environments import Greeter, Spot, Track, Walk
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.server.app import PageArguments, create_app
from openenv.server.web.web_page import attach_web
from servers import Serve

pytestmark = pytest.mark.slow

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright").expect


class Lane(Track):
    """A track from 0 on, whatever its seed; the page draws one."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Spot:
        return super().reset(None, episode_id)


def application(arguments: PageArguments | None = None) -> Any:
    """An application with a page."""
    app = create_app(Lane, Walk, Spot, env_name="walk", max_concurrent_envs=4)
    attach_web(app, arguments)
    return app


def play(page: Any) -> None:
    """Reset, and step twice."""
    page.get_by_role("button", name="Start an episode").click()
    expect(page.locator(".badges")).to_contain_text("step 0")
    for count in (1, 2):
        page.locator(".action").get_by_role("button", name="Step").click()
        expect(page.locator(".badges")).to_contain_text(f"step {count}")
    expect(page.locator(".seen .facts dd").first).to_have_text("2")


def test_the_page_works_behind_a_prefix(serve: Serve, visit: Callable[..., Any]) -> None:
    app = application()

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await app(scope, receive, send)
        assert scope["path"].startswith("/spaces/walk/") or scope["path"].endswith("favicon.ico"), scope["path"]
        path = scope["path"].removeprefix("/spaces/walk")
        return await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    visitor = visit(serve(proxied).url)
    page = visitor.page("/spaces/walk/web")
    assert page.url.endswith("/spaces/walk/web/")
    play(page)
    expect(page.locator(".python").first).to_contain_text("/spaces/walk")
    assert any(url.startswith("ws:") and url.endswith("/spaces/walk/ws/ui") for url in visitor.asked)


def test_the_page_works_where_sockets_do_not(serve: Serve, visit: Callable[..., Any]) -> None:
    app = application()

    async def without_sockets(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close"})
        return await app(scope, receive, send)

    page = visit(serve(without_sockets).url).page()
    play(page)
    expect(page.locator("#connection")).to_contain_text("No live updates")
    expect(page.locator(".latest li")).to_have_count(2)


def test_in_production_there_are_tools_and_nothing_to_reset(serve: Serve, visit: Callable[..., Any]) -> None:
    app = create_app(Greeter, CallToolAction, CallToolObservation, env_name="greeter", mode="production")
    attach_web(app)
    page = visit(serve(app).url).page()
    expect(page.get_by_role("tab")).to_have_text(["Tools", "History", "Sessions", "About"])
    expect(page.locator(".head")).to_contain_text("production")
    expect(page.get_by_role("button", name="Reset")).to_have_count(0)
    page.get_by_role("button", name="Call").click()
    expect(page.locator(".result")).to_contain_text("hello")
    assert "env.reset()" not in page.locator("#panel-tools .python").text_content()


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("is_primary", [False, True])
def test_a_page_of_ones_own_is_a_tab(is_primary: bool, is_alone: bool, serve: Serve, visit: Callable[..., Any]) -> None:
    app = application(PageArguments(print, "Mine", is_primary, not is_alone, title="My walk"))

    async def own(request: Any) -> HTMLResponse:
        return HTMLResponse("<h1>my own page</h1>")

    app.router.routes.append(Route("/web/gradio/", own))
    page = visit(serve(app).url).page()
    mine = page.frame_locator("iframe.custom").locator("h1")
    if is_alone:
        expect(mine).to_have_text("my own page")
        expect(page.get_by_role("tab")).to_have_count(0)
        return
    expect(page.get_by_role("heading", level=1).first).to_contain_text("My walk")
    names = ["Play", "History", "Episodes", "Sessions", "About"]
    expect(page.get_by_role("tab")).to_have_text(["Mine", *names] if is_primary else [*names, "Mine"])
    page.get_by_role("tab", name="Mine").click()
    expect(mine).to_have_text("my own page")


def test_a_page_whose_file_did_not_come_is_loaded_again(serve: Serve, visit: Callable[..., Any]) -> None:
    visitor = visit(serve(application()).url)
    failures = iter(["plot.js", "views.css", "main.js"])
    failing = [next(failures)]

    def fail(route: Any) -> None:
        if route.request.url.endswith(failing[0]):
            failing[0] = next(failures, "nothing")
            route.abort("connectionreset")
        else:
            route.continue_()

    visitor.context.route("**/static/*", fail)
    play(visitor.page())
    assert failing == ["nothing"]
