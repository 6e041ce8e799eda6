"""A Gradio page made from an action's fields: a starting point for custom pages, or a part of them.

Environments import its names from `openenv.core.env_server.gradio_ui` and `gradio_theme`. Knows Gradio and the
manager's interface; must not know how the page is mounted.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openenv.errors import install_command
from openenv.types import EnvironmentMetadata

try:
    gr: Any = importlib.import_module("gradio")
except ModuleNotFoundError as exc:
    raise ImportError(f"a page made with Gradio needs it: {install_command('gradio')}") from exc

_TITLE = "OpenEnv Environment"
OPENENV_GRADIO_THEME: Any = gr.themes.Soft(primary_hue="emerald", neutral_hue="slate")
"""The theme of the standard page, for pages made with Gradio."""
OPENENV_GRADIO_CSS = ".gradio-container { max-width: 72rem; margin: 0 auto; } .openenv-reply { font-size: 0.9rem; }"


def get_gradio_display_title(metadata: EnvironmentMetadata | None, fallback: str = _TITLE) -> str:
    """Return the title of an environment's page."""
    return metadata.name if metadata is not None and metadata.name else fallback


def build_gradio_app(
    web_manager: Any,
    action_fields: Sequence[Mapping[str, Any]],
    metadata: EnvironmentMetadata | None,
    is_chat_env: bool,
    title: str = _TITLE,
    quick_start_md: str | None = None,
) -> Any:
    """Build a page with a form for the action, the reply, and the state; a `gradio_builder` may return it.

    Args:
        web_manager: Uses the environment.
        action_fields: The fields of its action.
        metadata: Its description.
        is_chat_env: Whether its actions are messages; the form is then one text.
        title: The heading of the page.
        quick_start_md: A program that uses the environment, as Markdown.
    """
    with gr.Blocks(title=title) as blocks:
        gr.Markdown(f"# {get_gradio_display_title(metadata, title)}")
        if metadata is not None and metadata.description:
            gr.Markdown(metadata.description)
        with gr.Row():
            with gr.Column():
                inputs = [_input(field, is_long=is_chat_env) for field in action_fields]
                step = gr.Button("Step", variant="primary")
                reset, state = gr.Button("Reset"), gr.Button("State")
            with gr.Column():
                status = gr.Textbox(label="Status", interactive=False)
                reply = gr.JSON(label="Reply", elem_classes="openenv-reply")
        outputs = [reply, status]
        step.click(_step(web_manager, action_fields), inputs, outputs, api_name="step")
        reset.click(_reset(web_manager), None, outputs, api_name="reset")
        state.click(_state(web_manager), None, outputs, api_name="state")
        if quick_start_md:
            with gr.Accordion("Use it from Python", open=False):
                gr.Markdown(quick_start_md)
    return blocks


Reply = tuple[dict[str, Any], str]


def _step(manager: Any, fields: Sequence[Mapping[str, Any]]) -> Callable[..., Any]:
    async def step(*values: Any) -> Reply:
        try:
            action = {
                str(field["name"]): _value(field, value)
                for field, value in zip(fields, values, strict=True)
                if value not in (None, "") or field["required"]
            }
            outcome = await manager.step_environment(action)
        except Exception as exc:  # the page shows what went wrong, and stays
            return {}, f"{type(exc).__name__}: {exc}"
        return outcome, f"reward {outcome.get('reward')}, {'the episode has ended' if outcome.get('done') else 'go on'}"

    return step


def _reset(manager: Any) -> Callable[..., Any]:
    async def reset() -> Reply:
        try:
            return await manager.reset_environment(), "a new episode"
        except Exception as exc:
            return {}, f"{type(exc).__name__}: {exc}"

    return reset


def _state(manager: Any) -> Callable[..., Any]:
    def state() -> Reply:
        try:
            return manager.get_state(), "the state"
        except Exception as exc:
            return {}, f"{type(exc).__name__}: {exc}"

    return state


def _input(field: Mapping[str, Any], *, is_long: bool) -> Any:
    """Build the input component of a field."""
    label = f"{field['name']} *" if field["required"] else str(field["name"])
    about = {"label": label, "info": field.get("help_text") or None, "value": field.get("default_value")}
    kind = field["type"]
    if kind == "select":
        return gr.Dropdown(choices=list(field["choices"] or ()), **about)
    if kind == "checkbox":
        return gr.Checkbox(**{**about, "value": bool(about["value"])})
    if kind == "number":
        return gr.Number(minimum=field.get("min_value"), maximum=field.get("max_value"), **about)
    if about["value"] is not None and not isinstance(about["value"], str):
        about["value"] = json.dumps(about["value"])
    lines = 4 if is_long or kind == "textarea" else 1
    return gr.Textbox(lines=lines, placeholder=str(field.get("placeholder") or ""), **about)


def _value(field: Mapping[str, Any], value: Any) -> Any:
    """Convert the input to the field's value; JSON text becomes a list or an object."""
    if field["type"] == "number" and isinstance(value, float) and value.is_integer():
        return int(value)
    if field["type"] == "text" and isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if field["type"] == "tensor" and isinstance(value, str):
        return [int(part) for part in value.replace("[", "").replace("]", "").split(",") if part.strip()]
    return value
