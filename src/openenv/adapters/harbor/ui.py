"""A Gradio page for Harbor's tasks, for applications that mount one. The server's web UI needs no Gradio."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openenv.errors import install_command
from openenv.rollout.capture.sessions_api.engine_probe import list_models, validate_llm

from .capabilities import list_harnesses
from .environment import is_private
from .models import HarborRolloutResult
from .options import HarborPermissions, HarborRun, takes_fields
from .rollout import run_task
from .runner import default_trials_dir, summary
from .service import HarborService
from .tasks import HarborTaskProvider

# OpenAI's API in front of all providers; the model's name selects one.
_ROUTER = "https://router.huggingface.co/v1"


def count_actions(result: HarborRolloutResult) -> int:
    """Count the agent's tool calls, except in discarded turns."""
    return sum(len(turn.tool_calls) for turn in result.turns if not turn.discarded)


def js_prelude() -> str:
    """Return an empty string. The published page loads a script first; this page needs none."""
    return ""


@dataclass(frozen=True)
class EndpointForm:
    """An endpoint that a user entered."""

    url: str
    model: str
    """Empty selects the only model that the endpoint serves."""
    api_key: str
    provider: str = "openai"
    """`openai` or `anthropic`."""
    purpose: str = "eval"
    """`train` requires token IDs and log-probabilities."""
    include_experimental: bool = False
    """Also list untested agents."""
    datasets: Sequence[str] | None = None
    """The served datasets."""
    private_urls: bool = True
    """Allow private addresses."""
    kind: str = "custom URL"
    """The endpoint's label in lists."""


def _validate(form: EndpointForm) -> dict[str, Any]:
    """Probe an endpoint, and return it as a dict; if `ok` is False, `reason` explains the problem."""
    # Users paste addresses with spaces and trailing slashes.
    url, model, key = form.url.strip().rstrip("/"), form.model, form.api_key.strip() or None
    engine: dict[str, Any] = {
        "kind": form.kind,
        "include_experimental": form.include_experimental,
        "datasets": list(form.datasets or []),
        "custom": {"url": url, "model": model, "provider": form.provider, "purpose": form.purpose},
    }

    def refused(reason: str) -> dict[str, Any]:
        return {**engine, "ok": False, "reason": reason}

    if not url:
        return refused("Enter the endpoint's URL.")
    # Checked before the first request, because the request itself is the danger.
    if not form.private_urls and is_private(url):
        return refused("This server calls no private addresses.")
    if not model:
        served = list_models(url, api_key=key)
        if len(served) != 1:
            return refused(f"Pick a model; this endpoint lists: {', '.join(served[:12]) or 'nothing'}.")
        model = served[0]
    # The probe makes a few short calls, because servers seldom document what they return.
    report = validate_llm(url, model, api_key=key, provider=form.provider)
    if not report.reachable:
        return refused("; ".join(map(str, report.findings)) or "The endpoint does not answer.")
    if form.purpose == "train" and not report.trainable:
        return refused("The endpoint returns no token IDs with log-probabilities, which training requires.")
    usable = [each for each in list_harnesses() if form.include_experimental or each.status == "validated"]
    return {
        **engine,
        "ok": True,
        "url": url,
        "model": report.model,
        "api_key": key or "",
        "provider": form.provider,
        "purpose": form.purpose,
        "capture_level": report.capture_level,
        "rollout_type": "eval" if form.purpose == "eval" else report.rollout_type,
        "findings": list(report.findings),
        "harnesses": [harness.name for harness in usable],
    }


validate_endpoint = takes_fields(EndpointForm, _validate, name="validate_endpoint")


def connect_endpoint(
    form: Mapping[str, Any],
    *,
    include_experimental: bool = False,
    datasets: Sequence[str] | None = None,
    settings: HarborPermissions | None = None,
    account_token: str | None = None,
) -> dict[str, Any]:
    """Validate the endpoint that a form describes, as `validate_endpoint` does.

    Args:
        form: `source` is `hf` for Hugging Face's inference providers (`model`, `route`, `api_key` or `use_account`), or
            `url` for any other endpoint (`url`, `model`, `api_key`, `api`, `purpose`).
        include_experimental: Also list untested agents.
        datasets: The served datasets.
        settings: The callers' permissions.
        account_token: The caller's token of the Hub, for `use_account`.
    """
    allowed = settings or HarborPermissions()
    public = {name: value for name, value in form.items() if name != "api_key"}  # the page repeats the form

    def text(name: str) -> str:
        return str(form.get(name) or "").strip()

    def refused(reason: str) -> dict[str, Any]:
        return {"ok": False, "reason": reason, "custom": public}

    # The page may be public, so its form follows the same permissions as the tool.
    if not allowed.takes_endpoints:
        return refused("This server runs rollouts on its own endpoint only.")
    common: dict[str, Any] = {"include_experimental": include_experimental, "datasets": datasets}
    if form.get("source") != "hf":
        engine = validate_endpoint(
            text("url"),
            text("model"),
            text("api_key"),
            text("api") or "openai",
            text("purpose") or "eval",
            private_urls=allowed.takes_private_urls,
            **common,
        )
        return {**engine, "custom": public}
    # The visitor's key is used for this probe and never stored.
    key = text("api_key") or ((account_token or "") if form.get("use_account") else "")
    if not text("model"):
        return refused("Pick a model.")
    if not key:
        return refused("Enter a Hugging Face token with the permission to call inference providers.")
    model = f"{text('model')}:{text('route')}" if text("route") else text("model")
    return {**validate_endpoint(_ROUTER, model, key, kind="Hugging Face", **common), "custom": public}


def harbor_gradio_builder(*, datasets: Sequence[str] | None = None, title: str | None = None) -> Any:
    """Return a page that lists tasks and runs rollouts on the `HarborService` of this process.

    Raises:
        ImportError: Gradio is not installed.
    """
    try:
        # Gradio is optional and slow to import.
        gr: Any = importlib.import_module("gradio")
    except ImportError:
        raise ImportError(f"This page needs Gradio: {install_command('gradio')}") from None
    provider = HarborTaskProvider(datasets)
    # Datasets are the splits of the Task API.
    names = [split["name"] for split in provider.list_splits()]
    first = names[0] if names else None

    def rows(split: str) -> list[list[Any]]:
        return [[task["index"], task["task_name"], task["instruction"][:200]] for task in provider.list_tasks(split)]

    async def run(split: str, index: float, harness: str, sandbox: str) -> tuple[str, dict[str, Any]]:
        service = HarborService.current()
        if service is None:
            return "No capture server runs in this process.", {}
        result = await run_task(
            HarborRun(
                task_dir=provider.task_dir(split, int(index)),
                harness=harness,
                sandbox=sandbox,
                registry=service.capture.registry,
                intercept_url=service.capture.url,
                model=service.model,
                trials_dir=default_trials_dir(),
                dataset=split,
                capture_level=service.capture_level,
                inference=service.capture.inference,
            )
        )
        return f"{summary(result)}; {count_actions(result)} tool calls", result.model_dump()

    with gr.Blocks(title=title or "Harbor's tasks") as page:
        split = gr.Dropdown(names, value=first, label="Dataset")
        listing = gr.Dataframe(rows(first) if first else [], headers=["index", "task", "instruction"])
        split.change(rows, split, listing)
        index = gr.Number(0, label="Task", precision=0)
        harness = gr.Dropdown([each.name for each in list_harnesses()], value="oracle", label="Agent")
        sandbox = gr.Dropdown(["docker", "kubernetes"], value="docker", label="Sandbox")
        outcome, details = gr.Textbox(label="Result"), gr.JSON(label="Details")
        gr.Button("Run").click(run, [split, index, harness, sandbox], [outcome, details])
    return page
