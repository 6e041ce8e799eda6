"""Texts, images and thoughts of messages, from one dialect to another.

    chat        {"type": "text", "text": ...}         {"type": "image_url", "image_url": {"url": ...}}
    responses   {"type": "input_text", "text": ...}   {"type": "input_image", "image_url": ...}
    Anthropic   {"type": "text", "text": ...}         {"type": "image", "source": {"type": "base64", ...}}
    Google      {"text": ...}                         {"inlineData": {"mimeType": ..., "data": ...}}

What has no counterpart is left out. Values only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Any

from ..encoding import Json
from .dialect import as_dict, as_list, dicts_in

ChatContent = str | list[Json]
"""The content of a chat message: plain text where it has nothing else."""
_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
_DETAILS = ("auto", "low", "high")


def is_image_mime_type(mime_type: object) -> bool:
    """Say whether a media type is that of an image."""
    return isinstance(mime_type, str) and mime_type.lower().startswith("image/")


def make_data_url(mime_type: str, data: str) -> str:
    """Return base64 data as an address; what is one already stays as it is."""
    return data if data.startswith("data:") else f"data:{mime_type};base64,{data}"


def parse_data_url(url: str) -> tuple[str, str] | None:
    """Return media type and base64 data of an image's address; None for any other address."""
    match = _DATA_URL.fullmatch(url)
    return (match[1], match[2]) if match is not None and is_image_mime_type(match[1]) else None


# chat


def openai_text_block(text: str) -> Json:
    """Return a text as a part of a chat message."""
    return {"type": "text", "text": text}


def openai_image_url_block(url: str, *, detail: object = None) -> Json:
    """Return an image as a part of a chat message."""
    image = {"url": url, "detail": detail} if detail in _DETAILS else {"url": url}
    return {"type": "image_url", "image_url": image}


def openai_image_url(block: Json) -> str | None:
    """Return the address of a part's image."""
    image = block.get("image_url")
    return _text(image) or _text(as_dict(image).get("url"))


def openai_image_detail(block: Json) -> str | None:
    """Return how closely a part's image is to be looked at."""
    return _text(as_dict(block.get("image_url")).get("detail")) or _text(block.get("detail"))


def openai_content_from_text_and_images(parts: list[Json], *, text_separator: str = "\n") -> ChatContent:
    """Return parts as the content of a chat message: one text where there is no image."""
    if any(part.get("type") == "image_url" for part in parts):
        return parts
    texts = [part.get("text", "") for part in parts if part.get("type") == "text"]
    return text_separator.join(text for text in texts if isinstance(text, str))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts_of(content: object, read: Callable[[Json], list[Json]]) -> ChatContent:
    """Read a content, block by block, as that of a chat message."""
    if not isinstance(content, list):
        return str(content) if content else ""
    parts: list[Json] = []
    for block in content:
        if isinstance(block, str):
            parts.append(openai_text_block(block))
        elif isinstance(block, dict):
            parts += read(block)
    return openai_content_from_text_and_images(parts)


def _text_part(text: object) -> list[Json]:
    return [openai_text_block(text)] if isinstance(text, str) else []


# responses


def openai_responses_input_content_to_chat(content: object) -> ChatContent:
    """Return the content of an input item as that of a chat message."""
    return _texts_of(content, _responses_block)


def _responses_block(block: Json) -> list[Json]:
    kind, url = block.get("type"), openai_image_url(block)
    if kind in ("input_text", "output_text", "text"):
        return _text_part(block.get("text"))
    if kind in ("input_image", "image_url") and url:
        return [openai_image_url_block(url, detail=block.get("detail"))]
    return []


# Anthropic


def anthropic_content_to_openai_chat(content: object) -> ChatContent:
    """Return the content of an Anthropic message as that of a chat message: its texts, images and text documents."""
    return _texts_of(content, _anthropic_block)


def _anthropic_block(block: Json) -> list[Json]:
    kind = block.get("type")
    if kind == "text":
        return _text_part(block.get("text"))
    if kind == "image":
        image = anthropic_image_to_openai_chat(block)
        return [image] if image is not None else []
    document = anthropic_document_to_text(block) if kind == "document" else ""
    return [openai_text_block(document)] if document else []


def anthropic_document_to_text(block: Json) -> str:
    """Return the text of a document; a document that is not text has none."""
    source = as_dict(block.get("source"))
    if source.get("type") == "text":
        return _text(source.get("data")) or ""
    if source.get("type") != "content":
        return ""
    texts = [inner.get("text") for inner in dicts_in(source.get("content")) if inner.get("type") == "text"]
    return "\n".join(text for text in texts if isinstance(text, str))


def anthropic_image_to_openai_chat(block: Json) -> Json | None:
    """Return an image as a part of a chat message; None for one that cannot be read."""
    source = as_dict(block.get("source"))
    mime_type, data = source.get("media_type") or source.get("mediaType"), _text(source.get("data"))
    if source.get("type") == "base64" and isinstance(mime_type, str) and is_image_mime_type(mime_type) and data:
        return openai_image_url_block(make_data_url(mime_type, data))
    url = _text(source.get("url"))
    return openai_image_url_block(url) if source.get("type") == "url" and url else None


def openai_chat_content_to_anthropic_blocks(content: object) -> list[Json]:
    """Return the content of a chat message as Anthropic's blocks, at least one."""
    return _converted(content, openai_text_block, openai_chat_image_to_anthropic)


def openai_chat_image_to_anthropic(part: Json) -> Json | None:
    """Return an image of a chat message as a block; None where it has no address."""
    url = openai_image_url(part)
    if url is None:
        return None
    inline = parse_data_url(url)
    if inline is None:
        return {"type": "image", "source": {"type": "url", "url": url}}
    return {"type": "image", "source": {"type": "base64", "media_type": inline[0], "data": inline[1]}}


def _converted(content: object, text: Callable[[str], Json], image: Callable[[Json], Json | None]) -> list[Json]:
    if not isinstance(content, list):
        return [text(str(content) if content else "")]
    parts: list[Json] = []
    for part in content:
        value = part if isinstance(part, str) else as_dict(part).get("text")
        kind = "text" if isinstance(part, str) else as_dict(part).get("type")
        if kind == "text" and isinstance(value, str):
            parts.append(text(value))
        elif kind == "image_url":
            converted = image(part)
            parts += [converted] if converted is not None else []
    return parts or [text("")]


# Google, whose clients write names as inlineData or as inline_data


def google_content_parts_to_openai_chat(parts: object) -> ChatContent:
    """Return Google's parts as the content of a chat message: texts and images, without thoughts."""
    return _texts_of(as_list(parts), _google_part)


def _google_part(part: Json) -> list[Json]:
    if part.get("thought") is True:
        return []
    if isinstance(part.get("text"), str):
        return _text_part(part["text"])
    image = google_part_to_openai_chat(part)
    return [image] if image is not None else []


def google_part_to_openai_chat(part: Json) -> Json | None:
    """Return a part with an image as a part of a chat message; None for any other part."""
    inline = as_dict(part.get("inlineData") or part.get("inline_data"))
    mime_type, data = inline.get("mimeType") or inline.get("mime_type"), _text(inline.get("data"))
    if isinstance(mime_type, str) and is_image_mime_type(mime_type) and data:
        return openai_image_url_block(make_data_url(mime_type, data))
    file = as_dict(part.get("fileData") or part.get("file_data"))
    url = _text(file.get("fileUri") or file.get("file_uri"))
    is_image = is_image_mime_type(file.get("mimeType") or file.get("mime_type"))
    return openai_image_url_block(url) if is_image and url else None


def openai_chat_content_to_google_parts(content: object) -> list[Json]:
    """Return the content of a chat message as Google's parts, at least one."""
    return _converted(content, lambda text: {"text": text}, openai_chat_image_to_google)


def openai_chat_image_to_google(part: Json) -> Json | None:
    """Return an image of a chat message as a part; None where it has no address."""
    url = openai_image_url(part)
    if url is None:
        return None
    inline = parse_data_url(url)
    if inline is None:
        return {"file_data": {"mime_type": "image/jpeg", "file_uri": url}}
    return {"inline_data": {"mime_type": inline[0], "data": inline[1]}}


# Thoughts. Chat completions have them as `reasoning_content`. Others have a signature with them, or hide them: clients
# only send back what they got, so any text will do that stands for the thought.

_SIGNATURE = "sg_oe_"
_HIDDEN = "oe:"


def make_signature(reasoning_text: str) -> str:
    """Return a signature for a thought in an Anthropic message; none for none."""
    if not reasoning_text:
        return ""
    digest = hashlib.sha256(reasoning_text.encode()).digest()
    return _SIGNATURE + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def make_google_signature(reasoning_text: str) -> str:
    """Return a signature for a thought in a Google part, whose clients read it as base64."""
    return base64.b64encode(make_signature(reasoning_text).encode()).decode()


def encrypt_reasoning(reasoning_text: str) -> str:
    """Return a thought as the `encrypted_content` of a response; it is only encoded."""
    return _HIDDEN + base64.urlsafe_b64encode(reasoning_text.encode()).decode() if reasoning_text else ""


def decrypt_reasoning(encrypted: object) -> str:
    """Return the thought in what `encrypt_reasoning` made; empty for anything else."""
    if not isinstance(encrypted, str) or not encrypted.startswith(_HIDDEN):
        return ""
    try:
        return base64.urlsafe_b64decode(encrypted[len(_HIDDEN) :]).decode()
    except ValueError:  # no base64, or no text
        return ""


def extract_reasoning_from_anthropic_content(content: object) -> str:
    """Return the thoughts in an Anthropic message."""
    return _joined(block.get("thinking") for block in dicts_in(content) if block.get("type") == "thinking")


def extract_reasoning_from_gemini_parts(parts: object) -> str:
    """Return the thoughts in Google's parts."""
    return _joined(part.get("text") for part in dicts_in(parts) if part.get("thought") is True)


def extract_reasoning_from_responses_item(item: Json) -> str:
    """Return the thought of a reasoning item: its content, else its summary, else what it hides."""
    for name in ("content", "summary"):
        text = _joined(part.get("text") for part in dicts_in(item.get(name)))
        if text:
            return text
    return decrypt_reasoning(item.get("encrypted_content"))


def _joined(texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)
