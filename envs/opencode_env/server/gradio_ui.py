"""A page of this environment's own, for those who have Gradio: a form, a live log, reward and files.

Gradio loads when the page is built, and is not needed otherwise.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Any

from opencode_env.server.catalog import ENDPOINT_KINDS, SCRIPTED

_MISSING = "The page of opencode_env needs Gradio: pip install 'openenv-opencode_env[gradio]'"
_FIELDS = ("endpoint", "instruction", "setup", "verify", "model")


def gradio_builder(
    web_manager: Any,
    action_fields: list[dict[str, Any]] | None = None,
    metadata: Any = None,
    is_chat_env: bool = False,
    title: str = "OpenCode",
    quick_start_md: str = "",
) -> Any:
    """Build the page.

    Args:
        web_manager: Has the environment, as `env`.
        action_fields, metadata, is_chat_env: As the server passes them; not used here.
        title: The page's title.
        quick_start_md: Text above the form.

    Raises:
        ImportError: Gradio is not installed.
    """
    try:
        gradio: Any = importlib.import_module("gradio")
    except ImportError as exc:
        raise ImportError(_MISSING) from exc
    with gradio.Blocks(title=title) as page:
        if quick_start_md:
            gradio.Markdown(quick_start_md)
        endpoint = gradio.Dropdown([SCRIPTED, *ENDPOINT_KINDS], value=SCRIPTED, label="Endpoint")
        instruction = gradio.Textbox(label="Instruction", lines=4)
        setup = gradio.Textbox(label="Setup, a shell line each", lines=3)
        verify = gradio.Textbox(label="Verify, a shell line each", lines=3)
        model = gradio.Textbox(label="Model, if not the endpoint's own")
        start = gradio.Button("Run", variant="primary")
        log = gradio.Textbox(label="Progress", lines=12)
        result = gradio.Code(label="Result", language="json")

        def run(*values: str) -> Iterator[tuple[str, str]]:
            yield from run_form(web_manager.env, dict(zip(_FIELDS, values, strict=True)))

        start.click(run, [endpoint, instruction, setup, verify, model], [log, result])
    return page


def run_form(env: Any, form: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Run the rollout that a filled form asks for; give the log so far and the result, again with each event."""
    news: Queue[str | None] = Queue()
    results: list[str] = []

    def work() -> None:
        try:
            arguments: dict[str, Any] = dict(form)
            arguments |= {name: form[name].strip().splitlines() for name in ("setup", "verify")}
            result = env._run_rollout_impl(progress_cb=news.put, **arguments)
            results.append(json.dumps(json.loads(result.model_dump_json()), indent=2))
        except Exception as exc:  # the page shows what happened
            results.append(json.dumps({"error": f"{type(exc).__name__}: {exc}"}, indent=2))
        finally:
            news.put(None)

    Thread(target=work, name="opencode-page", daemon=True).start()
    log = ""
    while (line := news.get()) is not None:
        log += line + "\n"
        yield log, ""
    yield log, results[0]
