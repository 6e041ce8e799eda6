"""The quick start: a short Python program that uses this server and runs as it is.

Knows schemas and the names of clients; must not import clients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pprint import pformat
from typing import Any

from openenv import settings
from openenv._lazy import load_package_version
from openenv.protocol.schema import json_schema, make_example
from openenv.protocol.tool_messages import CallToolAction, ListToolsAction
from openenv.types import EnvironmentMetadata

DEFAULT_URL = "http://127.0.0.1:8000"
_FORMATS = {
    "date": "2024-01-01",
    "date-time": "2024-01-01T00:00:00Z",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def quick_start(
    action_cls: type[Any] | None, *, url: str, asks_for_token: bool = False, plays: bool = True, has_tools: bool = False
) -> str:
    """Write the program; `plays` says whether the server can be reset and stepped, as in simulation mode."""
    token = "# The server asks for a token: set OPENENV_TOKEN to it first.\n" if asks_for_token else ""
    if has_tools or action_cls in (CallToolAction, ListToolsAction) or not plays:
        reset = "    env.reset()\n" if plays else ""
        return (
            f"{token}from openenv import MCPToolClient\n\n"
            f'with MCPToolClient("{url}").sync() as env:\n'
            f"{reset}"
            "    for tool in env.list_tools():\n"
            "        print(tool.name, tool.description)\n"
        )
    action = pformat(example_action(action_cls), width=90, sort_dicts=False)
    shown = action.replace("\n", "\n" + " " * 22)
    return (
        f"{token}from openenv import GenericEnvClient\n\n"
        f'with GenericEnvClient("{url}").sync() as env:\n'
        "    result = env.reset()\n"
        f"    result = env.step({shown})\n"
        "    print(result.observation, result.reward, result.done)\n"
    )


def get_quick_start_markdown(
    metadata: EnvironmentMetadata | None, action_cls: type[Any], observation_cls: type[Any]
) -> str:
    """Write the program as Markdown, for custom pages."""
    host, space = settings.space_host(), settings.space_id()
    url = f"https://{host}" if host else "http://localhost:8000"
    name = metadata.name if metadata is not None else "this environment"
    lines = [f"### Use {name} from Python", "", "```bash", f"pip install openenv=={load_package_version()}", "```", ""]
    if space:
        lines = [*lines[:2], f"It runs as the Space [{space}](https://huggingface.co/spaces/{space}).", "", *lines[2:]]
    return "\n".join([*lines, "```python", quick_start(action_cls, url=url).rstrip(), "```"])


def example_action(action_cls: type[Any] | None) -> dict[str, Any]:
    """Make an action that fits a model, as far as its schema says."""
    if action_cls is None:
        return {}
    try:
        schema = json_schema(action_cls)
        fields, required = schema.get("properties", {}), schema.get("required", ())
        wanted = [name for name in fields if name in required or fields[name].get("default") is not None]
        schema["required"] = [name for name in wanted if name != "metadata"]
        example = make_example(schema, _example_text)
    except Exception:  # a class without a schema, or with one that no value satisfies
        return {}
    return example if isinstance(example, dict) else {}


def _example_text(schema: Mapping[str, Any]) -> str:
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    pattern = schema.get("pattern")
    text = next((one for one in ("hello", "a", "0", "A", "up") if pattern is None or re.search(pattern, one)), "hello")
    least: int = schema.get("minLength", 0)
    text += "." * max(0, least - len(text))
    most: int = schema.get("maxLength", len(text))
    return text[:most]
