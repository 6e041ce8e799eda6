"""Environment variables: accepted spellings, defaults, and mistakes that are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenv import settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("TRUE", True), (" 1 ", True), ("yes", True), ("false", False), ("0", False), ("", False)],
)
def test_the_web_page_is_asked_for_by_a_truth_word(text: str, expected: bool) -> None:
    assert settings.web_interface_enabled({"ENABLE_WEB_INTERFACE": text}) is expected


@pytest.mark.parametrize(
    ("read", "name", "default"),
    [
        (settings.server_mode, "OPENENV_MODE", "simulation"),
        (settings.client_mode, "OPENENV_CLIENT_MODE", "simulation"),
        (settings.runner_name, "OPENENV_RUNNER", None),
    ],
)
def test_text_settings_have_defaults(read: Callable[..., Any], name: str, default: str | None) -> None:
    assert read({}) == default
    assert read({name: ""}) == default
    assert read({name: "production"}) == "production"


def test_the_runner_is_lower_case() -> None:
    assert settings.runner_name({"OPENENV_RUNNER": " Inline "}) == "inline"


def test_numbers_are_numbers_or_a_clear_error() -> None:
    assert settings.max_sessions({}) is None
    assert settings.max_sessions({"OPENENV_MAX_SESSIONS": " 12 "}) == 12
    assert settings.session_timeout({"OPENENV_SESSION_TIMEOUT": "1.5"}) == 1.5
    with pytest.raises(ValueError, match="OPENENV_MAX_SESSIONS must be a number, not 'many'"):
        settings.max_sessions({"OPENENV_MAX_SESSIONS": "many"})


def test_tokens_are_separated_by_commas_and_a_list_without_any_is_a_mistake() -> None:
    assert settings.orchestrator_tokens({}) == settings.orchestrator_tokens({"OPENENV_TOKEN": " "}) == ()
    assert settings.orchestrator_tokens({"OPENENV_TOKEN": " one, two,"}) == ("one", "two")
    assert settings.agent_tokens({"OPENENV_AGENT_TOKEN": "three"}) == ("three",)
    assert settings.observer_tokens({"OPENENV_OBSERVER_TOKEN": "four"}) == ("four",)
    assert settings.client_token({"OPENENV_TOKEN": "one,two"}) == "one"
    assert settings.client_token({}) is None
    with pytest.raises(ValueError, match="OPENENV_TOKEN contains no token"):
        settings.orchestrator_tokens({"OPENENV_TOKEN": " , "})


def test_redaction_and_the_largest_message_are_settings() -> None:
    assert settings.redact_errors({"OPENENV_REDACT_ERRORS": "1"})
    assert not settings.redact_errors({})
    assert settings.max_message_mb({"OPENENV_MAX_MESSAGE_MB": "0.5"}) == 0.5


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "production")
    assert settings.server_mode() == "production"


def test_export_sets_what_is_given_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_RUNNER", "thread")
    monkeypatch.setenv("OPENENV_MAX_SESSIONS", "1")
    settings.export({"OPENENV_MAX_SESSIONS": 7, "OPENENV_RUNNER": None})
    assert settings.max_sessions() == 7
    assert settings.runner_name() == "thread"


def test_folders_are_those_that_are_named_or_the_users_own() -> None:
    assert settings.cache_dir({"OPENENV_CACHE": "/big/cache", "HOME": "/home/me"}) == Path("/big/cache")
    assert settings.cache_dir({"XDG_CACHE_HOME": "/x", "HOME": "/home/me"}) == Path("/x/openenv")
    assert settings.cache_dir({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}) == Path("/home/me/.cache/openenv")
    assert settings.rollout_store({"OPENENV_ROLLOUTS": "/runs"}) == Path("/runs")
    assert settings.rollout_store({"HOME": "/home/me"}) == Path("/home/me/.local/share/openenv/rollouts")


def test_the_models_key_is_read_or_none() -> None:
    assert settings.model_key({"OPENENV_MODEL_KEY": " sk-1 "}) == "sk-1"
    assert settings.model_key({}) is None


def test_the_fast_server_is_on_unless_it_is_turned_off() -> None:
    assert settings.fast_enabled({})
    assert settings.fast_enabled({"OPENENV_FAST": "1"})
    for value in ("0", "false", " No "):
        assert not settings.fast_enabled({"OPENENV_FAST": value})


def test_user_numbers_of_sandboxes_are_a_range() -> None:
    assert settings.sandbox_uids({}) is None
    assert settings.sandbox_uids({"OPENENV_SANDBOX_UIDS": "70000-70009"}) == range(70_000, 70_010)
    for wrong in ("70000", "0-5", "9-3", "a-b", "-5", "1-2-3"):
        with pytest.raises(ValueError, match="OPENENV_SANDBOX_UIDS"):
            settings.sandbox_uids({"OPENENV_SANDBOX_UIDS": wrong})
