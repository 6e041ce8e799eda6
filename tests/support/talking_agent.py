"""A command line agent for tests: takes messages as lines of JSON, prints events, and calls tools over MCP by itself.

echo TEXT          text, then the end of the turn
count              how many messages it has had in this conversation
call NAME JSON     calls a tool of the environment
tools              lists the tools of the environment
env NAME           prints a variable
quit CODE          ends in the middle of its turn
hang               never ends its turn
flood N            prints N events
bye                ends the conversation
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from typing import Any


def write(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def emit(kind: str, **data: Any) -> None:
    """Print an event."""
    write(json.dumps({"type": kind, "data": data}))


class McpClient:
    """The least that MCP needs, over Streamable HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: str | None = None
        client = {"name": "talking-agent", "version": "1"}
        self._ask("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client})
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def call(self, method: str, params: dict[str, Any]) -> Any:
        """Ask for something and return the result."""
        return self._ask(method, params)["result"]

    def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        body = self._send({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        lines = [line[5:] for line in body.splitlines() if line.startswith("data:")] or [body]
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    def _send(self, message: dict[str, Any]) -> str:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if self._session is not None:
            headers["Mcp-Session-Id"] = self._session
        request = urllib.request.Request(self._url, json.dumps(message).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            self._session = reply.headers.get("Mcp-Session-Id", self._session)
            text: str = reply.read().decode()
            return text


def answer(message: str, count: int) -> tuple[str, bool]:
    """Act on a message; return the response, and whether the conversation is over."""
    verb, _, rest = message.partition(" ")
    if verb == "echo":
        emit("text_output", text=rest)
        return rest, False
    if verb == "count":
        return str(count), False
    if verb == "env":
        return os.environ.get(rest, ""), False
    if verb in ("call", "tools"):
        client = McpClient(os.environ["OPENENV_MCP_URL"])
        if verb == "tools":
            return " ".join(tool["name"] for tool in client.call("tools/list", {})["tools"]), False
        name, _, arguments = rest.partition(" ")
        emit("tool_call", name=name, arguments=json.loads(arguments))
        result = client.call("tools/call", {"name": name, "arguments": json.loads(arguments)})
        text = "".join(block.get("text", "") for block in result["content"])
        emit("tool_result", name=name, text=text, is_error=result.get("isError", False))
        return text, False
    if verb == "quit":
        sys.stderr.write("the agent gave up\n")
        sys.stderr.flush()
        os._exit(int(rest))
    if verb == "hang":
        emit("text_output", text="thinking")
        signal.pause()
    if verb == "flood":
        for number in range(int(rest)):
            emit("text_output", text=f"{number} {'x' * 1000}")
        return rest, False
    return message, verb == "bye"


def main() -> None:
    """Take messages until the input ends."""
    write("ready")
    for count, line in enumerate(sys.stdin, 1):
        response, done = answer(json.loads(line)["content"], count)
        emit("turn_complete", response=response, done=done)


if __name__ == "__main__":
    main()
