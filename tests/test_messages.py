"""The text of an exception as it is sent: it says what is wrong, whatever the exception's own text is."""

from __future__ import annotations

import pytest

from environments import Idle
from openenv import Action, LocalEnv, Observation
from openenv.errors import ExecutionError, message_of


class Spoken(KeyError):
    """A KeyError with words of its own."""

    def __str__(self) -> str:
        return "there is no such room"


@pytest.mark.parametrize(
    ("exc", "text"),
    [
        (ValueError("no way north"), "no way north"),
        (ValueError(), "ValueError"),
        (KeyError("north"), "KeyError: 'north'"),
        (KeyError(), "KeyError"),
        (Spoken("north"), "there is no such room"),
        (SystemExit(3), "SystemExit: 3"),
        (IndexError("list index out of range"), "list index out of range"),
    ],
)
def test_a_key_or_a_number_alone_comes_with_the_name_of_its_class(exc: BaseException, text: str) -> None:
    assert message_of(exc) == text


class Lost(Idle):
    """Looks up what is not there."""

    def step(self, action: Action, **kwargs: object) -> Observation:
        return Observation(metadata={}["north"])


def test_a_client_learns_what_kind_of_failure_it_was() -> None:
    with LocalEnv(Lost).sync() as env:
        env.reset()
        with pytest.raises(ExecutionError, match="KeyError: 'north'"):
            env.step({})
