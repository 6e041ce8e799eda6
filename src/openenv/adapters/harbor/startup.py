"""What is looked at before Harbor's tasks are run or served: variables, endpoint, sandboxes, datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openenv import settings
from openenv.rollout.capture.sessions_api.engine_probe import list_models, validate_llm

from .capabilities import KNOWN_SANDBOXES, HarborCapabilities
from .capabilities import Capabilities as Capabilities
from .capabilities import capabilities as capabilities


def load_env_file(path: str | Path | None = None) -> list[str]:
    """Set the variables of a file that are not set; return their names, never their values.

    Args:
        path: The file, which must be there; by default `OPENENV_ENV_FILE`. A `.env` is read only where it is named.

    Raises:
        OSError: it cannot be read.
    """
    chosen = Path(path).expanduser() if path is not None else settings.env_file()
    return [] if chosen is None else settings.export_file(chosen)


def prepare(
    *,
    llm_url: str | None = None,
    model: str | None = None,
    datasets: Sequence[str] | None = None,
    sandboxes: Sequence[str] | None = None,
    env_file: str | Path | None = None,
    require_llm: bool = True,
    quiet: bool = False,
    api_key: str | None = None,
    auth_header: str = "Authorization",
    provider: str = "openai",
    report: Callable[[str], None] = print,
) -> HarborCapabilities:
    """Look at everything that rollouts need, and return what was found.

    Args:
        llm_url: The model's endpoint.
        model: Its id there; by default `OPENENV_MODEL`, or the only one that the endpoint serves.
        datasets: By default those of `OPENENV_DATASETS`.
        sandboxes: The backends to look at; by default `OPENENV_SANDBOXES`, or those that start images.
        env_file: Variables to set first.
        require_llm: Whether the endpoint must answer. One that names no tokens will do, for evaluations.
        quiet: Print nothing.
        api_key: The endpoint's key; by default `OPENENV_LLM_API_KEY`.
        auth_header: The header that has it.
        provider: `openai` or `anthropic`.
        report: Gets what was found, as lines for a terminal.

    Raises:
        RuntimeError: the endpoint is required, and there is none or it does not answer.
    """
    load_env_file(env_file)
    if require_llm and not llm_url:
        raise RuntimeError("no LLM URL given: pass --llm-url (or llm_url=) with the model's endpoint")
    llm: dict[str, Any] = {}
    if llm_url:
        key = api_key or settings.llm_api_key()
        llm = _ask(llm_url, model or settings.llm_model() or "", key, auth_header, provider)
    found = capabilities(
        datasets=settings.harbor_datasets() if datasets is None else datasets,
        sandboxes=(settings.harbor_sandboxes() or KNOWN_SANDBOXES) if sandboxes is None else sandboxes,
        llm=llm,
    )
    if not quiet:
        report(found.render())
    if require_llm and not llm.get("reachable"):
        reasons = "\n  ".join(llm.get("findings") or ["it does not answer"])
        raise RuntimeError(f"inference endpoint is not usable:\n  {reasons}")
    return found


def _ask(url: str, model: str, api_key: str | None, auth_header: str, provider: str) -> dict[str, Any]:
    about: dict[str, Any] = {"url": url, "authenticated": bool(api_key)}
    if not model:
        served = list_models(url, api_key=api_key, auth_header=auth_header)
        model = served[0] if len(served) == 1 else ""
    if not model:
        problem = "no model given and the endpoint does not serve exactly one; pass --model"
        return {**about, "model": "", "ok": False, "findings": [problem]}
    report = validate_llm(url, model, api_key=api_key, auth_header=auth_header, provider=provider)
    names = "ok findings served_models capture_level rollout_type trainable reachable param_fixes logprobs_mode"
    return {
        **about,
        "model": report.model,
        **{name: getattr(report, name) for name in names.split()},
        "tool_support": report.tool_support,
    }
