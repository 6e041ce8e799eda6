"""The description of the page: names, schemas, tools, the action's form fields, README and quick start.

Most of it is built once. Knows the service and descriptions; must not know requests or visitors.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from openenv import settings
from openenv._lazy import load_package_version
from openenv.env.binding import bind, factory_name
from openenv.env.environment import Environment, class_metadata
from openenv.protocol.schema import json_schema, resolve_reference
from openenv.types import EnvironmentMetadata, ServerMode

from ..access import Role
from ..app import PageArguments
from ..mcp.tool_calls import NoTools
from ..service import EnvService
from .quickstart import example_action, quick_start
from .visitor_actions import VisitorActions

logger = logging.getLogger(__name__)

CUSTOM_PATH = "gradio/"
_PATIENCE_S = 5.0
_LONG_TEXT = 100
_LONG_NAMES = ("message", "code")
_KINDS = {"boolean": "checkbox", "integer": "number", "number": "number", "string": "text"}
_FRONT_MATTER = re.compile(r"\A---\s*\n.*?\n---\s*(?:\n|\Z)", re.S)
_MOST_CHARS = 1_000_000


class PageDescription:
    """Describes the page of one served environment; its README may be in `folder`."""

    def __init__(
        self, service: EnvService, actions: VisitorActions, arguments: PageArguments, folder: Path | None
    ) -> None:
        self._service = service
        self._actions = actions
        self._arguments = arguments
        self._folder = folder
        self._metadata: EnvironmentMetadata | None = None
        self._tools: list[dict[str, Any]] | None = None
        self._knows_tools = False
        self._finding = asyncio.Lock()
        self._asking: dict[str, asyncio.Task[Any]] = {}
        self._html: str | None = None

    async def metadata(self) -> EnvironmentMetadata:
        """Return the answer of `/metadata` with a README; only a name if the environment cannot be built."""
        if self._metadata is None:
            service = self._service
            env_cls = service.manager.env_cls
            readme = await asyncio.to_thread(find_readme, service.env_name, self._folder)
            try:
                # The default answer depends on the class alone, so a slow environment need not be built for it.
                if env_cls is not None and getattr(env_cls, "get_metadata", None) is Environment.get_metadata:
                    metadata = await asyncio.to_thread(class_metadata, env_cls)
                    metadata.name = service.env_name or metadata.name
                else:
                    metadata = await self._ask("metadata", service.metadata)
            except Exception:
                logger.warning("the environment cannot describe itself", exc_info=True)
                plain = await asyncio.to_thread(load_environment_metadata, service.factory, service.env_name)
                return plain.model_copy(update={"readme_content": readme})
            self._metadata = metadata.model_copy(update={"readme_content": metadata.readme_content or readme})
        return self._metadata

    async def describe(self, role: Role, *, url: str, asks_for_token: bool) -> dict[str, Any]:
        """Return the response to `GET /web/page`."""
        async with self._finding:  # one environment is built for all concurrent visitors
            metadata = await self.metadata()
            tools = await self._find_tools()
            if self._html is None and metadata.readme_content:
                self._html = await asyncio.to_thread(readme_html, metadata.readme_content)
        service = self._service
        plays = service.mode is ServerMode.SIMULATION
        action_cls = service.action_cls
        text = quick_start(
            action_cls, url=url, asks_for_token=asks_for_token, plays=plays, has_tools=_steps_tools(action_cls, tools)
        )
        return {
            "title": title_of(metadata, self._arguments.title),
            "name": metadata.name,
            "description": metadata.description,
            "version": metadata.version,
            "author": metadata.author,
            "mode": service.mode.value,
            "role": role.value,
            "asks_for_token": asks_for_token,
            "is_chat": is_chat(action_cls),
            "max_sessions": service.manager.max_sessions,
            "action": {
                "schema": {} if action_cls is None else service.schema().action,
                "fields": action_fields(action_cls),
                "example": example_action(action_cls),
            },
            "reset": {"schema": reset_schema(service.manager.env_cls)},
            "tools": tools,
            "readme_html": self._html,
            "quick_start": {"text": text},
            "openenv_version": load_package_version(),
            "docs_url": None if asks_for_token else "../docs",
            "has_rollouts": self._arguments.rollout_store is not None,
            "custom_tab": self._custom_tab() if role is Role.ORCHESTRATOR else None,
        }

    async def _ask(self, what: str, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Query an environment, one query at a time; if it hangs, the page appears without the answer.

        Raises:
            TimeoutError: The answer takes too long.
        """
        asking = self._asking.get(what)
        if asking is None:
            asking = self._asking[what] = asyncio.ensure_future(ask())
        done, _ = await asyncio.wait({asking}, timeout=_PATIENCE_S)
        if not done:
            raise TimeoutError(f"the environment has not described its {what} yet")
        self._asking.pop(what, None)
        return asking.result()

    def _custom_tab(self) -> dict[str, Any] | None:
        own = self._arguments
        if own.gradio_builder is None:
            return None
        shown = {"primary": own.tab_is_primary, "only": not own.shows_default}
        return {"name": own.tab_name, "href": CUSTOM_PATH, **shown}

    async def _find_tools(self) -> list[dict[str, Any]] | None:
        if not self._knows_tools:
            try:
                tools = await self._ask("tools", self._actions.tools)
            except NoTools:
                tools = None
            except Exception:
                logger.warning("the environment's tools cannot be listed", exc_info=True)
                return None
            self._tools = None if tools is None else [_tool(described) for described in tools]
            self._knows_tools = True
        return self._tools


def title_of(metadata: EnvironmentMetadata, override: str | None) -> str:
    """Return the page's title."""
    return override or f"OpenEnv Agentic Environment: {metadata.name}"


def _steps_tools(action_cls: type[Any] | None, tools: list[dict[str, Any]] | None) -> bool:
    """Return whether an environment has tools and its action has no fields to fill in."""
    own = [field for field in action_fields(action_cls) if field["name"] not in ("type", "tool_name", "arguments")]
    return tools is not None and not own


def _tool(described: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": described["name"],
        "title": described.get("title"),
        "description": described.get("description"),
        "input_schema": described.get("inputSchema") or described.get("input_schema") or {"type": "object"},
    }


def reset_schema(env_cls: type[Any] | None) -> dict[str, Any]:
    """Return the JSON schema of a reset's parameters."""
    properties: dict[str, Any] = {
        "seed": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": None, "title": "Seed"},
        "episode_id": {
            "anyOf": [{"type": "string", "maxLength": 255}, {"type": "null"}],
            "default": None,
            "title": "Episode Id",
        },
    }
    required: list[str] = []
    is_open = True
    if env_cls is not None:
        is_open = _add_parameters(env_cls, properties, required)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": is_open}


def _add_parameters(env_cls: type[Any], properties: dict[str, Any], required: list[str]) -> bool:
    """Add the parameters of a class's `reset`; return whether it accepts others as well."""
    try:
        method = getattr(env_cls, bind(env_cls).reset.name)
        parameters = list(inspect.signature(method, eval_str=True).parameters.values())
    except Exception:  # compiled code, or an annotation that this process cannot import
        return True
    named = [p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in named:
        if parameter.name in properties:
            continue
        schema = _schema_of(parameter.annotation)
        schema.setdefault("title", parameter.name.replace("_", " ").title())
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, (str, int, float, bool, list, dict, type(None))):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not is_open:
        taken = {p.name for p in named}
        for name in ("seed", "episode_id"):
            if name not in taken:
                del properties[name]
    return is_open


def _schema_of(annotation: Any) -> dict[str, Any]:
    if annotation is inspect.Parameter.empty:
        return {}
    try:
        return json_schema(annotation)
    except Exception:  # not a model
        try:
            return TypeAdapter(annotation).json_schema()
        except Exception:
            return {}


# -- form fields ------------------------------------------------------------------------------------------------------


def action_fields(action_cls: type[Any] | None) -> list[dict[str, Any]]:
    """Describe the fields of an action class except `metadata`, for custom pages; the standard page uses the schema."""
    if action_cls is None:
        return []
    try:
        schema = json_schema(action_cls)
    except Exception:  # a class that pydantic cannot describe has no form
        return []
    required = schema.get("required", ())
    return [
        _field(name, _resolved(described, schema), is_required=name in required)
        for name, described in schema.get("properties", {}).items()
        if name != "metadata"
    ]


def is_chat(action_cls: type[Any] | None) -> bool:
    """Return whether an action is a tokenized message: its field `tokens` is a tensor."""
    described = getattr(action_cls, "model_fields", {}).get("tokens")
    return described is not None and "Tensor" in str(described.annotation)


def _field(name: str, schema: Mapping[str, Any], *, is_required: bool) -> dict[str, Any]:
    description = schema.get("description", "")
    kind = _kind(name, schema)
    choices = schema.get("enum")
    if choices is None and "const" in schema:
        choices = [schema["const"]]
    return {
        "name": name,
        "type": kind,
        "required": is_required,
        "description": description,
        "default_value": schema.get("default"),
        "choices": choices,
        "min_value": schema.get("minimum", schema.get("exclusiveMinimum")),
        "max_value": schema.get("maximum", schema.get("exclusiveMaximum")),
        "min_length": schema.get("minLength"),
        "max_length": schema.get("maxLength"),
        "pattern": schema.get("pattern"),
        "placeholder": _placeholder(name, kind),
        "help_text": description or _help(name, kind),
    }


def _kind(name: str, schema: Mapping[str, Any]) -> str:
    lower = name.lower()
    if "tokens" in lower:
        return "tensor"
    if "enum" in schema or "const" in schema:
        return "select"
    kind = _KINDS.get(str(schema.get("type")), "text")
    is_long = schema.get("maxLength", 0) > _LONG_TEXT or any(word in lower for word in _LONG_NAMES)
    return "textarea" if kind == "text" and schema.get("type") == "string" and is_long else kind


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references and unwrap optional types."""
    for _ in range(8):  # a class may refer to itself
        schema = resolve_reference(schema, root)
        options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
        if len(options) != 1:
            break
        schema = {**options[0], **{key: value for key, value in schema.items() if key != "anyOf"}}
    return schema


def _placeholder(name: str, kind: str) -> str:
    words = name.replace("_", " ")
    if kind == "tensor":
        return "Token ids, separated by commas: 1, 2, 3"
    return f"{words[:1].upper()}{words[1:]}"


def _help(name: str, kind: str) -> str:
    lower = name.lower()
    if kind == "tensor":
        return "The ids of the tokens, as whole numbers separated by commas"
    if "code" in lower:
        return "Source code that the environment runs"
    if "message" in lower:
        return "What to say"
    return ""


# -- README -----------------------------------------------------------------------------------------------------------


def load_environment_metadata(env: Any, env_name: str | None = None) -> EnvironmentMetadata:
    """Describe an environment: an instance by its own metadata, a class or factory by its name and README.

    Args:
        env: The environment, or its factory, which is not called.
        env_name: Its name, also for finding the README.
    """
    if isinstance(env, Environment):
        return env.get_metadata()
    while isinstance(env, functools.partial):
        env = env.func
    label = env.__name__ if inspect.isclass(env) else env_name or factory_name(env)
    return EnvironmentMetadata(
        name=env_name or label,
        description=f"{label} environment",
        version="1.0.0",
        readme_content=find_readme(env_name),
    )


def find_readme(env_name: str | None, folder: Path | None = None) -> str | None:
    """Return the text of an environment's README, if it has one; `folder` is the environment's folder."""
    for place in _places(env_name, folder):
        try:
            if place.is_file():
                return place.read_text(encoding="utf-8")
        except (OSError, ValueError):  # unreadable, or not text
            continue
    return None


def _places(env_name: str | None, folder: Path | None) -> Iterator[Path]:
    configured = settings.readme_path()
    if configured is not None:
        yield configured
    is_plain = env_name is not None and not {"/", "\\", "\0"}.intersection(env_name) and env_name not in (".", "..")
    if is_plain:
        yield Path("envs") / str(env_name) / "README.md"
    if folder is not None:
        yield folder / "README.md"
    yield Path("/app/env/README.md")
    yield Path("/app/README.md")
    if is_plain:
        yield Path("src/envs") / str(env_name) / "README.md"


def readme_html(text: str | None) -> str | None:
    """Render a README without its front matter. HTML is shown as text, so that no script can run."""
    if text is None or not text.strip():
        return None
    from markdown_it import MarkdownIt  # only the page needs it

    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.add_render_rule("link_open", _outward_link)
    rendered: str = parser.render(_FRONT_MATTER.sub("", text, count=1)[:_MOST_CHARS])
    return rendered


def _outward_link(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """Open links in a new tab, without a reference to this page."""
    if not str(tokens[index].attrGet("href") or "").startswith("#"):
        tokens[index].attrSet("target", "_blank")
        tokens[index].attrSet("rel", "noopener noreferrer")
    rendered: str = renderer.renderToken(tokens, index, options, env)
    return rendered
