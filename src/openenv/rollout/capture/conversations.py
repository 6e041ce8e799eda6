"""The agent's conversations in a recording as chat messages, for fine-tuning and preference pairs.

Messages of chat endpoints are exactly those that were sent and answered; those of other dialects are translated. Calls
that the agent abandoned, auxiliary calls such as a request for a title, and encrypted thoughts are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from .dialects.dialect import as_dict, dicts_in
from .encoding import Json
from .export import main_setting
from .graph import CallNode, build, setting_of
from .records import Call, Recording
from .training_trace import Conversation
from .transcript import TranscriptMessage, TranscriptPart, answer, question


def conversations(recording: Recording) -> list[Conversation]:
    """Return the agent's conversations; several if it compacted one, or has sub-agents of the same kind."""
    graph = build(recording.calls)
    main = main_setting(graph)
    leaves = sorted(graph.leaves, key=lambda leaf: leaf.number)
    paths = [leaf.path() for leaf in leaves if not leaf.discarded]
    found = (_conversation(path) for path in paths if setting_of(path[0].call) == main)
    return [each for each in found if each is not None]


def _conversation(path: list[CallNode]) -> Conversation | None:
    """Return the conversation of a path, up to the last whole answer; None without one."""
    calls = [node.call for node in path]
    while calls and (calls[-1].ended != "complete" or calls[-1].error is not None or not calls[-1].answer):
        calls.pop()
    if not calls:
        return None
    last = calls[-1]
    if last.endpoint_dialect != "openai_chat" and any(part.cut for part in _parts(last)):
        return None  # a text is too long for a transcript
    return Conversation([*_asked(last), _answered(last)], len(_asked(calls[0])), _tools(last))


def _parts(call: Call) -> Iterator[TranscriptPart]:
    for message in (*question(call), answer(call)):
        yield from message.parts


def _asked(call: Call) -> list[Json]:
    if call.endpoint_dialect == "openai_chat":
        return dicts_in(call.sent.get("messages"))
    return [message for each in _turns(question(call)) for message in _chat_messages(each)]


def _turns(messages: Iterable[TranscriptMessage]) -> Iterator[TranscriptMessage]:
    """Yield messages with one for consecutive pieces of an answer, which are several items in some dialects."""
    for role, pieces in itertools.groupby(messages, key=lambda message: message.role):
        if role == "assistant":
            yield TranscriptMessage(role, tuple(part for message in pieces for part in message.parts))
        else:
            yield from pieces


def _answered(call: Call) -> Json:
    if call.endpoint_dialect == "openai_chat":
        choices = dicts_in((call.response or {}).get("choices")) or [{}]
        message = as_dict(choices[0].get("message"))
        return {"role": "assistant", **{name: value for name, value in message.items() if value not in (None, [])}}
    return next(_chat_messages(answer(call)), {"role": "assistant", "content": ""})


def _chat_messages(message: TranscriptMessage) -> Iterator[Json]:
    """Yield a message of a transcript in the form of chat completions; each tool result is a message."""
    results = [part for part in message.parts if part.kind == "result"]
    for part in results:
        yield {"role": "tool", "tool_call_id": part.call_id, "content": part.text}
    parts = [part for part in message.parts if part.kind != "result"]
    if results and not parts:
        return
    said: Json = {"role": message.role, "content": "".join(part.text for part in parts if part.kind == "text")}
    thoughts = "".join(part.text for part in parts if part.kind == "reasoning")
    if thoughts:
        said["reasoning_content"] = thoughts
    calls = [part for part in parts if part.kind == "call"]
    if calls:
        functions = [(part.call_id, {"name": part.name, "arguments": part.text}) for part in calls]
        said["tool_calls"] = [{"id": key, "type": "function", "function": function} for key, function in functions]
    images = [{"type": "image_url", "image_url": {"url": part.text}} for part in parts if part.kind == "image"]
    if images:
        said["content"] = [{"type": "text", "text": said["content"]}, *images]
    yield said


def _tools(call: Call) -> list[Json]:
    tools = dicts_in(call.sent.get("tools"))
    return [tool if "function" in tool else {"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Json) -> Json:
    """Return a tool of another dialect as the function of a chat tool."""
    parameters = tool.get("parameters") or tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"name": tool.get("name"), "description": tool.get("description") or "", "parameters": parameters}
