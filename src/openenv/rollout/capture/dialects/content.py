"""Translate texts, images and thoughts of messages between dialects.

    chat        {"type": "text", "text": ...}         {"type": "image_url", "image_url": {"url": ...}}
    responses   {"type": "input_text", "text": ...}   {"type": "input_image", "image_url": ...}
    Anthropic   {"type": "text", "text": ...}         {"type": "image", "source": {"type": "base64", ...}}
    Google      {"text": ...}                         {"inlineData": {"mimeType": ..., "data": ...}}

Parts without a counterpart, such as audio, are left out. Values only, no IO.
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
"""The content of a chat message: a plain text, or a list of parts if it has images."""
_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
_DETAILS = ("auto", "low", "high")


def is_image_mime_type(mime_type: object) -> bool:
    """Return whether a value is the media type of an image, such as `image/png`."""
    return isinstance(mime_type, str) and mime_type.lower().startswith("image/")


def make_data_url(mime_type: str, data: str) -> str:
    """Return base64 data as a data URL; a data URL stays unchanged."""
    return data if data.startswith("data:") else f"data:{mime_type};base64,{data}"


def parse_data_url(url: str) -> tuple[str, str] | None:
    """Return the media type and the base64 data of an image's data URL; None for any other URL."""
    match = _DATA_URL.fullmatch(url)
    return (match[1], match[2]) if match is not None and is_image_mime_type(match[1]) else None


# Chat completions: {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail": "low"}}


def openai_text_block(text: str) -> Json:
    """Return a text as a part of a chat message."""
    return {"type": "text", "text": text}


def openai_image_url_block(url: str, *, detail: object = None) -> Json:
    """Return an image as a part of a chat message."""
    image = {"url": url, "detail": detail} if detail in _DETAILS else {"url": url}
    return {"type": "image_url", "image_url": image}


def openai_image_url(block: Json) -> str | None:
    """Return the URL of an image part; None without one."""
    # {"image_url": {"url": "..."}} in chat completions, {"image_url": "..."} in responses
    image = block.get("image_url")
    return _text(image) or _text(as_dict(image).get("url"))


def openai_image_detail(block: Json) -> str | None:
    """Return the detail level of an image part: `auto`, `low` or `high`."""
    return _text(as_dict(block.get("image_url")).get("detail")) or _text(block.get("detail"))


def openai_content_from_text_and_images(parts: list[Json], *, text_separator: str = "\n") -> ChatContent:
    """Return parts as the content of a chat message: a single text if no part is an image."""
    # Many chat templates accept only text. A list of text parts would also change the prompt in some of them.
    if any(part.get("type") == "image_url" for part in parts):
        return parts
    texts = [part.get("text", "") for part in parts if part.get("type") == "text"]
    return text_separator.join(text for text in texts if isinstance(text, str))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts_of(content: object, read: Callable[[Json], list[Json]]) -> ChatContent:
    """Translate a content to chat completions, block by block."""
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


# Responses: {"type": "input_text", "text": ...}, {"type": "input_image", "image_url": "...", "detail": "auto"}


def openai_responses_input_content_to_chat(content: object) -> ChatContent:
    """Translate the content of an input item to chat completions."""
    return _texts_of(content, _responses_block)


def _responses_block(block: Json) -> list[Json]:
    kind, url = block.get("type"), openai_image_url(block)
    if kind in ("input_text", "output_text", "text"):
        return _text_part(block.get("text"))
    if kind in ("input_image", "image_url") and url:
        return [openai_image_url_block(url, detail=block.get("detail"))]
    return []


# Anthropic: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ...}}, or
# {"source": {"type": "url", "url": ...}}; documents are {"type": "document", "source": {"type": "text", "data": ...}}


def anthropic_content_to_openai_chat(content: object) -> ChatContent:
    """Translate the content of an Anthropic message to chat completions: texts, images and text documents."""
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
    """Return the text of a document; empty for other documents, such as PDF."""
    source = as_dict(block.get("source"))
    if source.get("type") == "text":
        return _text(source.get("data")) or ""
    if source.get("type") != "content":
        return ""
    texts = [inner.get("text") for inner in dicts_in(source.get("content")) if inner.get("type") == "text"]
    return "\n".join(text for text in texts if isinstance(text, str))


def anthropic_image_to_openai_chat(block: Json) -> Json | None:
    """Return an Anthropic image as a part of a chat message; None if it is invalid."""
    source = as_dict(block.get("source"))
    mime_type, data = source.get("media_type") or source.get("mediaType"), _text(source.get("data"))
    if source.get("type") == "base64" and isinstance(mime_type, str) and is_image_mime_type(mime_type) and data:
        return openai_image_url_block(make_data_url(mime_type, data))
    url = _text(source.get("url"))
    return openai_image_url_block(url) if source.get("type") == "url" and url else None


def openai_chat_content_to_anthropic_blocks(content: object) -> list[Json]:
    """Return the content of a chat message as Anthropic blocks, at least one."""
    return _converted(content, openai_text_block, openai_chat_image_to_anthropic)


def openai_chat_image_to_anthropic(part: Json) -> Json | None:
    """Return an image of a chat message as an Anthropic block; None if it has no URL."""
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
    return parts or [text("")]  # both APIs refuse an empty list


# Google: its REST clients write `inlineData`, its Python clients `inline_data`; both are accepted everywhere.


def google_content_parts_to_openai_chat(parts: object) -> ChatContent:
    """Translate Google's parts to chat completions: texts and images, without thoughts."""
    return _texts_of(as_list(parts), _google_part)


def _google_part(part: Json) -> list[Json]:
    if part.get("thought") is True:
        return []
    if isinstance(part.get("text"), str):
        return _text_part(part["text"])
    image = google_part_to_openai_chat(part)
    return [image] if image is not None else []


def google_part_to_openai_chat(part: Json) -> Json | None:
    """Return a Google image as a part of a chat message; None for any other part."""
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
    """Return an image of a chat message as a Google part; None if it has no URL."""
    url = openai_image_url(part)
    if url is None:
        return None
    inline = parse_data_url(url)
    if inline is None:
        # The API requires a media type, and a URL does not tell it.
        return {"file_data": {"mime_type": "image/jpeg", "file_uri": url}}
    return {"inline_data": {"mime_type": inline[0], "data": inline[1]}}


# Thoughts. Chat completions have the field `reasoning_content`. The other dialects sign or encrypt thoughts:
#
#     Anthropic   {"type": "thinking", "thinking": "...", "signature": "..."}
#     Google      {"thought": true, "text": "...", "thoughtSignature": "..."}
#     responses   {"type": "reasoning", "content": [...], "encrypted_content": "..."}
#
# Clients only send these values back, unread. So any text in the right form is accepted.

_SIGNATURE = "sg_oe_"
_HIDDEN = "oe:"


def make_signature(reasoning_text: str) -> str:
    """Return the signature of a thought in an Anthropic message; empty for an empty thought."""
    if not reasoning_text:
        return ""
    digest = hashlib.sha256(reasoning_text.encode()).digest()
    return _SIGNATURE + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def make_google_signature(reasoning_text: str) -> str:
    """Return the signature of a thought in a Google part: base64, because Google's clients decode it."""
    return base64.b64encode(make_signature(reasoning_text).encode()).decode()


def encrypt_reasoning(reasoning_text: str) -> str:
    """Return a thought as the `encrypted_content` of a response. It is encoded, not encrypted."""
    # With `store: false`, a client sends the item back without its content; the thought must survive in this field.
    return _HIDDEN + base64.urlsafe_b64encode(reasoning_text.encode()).decode() if reasoning_text else ""


def decrypt_reasoning(encrypted: object) -> str:
    """Return the thought in a value of `encrypt_reasoning`; empty for other values."""
    if not isinstance(encrypted, str) or not encrypted.startswith(_HIDDEN):
        return ""
    try:
        return base64.urlsafe_b64decode(encrypted[len(_HIDDEN) :]).decode()
    except ValueError:  # invalid base64, or invalid UTF-8
        return ""


def extract_reasoning_from_anthropic_content(content: object) -> str:
    """Return the thoughts in an Anthropic message."""
    return _joined(block.get("thinking") for block in dicts_in(content) if block.get("type") == "thinking")


def extract_reasoning_from_gemini_parts(parts: object) -> str:
    """Return the thoughts in Google's parts."""
    return _joined(part.get("text") for part in dicts_in(parts) if part.get("thought") is True)


def extract_reasoning_from_responses_item(item: Json) -> str:
    """Return the thought of a reasoning item: its content, its summary or its encrypted content."""
    for name in ("content", "summary"):
        text = _joined(part.get("text") for part in dicts_in(item.get(name)))
        if text:
            return text
    return decrypt_reasoning(item.get("encrypted_content"))


def _joined(texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)
