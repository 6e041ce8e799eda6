"""The manifest of behaviours (`tests/interaction`) once more, with the environments in worker processes.

The tests are those of that file, loaded a second time; only what they serve is replaced. Their environments count on
sharing memory with the test: here, files take its place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from openenv.server.app import create_app
from servers import Serve
from waiting import comes_true

SUITE = Path(__file__).parents[3] / "interaction"
WAYS = ["ws, blocking", pytest.param("http", marks=pytest.mark.slow)]
NOT_SENDABLE = {"test_a_constructor_that_fails_is_reported_with_its_reason"}  # its factory is a closure
EVERY_TIME = {
    "test_reset_step_and_state_make_a_round_trip",
    "test_close_closes_the_environment_and_frees_its_slot",
    "test_an_environment_that_tries_to_exit_does_not_end_its_server",
}
"""What differs most in another process; the others are slow tests, since each starts one."""


def _load(name: str, file: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SUITE / file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Gate:
    """An event between processes."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def set(self) -> None:
        self._file.touch()

    def wait(self, timeout_s: float) -> bool:
        return comes_true(self._file.exists, timeout_s)


class Counted(type):
    """Counts in files, so that all processes see the same."""

    folder: Path

    def _count(cls, name: str) -> int:
        return len(list(cls.folder.glob(f"{name}-*")))

    @property
    def built(cls) -> int:
        return cls._count("built")

    @built.setter
    def built(cls, value: int) -> None:
        (cls.folder / f"built-{uuid.uuid4().hex}").touch()

    @property
    def closed(cls) -> int:
        return cls._count("closed")

    @closed.setter
    def closed(cls, value: int) -> None:
        (cls.folder / f"closed-{uuid.uuid4().hex}").touch()


def shared(base: type[Any], folder: str) -> type[Any]:
    """Make a class whose counts and gate all processes share."""
    place = Path(folder)
    kind = type("CountedABC", (Counted, type(base)), {})
    members = {"folder": place, "gate": Gate(place / "gate"), "__made_by__": (shared, (base, folder))}
    made: type[Any] = kind(base.__name__, (base,), members)
    return made


behaviours = _load("process_runner_behaviours", "test_behaviours.py")
ways = _load("process_runner_ways", "conftest.py")


class ProcessWay(ways.Way):  # type: ignore[name-defined,misc]
    """Serves in worker processes."""

    def serve(self, env: Any, action_cls: Any, observation_cls: Any, sessions: int = 4) -> Any:
        """Make an environment reachable."""
        self._env = env
        options = {"max_concurrent_envs": sessions, "runner": "process", "env_processes": 1}
        self.server = self._serve(create_app(env, action_cls, observation_cls, **options))
        return self


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Any]:
    """Each transport in turn."""
    with contextlib.ExitStack() as stack:
        yield ProcessWay(request.param, serve, stack)


@pytest.fixture
def lab(tmp_path: Path) -> type[Any]:
    """A class of its own for each test."""
    return shared(behaviours.Lab, str(tmp_path))


@pytest.fixture(autouse=True)
def _fresh_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(behaviours, "fresh", lambda cls: shared(cls, str(tmp_path)))


def test_the_suite_is_the_one_that_every_transport_runs() -> None:
    assert len(COPIED) >= len(behaviours.MANIFEST) - len(NOT_SENDABLE)


COPIED = {
    name: value if name in EVERY_TIME else pytest.mark.slow(value)
    for name, value in vars(behaviours).items()
    if name.startswith("test_") and name not in NOT_SENDABLE and "way" in value.__annotations__
}
globals().update(COPIED)
