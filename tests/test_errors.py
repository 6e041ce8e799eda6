"""The error tree: codes, details, texts that existing code matches on, builtin co-bases, pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest

from openenv import errors
from openenv.types import WSErrorCode

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.OpenEnvError)]

EXAMPLES = [
    errors.ConcurrencyConfigurationError("Env", 4),
    errors.SessionNotFoundError("s1"),
    errors.SessionClosedError("s1", "expired"),
    errors.ServerError("m", details={"a": 1}),
    errors.SessionCapacityError(1, 1),
    errors.SessionCreationError("why"),
    errors.EnvironmentFactoryError("make", reason="boom"),
    errors.SessionLost("timeout"),
    errors.RequestTimeout("late"),
    errors.ConnectFailed("refused"),
    errors.SlotsFailed({3: errors.SessionLost("expired")}, [None]),
    errors.StaleRequest(7, 9),
    errors.Forbidden("agent"),
    errors.SandboxGone("box", "expired"),
    errors.ToolTimeout("read", timeout_s=2.0),
    *(cls("read", "failed") for cls in (errors.ToolCallError, errors.ToolArgumentsError, errors.ToolTransportError)),
]
EXAMPLES += [cls("text") for cls in CLASSES if cls not in {type(error) for error in EXAMPLES}]


def test_every_class_has_a_code_of_its_own_and_stands_in_the_tree_of_the_docstring() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    for cls in CLASSES:
        assert cls.__name__ in (errors.__doc__ or "")


def test_every_code_of_an_error_frame_has_a_class() -> None:
    assert {code.value for code in WSErrorCode} <= {cls.code for cls in CLASSES}


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ServerError, RuntimeError),
        (errors.ExecutionError, RuntimeError),
        (errors.SessionCapacityError, RuntimeError),
        (errors.ClientModeError, RuntimeError),
        (errors.ProtocolError, RuntimeError),
        (errors.ConnectFailed, ConnectionError),
        (errors.RequestTimeout, TimeoutError),
        (errors.SessionLost, ConnectionError),
    ],
)
def test_old_except_clauses_keep_working(cls: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_has_a_text_and_json_able_details(error: errors.OpenEnvError) -> None:
    assert str(error)
    assert isinstance(error.details, dict)


def test_texts_and_details_are_those_of_the_contract() -> None:
    capacity = errors.SessionCapacityError(3, 4)
    assert str(capacity) == "Server at capacity: 3/4 sessions active. Cannot accept new connections."
    assert capacity.details == {"active_sessions": 3, "max_sessions": 4}
    factory = errors.EnvironmentFactoryError("make")
    assert str(factory) == "Environment factory 'make' failed to create instance."
    assert factory.details == {"factory_name": "make"}
    assert errors.SessionNotFoundError("x").details == {"session_id": "x"}
    assert errors.SessionClosedError("x", "y").details == {"session_id": "x", "reason": "y"}
    assert errors.SessionLost("z").details == {"reason": "z"}
    assert "reset()" in str(errors.SessionLost("z"))
    assert "SUPPORTS_CONCURRENT_SESSIONS" in str(errors.ConcurrencyConfigurationError("Env", 2))


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_keeps_class_text_and_attributes_when_it_is_pickled_or_copied(error: errors.OpenEnvError) -> None:
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for twin in (*copies, copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert (str(twin), twin.args, twin.details) == (str(error), error.args, error.details)
        assert repr(vars(twin)) == repr(vars(error))


def test_the_command_for_an_extra_names_its_packages_and_never_this_one() -> None:
    assert re.fullmatch(r"pip install 'huggingface-hub>=[\d.]+'", errors.install_command("hub"))
    assert re.fullmatch(r"pip install 'ray\[default\]>=[\d.]+'", errors.install_command("ray"))
    core = errors.install_command("core").split()[2:]
    assert [re.split("[<>=]", word.strip("'"), maxsplit=1)[0] for word in core] == [
        "gradio",
        "httpx",
        "huggingface-hub",
        "openai",
        "requests",
    ]


# `pip install openenv` and `uv add "openenv[hub]"`, but not openenv==0.11.0, openenv-client or openenv-maze_env.
_ANOTHER_PACKAGE = re.compile(
    r"(?:pip install|uv add|uvx|pipx install)(?:\s+-\S+)*\s+[\"']?"
    r"openenv(?:[-_]core)?(?:\[[^\]]*\])?(?![\w=*\[-])"
)


def test_no_text_or_file_installs_the_package_of_this_name_on_the_index() -> None:
    """An index may have another `openenv`: commands name this version, a checkout, or the packages of an extra."""
    root = Path(__file__).resolve().parents[1]
    wrong = []
    for place in ("src", "docs", "docs_src", "envs", "examples", "packages", "README.md", "CONTRIBUTING.md"):
        for path in [root / place] if (root / place).is_file() else sorted((root / place).rglob("*")):
            if path.suffix not in (".py", ".md", ".tmpl", ".toml", ".yaml", ".js", ".txt", "") or not path.is_file():
                continue
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            wrong += [f"{path.relative_to(root)}: {line.strip()}" for line in lines if _ANOTHER_PACKAGE.search(line)]
    # The page that warns of it, and the comment that explains which instructions an image rewrites.
    allowed = ("docs/install.md: !!! warning", "src/openenv/providers/own_wheel.py: #")
    assert [line for line in wrong if not line.startswith(allowed)] == []
