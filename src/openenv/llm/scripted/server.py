"""`ScriptedModel`: a scripted model behind a port of its own.

Knows how the application is served. Must not know dialects.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TypedDict

from ...testing.scripted.script import PREFIX, Script, Scripts, load_scripts
from ...testing.scripted.wire_formats import EngineName
from ...testing.thread_server import ThreadServer
from .app import Played, ScriptedApp


class ModelAddress(TypedDict):
    """Where a model answers and what it is called: keywords of `openenv.rollout.Model`."""

    base_url: str
    name: str


class ScriptedModel:
    """A server that plays scripts instead of asking a model. It says so: in its models' names and in a header.

    Use it as a context manager. It answers OpenAI's chat completions and responses and Anthropic's messages, streamed
    or not, with token ids and log-probabilities that are exact for its own tokeniser.

    Args:
        scripts: One script, several, or a file of them.
        host: The address to bind.
        port: The port to bind; 0 is any free one.
        engine: Where token ids stand in replies: as vLLM or SGLang writes them, or nowhere (`plain`).
        tokens_per_chunk: How many tokens of a stream go out together.
        api_key: The key that requests must bring; None takes any.
        headers: More headers for every reply, such as a policy's version.
        remembered: How many of the last requests `played` keeps.

    Raises:
        ValueError: The scripts cannot be read.
        OSError: The port is taken.
    """

    def __init__(
        self,
        scripts: Scripts,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        engine: EngineName = "vllm",
        tokens_per_chunk: int = 1,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        remembered: int = 256,
    ) -> None:
        self.scripts: tuple[Script, ...] = load_scripts(scripts)
        self._app = ScriptedApp(
            self.scripts,
            engine=engine,
            tokens_per_chunk=tokens_per_chunk,
            api_key=api_key,
            headers=headers,
            remembered=remembered,
        )
        self._server = ThreadServer(self._app, host=host, port=port)

    @property
    def url(self) -> str:
        """The address of the API, ending in `/v1`."""
        return f"{self._server.url}/v1"

    @property
    def base_url(self) -> str:
        """The same as `url`."""
        return self.url

    @property
    def root_url(self) -> str:
        """The address without `/v1`, as Anthropic's clients want it."""
        return self._server.url

    @property
    def port(self) -> int:
        """The port that it answers on."""
        return self._server.port

    @property
    def name(self) -> str:
        """The name of the first script's model."""
        return self.scripts[0].model_name

    def model(self, name: str | None = None) -> ModelAddress:
        """Return what `openenv.rollout.Model` needs to know of one of the scripts, by default the first.

        Raises:
            KeyError: No script has that name.
        """
        for script in self.scripts:
            if name is None or script.name == name.removeprefix(PREFIX):
                return {"base_url": self.url, "name": script.model_name}
        raise KeyError(f"no script is called {name!r}")

    def played(self) -> list[Played]:
        """Return what the last requests were given, oldest first."""
        return list(self._app.played)

    def set_header(self, name: str, value: str) -> None:
        """Change a header of every reply from now on."""
        self._app.headers[name] = value

    def start(self) -> ScriptedModel:
        """Begin to answer; the same as entering the `with` block."""
        self._server.start()
        return self

    def close(self) -> None:
        """End all replies under way and stop answering."""
        self._app.stop()
        self._server.close()

    def __enter__(self) -> ScriptedModel:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
