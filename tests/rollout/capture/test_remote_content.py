"""Messages contain their images and files: an agent cannot have the endpoint fetch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PNG = "data:image/png;base64,iVBORw0KGgo="
REMOTE = "https://elsewhere.example/x.png"
CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"
GOOGLE = "beta/models/m:generateContent"


def chat(part: Any) -> Any:
    """Return a chat request with one part."""
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}


def responses(part: Any) -> Any:
    """Return a request for a response with one part."""
    return {"input": [{"role": "user", "content": [part]}]}


def anthropic(part: Any) -> Any:
    """Return a request for a message with one block."""
    return {"max_tokens": 9, "messages": [{"role": "user", "content": [part]}]}


def google(part: Any) -> Any:
    """Return a request for content with one part."""
    return {"contents": [{"role": "user", "parts": [part]}]}


NESTED = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {"type": "url"}}]}
NESTED["content"][0]["source"]["url"] = REMOTE  # type: ignore[index]
SCREENSHOT = {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}
SCREENSHOT["output"]["image_url"] = REMOTE  # type: ignore[index]
REFUSED = [
    (CHAT, chat({"type": "image_url", "image_url": {"url": REMOTE}}), "messages[0].content[1].image_url.url", "https"),
    (CHAT, chat({"type": "image_url", "image_url": "HTTP://x.example/"}), "messages[0].content[1].image_url", "http"),
    (CHAT, chat({"image_url": " \nhttps://x.example/"}), "messages[0].content[1].image_url", "https"),
    (CHAT, chat({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}), ".video_url.url", "file"),
    (CHAT, chat({"type": "audio_url", "audio_url": {"url": "/etc/passwd.png"}}), ".audio_url.url", "file"),
    (CHAT, chat({"type": "image", "image": [PNG, REMOTE]}), ".image[1]", "https"),
    (CHAT, chat({"type": "text", "text": "x", "image_url": REMOTE}), ".image_url", "https"),
    (CHAT, chat({"type": "file", "file": {"file_id": "file-1"}}), ".file.file_id", "file_id"),
    (CHAT, chat({"type": "file", "file": {"file_data": REMOTE}}), ".file.file_data", "https"),
    (CHAT, chat({"type": "input_audio", "input_audio": {"data": REMOTE}}), ".input_audio.data", "https"),
    (CHAT, chat({"type": "image_url", "image_urls": [PNG, REMOTE]}), ".image_urls[1]", "https"),
    (CHAT, chat({"images": [REMOTE]}), ".images[0]", "https"),
    (CHAT, chat({"type": "image_url", "image_url": {"href": REMOTE}}), ".image_url.href", "https"),
    (CHAT, chat({"type": "media", "source": "S3://bucket/x.png"}), ".source", "s3"),
    (CHAT, chat({"type": "image_url", "media": {"path": " file:///etc/passwd"}}), ".media.path", "file"),
    (RESPONSES, responses({"type": "input_file", "file_path": REMOTE}), "input[0].content[0].file_path", "https"),
    (MESSAGES, anthropic({"type": "image", "source": {"type": "s3", "location": REMOTE}}), ".source.location", "https"),
    (RESPONSES, responses({"type": "input_image", "image_url": REMOTE}), "input[0].content[0].image_url", "https"),
    (RESPONSES, responses({"type": "input_file", "file_url": REMOTE}), "input[0].content[0].file_url", "https"),
    (RESPONSES, responses({"type": "input_file", "file_id": "file-1"}), "input[0].content[0].file_id", "file_id"),
    (RESPONSES, {"input": [SCREENSHOT]}, "input[0].output.image_url", "https"),
    (MESSAGES, anthropic({"type": "image", "source": {"type": "url", "url": REMOTE}}), ".source.url", "https"),
    (MESSAGES, anthropic({"type": "document", "source": {"type": "url", "url": REMOTE}}), ".source.url", "https"),
    (MESSAGES, anthropic({"type": "image", "source": {"type": "file", "file_id": "f"}}), ".source.file_id", "file_id"),
    (MESSAGES, anthropic(NESTED), "messages[0].content[0].content[0].source.url", "https"),
    (GOOGLE, google({"fileData": {"mimeType": "image/png", "fileUri": "gs://b/x"}}), ".fileData.fileUri", "gs"),
    (GOOGLE, google({"file_data": {"mime_type": "image/png", "file_uri": REMOTE}}), ".file_data.file_uri", "https"),
]


@pytest.mark.parametrize(("path", "body", "place", "scheme"), REFUSED)
def test_content_that_the_endpoint_would_fetch_is_refused_unless_the_model_allows_its_scheme(
    open_agent: Callable[..., Any], engine: Any, path: str, body: Any, place: str, scheme: str
) -> None:
    agent = open_agent(dialect="anthropic" if path == MESSAGES else "openai_chat")
    response = agent.client.post(f"{agent.client.base_url}".rstrip("/") + path, json=body, headers=agent.headers)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert f"{place} refers to remote content: " in message
    assert message.endswith("send the content in a data: URL")
    assert engine.requests == []
    assert (agent.capture.calls(), agent.capture.stats().calls) == ([], 0)
    agent = open_agent(content_schemes=("data", scheme))
    response = agent.client.post(f"{agent.client.base_url}".rstrip("/") + path, json=body, headers=agent.headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}})),
        (CHAT, chat({"type": "file", "file": {"file_data": "iVBORw0KGgo=", "filename": "https://x"}})),
        (CHAT, chat({"type": "input_audio", "input_audio": {"data": "iVBORw0KGgo=", "format": "wav"}})),
        (CHAT, chat({"type": "text", "text": f"look at {REMOTE}"})),
        (
            CHAT,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": REMOTE,
                        "tool_calls": [{"id": "c", "function": {"name": "get", "arguments": f'{{"url":"{REMOTE}"}}'}}],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": REMOTE},
                ]
            },
        ),
        (RESPONSES, responses({"type": "input_image", "image_url": PNG})),
        (RESPONSES, {"input": REMOTE, "instructions": REMOTE}),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": REMOTE}]}),
        (
            RESPONSES,
            responses({"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "url": REMOTE}]}),
        ),
        (MESSAGES, anthropic({"type": "document", "source": {"type": "text", "data": REMOTE}})),
        (MESSAGES, anthropic({"type": "tool_use", "id": "t", "name": "get", "input": {"url": REMOTE, "image": "x"}})),
        (MESSAGES, anthropic({"type": "search_result", "source": REMOTE, "title": REMOTE, "content": []})),
        (GOOGLE, google({"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}})),
        (GOOGLE, google({"functionCall": {"name": "get", "args": {"url": REMOTE}}})),
        (GOOGLE, google({"functionResponse": {"name": "get", "response": {"url": REMOTE}}})),
    ],
)
def test_content_in_the_message_and_addresses_in_texts_and_tool_values_pass(
    open_agent: Callable[..., Any], path: str, body: Any
) -> None:
    agent = open_agent()
    response = agent.client.post(f"{agent.client.base_url}".rstrip("/") + path, json=body, headers=agent.headers)
    assert response.status_code == 200, response.text
    assert len(agent.capture.calls()) == 1
