"""The server configurations that are compared. The one place to change how a server is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from interpreters import Interpreter

BENCHMARKS = Path(__file__).resolve().parent
APPS = BENCHMARKS / "apps"

# {python}, {app} and {port} are filled in; the working directory is benchmarks/apps
UVICORN = "{python} -m uvicorn {app}:app --host 127.0.0.1 --port {port} --log-level warning"
SERVE = "{python} -m openenv.cli serve {app}:app --host 127.0.0.1 --port {port} --log-level warning"
STUB = "{python} stub_server.py --port {port}"

PUBLISHED, OURS, BEFORE = "published", "ours", "before"


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to serve an app."""

    key: str
    label: str
    side: str
    command: str

    @property
    def is_ours(self) -> bool:
        """Whether it runs this project, as it is or as it was before."""
        return self.side in (OURS, BEFORE)

    def before(self) -> Configuration:
        """Return the same configuration of another checkout of this project."""
        return Configuration(
            key=self.key.replace(OURS, BEFORE),
            label=self.label.replace(OURS, BEFORE),
            side=BEFORE,
            command=self.command,
        )


CONFIGURATIONS = (
    Configuration(
        key="published-default",
        label="openenv 0.10.0, uvicorn as scaffolded",
        side=PUBLISHED,
        command=f"{UVICORN} --loop asyncio --http h11",
    ),
    Configuration(
        key="published-uvloop",
        label="openenv 0.10.0, uvloop + httptools",
        side=PUBLISHED,
        command=f"{UVICORN} --loop uvloop --http httptools",
    ),
    Configuration(
        key="ours-thread", label="ours, serve --runner thread", side=OURS, command=f"{SERVE} --runner thread"
    ),
    Configuration(
        key="ours-inline", label="ours, serve --runner inline", side=OURS, command=f"{SERVE} --runner inline"
    ),
    Configuration(
        key="ours-uvicorn",
        label="ours, plain uvicorn, uvloop + httptools",
        side=OURS,
        command=f"{UVICORN} --loop uvloop --http httptools",
    ),
)
BEFORE_CONFIGURATIONS = tuple(c.before() for c in CONFIGURATIONS if c.side == OURS)
STUB_SERVER = Configuration(key="stub", label="stub server", side="", command=STUB)

# what is measured on one server beside its plain figure
VARIANTS = {
    "stateless": "stateless",
    "sockets": "a v1 socket for each session",
    "clients": "an async client with a v1 socket for each session",
    "json": "VectorEnv, JSON",
    "first": "VectorEnv, JSON, the first 64 that are ready",
}

LABELS = (
    {configuration.key: configuration.label for configuration in CONFIGURATIONS + BEFORE_CONFIGURATIONS}
    | {PUBLISHED: "openenv 0.10.0", OURS: "ours", BEFORE: "before"}
    | {
        f"{configuration.key} {variant}": f"{configuration.label}, {words}"
        for configuration in CONFIGURATIONS + BEFORE_CONFIGURATIONS
        for variant, words in VARIANTS.items()
        if configuration.is_ours or variant == "clients"
    }
)


@dataclass(frozen=True, slots=True)
class Runnable:
    """A configuration together with the interpreter that runs it; None when there is none."""

    configuration: Configuration
    interpreter: Interpreter | None
    missing: str = ""
    app: str = "echo_app"
    cores: frozenset[int] = frozenset()  # of the server; empty for those of this process

    @property
    def key(self) -> str:
        """Return the configuration's key."""
        return self.configuration.key

    def command(self, port: int) -> list[str]:
        """Return the command line that serves on a port."""
        assert self.interpreter
        filled = {"python": self.interpreter.python, "app": self.app, "port": port}
        return [part.format(**filled) for part in self.configuration.command.split()]

    def environment(self) -> Mapping[str, str]:
        """Return the environment of the server process."""
        assert self.interpreter
        return self.interpreter.environment
