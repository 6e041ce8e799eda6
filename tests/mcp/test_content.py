"""What tools, resources and prompts may contain besides text, as MCP writes it; the conformance suite's environment
serves as the sample."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from mcp.types import TextContent

from openenv.env.tools.source import ContentBlock
from servers import Serve

SAMPLE = Path(__file__).parent / "conformance_env.py"


@pytest.fixture(scope="module")
def sample() -> Any:
    """The suite's environment."""
    spec = importlib.util.spec_from_file_location("conformance_env", SAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def url(serve_once: Serve, sample: Any) -> str:
    """It served."""
    return str(serve_once(sample.app).url)


@pytest.fixture(params=["handshake", "modern"])
def client(request: pytest.FixtureRequest, url: str) -> Any:
    """A client of either era."""
    return request.getfixturevalue(request.param)(url)


def test_blocks_of_every_kind_arrive_as_mcp_writes_them(client: Any, sample: Any) -> None:
    (image,) = client.call("test_image_content").result["content"]
    assert image == {"type": "image", "data": sample.PNG, "mimeType": "image/png"}
    (audio,) = client.call("test_audio_content").result["content"]
    assert audio == {"type": "audio", "data": sample.WAV, "mimeType": "audio/wav"}
    (embedded,) = client.call("test_embedded_resource").result["content"]
    assert embedded["type"] == "resource"
    assert embedded["resource"] == {
        "uri": "test://embedded-resource",
        "mimeType": "text/plain",
        "text": "This is an embedded resource content.",
    }
    mixed = client.call("test_multiple_content_types").result["content"]
    assert [block["type"] for block in mixed] == ["text", "image", "resource"]


def test_a_failure_that_a_tool_words_itself_arrives_in_its_words(client: Any) -> None:
    answer = client.call("test_error_handling")
    assert answer.result["isError"] is True
    assert answer.text == "This tool intentionally returns an error for testing"


def test_binary_resources_and_templates_arrive(client: Any, sample: Any) -> None:
    (binary,) = client.request("resources/read", {"uri": "test://static-binary"}).result["contents"]
    assert (binary["mimeType"], binary["blob"]) == ("image/png", sample.PNG)
    (filled,) = client.request("resources/read", {"uri": "test://template/7/data"}).result["contents"]
    assert '"id": "7"' in filled["text"]


def test_prompts_with_resources_and_images_arrive(client: Any, sample: Any) -> None:
    params = {"name": "test_prompt_with_embedded_resource", "arguments": {"resourceUri": "test://a"}}
    resource, words = client.request("prompts/get", params).result["messages"]
    assert resource["content"]["resource"]["uri"] == "test://a"
    assert words["content"]["type"] == "text"
    image, _ = client.request("prompts/get", {"name": "test_prompt_with_image"}).result["messages"]
    assert (image["content"]["type"], image["content"]["data"]) == ("image", sample.PNG)


def test_a_schema_is_listed_as_its_author_wrote_it(client: Any, sample: Any) -> None:
    tools = {tool["name"]: tool for tool in client.request("tools/list").result["tools"]}
    assert tools["json_schema_2020_12_tool"]["inputSchema"] == sample.SCHEMA_2020_12


def test_what_a_block_says_about_itself_is_written_once_in_either_protocol() -> None:
    block = ContentBlock.read(TextContent.model_validate({"type": "text", "text": "a", "_meta": {"k": 1}}))
    assert block == {"type": "text", "text": "a", "annotations": None, "meta": {"k": 1}}
    assert block.as_mcp() == {"type": "text", "text": "a", "_meta": {"k": 1}}
