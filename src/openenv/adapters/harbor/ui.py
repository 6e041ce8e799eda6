"""A Gradio page for Harbor's tasks, for applications that mount one; the server's own page needs no Gradio."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from openenv.rollout.capture.sessions_api.engine_probe import list_models, validate_llm

from .capabilities import list_harnesses
from .environment import HarborServerOptions, is_private
from .models import HarborRolloutResult
from .rollout import run_rollout
from .runner import default_trials_dir, summary
from .service import HarborService
from .tasks import HarborTaskProvider

_ROUTER = "https://router.huggingface.co/v1"


def count_actions(result: HarborRolloutResult) -> int:
    """Return how many tools the agent called in the turns that count."""
    return sum(len(turn.tool_calls) for turn in result.turns if not turn.discarded)


def js_prelude() -> str:
    """Return the script that the page loads first: none."""
    return ""


def validate_endpoint(
    url: str,
    model: str,
    api_key: str,
    provider: str = "openai",
    purpose: str = "eval",
    include_experimental: bool = False,
    datasets: Sequence[str] | None = None,
    private_urls: bool = True,
    kind: str = "custom URL",
) -> dict[str, Any]:
    """Ask an endpoint what it names, and return it as one that rollouts can run on; `reason` says why it cannot be.

    Args:
        url: The endpoint.
        model: The model; by default the only one that it serves.
        api_key: Its key.
        provider: `openai` or `anthropic`.
        purpose: `train` asks for tokens and log-probabilities.
        include_experimental: Also list agents that were not tried.
        datasets: What is served.
        private_urls: Whether the address may be a private one.
        kind: What to call the endpoint in lists.
    """
    url = url.strip().rstrip("/")
    engine: dict[str, Any] = {
        "kind": kind,
        "include_experimental": include_experimental,
        "datasets": list(datasets or []),
        "custom": {"url": url, "model": model, "provider": provider, "purpose": purpose},
    }

    def refused(reason: str) -> dict[str, Any]:
        return {**engine, "ok": False, "reason": reason}

    if not url:
        return refused("Enter the endpoint's URL.")
    if not private_urls and is_private(url):
        return refused("This server calls no private addresses.")
    key = api_key.strip() or None
    if not model:
        served = list_models(url, api_key=key)
        if len(served) != 1:
            return refused(f"Pick a model: this endpoint serves {', '.join(served[:12]) or 'none that it names'}.")
        model = served[0]
    report = validate_llm(url, model, api_key=key, provider=provider)
    if not report.reachable:
        return refused("; ".join(map(str, report.findings)) or "The endpoint does not answer.")
    if purpose == "train" and not report.trainable:
        return refused("The endpoint does not name the tokens that it samples, so nothing can be trained on them.")
    usable = [harness for harness in list_harnesses() if include_experimental or harness.status == "validated"]
    return {
        **engine,
        "ok": True,
        "url": url,
        "model": report.model,
        "api_key": key or "",
        "provider": provider,
        "purpose": purpose,
        "capture_level": report.capture_level,
        "rollout_type": "eval" if purpose == "eval" else report.rollout_type,
        "findings": list(report.findings),
        "harnesses": [harness.name for harness in usable],
    }


def connect_endpoint(
    form: Mapping[str, Any],
    *,
    include_experimental: bool = False,
    datasets: Sequence[str] | None = None,
    settings: HarborServerOptions | None = None,
    account_token: str | None = None,
) -> dict[str, Any]:
    """Return the endpoint that a form describes, as `validate_endpoint` does.

    Args:
        form: `source` is `hf` for Hugging Face's inference providers (`model`, `route`, `api_key` or `use_account`), or
            `url` for any other (`url`, `model`, `api_key`, `api`, `purpose`).
        include_experimental: Also list agents that were not tried.
        datasets: What is served.
        settings: What callers may do.
        account_token: The caller's token of the Hub, for `use_account`.
    """
    allowed = settings or HarborServerOptions()
    shown = {name: value for name, value in form.items() if name != "api_key"}

    def text(name: str) -> str:
        return str(form.get(name) or "").strip()

    def refused(reason: str) -> dict[str, Any]:
        return {"ok": False, "reason": reason, "custom": shown}

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
        return {**engine, "custom": shown}
    key = text("api_key") or ((account_token or "") if form.get("use_account") else "")
    if not text("model"):
        return refused("Pick a model.")
    if not key:
        return refused("Give a token of Hugging Face's with the right to call inference providers.")
    model = f"{text('model')}:{text('route')}" if text("route") else text("model")
    return {**validate_endpoint(_ROUTER, model, key, kind="Hugging Face", **common), "custom": shown}


def harbor_gradio_builder(*, datasets: Sequence[str] | None = None, title: str | None = None) -> Any:
    """Return a page that lists tasks and runs rollouts on this process's `HarborService`.

    Raises:
        ImportError: Gradio is not installed.
    """
    try:
        gr: Any = importlib.import_module("gradio")
    except ImportError:
        raise ImportError("This page needs Gradio: pip install 'openenv[core]'") from None
    provider = HarborTaskProvider(datasets)
    names = [split["name"] for split in provider.list_splits()]
    first = names[0] if names else None

    def rows(split: str) -> list[list[Any]]:
        return [[task["index"], task["task_name"], task["instruction"][:200]] for task in provider.list_tasks(split)]

    async def run(split: str, index: float, harness: str, sandbox: str) -> tuple[str, dict[str, Any]]:
        service = HarborService.current()
        if service is None:
            return "No capture server runs in this process.", {}
        result = await run_rollout(
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
