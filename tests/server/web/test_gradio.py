"""The bridge to Gradio, with the real one: an environment's own page as a tab, behind the gate."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from servers import Serve

gr = pytest.importorskip("gradio")

SEEN: dict[str, Any] = {}


def build(
    web_manager: Any, action_fields: Any, metadata: Any, is_chat_env: bool, title: str, quick_start_md: str
) -> Any:
    """A page with one button that takes a step, from a coroutine as custom pages do."""
    SEEN.update(
        manager=web_manager, fields=action_fields, metadata=metadata, chat=is_chat_env, title=title, md=quick_start_md
    )

    async def go(direction: str) -> str:
        if web_manager.episode_state.current_observation is None:
            await web_manager.reset_environment()
        stepped = await web_manager.step_environment({"direction": direction})
        seen = await web_manager._run_sync_in_thread_pool(web_manager.env.state.model_dump)
        return f"{stepped['observation']['place']} {seen['place']} {web_manager.get_state()['place']}"

    with gr.Blocks() as blocks:
        gr.Markdown(quick_start_md)
        direction = gr.Textbox()
        shown = gr.Textbox()
        gr.Button("Go").click(go, direction, shown, api_name="go")
    return blocks


@pytest.fixture(autouse=True)
def _with_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")


def gradio_app(envs: dict[str, Any], **kwargs: Any) -> Any:
    kwargs.setdefault("gradio_builder", build)
    return create_app(envs["Street"], envs["Walk"], envs["View"], max_concurrent_envs=4, **kwargs)


def test_the_builder_is_given_what_the_contract_says(envs: dict[str, Any]) -> None:
    gradio_app(envs, title_override="My page")
    assert [field["name"] for field in SEEN["fields"]] == ["direction", "paces"]
    assert (SEEN["metadata"].name, SEEN["chat"], SEEN["title"]) == ("Street", False, "My page")
    assert "GenericEnvClient" in SEEN["md"]
    gradio_app(envs)
    assert SEEN["title"] == "OpenEnv Agentic Environment: Street"


@pytest.mark.parametrize(
    ("arguments", "tab"),
    [
        ({}, {"name": "Custom", "href": "gradio/", "primary": False, "only": False}),
        (
            {"custom_tab_name": "REPL", "custom_tab_primary": True},
            {"name": "REPL", "href": "gradio/", "primary": True, "only": False},
        ),
        ({"show_default_tab": False}, {"name": "Custom", "href": "gradio/", "primary": False, "only": True}),
    ],
)
def test_the_page_says_where_the_tab_is(
    serve: Serve, visit: Callable[..., Any], envs: dict[str, Any], arguments: Any, tab: Any
) -> None:
    browser = visit(serve(gradio_app(envs, **arguments)).url)
    assert browser.get("/web/page").json()["custom_tab"] == tab
    shown = browser.get("/web/gradio/")
    assert shown.status_code == 200
    assert "OpenEnv Agentic Environment: Street" in shown.text


def test_something_that_is_no_gradio_page_is_a_type_error(envs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"Blocks.*str"):
        gradio_app(envs, gradio_builder=lambda *_: "nothing")


def test_a_press_of_its_button_plays_the_shared_episode(
    serve: Serve, visit: Callable[..., Any], envs: dict[str, Any]
) -> None:
    from gradio_client import Client

    server = serve(gradio_app(envs))
    program = visit(server.url, cookie=False)
    client = Client(f"{server.url}/web/gradio/", verbose=False)
    assert client.predict("right", api_name="/go") == "1 1 1"
    assert client.predict("right", api_name="/go") == "2 2 2"
    assert program.get("/web/state").json()["place"] == 2
    assert len(server.manager.sessions()) == 1


def test_the_tab_is_for_orchestrators(serve: Serve, visit: Callable[..., Any], envs: dict[str, Any]) -> None:
    access = AccessPolicy(orchestrator="all", observer="look", agent="tools")
    url = serve(gradio_app(envs, access=access)).url
    browser = visit(url)
    for path in ("/web/gradio/", "/web/gradio/config", "/web/gradio/gradio_api/info"):
        assert browser.get(path).status_code == 401, path
        for token in ("look", "tools"):
            assert browser.get(path, headers={"Authorization": f"Bearer {token}"}).status_code == 403
    assert browser.post("/web/gradio/gradio_api/call/go", {"data": ["right"]}).status_code == 401
    browser.post("/web/login", {"token": "look"})
    assert browser.get("/web/page").json()["custom_tab"] is None
    browser.post("/web/login", {"token": "all"})
    assert browser.get("/web/gradio/").status_code == 200
    assert browser.get("/web/page").json()["custom_tab"]["name"] == "Custom"
    foreign = browser.post(
        "/web/gradio/gradio_api/call/go", {"data": ["right"]}, headers={"Origin": "http://evil.example"}
    )
    assert (foreign.status_code, foreign.json()["code"]) == (403, "FOREIGN_ORIGIN")


def test_open_streams_do_not_hold_a_shutdown_up(serve: Serve, visit: Callable[..., Any], envs: dict[str, Any]) -> None:
    server = serve(gradio_app(envs))
    browser = visit(server.url)
    began, ended = threading.Event(), threading.Event()

    def listen() -> None:
        with browser.client.stream("GET", "/web/gradio/gradio_api/heartbeat/abc") as stream:
            for _ in stream.iter_raw():
                began.set()
        ended.set()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert began.wait(60)
    loop = server.app.state.openenv_web.visitors._loop or SEEN["manager"]._loop
    loop.call_soon_threadsafe(server.app.state.openenv_server.end_streams)
    assert ended.wait(30)


def test_the_application_in_the_documentation_works(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradio_client import Client

    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "docs_src"))
    server = serve(importlib.import_module("gradio_app").app)
    client = Client(f"{server.url}/web/gradio/", verbose=False)
    assert client.predict(api_name="/begin") == "Guess a word of five letters."
    assert len(client.predict("cloud", api_name="/guess")) == 5


def test_the_standard_gradio_page_plays_an_environment(envs: dict[str, Any], serve: Serve) -> None:
    from openenv.core.env_server.gradio_theme import OPENENV_GRADIO_CSS, OPENENV_GRADIO_THEME
    from openenv.core.env_server.gradio_ui import build_gradio_app, get_gradio_display_title

    assert isinstance(OPENENV_GRADIO_THEME, gr.themes.Base)
    assert "gradio-container" in OPENENV_GRADIO_CSS
    assert get_gradio_display_title(None, "Mine") == "Mine"
    from gradio_client import Client

    page = Client(f"{serve(gradio_app(envs, gradio_builder=build_gradio_app)).url}/web/gradio/", verbose=False)
    reply, status = page.predict(api_name="/reset")
    assert (reply["done"], status) == (False, "a new episode")
    reply, status = page.predict("right", 1, api_name="/step")
    assert reply["observation"]["place"] == 1, status
    state, _ = page.predict(api_name="/state")
    assert state["place"] == 1
    _, status = page.predict("left", 5, api_name="/step")
    assert "there is no road there" in status
