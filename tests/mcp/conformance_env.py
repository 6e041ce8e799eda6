"""What the MCP conformance suite wants a server to have: tools, resources and prompts with names and contents that the
suite fixes. Served by `scripts/mcp_conformance`; works with either major of FastMCP.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.prompts import Message
from fastmcp.tools import Tool
from fastmcp.tools.base import ToolResult
from mcp.types import AudioContent, EmbeddedResource, ImageContent, TextContent

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.env.mcp_environment import MCPEnvironment
from openenv.types import Action, Observation, State

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WAV = base64.b64encode(
    b"RIFF$\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data\0\0\0\0",
).decode()


def text(words: str) -> Any:
    """A block of text."""
    return TextContent.model_validate({"type": "text", "text": words})


def image() -> Any:
    """A picture of one pixel."""
    return ImageContent.model_validate({"type": "image", "data": PNG, "mimeType": "image/png"})


def embedded(uri: str, mime_type: str, words: str) -> Any:
    """A resource within a result."""
    resource = {"uri": uri, "mimeType": mime_type, "text": words}
    return EmbeddedResource.model_validate({"type": "resource", "resource": resource})


# -- tools --------------------------------------------------------------------------------------------------------


def test_simple_text() -> str:
    """Return text."""
    return "This is a simple text response for testing."


def test_image_content() -> ToolResult:
    """Return an image."""
    return ToolResult(content=[image()])


def test_audio_content() -> ToolResult:
    """Return a sound."""
    sound = AudioContent.model_validate({"type": "audio", "data": WAV, "mimeType": "audio/wav"})
    return ToolResult(content=[sound])


def test_embedded_resource() -> ToolResult:
    """Return a resource."""
    words = "This is an embedded resource content."
    return ToolResult(content=[embedded("test://embedded-resource", "text/plain", words)])


def test_multiple_content_types() -> ToolResult:
    """Return text, an image and a resource."""
    data = embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
    return ToolResult(content=[text("Multiple content types test:"), image(), data])


async def test_tool_with_logging(ctx: Context) -> str:
    """Log three messages."""
    for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.info(words)
        await asyncio.sleep(0.05)
    return "logged"


async def test_logging_tool(ctx: Context) -> str:
    """Log one message."""
    await ctx.info("logged")
    return "logged"


async def test_tool_with_progress(ctx: Context) -> str:
    """Tell progress."""
    for done in (0, 50, 100):
        await ctx.report_progress(done, 100)
        await asyncio.sleep(0.05)
    return "done"


def test_error_handling() -> str:
    """Fail."""
    raise ToolError("This tool intentionally returns an error for testing")


def json_schema_2020_12_tool(
    name: str = "", address: Any = None, contactMethod: str = "", phone: str = "", email: str = ""
) -> str:
    """Have a schema with keywords of JSON Schema 2020-12."""
    return f"{name} {address} {contactMethod} {phone} {email}"


SCHEMA_2020_12 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


TOOLS = (
    test_simple_text,
    test_image_content,
    test_audio_content,
    test_embedded_resource,
    test_multiple_content_types,
    test_tool_with_logging,
    test_logging_tool,
    test_tool_with_progress,
    test_error_handling,
)


# -- resources ----------------------------------------------------------------------------------------------------


def static_text() -> str:
    """A resource that is text."""
    return "This is the content of the static text resource."


def static_binary() -> bytes:
    """A resource that is an image."""
    return base64.b64decode(PNG)


def template(id: str) -> str:
    """A resource with a parameter."""
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


# -- prompts ------------------------------------------------------------------------------------------------------


def test_simple_prompt() -> str:
    """A prompt."""
    return "This is a simple prompt for testing."


def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """A prompt with arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:
    """A prompt with a resource."""
    resource = embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
    return [Message(resource), Message("Please process the embedded resource above.")]


def test_prompt_with_image() -> list[Message]:
    """A prompt with an image."""
    return [Message(image()), Message("Please analyze the image above.")]


PROMPTS = (
    test_simple_prompt,
    test_prompt_with_arguments,
    test_prompt_with_embedded_resource,
    test_prompt_with_image,
)


def new_server() -> FastMCP:
    """Make a server with all of them."""
    server: FastMCP = FastMCP("conformance", dereference_schemas=False)
    for tool in TOOLS:
        server.tool(tool, output_schema=None)
    described = Tool.from_function(json_schema_2020_12_tool, output_schema=None)
    server.add_tool(described.model_copy(update={"parameters": SCHEMA_2020_12}))
    for prompt in PROMPTS:
        server.prompt(prompt)
    server.resource("test://static-text", mime_type="text/plain")(static_text)
    server.resource("test://static-binary", mime_type="image/png")(static_binary)
    server.resource("test://template/{id}/data", mime_type="application/json")(template)
    return server


class ConformanceEnv(MCPEnvironment):
    """An environment of what the suite asks for."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__(new_server())

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Begin."""
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("there are only tools here")

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


app = create_app(ConformanceEnv, CallToolAction, CallToolObservation, env_name="conformance", max_concurrent_envs=64)
